"""Names of TensorFlow and Keras that are not public, one function each.

tests/engine/test_compat.py fails if one of them changes.
"""

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.losses import loss as keras_losses
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops import summary_ops_v2
from tensorflow.python.trackable.base import Trackable
from tensorflow.python.util import _pywrap_determinism

from ctl_core.run.errors import SetupError

Within = contextlib.AbstractContextManager[None]


class _Thread(threading.local):
    """What a thread is in: each replica is traced in one of its own."""

    training: bool | None = None
    reduce: Callable[[Any], Any] | None = None
    device: "_DeviceUpdate | None" = None
    keeps_means = False

    def __init__(self) -> None:
        self.losses: Any = weakref.WeakKeyDictionary()


_thread = _Thread()
_replacing = threading.RLock()
_users: collections.Counter[tuple[Any, str]] = collections.Counter()
_originals: dict[tuple[Any, str], Any] = {}


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute by what is made of it, or of None, while any thread is within."""
    key = owner, name
    with _replacing:
        if not _users[key]:
            _originals[key] = vars(owner).get(name)
            setattr(owner, name, replace(_originals[key]))
        _users[key] += 1
    try:
        yield
    finally:
        with _replacing:
            _users[key] -= 1
            if not _users[key]:
                original = _originals.pop(key)
                delattr(owner, name) if original is None else setattr(owner, name, original)


@contextlib.contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object other values within."""
    before = {name: getattr(owner, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def flatten_layers(model: Any) -> list[keras.Layer]:
    """Returns a Keras model and all its layers, parents first; of anything else, nothing."""
    return list(model._flatten_layers()) if isinstance(model, keras.Layer) else []


def read_added_losses(layer: keras.Layer) -> list[Any]:
    """Returns what ``add_loss`` of the layer itself was called with since the model was called."""
    return list(layer._losses or ())


def read_rate(optimizer: Any) -> Any:
    """Returns the schedule or variable that a Keras optimizer was given; of any other, None."""
    return optimizer._learning_rate if isinstance(optimizer, keras.Optimizer) else None


@contextlib.contextmanager
def _gradients_reduced_by(reduce: Callable[[Any], Any]) -> Iterator[None]:
    """Within, this thread's Keras optimizers, inside whatever object, sum over replicas so."""

    def replace(of_keras: Any) -> Any:
        def sum_gradients(self: Any, grads_and_vars: Any) -> Any:
            own = _thread.reduce
            return own(grads_and_vars) if own else of_keras(self, grads_and_vars)

        return sum_gradients

    method = _replaced(keras.optimizers.Optimizer, "_all_reduce_sum_gradients", replace)
    with method, _set(_thread, reduce=reduce):
        yield


def skip_reduction() -> Within:
    """Where gradients are summed over the replicas already: Keras does not sum again."""
    return _gradients_reduced_by(lambda grads_and_vars: grads_and_vars)


def refuse_optimizers(why: str) -> Within:
    """Where no Keras optimizer may be applied; one that is raises a SetupError with these words."""

    def refuse(_: Any) -> Any:
        raise SetupError(why)

    return _gradients_reduced_by(refuse)


class _DeviceUpdate:
    """Stands in for the strategy in a Keras optimizer that updates the variables of one device."""

    def __init__(self, strategy: tf.distribute.Strategy, index: int) -> None:
        """``index`` is the number of the device in this process."""
        self._strategy = strategy
        self._index = index

    @property
    def extended(self) -> "_DeviceUpdate":
        return self

    def update(
        self, variable: Any, function: Callable[..., Any], args: Any = (), group: bool = True
    ) -> Any:
        """Calls a function with the device's part of a variable."""
        own = self._strategy.experimental_local_results(variable)[self._index]
        with tf.device(own.device):
            return function(own, *args)


@contextlib.contextmanager
def update_device(strategy: tf.distribute.Strategy, index: int) -> Iterator[None]:
    """Within, this thread's Keras optimizers update the variables of one device, and no others.

    To be used in ``strategy.extended.update``. A Keras optimizer by itself lets all replicas meet
    before it updates (``merge_call``), which they cannot under a condition (``tf.cond``): it could
    neither skip an update nor average its weights at every tenth step.
    """

    def replace_meeting(of_tensorflow: Any) -> Any:
        def call(function: Callable[..., Any], distribution: Any, *args: Any, **named: Any) -> Any:
            if _thread.device is None:
                return of_tensorflow(function, distribution, *args, **named)
            return function(_thread.device, *args, **named)

        return call

    def get_strategy(optimizer: Any) -> Any:
        return _thread.device or vars(optimizer)["_distribution_strategy"]

    def set_strategy(optimizer: Any, value: Any) -> None:
        vars(optimizer)["_distribution_strategy"] = value

    meeting = _replaced(tf.__internal__.distribute.interim, "maybe_merge_call", replace_meeting)
    of_optimizer = _replaced(
        keras.optimizers.Optimizer,
        "_distribution_strategy",
        lambda _: property(get_strategy, set_strategy),
    )
    by_variable = _replaced(keras.optimizers.MultiOptimizer, "apply", _apply_by_variable)
    device = _DeviceUpdate(strategy, index)
    with meeting, of_optimizer, by_variable, _set(_thread, device=device):
        yield


def _apply_by_variable(of_keras: Callable[..., None]) -> Callable[..., None]:
    """Returns a ``MultiOptimizer.apply`` that takes the gradients of some of its variables.

    Keras' own insists on one for each variable that the optimizer was built with, frozen ones too.
    """

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is None or not self.built:
            return of_keras(self, grads, trainable_variables)
        groups: dict[int, list[tuple[Any, Any]]] = {}
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            index = self._var_to_optimizer_idx[self._var_key(variable)]
            groups.setdefault(index, []).append((gradient, variable))
        for index, pairs in sorted(groups.items()):
            gradients, variables = zip(*pairs, strict=True)
            self.optimizers[index].apply(list(gradients), list(variables))
        self.iterations.assign_add(1)

    return apply


@contextlib.contextmanager
def run_layers(training: bool) -> Iterator[None]:
    """Within, a Keras layer called from outside of any other gets ``training``, unless it is told.

    A tf.function that calls one is traced for each ``training``.
    """

    def replace_in_layers(of_keras: Any) -> Any:
        def call_context(self: Any) -> Any:
            found = of_keras(self)
            if found.get_value("training") is None:
                found.set_value("training", _thread.training)
            return found

        return call_context

    def replace_in_functions(of_tensorflow: Any) -> Any:
        def make_context(scope_type: Any = None) -> Any:
            return of_tensorflow((scope_type, _thread.training))

        return make_context

    layers = _replaced(keras.Layer, "_get_call_context", replace_in_layers)
    functions = _replaced(function_context, "make_function_context", replace_in_functions)
    with layers, functions, _set(_thread, training=training):
        yield


def separate_losses() -> Within:
    """Within, each replica has the losses of its own ``add_loss``, where there are several.

    They take turns at being traced, as at a synchronized batch normalisation: the next one would
    clear the layer's list, or add to it, before the first has read it.
    """

    def of_replica(layer: Any) -> Any:
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return vars(layer).get("_losses")
        return _thread.losses.setdefault(layer, [])

    def of_all(layer: Any, losses: Any) -> None:
        vars(layer)["_losses"] = losses

    return _replaced(keras.Layer, "_losses", lambda _: property(of_replica, of_all))


@contextlib.contextmanager
def convert_variables() -> Iterator[None]:
    """Within, ``float`` and ``int`` take a variable of several replicas as that of one."""
    of_float = _replaced(DistributedVariable, "__float__", lambda _: lambda v: float(v.numpy()))
    of_int = _replaced(DistributedVariable, "__int__", lambda _: lambda v: int(v.numpy()))
    with of_float, of_int:
        yield


def name_anew() -> Within:
    """Within, Keras names objects as in a new process; ``clear_session`` forgets more.

    Afterwards, names go on as if nothing had been made within.
    """
    return _set(global_state.GLOBAL_STATE_TRACKER, object_name_uids=None)


def leave_creator_scopes() -> Within:
    """Within, no ``tf.variable_creator_scope`` around it sees the variables that are created."""
    return _set(tf.compat.v1.get_default_graph(), _variable_creator_stack=[])


def is_op_determinism_enabled() -> bool:
    """Returns whether ops are deterministic."""
    return bool(_pywrap_determinism.is_enabled())


@contextlib.contextmanager
def keep_op_determinism() -> Iterator[None]:
    """Afterwards, ops are as deterministic as before: TensorFlow itself can only switch it on."""
    before = is_op_determinism_enabled()
    try:
        yield
    finally:
        _pywrap_determinism.enable(before)


def get_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that ``keras.random`` draws from without a seed, if it has drawn."""
    return global_state.get_global_attribute("global_seed_generator")


def draw_from(generator: keras.random.SeedGenerator | None) -> Within:
    """Within this thread, ``keras.random`` draws without a seed from a generator."""
    return _set(global_state.GLOBAL_STATE_TRACKER, global_seed_generator=generator)


@contextlib.contextmanager
def run_replica(generator: keras.random.SeedGenerator | None) -> Iterator[None]:
    """Within this thread, ``draw_from``, and Keras divides no mean of a loss by the replicas."""

    def replace(of_keras: Any) -> Any:
        return lambda value: value if _thread.keeps_means else of_keras(value)

    divide = _replaced(keras_losses, "scale_loss_for_distribution", replace)
    with draw_from(generator), divide, _set(_thread, keeps_means=True):
        yield


def keep_op_seed() -> Within:
    """Around ``tf.random.set_seed``: afterwards eager random ops go on as they would have."""
    of_process = context.context()
    return _set(of_process, _seed=of_process._seed, _rng=getattr(of_process, "_rng", None))


def make_scratch_graph(name: str) -> Any:
    """Returns a graph in which Keras builds variables as in a tf.function: outside of it."""
    return tf.__internal__.FuncGraph(name)


def find_captured_variables(graph: Any, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns the variables that a scratch graph uses and that are outside of it, in order."""
    local = strategy.experimental_local_results
    watched = {id(part.handle): part for v in graph._watched_variables for part in local(v)}
    return [watched[id(outer)] for outer, _ in graph.captures if id(outer) in watched]


def find_written_resources(graph: Any) -> list[Any]:
    """Returns the handles, of what a function's graph captures, that it does not only read."""
    find = auto_control_deps_utils.get_read_write_resource_inputs
    written = {tensor.name for op in graph.get_operations() for tensor in find(op)[1]}
    return [outer for outer, inner in graph.captures if inner.name in written]


def find_called_graphs(op: Any) -> list[Any]:
    """Returns the graphs of the functions that an op calls."""
    attributes = [value for _, value in sorted(op.node_def.attr.items())]  # in one order for all
    named = [f for a in attributes for f in (*([a.func] * a.HasField("func")), *a.list.func)]
    functions = [op.graph._get_function(function.name) for function in named]
    # Those of the older kind, as in TensorFlow's CTC loss, keep none: no hook is in them.
    return [function.graph for function in functions if hasattr(function, "graph")]


def add_called_ops(operations: Iterable[Any]) -> Iterator[Any]:
    """Yields ops, each before those of the functions that it calls; a function's once."""
    seen: dict[int, Any] = {}  # holds the graphs, so that no other one gets the same id

    def walk(operations: Iterable[Any]) -> Iterator[Any]:
        for op in operations:
            yield op
            for graph in find_called_graphs(op):
                if id(graph) not in seen:
                    seen[id(graph)] = graph
                    yield from walk(graph.get_operations())

    return walk(operations)


def read_translated_stack(error: BaseException) -> list[tuple[str, int]]:
    """Returns the lines of the source that an exception went through in converted functions."""
    stack = getattr(getattr(error, "ag_error_metadata", None), "translated_stack", ())
    return [(frame.filename, frame.lineno) for frame in reversed(stack)]


def keep_large_sums_whole() -> None:
    """From here on, TensorFlow does not split sums of large tensors to save memory.

    In a loop of the graph the parts of such a sum fail by AlreadyExistsError (its issue 23780).
    """
    of_process = context.context()
    of_process._config = config = of_process._config or tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.memory_optimization = rewrites.SWAPPING_HEURISTICS
    of_process._thread_local_data.function_call_options = None  # made anew of that


class GraphWriter(tf.summary.SummaryWriter):
    """The writer of the summaries in a graph, which is opened when the first one is traced."""

    def __init__(self, find: Callable[[], tf.summary.SummaryWriter | None]) -> None:
        self._find = find

    @functools.cached_property
    def _resource(self) -> tf.Tensor:
        with tf.init_scope(), tf.device("CPU:0"):
            if (writer := self._find()) is None:  # in the graph, but never run
                return tf.raw_ops.SummaryWriter(shared_name="unopened", container="")
            return writer._resource

    def close(self) -> None:
        """Does nothing: whoever opened the writer does that."""

    init = flush = close


@contextlib.contextmanager
def mute_other_summaries(step: Any, replica: int | None = None) -> Iterator[None]:
    """On a replica, at a step: only the first of all writes summaries.

    TensorFlow's own rule knows the number before the graph runs: then the graphs of the others are
    simplified to something else, which rounds differently, and replicas drift apart.
    """
    if replica is None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group

    def is_first() -> tf.Tensor:
        return tf.equal(tf.cast(replica, step.dtype), tf.minimum(step, 0))

    with _set(summary_ops_v2._summary_state, is_recording_distribution_strategy=is_first):
        yield


@contextlib.contextmanager
def enter_replica_context(context: tf.distribute.ReplicaContext) -> Iterator[None]:
    """Enters a replica context, even one that is entered already.

    TensorFlow would also change which replica writes summaries; that stays as it is.
    """
    state = summary_ops_v2._summary_state
    recording = state.is_recording_distribution_strategy
    recording_outside = context._summary_recording_distribution_strategy
    try:
        with context:
            state.is_recording_distribution_strategy = recording
            yield
    finally:
        context._summary_recording_distribution_strategy = recording_outside


class SavedObject(NamedTuple):
    """An object in a checkpoint.

    Attributes:
        children: by name, their positions in the list of all objects
        shape: that of a variable's value; None for any other object
    """

    children: dict[str, int]
    shape: tuple[int, ...] | None


def read_object_graph(checkpoint: str) -> list[SavedObject]:
    """Returns the objects of a ``tf.train.Checkpoint``, given the prefix of its files.

    The root is the first one.
    """
    reader = tf.train.load_checkpoint(checkpoint)
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    )
    shapes = reader.get_variable_to_shape_map()
    objects: list[SavedObject] = []
    for node in graph.nodes:
        children = {child.local_name: child.node_id for child in node.children}
        keys = [value.checkpoint_key for value in node.attributes if value.name == "VARIABLE_VALUE"]
        shape = tuple(shapes[keys[0]]) if keys else None
        objects.append(SavedObject(children, shape))
    return objects


def read_max_to_keep(manager: tf.train.CheckpointManager) -> int | None:
    """Returns how many checkpoints a manager keeps; None for all."""
    return getattr(manager, "_max_to_keep", None)


def hold_objects(manager: tf.train.CheckpointManager, checkpoint: tf.train.Checkpoint) -> Within:
    """Lets a manager save another checkpoint than its own."""
    return _set(manager, _checkpoint=checkpoint)


class GraphCheckpoint(tf.train.Checkpoint):
    """A checkpoint of the same parts at each write: the graph for it is traced once.

    TensorFlow looks through all objects at each write, several times the work of writing them.

    Attributes:
        children: the parts by name, in place of attributes
    """

    children: dict[str, Any]
    _traced: Any = None
    _in_graph = True  # whether to trace at all: what Python serializes would be fixed then
    _on: str | None = None  # the device of its variables: what is elsewhere gets a file of its own

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "children", {})  # set as usual, it would be a part itself

    def _trackable_children(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {**super()._trackable_children(*args, **options), **self.children}

    def _write(self, file_prefix: Any, options: Any = None) -> Any:
        if not (self._in_graph and tf.executing_eagerly()):
            return super()._write(file_prefix, options)
        if self._traced is None:

            @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
            def traced(path: tf.Tensor) -> None:
                with tf.device(self._on):
                    self.write(path)

            self._traced = traced
        self._traced(tf.constant(file_prefix))
        for callback in getattr(options, "experimental_write_callbacks", None) or ():
            callback(file_prefix)
        return file_prefix


def read_position(iterator: tf.data.Iterator) -> tf.Tensor:
    """Returns an iterator's position, a vector of variants, which is encoded when it is written."""
    return iterator._serialize_to_tensors()["_STATE"]


def restore_position(iterator: tf.data.Iterator, position: tf.Tensor) -> None:
    """Lets an iterator go on from what ``read_position`` has returned of another."""
    iterator._restore_from_tensors({"_STATE": position})


class Node(Trackable):  # type: ignore[misc]
    """An object of a checkpoint that has nothing but children.

    They are no attributes: those of a loaded SavedModel have names that TensorFlow uses itself.

    Attributes:
        children: the children by name
    """

    def __init__(self) -> None:
        self.children: dict[str, Any] = {}

    def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self.children


def saves_itself(part: Any) -> bool:
    """Returns whether a part of a checkpoint has state besides variables, as a table has."""
    kinds = ("_serialize_to_tensors", "_gather_saveables_for_checkpoint")
    if any(getattr(type(part), name) is not getattr(Trackable, name) for name in kinds):
        return True
    return bool(part._gather_saveables_for_checkpoint())  # of a table in a loaded SavedModel


def find_inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset reads."""
    return list(dataset._inputs())


def list_stages(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it reads, however far back."""
    yield dataset
    for part in find_inputs(dataset):
        yield from list_stages(part)


def find_functions(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the functions that a stage of a pipeline calls; each has ``function.graph``."""
    return list(dataset._functions())


def stops_on_empty_dataset(dataset: tf.data.Dataset) -> bool:
    """Returns whether a stage ends with the first of its inputs; only mixtures may go on."""
    return getattr(dataset, "_stop_on_empty_dataset", True) is not False


def read_cache_file(dataset: tf.data.Dataset) -> str | None:
    """Returns the file of a stage that is a cache, "" for one in memory; None for another stage."""
    if type(dataset).__name__ != "CacheDataset":
        return None
    return tf.get_static_value(tf.convert_to_tensor(dataset._filename)).decode()  # type: ignore[no-any-return]


def is_shuffle(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage of a pipeline shuffles elements."""
    return "Shuffle" in type(stage).__name__


def is_tuned(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline leaves to tf.data's tuner how many calls a stage makes at once."""
    numbers = [getattr(stage, "_num_parallel_calls", None) for stage in list_stages(dataset)]
    return any(n is not None and tf.get_static_value(n) == tf.data.AUTOTUNE for n in numbers)


def cut_join(seconds: float) -> Within:
    """Within, processes that join a cluster wait so long for one that has gone, not an hour."""
    own, milliseconds = context.context(), int(1000 * seconds)

    def configure(*args: Any, **how: Any) -> None:
        how["cluster_register_timeout_in_ms"] = milliseconds
        context.Context.configure_coordination_service(own, *args, **how)
        own.coordination_service.cluster_register_with_barrier = True

    return _set(own, configure_coordination_service=configure)


def list_cpu_devices(count: int) -> Within:
    """Lets MultiWorkerMirroredStrategy have ``count`` replicas on a CPU, instead of one."""

    def local_devices(_: Any, resolver: Any, worker: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker}/device:CPU:{index}" for index in range(count)), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    own = extended._initialize_local_devices if count == 1 else local_devices
    return _set(extended, _initialize_local_devices=own)
