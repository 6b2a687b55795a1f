"""The private names of TensorFlow and Keras that the engine uses; these fail when they change."""

import threading
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from ctl_core import compat


def test_is_tuned() -> None:
    numbers, auto = tf.data.Dataset.range(10), tf.data.AUTOTUNE
    halves = numbers.map(lambda x: x // 2, 2).batch(2, num_parallel_calls=2).prefetch(auto)
    for plain in (halves, numbers.interleave(tf.data.Dataset.range)):
        assert not compat.is_tuned(plain.zip(numbers))
    for tuned in (numbers.map(lambda x: x, auto), numbers.batch(2, num_parallel_calls=auto)):
        assert compat.is_tuned(tuned.repeat().prefetch(2))


def test_captured_variables() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        first, second, unused = (tf.Variable(value) for value in (1.0, 2.0, 3.0))
    with compat.make_scratch_graph("test").as_default() as graph:
        inside = second * first * tf.constant(4.0)
    assert inside.graph is graph
    captured = compat.find_captured_variables(graph, strategy)
    handles = [variable.handle for variable in captured]
    local = [strategy.experimental_local_results(v)[0].handle for v in (first, second, unused)]
    assert {*map(id, handles)} == {*map(id, local[:2])}


def test_global_seed_generator() -> None:
    keras.utils.set_random_seed(1)
    assert compat.get_seed_generator() is None
    keras.random.normal(())
    made = compat.get_seed_generator()
    assert isinstance(made, keras.random.SeedGenerator)
    with compat.draw_from(made):
        keras.utils.set_random_seed(1)
        assert compat.get_seed_generator() is None
    assert compat.get_seed_generator() is made
    found: list[Any] = []

    def draw_in_thread() -> None:
        with compat.draw_from(made):
            found.append(compat.get_seed_generator())
        found.append(compat.get_seed_generator())

    thread = threading.Thread(target=draw_in_thread)
    thread.start()
    thread.join()
    assert found == [made, None]


def test_name_anew() -> None:
    keras.layers.Dense(1)
    compat.name_anew()
    assert [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]


def test_flatten_layers() -> None:
    inner = keras.Sequential([keras.layers.Dense(1)])
    model = keras.Sequential([inner, keras.layers.Dense(2)])
    assert compat.flatten_layers(model) == [model, inner, inner.layers[0], model.layers[1]]
    assert compat.flatten_layers(object()) == []


def test_rate_of() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 9)
    optimizer = keras.optimizers.SGD(schedule)
    assert compat.read_rate(optimizer) is schedule and compat.read_rate(object()) is None
    assert float(compat.read_rate(keras.optimizers.SGD(0.5))) == 0.5
    with pytest.raises(TypeError, match="hence its learning rate is not settable"):
        optimizer.learning_rate = 0.1


def test_written_resources() -> None:
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
        found = tf.function(lambda value: strategy.run(on_replica, (value,)))(distributed)
    assert [part.numpy().tolist() for part in found.values] == [[1.0], [2.0]]
    assert "_losses" not in vars(keras.Layer)
    layer(values[1])  # as ever, where there are no replicas
    assert [float(loss) for loss in layer.losses] == [2.0]


def test_graphs_called_of_functions_without_a_graph() -> None:
    """The loops of TensorFlow's dense CTC loss, which are functions of the older kind."""
    with tf.Graph().as_default() as graph:
        logits = tf.compat.v1.placeholder(tf.float32, [3, 1, 4])
        tf.nn.ctc_loss(tf.constant([[1, 2]]), logits, tf.constant([2]), tf.constant([3]))
    assert {"While", "Exp"} <= {op.type for op in compat.add_called_ops(graph.get_operations())}


def test_graph_writer_and_summaries_of_first_replica(tmp_path: Path) -> None:
    """The writer is looked for when a summary is traced.

    The graph of each replica has the summary, and which of them writes is no constant in it.
    """
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    writer = tf.summary.create_file_writer(str(tmp_path))
    found: list[tf.summary.SummaryWriter] = []
    recorded: list[tf.Tensor] = []
    in_graph = compat.GraphWriter(lambda: found.append(writer) or writer)  # type: ignore[func-returns-value]
    unopened = compat.GraphWriter(lambda: None)

    def on_replica(step: tf.Tensor) -> None:
        with compat.mute_other_summaries(step):
            recorded.append(tf.get_static_value(tf.summary.should_record_summaries()))
            tf.summary.scalar("there", 1.0)

    @tf.function(autograph=False)
    def write(step: tf.Tensor) -> None:
        with in_graph.as_default(step):
            assert not found
            strategy.run(on_replica, (step,))
        with unopened.as_default(step), tf.summary.record_if(step < 0):
            tf.summary.scalar("nowhere", 1.0)

    write(tf.constant(3, tf.int64))
    assert found == [writer] and recorded == [None, None]
    writer.flush()
    (file,) = tmp_path.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(file))
    written = [(event.step, value.tag) for event in events for value in event.summary.value]
    assert written == [(3, "there")]


def test_max_to_keep_and_holding(tmp_path: Path) -> None:
    one, other = (tf.train.Checkpoint(x=tf.Variable(value)) for value in (1.0, 2.0))
    manager = tf.train.CheckpointManager(one, str(tmp_path), max_to_keep=3)
    assert compat.read_max_to_keep(manager) == 3
    with compat.hold_objects(manager, other):
        path = manager.save()
    assert manager.checkpoint is one
    assert tf.train.load_checkpoint(path).get_tensor("x/.ATTRIBUTES/VARIABLE_VALUE") == 2.0


def test_lines_of_a_helper_that_fails() -> None:
    def helper(x: Any) -> Any:
        return tf.reshape(x, [2, 3])

    converted = tf.autograph.to_graph(lambda x: helper(x))
    with pytest.raises(Exception, match=r"[Rr]eshape") as caught:
        converted(tf.zeros([4]))
    line = helper.__code__.co_firstlineno + 1
    assert (__file__, line) in compat.read_translated_stack(caught.value)
    assert compat.read_translated_stack(ValueError()) == []


def test_a_graph_checkpoint_is_traced_once(tmp_path: Path) -> None:
    variable, node = tf.Variable(1.0), compat.make_node(tf.Module())
    node.variables = variable  # a tf.Module has other ones by this name
    checkpoint = compat.GraphCheckpoint(x=node)
    for value in (1.0, 2.0):
        variable.assign(value)
        checkpoint.write(str(tmp_path / "a"))
        read = tf.train.load_checkpoint(str(tmp_path / "a"))
        assert read.get_tensor("x/variables/.ATTRIBUTES/VARIABLE_VALUE") == value
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


def test_large_sums_are_kept_whole() -> None:
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


def test_layers_run() -> None:
    """As they are told, or as the outermost layer is, or else as is said around."""

    class Told(keras.layers.Layer):
        def call(self, inputs: Any, training: bool = True) -> Any:
            return inputs if training else -inputs

    one, inner = tf.ones([1]), Told()
    traced, outer = tf.function(lambda x: inner(x)), keras.Sequential([keras.Input(()), inner])
    for training in (False, True):
        with compat.run_layers(training):
            found = [float(layer(one)[0]) for layer in (inner, outer, traced)]
            assert found == [1 if training else -1] * 3
            assert [float(layer(one, training=True)[0]) for layer in (inner, outer)] == [1, 1]


def test_stages() -> None:
    dataset = tf.data.Dataset.zip(tf.data.Dataset.range(4).shuffle(2), tf.data.Dataset.range(4))
    names = [type(stage).__name__ for stage in compat.list_stages(dataset)]
    assert names == ["_ZipDataset", "_ShuffleDataset", "_RangeDataset", "_RangeDataset"]


def test_cpu_devices_of_worker() -> None:
    from tensorflow.python.distribute import collective_all_reduce_strategy as module

    with compat.list_cpu_devices(2):
        replaced = module.CollectiveAllReduceExtended._initialize_local_devices
        assert replaced(None, None, "/job:worker")[0][1] == "/job:worker/device:CPU:1"
    assert module.CollectiveAllReduceExtended._initialize_local_devices is not replaced
