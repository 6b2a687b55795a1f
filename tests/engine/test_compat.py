"""Tests of those uses of private TensorFlow APIs that a training run does not cover.

The other names of ``ctl_core/compat`` are covered by tests that train: see ``make test-compat``.
"""

import contextlib
import functools
import gc
import tomllib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import keras
import numpy as np
import pytest
import tensorflow as tf
from packaging.requirements import Requirement
from tensorflow.python.ops import collective_ops

from ctl_core import compat
from ctl_core.compat import versions
from ctl_core.run.errors import SetupError
from tests.golden import ROOT


def test_bounds_are_the_versions_that_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyproject.toml allows no versions newer than the tested ones.

    With a newer version, a message says how to change pyproject.toml.
    """
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in map(Requirement, pyproject["project"]["dependencies"]):
        name = requirement.name.removesuffix("-cpu")
        if name in versions.TESTED:
            major, minor = versions.TESTED[name]
            assert f"<{major}.{minor + 1}" in str(requirement.specifier).split(",")
    monkeypatch.setattr(tf, "__version__", "2.21.7")
    monkeypatch.setattr(keras, "__version__", "3.15.0")
    assert compat.describe_untested() == []
    monkeypatch.setattr(tf, "__version__", "2.22.0rc0")
    monkeypatch.setattr(keras, "__version__", "4.0.0")
    of_tensorflow, of_keras = compat.describe_untested()
    assert of_tensorflow.startswith("tensorflow 2.22.0rc0 is newer than 2.21, with which")
    assert "tensorflow<2.23" in of_tensorflow
    assert of_keras.startswith("keras 4.0.0 is newer than 3.15")
    assert "keras<4.1" in of_keras


def test_is_tuned_tells_whether_a_stage_is_tuned() -> None:
    numbers, auto = tf.data.Dataset.range(10), tf.data.AUTOTUNE
    halves = numbers.map(lambda x: x // 2, 2).batch(2, num_parallel_calls=2).prefetch(auto)
    for plain in (halves, numbers.interleave(tf.data.Dataset.range)):
        assert not compat.is_tuned(plain.zip(numbers))
    for tuned in (numbers.map(lambda x: x, auto), numbers.batch(2, num_parallel_calls=auto)):
        assert compat.is_tuned(tuned.repeat().prefetch(2))


def test_stages_of_pipelines(tmp_path: Path) -> None:
    numbers = tf.data.Dataset.range(4)
    shuffled = numbers.shuffle(4)
    cached = numbers.cache(str(tmp_path / "cache"))
    saved = numbers.snapshot(str(tmp_path / "snapshot"))
    stages = {"plain": numbers, "shuffle": shuffled, "cache": cached, "snapshot": saved}
    is_true = {
        check.__name__: [
            name for name, stage in stages.items() if any(map(check, compat.list_stages(stage)))
        ]
        for check in (compat.is_shuffle, compat.draws_random_numbers, compat.is_snapshot)
    }
    assert is_true["is_shuffle"] == is_true["draws_random_numbers"] == ["shuffle"]
    assert is_true["is_snapshot"] == ["snapshot"]
    assert not compat.is_shuffle(tf.data.Dataset.random(1))
    assert compat.draws_random_numbers(tf.data.Dataset.random(1))
    assert compat.read_cache_file(cached) == str(tmp_path / "cache")
    assert compat.read_cache_file(numbers.cache()) == ""
    assert compat.read_cache_file(numbers) is None
    folders = set(map(compat.read_snapshot_folder, compat.list_stages(saved)))
    assert folders == {None, str(tmp_path / "snapshot")}
    assert [id(stage) for stage in compat.list_stages(shuffled)] == [id(shuffled), id(numbers)]


def test_stages_that_keep_the_rows_of_a_dataset() -> None:
    numbers = tf.data.Dataset.range(4)
    kept = {
        "map": numbers.map(lambda x: x),
        "parallel_map": numbers.map(lambda x: x, 2),
        "batch": numbers.batch(2),
        "parallel_batch": numbers.batch(2, num_parallel_calls=2),
        "padded_batch": numbers.padded_batch(2),
        "prefetch": numbers.prefetch(2),
        "options": numbers.with_options(tf.data.Options()),
    }
    for name, stage in kept.items():
        assert compat.keeps_rows(stage)
        assert compat.name_stage(stage) == name
        assert compat.is_batch(stage) == ("batch" in name)
        assert compat.is_padded_batch(stage) == ("padded" in name)
        assert compat.is_map(stage) == ("map" in name)
        assert not compat.drops_remainder(stage)
    assert all(map(compat.keeps_rows, [*compat.list_stages(numbers.ragged_batch(2))][:-1]))
    others = {
        "filter": numbers.filter(lambda x: x > 1),
        "flat_map": numbers.flat_map(tf.data.Dataset.from_tensors),
        "shuffle": numbers.shuffle(2),
        "cache": numbers.cache(),
        "unbatch": numbers.batch(2).unbatch(),
        "zip": numbers.enumerate(),
    }
    for name, stage in others.items():
        assert not compat.keeps_rows(stage)
        assert compat.name_stage(stage) == name
    for number in (None, 2):
        batches = numbers.batch(2, drop_remainder=True, num_parallel_calls=number)
        assert compat.drops_remainder(batches)
    assert compat.drops_remainder(numbers.padded_batch(2, drop_remainder=True))
    lengths = numbers.bucket_by_sequence_length(lambda x: tf.cast(x, tf.int32), [2], [2, 2])
    assert compat.groups_by_window(lengths)
    assert not compat.groups_by_window(numbers)


def test_graphs_of_functions_of_stages() -> None:
    numbers = tf.data.Dataset.range(4)
    (graph,) = compat.find_graphs(numbers.map(lambda x: x * 2))
    assert "Mul" in {op.type for op in graph.get_operations()}
    assert compat.find_graphs(numbers) == []


def test_functions_of_stages() -> None:
    numbers = tf.data.Dataset.range(4)
    assert not compat.has_function(numbers.batch(2))
    for stage in (
        numbers.map(lambda x: 1 // (2 - x)),
        numbers.flat_map(lambda x: tf.data.Dataset.from_tensors(x).map(lambda y: 1 // (2 - y))),
        tf.data.Dataset.zip((numbers, numbers)).map(lambda x, y: (x, 1 // (2 - y))),
    ):
        assert compat.has_function(stage)
        (source,) = compat.find_inputs(stage)
        elements = list(source)
        compat.call_function(stage, elements[1])
        with pytest.raises(tf.errors.InvalidArgumentError):
            compat.call_function(stage, elements[2])


def test_stages_whose_order_is_free() -> None:
    numbers = tf.data.Dataset.range(4)
    parallel: dict[str, Any] = {"num_parallel_calls": 2}
    free = {"deterministic": False, **parallel}

    def read(_: Any, **options: Any) -> tf.data.Dataset:
        return numbers.interleave(tf.data.Dataset.range, **options)

    with compat.note_interleave_order():
        interleaved, free_interleaved = read(0, **parallel), read(0, **free)
    datasets = [
        (numbers.map(abs, **parallel).batch(2, **parallel), False),
        (interleaved, False),
        (numbers.map(abs, **free), True),
        (numbers.batch(2, **free), True),
        (free_interleaved, True),
        (numbers.flat_map(functools.partial(read, **free)), True),
    ]
    for dataset, is_free in datasets:
        assert compat.has_free_order(dataset.repeat().prefetch(1)) is is_free
        options = tf.data.Options()
        options.deterministic = False
        assert compat.has_free_order(dataset.with_options(options).repeat())
        assert not compat.has_free_order(numbers.map(abs).with_options(options))


def test_mixtures_that_go_on() -> None:
    both = [tf.data.Dataset.range(4), tf.data.Dataset.range(2)]
    for stops in (True, False):
        mixed = tf.data.Dataset.sample_from_datasets(both, stop_on_empty_dataset=stops)
        assert all(map(compat.stops_on_empty_dataset, compat.list_stages(mixed))) is stops


def test_position_of_iterator() -> None:
    """After a position is restored, another iterator continues where the first one was."""
    dataset = tf.data.Dataset.range(6).shuffle(6, seed=3)
    first, second = iter(dataset), iter(dataset)
    next(first)
    compat.restore_position(second, compat.read_position(first))
    assert [int(number) for number in second] == [int(number) for number in first]


@pytest.mark.parametrize(
    ("dataset", "draws"),
    [
        (tf.data.Dataset.range(6), 0),
        (tf.data.Dataset.range(10_000).shuffle(6).shuffle(3), 2),
        (tf.data.Dataset.range(6).apply(tf.data.experimental.shuffle_and_repeat(6)), 1),
        (tf.data.Dataset.random(1), 1),
        (tf.data.Dataset.range(2).cache().repeat(), 1),
    ],
)
def test_draws_in_saved_positions(dataset: tf.data.Dataset, draws: int, tmp_path: Path) -> None:
    iterator = iter(dataset)
    for _ in range(3):  # A cache of two elements is complete before the third element is read.
        next(iterator)
    file = str(tmp_path / "position")
    tf.raw_ops.SaveV2(
        prefix=file,
        tensor_names=["0"],
        shape_and_slices=[""],
        tensors=[compat.read_position(iterator)],
    )
    content = Path(f"{file}.data-00000-of-00001").read_bytes()
    assert compat.count_saved_draws(content) == draws


def test_new_layers_are_watched_and_hidden() -> None:
    class WithoutInit(keras.Layer):
        def __init__(self) -> None:
            pass

    outer: list[keras.Layer] = []
    inner: list[keras.Layer] = []
    with compat.watch_new_layers(outer.append):
        first = keras.layers.Dense(1)
        with compat.watch_new_layers(inner.append):
            second = WithoutInit()
        with compat.hide_new_layers():
            keras.layers.Dense(1)
    keras.layers.Dense(1)
    assert list(map(id, outer)) == [id(first), id(second)]
    assert list(map(id, inner)) == [id(second)]


def test_layers_of_models() -> None:
    inner = keras.layers.Dense(1)
    model = keras.Sequential([keras.Sequential([inner])])
    layers = compat.flatten_layers(model)
    assert layers[0] is model
    assert inner in layers
    assert compat.flatten_layers(lambda batch: batch) == []


def test_names_of_random_generators() -> None:
    of_keras = keras.random.SeedGenerator(1).state
    of_tensorflow = tf.random.Generator.from_seed(1).state
    assert compat.is_keras_generator(of_keras.value.name)
    assert compat.is_tf_generator(f"create_model/{of_tensorflow.name}")
    other = tf.Variable(1.0, name="state")
    assert not compat.is_keras_generator(other.name)
    assert not compat.is_tf_generator(f"create_model/{other.name}")


def test_names_of_keras_start_again() -> None:
    name = keras.layers.Dense(1).name
    with compat.name_anew():
        assert keras.layers.Dense(1).name == "dense"
    assert keras.layers.Dense(1).name not in (name, "dense")


def test_optimizers_are_not_reduced_or_refused() -> None:
    """Optimizers skip reductions, or refuse updates, only inside the corresponding context."""
    optimizer = keras.optimizers.SGD(1.0)
    assert float(compat.read_rate(optimizer)) == 1.0
    assert compat.read_rate(object()) is None  # type: ignore[arg-type]
    variable = keras.Variable(3.0)
    pairs = [(tf.constant(1.0), variable)]
    with compat.skip_reduction():
        assert optimizer._all_reduce_sum_gradients(pairs) is pairs
    with compat.refuse_optimizers("no update"), pytest.raises(SetupError, match="no update"):
        optimizer.apply_gradients(pairs)
    assert float(variable) == 3.0
    optimizer.apply_gradients(pairs)
    assert float(variable) == 2.0


def test_groups_of_optimizers_take_some_of_their_variables() -> None:
    """An update on one device may have gradients for only some of the variables.

    Keras itself requires a gradient for each variable.
    """
    variables = [keras.Variable(3.0), keras.Variable(3.0)]
    first, second = keras.optimizers.SGD(1.0), keras.optimizers.SGD(2.0)
    optimizer = keras.optimizers.MultiOptimizer(
        lambda variable: first if variable is variables[0] else second
    )
    optimizer.build(variables)
    with compat.update_device(tf.distribute.get_strategy(), 0, None, lambda _: True):
        optimizer.apply([tf.constant(1.0)], variables[1:])
    assert [float(variable) for variable in variables] == [3.0, 1.0]


def test_slots_are_created_inside_a_context_of_their_variable() -> None:
    variable = keras.Variable([3.0], name="kernel")
    slots: list[tuple[Any, str]] = []

    @contextlib.contextmanager
    def note(reference: Any) -> Iterator[None]:
        def create(make: Any, **values: Any) -> tf.Variable:
            slots.append((reference, values["name"]))
            return make(**values)

        with tf.variable_creator_scope(create):
            yield

    with compat.place_slots(note):
        optimizer = keras.optimizers.Adam()
        optimizer.build([variable])
    (first, momentum), (second, velocity) = slots
    assert first is second is variable
    assert ("momentum" in momentum, "velocity" in velocity) == (True, True)
    assert len(optimizer.variables) == 4  # the iterations and the learning rate have no context


def test_managers() -> None:
    checkpoint, other = tf.train.Checkpoint(), tf.train.Checkpoint()
    manager = tf.train.CheckpointManager(checkpoint, "unused", max_to_keep=3)
    assert compat.read_max_to_keep(manager) == 3
    with compat.hold_objects(manager, other):
        assert manager.checkpoint is other
    assert manager.checkpoint is checkpoint


@pytest.mark.parametrize("name", ["ckpt", "mit 'ä' und \"x\""])
def test_the_list_of_checkpoints_is_the_one_that_tensorflow_writes(
    tmp_path: Path, name: str
) -> None:
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(step=tf.Variable(0)), tmp_path, max_to_keep=3, checkpoint_name=name
    )
    for step in range(5):
        with compat.hold_objects(manager, manager.checkpoint):
            manager.save(step)
        ours = (tmp_path / "checkpoint").read_bytes()
        tf.train.CheckpointManager._record_state(manager)
        assert (tmp_path / "checkpoint").read_bytes() == ours
    assert ours.count(b"all_model_checkpoint_paths") == 3
    assert not list(tmp_path.glob("checkpoint.*"))


def test_variables_of_replicas_convert() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable = tf.Variable(2)
    with compat.convert_variables():
        assert (float(variable), int(variable)) == (2.0, 2)


def test_variables_that_a_scratch_graph_uses() -> None:
    used, unused = tf.Variable(1.0), tf.Variable(2.0)
    with compat.make_scratch_graph("test").as_default() as graph:
        used.read_value()
    strategy = tf.distribute.get_strategy()
    variables = compat.find_captured_variables(graph, strategy)
    assert list(map(id, variables)) == [id(used)]
    assert used is not unused


def test_variables_that_a_scratch_graph_creates_are_not_kept() -> None:
    """The global graph does not collect the variables that replicas create in a scratch graph."""
    before = len(tf.compat.v1.get_default_graph().get_collection("variables"))
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    layer = keras.layers.Dense(1)
    with compat.make_scratch_graph("test").as_default(), strategy.scope():
        layer(tf.zeros([1, 1]))
    assert layer.built
    assert len(tf.compat.v1.get_default_graph().get_collection("variables")) == before


def test_determinism_is_put_back() -> None:
    before = compat.is_op_determinism_enabled()
    with compat.keep_op_determinism():
        tf.config.experimental.enable_op_determinism()
        assert compat.is_op_determinism_enabled()
    assert compat.is_op_determinism_enabled() == before


def test_keras_draws_from_a_generator() -> None:
    with compat.draw_from(keras.random.SeedGenerator(3)):
        first = float(keras.random.uniform([]))
    with compat.draw_from(keras.random.SeedGenerator(3)):
        assert float(keras.random.uniform([])) == first
        assert compat.get_seed_generator() is not None


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
    """A replica still has its own losses after another replica has called the same layer."""
    layer = keras.layers.ActivityRegularization(l1=1.0)
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )

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
    layer(values[1])  # Without replicas, losses work as usual.
    assert [float(loss) for loss in layer.losses] == [2.0]


def test_graphs_called_of_functions_without_a_graph() -> None:
    """Ops in the loops of TensorFlow's dense CTC loss are found.

    The bodies of these loops are functions of an older kind, which have no graph.
    """
    with tf.Graph().as_default() as graph:
        logits = tf.compat.v1.placeholder(tf.float32, [3, 1, 4])
        tf.nn.ctc_loss(tf.constant([[1, 2]]), logits, tf.constant([2]), tf.constant([3]))
    assert {"While", "Exp"} <= {op.type for op in compat.add_called_ops(graph.get_operations())}


def test_a_graph_checkpoint_is_traced_once(tmp_path: Path) -> None:
    variable, node, checkpoint = tf.Variable(1.0), compat.Node(), compat.GraphCheckpoint()
    # The name is also that of an attribute of TensorFlow.
    node.children["_self_name_based_restores"] = variable
    checkpoint.children["x"] = node
    for value in (1.0, 2.0):
        variable.assign(value)
        checkpoint.write(str(tmp_path / "a"))
        read = tf.train.load_checkpoint(str(tmp_path / "a"))
        key = "x/_self_name_based_restores/.ATTRIBUTES/VARIABLE_VALUE"
        assert read.get_tensor(key) == value
    assert checkpoint._traced is not None
    assert checkpoint._traced.experimental_get_tracing_count() == 1


def trace_custom_gradient() -> tf.types.experimental.ConcreteFunction:
    """Returns a traced function with a custom gradient, which nothing else keeps."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda gradient: gradient * value

    return tf.function(identity, autograph=False).get_concrete_function(tf.constant(2.0))


def test_forgetting_custom_gradients_frees_the_graphs_that_use_them() -> None:
    graph = weakref.ref(trace_custom_gradient().graph)
    gc.collect()
    assert graph() is not None
    compat.forget_custom_gradients()
    gc.collect()
    assert graph() is None


def test_released_custom_gradients_live_as_long_as_the_graphs_that_use_them() -> None:
    before = trace_custom_gradient().graph
    kept = weakref.ref(before)
    with compat.release_custom_gradients():
        function = trace_custom_gradient()
        graph = weakref.ref(function.graph)
    del before
    gc.collect()
    value = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(value)
        result = function(value)
    assert float(tape.gradient(result, value)) == 3.0
    del function, tape, result
    gc.collect()
    assert graph() is None
    assert kept() is not None


def pass_on(gradient_function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that returns its argument and has the given gradient function."""
    return tf.custom_gradient(  # type: ignore[no-any-return]
        lambda value: (tf.identity(value), gradient_function)
    )


OWN, RECOMPUTED, BUILT_IN = (
    compat.GradientKind.OWN, compat.GradientKind.RECOMPUTED, compat.GradientKind.BUILT_IN,
)  # fmt: skip
GRADIENTS: dict[str, tuple[Callable[..., Any], compat.GradientKind]] = {
    "one of the user": (pass_on(lambda gradient: -gradient), OWN),
    "a function of TensorFlow": (pass_on(tf.sign), OWN),
    "inside a function": (tf.function(pass_on(tf.sign), autograph=False), OWN),
    "Python code": (lambda value: tf.py_function(tf.sin, [value], tf.float32), OWN),
    "a recomputed function": (tf.recompute_grad(tf.sin), RECOMPUTED),
    "one of TensorFlow": (tf.nn.silu, BUILT_IN),
    "one of Keras": (
        lambda value: keras.quantizers.fake_quant_with_min_max_vars(value, -1.0, 1.0), BUILT_IN,
    ),
    "none": (tf.sin, BUILT_IN),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_are_not_of_tensorflow_are_found(name: str) -> None:
    """The ops of a symbolic gradient refer to the ops of the forward pass."""
    function, kind = GRADIENTS[name]
    with compat.make_scratch_graph("test").as_default() as graph:
        value = tf.compat.v1.placeholder(tf.float32, [3])
        result = function(value)
        forward = graph.get_operations()
        tf.gradients(result, value)
    kinds = set(map(compat.classify_gradient, compat.add_called_ops(forward)))
    assert kinds - {BUILT_IN} == {kind} - {BUILT_IN}
    backward = graph.get_operations()[len(forward) :]
    assert result.op in [compat.find_forward_op(op) for op in backward] or name == "one of Keras"


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
    """The memory optimizer of TensorFlow runs without its pass that splits large sums."""
    from tensorflow.python.eager import context

    def parts() -> int:
        """Returns the setting of the memory optimizer for function calls made now."""
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


def test_a_constant_that_is_not_used_is_left_unchecked() -> None:
    """The check for NaN ignores constants, but still reports an op that computes with NaN.

    A deterministic loss contains an unused constant that is NaN.
    """

    def compute_loss(label: tf.Tensor) -> tf.Tensor:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(label, tf.zeros([1, 3]))

    def add_nan(value: tf.Tensor) -> tf.Tensor:
        return value + tf.constant(float("nan"))

    with compat.keep_op_determinism():
        tf.config.experimental.enable_op_determinism()
        tf.debugging.enable_check_numerics()
        try:
            with pytest.raises(tf.errors.InvalidArgumentError, match="Const"):
                tf.function(compute_loss)(tf.constant([1]))
            with compat.leave_constants_unchecked():
                loss = tf.function(compute_loss)(tf.constant([1]))
                assert float(loss[0]) == pytest.approx(1.0986123)  # log(3)
                with pytest.raises(tf.errors.InvalidArgumentError, match="AddV2"):
                    tf.function(add_nan)(tf.constant(1.0))
        finally:
            tf.debugging.disable_check_numerics()


def test_iterators_that_a_graph_reads_are_found() -> None:
    training_data, other, unused = (iter(tf.data.Dataset.range(3)) for _ in range(3))
    variable = tf.Variable(1, dtype=tf.int64)

    @tf.function
    def read() -> tf.Tensor:
        return next(training_data) + next(other) + variable

    graph = read.get_concrete_function().graph
    assert compat.find_captured_iterators(graph, training_data) == [other]
    assert next(unused) == 0


def test_the_check_for_nan_accepts_float8() -> None:
    float8 = tf.dtypes.experimental.float8_e4m3fn

    def read(value: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.identity(tf.cast(value, float8)), tf.float32)

    tf.debugging.enable_check_numerics()
    try:
        with compat.check_float8():
            assert float(tf.function(read)(tf.constant(1.5))) == 1.5
            with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):
                tf.function(read)(tf.constant(float("nan")))
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("dtype", [tf.float32, tf.int8, tf.bfloat16, tf.complex64, tf.string])
def test_initial_values_of_any_dtype_are_sent(
    monkeypatch: pytest.MonkeyPatch, dtype: tf.DType
) -> None:
    """A mock replaces the collectives, which send only some dtypes, and the published strings."""
    sent: dict[Any, Any] = {}

    def send(value: tf.Tensor, shape: Any, dtype: tf.DType, *keys: int) -> None:
        assert (value.shape, value.dtype) == (shape, dtype)
        assert dtype == tf.float32
        sent[keys] = value

    def receive(shape: Any, dtype: tf.DType, *keys: int) -> tf.Tensor:
        assert (sent[keys].shape, sent[keys].dtype) == (shape, dtype)
        return sent[keys]

    monkeypatch.setattr(collective_ops, "broadcast_send", send)
    monkeypatch.setattr(collective_ops, "broadcast_recv", receive)
    monkeypatch.setattr(compat.distribution, "publish", sent.__setitem__)
    monkeypatch.setattr(compat.distribution, "read_published", lambda key, _: sent[key])
    monkeypatch.setattr(compat.distribution, "_PIECE", 7)
    value = tf.constant(["", "a b", "\xe9"]) if dtype == tf.string else tf.cast([0, 1, 3], dtype)

    def encode(value: tf.Tensor) -> tf.Tensor:
        return tf.cast(value, tf.float32)

    with compat.broadcast_any_dtype(encode, tf.cast):
        collective_ops.broadcast_send(value, value.shape, dtype, 2, 1, 5)
        received = collective_ops.broadcast_recv(value.shape, dtype, 2, 1, 5)
    assert received.dtype == dtype
    assert bool(tf.reduce_all(received == value))


def test_objects_of_a_checkpoint_are_listed(tmp_path: Path) -> None:
    inner: Any = tf.Module()
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


def test_texts_are_published_and_read_by_the_coordination_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mock replaces the service here; tests/engine/test_cluster.py uses a real service."""
    published: dict[str, str] = {}

    def read(key: str, _timeout_in_ms: int) -> str:
        if key not in published:
            raise tf.errors.DeadlineExceededError(None, None, "GetKeyValue() timed out")
        return published[key]

    context = vars(compat.distribution)["context"].Context
    for name, substitute in (
        ("set_config_key_value", create_autospec(context.set_config_key_value)),
        ("get_config_key_value", create_autospec(context.get_config_key_value)),
    ):
        monkeypatch.setattr(context, name, substitute)
    context.set_config_key_value.side_effect = lambda _, key, value: published.update({key: value})
    context.get_config_key_value.side_effect = lambda _, key, timeout: read(key, timeout)
    assert compat.read_published("a", 0.5) is None
    compat.publish("a", "text")
    assert compat.read_published("a", 0.5) == "text"
    assert context.get_config_key_value.call_args.args[2] == 500


def test_cpu_devices_of_worker() -> None:
    from tensorflow.python.distribute import collective_all_reduce_strategy as module

    with compat.list_cpu_devices(2):
        replaced = module.CollectiveAllReduceExtended._initialize_local_devices
        assert replaced(None, None, "/job:worker")[0][1] == "/job:worker/device:CPU:1"
    assert module.CollectiveAllReduceExtended._initialize_local_devices is not replaced


def test_replicas_gather_tensors_in_their_order() -> None:
    """Two devices of this process gather tensors in the order of the replicas, even in a loop.

    The size of the tensors may vary within the loop.

    No other test in this file may call a collective. TensorFlow numbers collectives, and requires
    that all collectives with the same number are of the same kind.
    """
    from tensorflow.python.distribute import collective_all_reduce_strategy as module

    strategy = module.CollectiveAllReduceStrategy._from_local_devices(("CPU:0", "CPU:1"))

    def gather(rows: tf.Tensor) -> tf.Tensor:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.fill([rows, 2], tf.cast(number + 3, tf.int64))
        with compat.let_sizes_vary():
            return compat.gather_from_replicas(own)

    @tf.function
    def gather_twice() -> tf.Tensor:
        gathered = tf.TensorArray(tf.int64, 2, infer_shape=False)
        for index in tf.range(2):
            results = strategy.experimental_local_results(strategy.run(gather, (index + 1,)))
            gathered = gathered.write(index, results[1])
        return gathered.concat()

    np.testing.assert_array_equal(gather_twice()[:, 0], [3, 4, 3, 3, 4, 4])


def test_means_of_losses_are_not_divided_by_the_replicas() -> None:
    strategy, loss = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), keras.losses.Huber()
    with strategy.scope():
        ones = tf.ones([4, 1])
        assert float(loss(ones, ones + 2.0)) == 1.5 / 2
        with compat.run_replica(None):
            assert float(loss(ones, ones + 2.0)) == 1.5


def test_replica_context_entered_again_keeps_the_recording_of_summaries() -> None:
    """Entering a replica context again does not change which replica writes summaries."""
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


def test_ops_that_xla_compiles_for_a_gpu() -> None:
    """The list of ops is complete even if TensorFlow has already started without a GPU."""
    tf.constant(0)
    assert {"MatMul", "Conv2D", "StatelessRandomUniformV2", "While"} <= compat.list_gpu_ops()
    assert not {"AsString", "CudnnRNNV3", "WriteScalarSummary"} & compat.list_gpu_ops()


def test_lowering_runs_nothing() -> None:
    """Lowering a function neither assigns variables nor draws random numbers.

    If lowering fails, the error names the op and the source line.
    """
    variable = tf.Variable(1.0)

    @tf.function(jit_compile=True, autograph=False)
    def double(x: Any) -> Any:
        return tf.strings.to_number(tf.strings.as_string(x)) if x.shape == [3] else change(x)

    def change(x: Any) -> Any:
        variable.assign_add(1.0)
        return tf.random.stateless_uniform([2], [1, 2]) * variable + x

    device = tf.config.list_logical_devices("CPU")[0].name
    tf.random.set_seed(1)
    expected = tf.random.uniform([]).numpy()
    tf.random.set_seed(1)
    compat.lower(double, [tf.TensorSpec([2])], device)
    assert variable.numpy() == 1.0
    assert tf.random.uniform([]).numpy() == expected
    with pytest.raises(ValueError, match=r"(?s)AsString.*test_compat.py"):
        compat.lower(double, [tf.TensorSpec([3])], device)


def test_autograph_is_allowed_within_a_function_that_it_does_not_convert() -> None:
    def halve_even(number: tf.Tensor) -> tf.Tensor:
        if number % 2 == 0:
            number = number // 2
        return number

    @tf.autograph.experimental.do_not_convert
    def read() -> list[int]:
        numbers = tf.data.Dataset.range(4)
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            numbers.map(halve_even)
        with compat.allow_autograph():
            return list(map(int, numbers.map(halve_even)))

    assert read() == [0, 1, 1, 3]


def test_results_of_ops_in_a_graph_are_replaced() -> None:
    def double_squares(op_type: str, result: tf.Tensor) -> tf.Tensor:
        return 2.0 * result if op_type == "Square" else result

    @tf.function
    def differentiate(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(value)
            square = tf.square(value)
        return square, tape.gradient(square, value)

    with compat.change_results(double_squares):
        square, gradient = differentiate(tf.constant(3.0))
        assert float(tf.square(3.0)) == 9.0
    assert (float(square), float(gradient)) == (18.0, 6.0)
    assert float(tf.function(tf.square)(3.0)) == 9.0
