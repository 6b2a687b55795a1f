"""Names of TensorFlow and Keras that are not public, one function each.

tests/engine/test_compat.py fails if one of them changes.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.errors import SetupError


def flatten_layers(model: Any) -> list[keras.Layer]:
    """Returns a Keras model and all its layers, parents first; of anything else, nothing.

    ``_flatten_layers``: Keras has no public way to nested layers.
    """
    return list(model._flatten_layers()) if isinstance(model, keras.Layer) else []


def captured_variables(graph: Any, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns the variables that a graph uses and that are outside of it, in their order.

    ``_watched_variables``: a FuncGraph that is no tf.function's has no public list of them.
    """
    local = strategy.experimental_local_results
    watched = {id(part.handle): part for v in graph._watched_variables for part in local(v)}
    return [watched[id(outer)] for outer, _ in graph.captures if id(outer) in watched]


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that ``keras.random`` draws from without a seed, if it has drawn."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("global_seed_generator")


def rate_of(optimizer: Any) -> Any:
    """Returns the schedule or variable that a Keras optimizer was given; of any other, None.

    ``_learning_rate``: the public attribute is the schedule's present value.
    """
    return optimizer._learning_rate if isinstance(optimizer, keras.Optimizer) else None


# How whatever Keras optimizer is applied in this thread sums its gradients over the replicas: by
# itself, or not again ("summed"), or not at all, with the words of a refusal.
_applied = threading.local()


def gradients_are_summed() -> contextlib.AbstractContextManager[None]:
    """Where gradients are summed over the replicas already: Keras optimizers do not sum again."""
    return _optimizers(summed=True)


def optimizers_refused(why: str) -> contextlib.AbstractContextManager[None]:
    """Where no Keras optimizer may be applied; one that is raises a SetupError with these words."""
    return _optimizers(refusal=why)


@contextlib.contextmanager
def _optimizers(summed: bool = False, refusal: str = "") -> Iterator[None]:
    """Says how Keras optimizers sum gradients within.

    Keras has no public switch for that: whatever optimizer is applied calls its
    ``_all_reduce_sum_gradients``. It is replaced on the class, since an optimizer may be inside any
    object, by one that looks what its thread is in: each replica is traced in a thread of its own.
    """

    def look(of_keras: Any) -> Any:
        @functools.wraps(of_keras)
        def sum_if_needed(self: Any, grads_and_vars: Any) -> Any:
            summed, refusal = getattr(_applied, "mode", (False, ""))
            if refusal:
                raise SetupError(refusal)
            return grads_and_vars if summed else of_keras(self, grads_and_vars)

        return sum_if_needed

    before = getattr(_applied, "mode", (False, ""))
    _applied.mode = (summed, refusal)
    try:
        with _replaced(keras.optimizers.Optimizer, "_all_reduce_sum_gradients", look):
            yield
    finally:
        _applied.mode = before


_replacing = threading.RLock()
_users: collections.Counter[tuple[Any, str]] = collections.Counter()
_originals: dict[tuple[Any, str], Any] = {}


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a class or a module while anybody is within, in whatever thread.

    Args:
        owner: the class or module
        name: of the attribute, which a class need not have
        replace: returns what stands in its place, of what it was or None
    """
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


# The ``training`` of layers that are called in this thread from outside of any other.
_running = threading.local()


@contextlib.contextmanager
def layers_run(training: bool) -> Iterator[None]:
    """Within, a Keras layer called from outside of any other gets ``training``, unless it is told.

    A tf.function that calls one is traced for each ``training``. What a layer hands on to those in
    it is in Keras' call context, and what tf.functions have been traced for is in TensorFlow's
    function context; neither has a public entrance. What makes the two, ``_get_call_context`` and
    ``make_function_context``, looks here what its thread is in: each replica is traced in a thread
    of its own.
    """
    from tensorflow.python.eager.polymorphic_function import function_context

    before = getattr(_running, "training", None)
    _running.training = training
    try:
        with (
            _replaced(keras.Layer, "_get_call_context", _look_in_layers),
            _replaced(function_context, "make_function_context", _look_in_functions),
        ):
            yield
    finally:
        _running.training = before


def _look_in_layers(of_keras: Any) -> Any:
    @functools.wraps(of_keras)
    def call_context(self: Any) -> Any:
        found, training = of_keras(self), getattr(_running, "training", None)
        if training is not None and found.get_value("training") is None:
            found.set_value("training", training)
        return found

    return call_context


def _look_in_functions(of_tensorflow: Any) -> Any:
    @functools.wraps(of_tensorflow)
    def make_function_context(scope_type: Any = None) -> Any:
        training = getattr(_running, "training", None)
        return of_tensorflow(scope_type if training is None else (scope_type, training))

    return make_function_context


def losses_apart() -> contextlib.AbstractContextManager[None]:
    """Within, each replica has the losses of its own ``add_loss``, where there are several.

    Keras keeps them in the list ``_losses`` of the layer, which replicas share: where they take
    turns at being traced, as at a synchronized batch normalisation, the next one clears the list,
    or adds to it, before the first has read it. Each replica is traced in a thread of its own.
    """

    def of_replica(layer: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return vars(layer).get("_losses")
        if not hasattr(_running, "losses"):
            _running.losses = weakref.WeakKeyDictionary()
        return _running.losses.setdefault(layer, [])

    def of_all(layer: Any, losses: Any) -> None:
        vars(layer)["_losses"] = losses

    return _replaced(keras.Layer, "_losses", lambda _: property(of_replica, of_all))


def in_layer_call() -> bool:
    """Whether a Keras layer is being called in this thread, by Keras' global state."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("current_call_ctx") is not None


def is_deterministic() -> bool:
    """Whether op determinism is on in this process, by us or by the user."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


@contextlib.contextmanager
def op_determinism(on: bool) -> Iterator[None]:
    """Within, ops are deterministic, or as they were; afterwards they are as they were.

    There is a public function to switch it on, and none to switch it off.
    """
    before = is_deterministic()
    if on:
        tf.config.experimental.enable_op_determinism()
    try:
        yield
    finally:
        if on and not before:
            from tensorflow.python.framework import config

            config.disable_op_determinism()


@contextlib.contextmanager
def names_anew() -> Iterator[None]:
    """Within, Keras names objects as in a new process: ``dense``, not ``dense_7``.

    What numbers are taken is kept in Keras' global state; ``clear_session``, which is public, would
    forget the dtype policy, too. Afterwards objects have names that neither has given.
    """
    from keras.src.backend.common import global_state

    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        taken: dict[str, int] = collections.defaultdict(int)
        for uids in (before, global_state.get_global_attribute("object_name_uids")):
            for name, number in (uids or {}).items():
                taken[name] = max(taken[name], number)
        global_state.set_global_attribute("object_name_uids", taken)


@contextlib.contextmanager
def global_seed_generator_kept() -> Iterator[None]:
    """Around ``keras.utils.set_random_seed``, which forgets that generator."""
    from keras.src.backend.common import global_state

    before = global_seed_generator()
    yield
    global_state.set_global_attribute("global_seed_generator", before)


@contextlib.contextmanager
def drawing_from(generator: keras.random.SeedGenerator | None) -> Iterator[None]:
    """Within, ``keras.random`` draws without a seed from a generator, in a replica's thread, too.

    Keras keeps one for each thread.
    """
    from keras.src.backend.common import global_state

    with global_seed_generator_kept():
        global_state.set_global_attribute("global_seed_generator", generator)
        yield


@contextlib.contextmanager
def seed_of_ops_kept() -> Iterator[None]:
    """Around ``tf.random.set_seed``: afterwards eager random ops go on as they would have.

    The seed, and the generator that gives each op its own, are private to TensorFlow's context.
    """
    from tensorflow.python.eager import context

    of_process = context.context()
    # There is no generator before a seed is set, nor is one asked without a seed.
    before = of_process._seed, getattr(of_process, "_rng", None)
    try:
        yield
    finally:
        of_process._seed, of_process._rng = before


def written_resources(graph: Any) -> list[Any]:
    """Returns the handles, of what a function's graph captures, that it does not only read.

    TensorFlow notes on each op that calls a function, in an attribute, which of its resources are
    only read; one without that note is taken to write.
    """
    reading = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
    written = set()
    for op in graph.get_operations():
        resources = [i for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource]
        if not resources or op.type in reading:
            continue
        try:
            read_only = set(op.get_attr("_read_only_resource_inputs"))
        except ValueError:
            read_only = set()
        written |= {op.inputs[i].name for i in resources if i not in read_only}
    return [outer for outer, inner in graph.captures if inner.name in written]


def graphs_called(op: Any) -> list[Any]:
    """Returns the graphs of the functions that an op calls: tf.functions, branches, loops.

    ``_get_function``: a graph has no public way to its functions. TensorFlow's older kind of
    function, of which the loops of its CTC loss are, keeps no graph: nothing of a hook is in it.
    """
    attributes = op.node_def.attr.values()
    named = [f for a in attributes for f in (*([a.func] * a.HasField("func")), *a.list.func)]
    functions = [op.graph._get_function(function.name) for function in named]
    return [function.graph for function in functions if hasattr(function, "graph")]


def with_called(operations: Iterable[Any]) -> Iterator[Any]:
    """Yields ops, each before those of the functions that it calls; a function's once."""
    seen: dict[int, Any] = {}  # holds the graphs, so that no other one gets the same id

    def walk(operations: Iterable[Any]) -> Iterator[Any]:
        for op in operations:
            yield op
            for graph in graphs_called(op):
                if id(graph) not in seen:
                    seen[id(graph)] = graph
                    yield from walk(graph.get_operations())

    return walk(operations)


class GraphWriter(tf.summary.SummaryWriter):
    """The writer of the summaries in a graph, which is opened when the first one is traced.

    ``_resource`` is what ``tf.summary`` asks a writer for where it writes, and nowhere else.
    """

    def __init__(self, find: Callable[[], tf.summary.SummaryWriter | None]) -> None:
        """``find`` returns the writer to write with, or None: nothing will be written."""
        self._find = find

    @functools.cached_property
    def _resource(self) -> tf.Tensor:
        with tf.init_scope(), tf.device("CPU:0"):
            if (writer := self._find()) is None:  # in the graph, but never run
                return tf.raw_ops.SummaryWriter(shared_name="unopened", container="")
            return writer._resource

    def init(self) -> None:
        """Does nothing: the writer is ready when it is found."""

    def flush(self) -> None:
        """Does nothing: whoever opened the writer flushes it."""

    def close(self) -> None:
        """Does nothing: whoever opened the writer closes it."""


@contextlib.contextmanager
def large_sums_whole() -> Iterator[None]:
    """Within, TensorFlow does not split sums of large tensors to save memory.

    Its memory optimizer does so (SCHEDULING_HEURISTICS), and in a loop of the graph the parts of
    such a sum fail by AlreadyExistsError: TensorFlow's issues 23780, 37740. What the optimizer may
    do stands in a configuration that nothing public changes once TensorFlow runs.
    """
    from tensorflow.python.eager import context

    of_process = context.context()
    before, config = of_process._config, tf.compat.v1.ConfigProto()
    if before is not None:
        config.CopyFrom(before)
    rewrites = config.graph_options.rewrite_options
    rewrites.memory_optimization = rewrites.SWAPPING_HEURISTICS

    def use(one: Any) -> None:
        of_process._config = one
        of_process._thread_local_data.function_call_options = None  # made anew of that

    use(config)
    try:
        yield
    finally:
        use(before)


@contextlib.contextmanager
def summaries_of_first_replica(step: Any, replica: int | None = None) -> Iterator[None]:
    """On a replica: only the first of all writes summaries, which shows only when the graph runs.

    TensorFlow has the same rule, but with a number that is known before: then the graphs of the
    others are simplified to something else, which rounds differently, and replicas drift apart.

    Args:
        step: the number of the step, from 1; None where no summary is written
        replica: the number of the replica; default: that of the replica context
    """
    from tensorflow.python.ops.summary_ops_v2 import _summary_state as summaries

    if step is None:
        yield
        return
    index = replica
    if index is None:
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
    before = summaries.is_recording_distribution_strategy
    summaries.is_recording_distribution_strategy = lambda: tf.equal(
        tf.cast(index, step.dtype), tf.minimum(step, 0)
    )
    try:
        yield
    finally:
        summaries.is_recording_distribution_strategy = before


def checkpointed_names(reader: Any) -> dict[str, str]:
    """Returns the names that the variables of a checkpoint had, by their keys."""
    return {
        attribute.checkpoint_key: attribute.full_name.split(":")[0]
        for node in _object_graph(reader).nodes
        for attribute in node.attributes
    }


def checkpointed_below(reader: Any, name: str) -> dict[str, str]:
    """Returns where below an attribute of a checkpoint its variables were, by their keys.

    A key names one of the ways to a variable, which may lead over the optimizer.

    Returns:
        The names of attributes, with slashes; of all variables, where there is no such attribute.
    """
    nodes = _object_graph(reader).nodes
    start = [child.node_id for child in nodes[0].children if child.local_name == name] or [0]
    queue, seen = collections.deque([("", start[0])]), set(start)
    found: dict[str, str] = {}
    while queue:
        path, number = queue.popleft()
        for attribute in nodes[number].attributes:
            found[attribute.checkpoint_key] = path[1:]
        for child in nodes[number].children:
            if child.node_id not in seen:
                seen.add(child.node_id)
                queue.append((f"{path}/{child.local_name}", child.node_id))
    return found


def _object_graph(reader: Any) -> Any:
    """Reads a checkpoint's object graph, whose form is not among TensorFlow's public names."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    return graph


@contextlib.contextmanager
def holding(manager: tf.train.CheckpointManager, checkpoint: tf.train.Checkpoint) -> Iterator[None]:
    """Lets a manager save another checkpoint than its own.

    It has no argument for that: its private ``_checkpoint`` is exchanged for a while.
    """
    own = manager.checkpoint
    manager._checkpoint = checkpoint
    try:
        yield
    finally:
        manager._checkpoint = own


@contextlib.contextmanager
def cpu_devices_of_worker(count: int) -> Iterator[None]:
    """Lets a worker without GPUs have ``count`` CPU devices as replicas.

    MultiWorkerMirroredStrategy takes one and has no argument for more: its private method
    ``_initialize_local_devices`` is replaced while it is created. tests/golden/test_processes.py
    trains on two workers with three devices each and fails if TensorFlow changes this.
    """
    if count == 1:
        yield
        return
    from tensorflow.python.distribute import collective_all_reduce_strategy as module

    extended = module.CollectiveAllReduceExtended
    original = extended._initialize_local_devices

    def local_devices(self: object, resolver: object, worker: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker}/device:CPU:{index}" for index in range(count)), "CPU"

    extended._initialize_local_devices = local_devices
    try:
        yield
    finally:
        extended._initialize_local_devices = original


class GraphCheckpoint(tf.train.Checkpoint):
    """A checkpoint of the same parts at each write, so that the graph for it is traced once.

    TensorFlow looks through all objects at each write, several times the work of writing small
    ones. Private here is ``_write``, which ``write`` and CheckpointManager call;
    tests/engine/test_checkpoint.py fails if TensorFlow changes this.
    """

    _traced: Any = None
    _in_graph = True  # whether to trace at all: what Python serializes would be fixed then
    _on: str | None = None  # the device of its variables: what is elsewhere gets a file of its own

    def _write(self, file_prefix: Any, options: Any = None) -> Any:
        if not (self._in_graph and tf.executing_eagerly()):
            return super()._write(file_prefix, options)
        if self._traced is None:

            @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
            def traced(path: tf.Tensor) -> None:
                with tf.device(self._on):
                    self.write(path)

            with warnings.catch_warnings():  # of tf.data, that options are unknown to a graph
                warnings.simplefilter("ignore", UserWarning)
                traced.get_concrete_function()  # here: the filters are those of all threads
            self._traced = traced
        self._traced(tf.constant(file_prefix))
        for callback in getattr(options, "experimental_write_callbacks", None) or ():
            callback(file_prefix)
        return file_prefix


def saves_itself(part: Any) -> bool:
    """Returns whether a part of a checkpoint has state besides variables: a table, an iterator."""
    from tensorflow.python.trackable.base import Trackable

    kinds = ("_serialize_to_tensors", "_gather_saveables_for_checkpoint")
    return any(getattr(type(part), name) is not getattr(Trackable, name) for name in kinds)


def trackable_node() -> Any:
    """An object whose attributes are parts of a checkpoint, whatever their names.

    tf.Module and tf.train.Checkpoint, which are public, have names of their own that collide.
    """
    return tf.__internal__.tracking.AutoTrackable()


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset reads."""
    return list(dataset._inputs())


def stages(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it reads, however far back."""
    yield dataset
    for part in inputs_of(dataset):
        yield from stages(part)


def tuned_parts(dataset: tf.data.Dataset) -> set[str]:
    """Returns what of a pipeline is left to tf.data's tuner by AUTOTUNE.

    Returns:
        Of ``num_parallel_calls``, ``cycle_length`` and ``nested`` (in datasets that a function
        makes, as that of ``interleave``) those that are.
    """
    found = set()
    for stage in stages(dataset):
        for name in ("num_parallel_calls", "cycle_length"):
            value = tf.get_static_value(getattr(stage, f"_{name}", None))
            if value is not None and value == tf.data.AUTOTUNE:
                found.add(name)
        for part in vars(stage).values():
            if isinstance(getattr(part, "output_structure", None), tf.data.DatasetSpec):
                ops = part.function.graph.get_operations()
                if any(op.type.startswith(("Parallel", "MapAndBatch")) for op in ops):
                    found.add("nested")
    return found


def max_to_keep(manager: tf.train.CheckpointManager) -> int | None:
    """Returns how many checkpoints a manager keeps; None for all."""
    return getattr(manager, "_max_to_keep", None)


def translated_stack(error: BaseException) -> list[tuple[str, int]]:
    """Returns the lines of the source that an exception went through in converted functions."""
    stack = getattr(getattr(error, "ag_error_metadata", None), "translated_stack", ())
    return [(frame.filename, frame.lineno) for frame in reversed(stack)]


def scratch_graph(name: str) -> Any:
    """Returns a graph in which Keras builds variables as in a tf.function: outside of it."""
    return tf.__internal__.FuncGraph(name)
