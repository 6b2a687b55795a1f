"""What the engine does with private names of TensorFlow, where no training would show a change.

The other names of ``ctl_core/compat.py`` are held by what trains: see ``make test-compat``.
"""

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core import compat


def test_is_tuned_tells_whether_a_stage_is_tuned() -> None:
    numbers, auto = tf.data.Dataset.range(10), tf.data.AUTOTUNE
    halves = numbers.map(lambda x: x // 2, 2).batch(2, num_parallel_calls=2).prefetch(auto)
    for plain in (halves, numbers.interleave(tf.data.Dataset.range)):
        assert not compat.is_tuned(plain.zip(numbers))
    for tuned in (numbers.map(lambda x: x, auto), numbers.batch(2, num_parallel_calls=auto)):
        assert compat.is_tuned(tuned.repeat().prefetch(2))


def test_written_resources_of_a_graph_are_found() -> None:
    read, written, deep, captured = (tf.Variable(float(i)) for i in range(4))

    @tf.function(autograph=False)
    def function(steps: tf.Tensor) -> tf.Tensor:
        def body(done: tf.Tensor) -> tuple[tf.Tensor]:
            tf.cond(done > 0, lambda: deep.assign_add(read.read_value()), lambda: deep.read_value())
            return (done + 1,)

        written.assign(2.0)
        tf.while_loop(lambda done: done < steps, body, (tf.constant(0),))
        return captured + 1.0

    graph = function.get_concrete_function(tf.constant(3)).graph
    handles = compat.find_written_resources(graph)
    assert {id(handle) for handle in handles} == {id(written.handle), id(deep.handle)}


def test_added_losses_are_those_of_the_layer_itself() -> None:
    layer = keras.layers.ActivityRegularization(l1=1.0)
    model = keras.Sequential([keras.layers.Dense(1, kernel_regularizer="l2"), layer])
    assert compat.read_added_losses(layer) == []
    model(tf.ones([2, 3]))
    assert [len(compat.read_added_losses(each)) for each in (model, *model.layers)] == [0, 0, 1]


def test_replicas_have_losses_of_their_own() -> None:
    """The first replica's are there when the second one has called the layer, too."""
    layer = keras.layers.ActivityRegularization(l1=1.0)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def on_replica(value: tf.Tensor) -> Any:
        with compat.run_layers(training=True):
            layer(value)
        tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)
        return tf.stack(layer.losses)

    values = [tf.fill([1, 1], float(n)) for n in (1, 2)]
    distributed = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )
    with compat.separate_losses():
        losses = tf.function(lambda value: strategy.run(on_replica, (value,)))(distributed)
    assert [replica.numpy().tolist() for replica in losses.values] == [[1.0], [2.0]]
    assert "_losses" not in vars(keras.Layer)
    layer(values[1])  # as ever, where there are no replicas
    assert [float(loss) for loss in layer.losses] == [2.0]


def test_graphs_called_of_functions_without_a_graph() -> None:
    """The loops of TensorFlow's dense CTC loss, which are functions of the older kind."""
    with tf.Graph().as_default() as graph:
        logits = tf.compat.v1.placeholder(tf.float32, [3, 1, 4])
        tf.nn.ctc_loss(tf.constant([[1, 2]]), logits, tf.constant([2]), tf.constant([3]))
    assert {"While", "Exp"} <= {op.type for op in compat.add_called_ops(graph.get_operations())}


def test_a_graph_checkpoint_is_traced_once(tmp_path: Path) -> None:
    variable, node, checkpoint = tf.Variable(1.0), compat.Node(), compat.GraphCheckpoint()
    node.children["_self_name_based_restores"] = variable  # TensorFlow's own attribute
    checkpoint.children["x"] = node
    for value in (1.0, 2.0):
        variable.assign(value)
        checkpoint.write(str(tmp_path / "a"))
        read = tf.train.load_checkpoint(str(tmp_path / "a"))
        key = "x/_self_name_based_restores/.ATTRIBUTES/VARIABLE_VALUE"
        assert read.get_tensor(key) == value
    assert checkpoint._traced.experimental_get_tracing_count() == 1


def test_the_seed_of_ops_is_put_back() -> None:
    tf.random.set_seed(3)
    first = tf.random.uniform([]).numpy()
    second = tf.random.uniform([]).numpy()
    tf.random.set_seed(3)
    assert tf.random.uniform([]).numpy() == first
    with compat.keep_op_seed():
        tf.random.set_seed(5)
        assert tf.random.uniform([]).numpy() not in (first, second)
    assert tf.random.uniform([]).numpy() == second


def test_grappler_does_not_split_large_sums() -> None:
    """The part of TensorFlow's memory optimizer that splits them is left out."""
    from tensorflow.python.eager import context

    def parts() -> int:
        """Those of the calls that are made now."""
        options = context.context().function_call_options
        config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
        return int(config.graph_options.rewrite_options.memory_optimization)

    rewrites = tf.compat.v1.ConfigProto().graph_options.rewrite_options
    of_process = context.context()
    of_process._config = of_process._thread_local_data.function_call_options = None
    assert parts() != rewrites.SWAPPING_HEURISTICS
    for _ in range(2):
        compat.keep_large_sums_whole()
        assert parts() == rewrites.SWAPPING_HEURISTICS
    assert float(tf.function(lambda: tf.add_n([tf.ones([]), tf.ones([])]))()) == 2.0


def test_objects_of_a_checkpoint_are_listed(tmp_path: Path) -> None:
    inner = tf.Module()
    inner.weight = tf.Variable(1.0)
    checkpoint = tf.train.Checkpoint(outer=tf.train.Checkpoint(inner=inner), same=inner)
    objects = compat.read_object_graph(checkpoint.write(str(tmp_path / "saved")))
    root = objects[0].children
    assert objects[root["outer"]].children["inner"] == root["same"]
    assert objects[root["same"]].children.keys() == {"weight"}


def test_joining_process_waits_as_long_as_it_is_told() -> None:
    from tensorflow.python.eager import context

    own_context = context.context()
    with compat.cut_join(2.5):
        own_context.configure_coordination_service("standalone", "/job:worker/task:0")
    config, own_context._coordination_service_config = own_context.coordination_service, None
    assert (config.service_type, config.cluster_register_timeout_in_ms) == ("standalone", 2500)
    assert config.cluster_register_with_barrier


def test_cpu_devices_of_worker() -> None:
    from tensorflow.python.distribute import collective_all_reduce_strategy as module

    with compat.list_cpu_devices(2):
        replaced = module.CollectiveAllReduceExtended._initialize_local_devices
        assert replaced(None, None, "/job:worker")[0][1] == "/job:worker/device:CPU:1"
    assert module.CollectiveAllReduceExtended._initialize_local_devices is not replaced


def test_means_of_losses_are_not_divided_by_the_replicas() -> None:
    strategy, loss = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), keras.losses.Huber()
    with strategy.scope():
        ones = tf.ones([4, 1])
        assert float(loss(ones, ones + 2.0)) == 1.5 / 2
        with compat.run_replica(None):
            assert float(loss(ones, ones + 2.0)) == 1.5


def test_replica_context_entered_again_keeps_the_recording_of_summaries() -> None:
    """Which replica writes summaries is set outside, and the same inside and afterwards."""
    from tensorflow.python.ops import summary_ops_v2

    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    state = summary_ops_v2._summary_state
    seen = []

    def on_replica() -> None:
        outer = tf.distribute.get_replica_context()
        recording = state.is_recording_distribution_strategy
        inner = tf.distribute.ReplicaContext(strategy, 0)
        with compat.enter_replica_context(inner):
            seen.append(tf.distribute.get_replica_context() is inner)
            seen.append(state.is_recording_distribution_strategy is recording)
            with compat.enter_replica_context(outer):
                seen.append(tf.distribute.get_replica_context() is outer)
        seen.append(tf.distribute.get_replica_context() is outer)
        seen.append(state.is_recording_distribution_strategy is recording)

    before = state.is_recording_distribution_strategy
    strategy.run(on_replica)
    assert seen == [True] * 5
    assert state.is_recording_distribution_strategy is before
