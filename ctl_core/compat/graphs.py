"""Wraps private TensorFlow APIs for graphs, their functions and captures, and AutoGraph's stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.pyct import inspect_utils
from tensorflow.python.debug.lib import check_numerics_callback
from tensorflow.python.eager import context, record
from tensorflow.python.framework import auto_control_deps_utils, errors, op_callbacks

from ctl_core.compat.patches import Scope, set_attributes, wrap_function

# A graph that captures variables and tensors from outside of it.
FunctionGraph: TypeAlias = tf.__internal__.FuncGraph


def make_scratch_graph(name: str) -> FunctionGraph:
    """Returns a graph for tracing. As in a tf.function, Keras creates variables outside the graph.

    The graph has its own collections. Otherwise, the variables of replicas would be added to the
    collections of the global graph, and would stay in memory until the process ends.
    """
    return tf.__internal__.FuncGraph(name, collections={})


def leave_creator_scopes() -> Scope:
    """Temporarily disables all ``tf.variable_creator_scope`` contexts around this context."""
    return set_attributes(tf.compat.v1.get_default_graph(), _variable_creator_stack=[])


def find_captured_variables(
    graph: FunctionGraph, strategy: tf.distribute.Strategy
) -> list[tf.Variable]:
    """Returns the variables that a scratch graph captures from outside, in the order of capture."""
    components = {
        id(component.handle): component
        for variable in graph._watched_variables
        for component in strategy.experimental_local_results(variable)
    }
    return [components[id(outer)] for outer, _ in graph.captures if id(outer) in components]


def find_written_resources(graph: FunctionGraph) -> list[tf.Tensor]:
    """Returns the resource handles that a function's graph captures and may write to."""
    written = set()
    for op in graph.get_operations():
        _, written_by_op = auto_control_deps_utils.get_read_write_resource_inputs(op)
        written |= {handle.name for handle in written_by_op}
    return [outer for outer, inner in graph.captures if inner.name in written]


def call_with_captures(
    function: tf.types.experimental.ConcreteFunction,
    tensors: Sequence[tf.Tensor],
    captures: Sequence[tf.Tensor],
) -> Any:
    """Calls a function with other tensors in the place of those that it captured.

    Args:
        function: the function
        tensors: the arguments, in which ragged and sparse tensors are flattened
        captures: the replacements, in the order of ``captured_inputs``
    """
    concrete: Any = function  # TensorFlow has no public way to replace captures in a single call
    return concrete._call_flat(list(tensors), list(captures))


def list_captured_inputs(function: tf.types.experimental.ConcreteFunction) -> list[tf.Tensor]:
    """Returns the tensors from outside of a function that each call passes after the arguments."""
    concrete: Any = function
    return list(concrete.captured_inputs)


def find_distributed_variable(handle: tf.Tensor) -> tf.Variable | None:
    """Returns the variable that has a component on each device, given a component's handle.

    Returns None for any other tensor, and for the handle of a variable that exists once.
    """
    reference = getattr(handle, "_distributed_container", None)
    variable: tf.Variable | None = None if reference is None else reference()
    return variable


def is_inaccessible(error: BaseException | None) -> bool:
    """Returns whether an error says that a graph used a tensor of another function's graph."""
    return isinstance(error, errors.InaccessibleTensorError)


def find_called_graphs(op: tf.Operation) -> list[FunctionGraph]:
    """Returns the graphs of the functions that an op calls, in the same order on each process."""
    if not _has_functions(op):
        return []
    names = []
    for _, attribute in sorted(op.node_def.attr.items()):
        if attribute.HasField("func"):
            names.append(attribute.func.name)
        names.extend(function.name for function in attribute.list.func)
    functions = [op.graph._get_function(name) for name in names]
    # Functions of an older kind, such as those in TensorFlow's CTC loss, have no ``graph``. They
    # can be left out, because they never call hooks.
    return [function.graph for function in functions if hasattr(function, "graph")]


_types_without_functions: set[str] = set()


def _has_functions(op: tf.Operation) -> bool:
    """Returns whether ops of the type of an op may call functions."""
    if op.type in _types_without_functions:
        return False
    # The attributes of a type: to read those of each op takes long in a large graph.
    kinds = {attribute.type for attribute in op.op_def.attr}
    if kinds & {"func", "list(func)"}:
        return True
    _types_without_functions.add(op.type)
    return False


def add_called_ops(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields ops, and after each op the ops in the functions that it calls.

    If several ops call the same function, the ops in the function are yielded only once.
    """
    return _walk_ops(operations, {})


def _walk_ops(
    operations: Iterable[tf.Operation], visited: dict[int, FunctionGraph]
) -> Iterator[tf.Operation]:
    """Yields the ops of ``add_called_ops``.

    Args:
        operations: the ops to start from
        visited: the graphs that were visited, by id. The dict keeps the graphs alive, so that no
            other graph can get the same id
    """
    for op in operations:
        yield op
        for graph in find_called_graphs(op):
            if id(graph) not in visited:
                visited[id(graph)] = graph
                yield from _walk_ops(graph.get_operations(), visited)


def read_translated_stack(error: BaseException) -> list[tuple[str, int]]:
    """Returns the lines that an exception passed through in functions converted by AutoGraph."""
    metadata = getattr(error, "ag_error_metadata", None)
    stack = getattr(metadata, "translated_stack", ())
    return [(frame.filename, frame.lineno) for frame in reversed(stack)]


def allow_autograph() -> contextlib.AbstractContextManager[Any]:
    """Lets AutoGraph convert functions again within a function that it must not convert.

    ``do_not_convert`` also applies to everything that the marked function calls, such as the
    functions that hooks pass to ``Dataset.map``.
    """
    scope: contextlib.AbstractContextManager[Any]
    scope = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED)
    return scope


def read_sources_once() -> Scope:
    """Lets AutoGraph read sources from ``linecache``, rather than from the disk each time."""
    return set_attributes(inspect_utils, _fix_linecache_record=_do_nothing)


def _do_nothing(_: object) -> None:
    pass


@contextlib.contextmanager
def change_results(change: Callable[[str, tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Replaces the results of the ops that this thread adds to graphs inside the context.

    Gradients are those of the ops, as if the results had not been replaced.

    Args:
        change: returns a replacement, given the type of the op and a result
    """

    def call(
        op_type: str,
        _inputs: Sequence[tf.Tensor],
        _attributes: Sequence[Any],
        outputs: Sequence[tf.Tensor],
        graph: tf.Graph | None = None,
        **_: Any,
    ) -> list[tf.Tensor] | None:
        if graph is None:  # an op that runs eagerly
            return None
        with record.stop_recording():
            return [change(op_type, output) for output in outputs]

    op_callbacks.add_op_callback(call)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(call)


def leave_constants_unchecked() -> Scope:
    """Makes ``tf.debugging.enable_check_numerics`` ignore constants that are NaN.

    The deterministic version of ``sparse_softmax_cross_entropy_with_logits`` contains a NaN
    constant, which is used only for invalid labels. An op that computes with NaN is still reported.
    """
    names = (*check_numerics_callback.SAFE_OPS, b"Const", b"BroadcastTo")
    return set_attributes(check_numerics_callback, SAFE_OPS=names)


def check_float8() -> Scope:
    """Makes ``tf.debugging.enable_check_numerics`` convert float8 tensors before it checks them.

    TensorFlow's op that looks for NaN does not support float8.
    """
    return wrap_function(check_numerics_callback, "_debug_summary", _summarize)


def _summarize(of_tensorflow: Callable[..., tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.size == 1:
        tensor = tf.cast(tensor, tf.float32)
    return of_tensorflow(tensor)


def keep_large_sums_whole() -> None:
    """Prevents TensorFlow from splitting sums of large tensors. The change is permanent.

    TensorFlow splits such sums to save memory. In a loop of a graph, a split sum fails with
    AlreadyExistsError (TensorFlow's issue 23780).
    """
    process_context = context.context()
    config = process_context._config or tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.memory_optimization = rewrites.SWAPPING_HEURISTICS
    process_context._config = config
    # Deletes the cached options, so that TensorFlow creates them from the new configuration.
    process_context._thread_local_data.function_call_options = None
