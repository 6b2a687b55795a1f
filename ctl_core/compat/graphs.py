"""Private names of graphs, their functions and captures, and of the call stack of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.python.debug.lib import check_numerics_callback
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps_utils

from ctl_core.compat.patches import Scope, set_attributes


def make_scratch_graph(name: str) -> tf.Graph:
    """Returns a graph in which Keras creates variables outside of it, as in a tf.function.

    The graph has its own collections. Otherwise, the variables of replicas would be added to the
    collections of the global graph, and would stay in memory until the process ends.
    """
    return tf.__internal__.FuncGraph(name, collections={})


def leave_creator_scopes() -> Scope:
    """Hides created variables from every ``tf.variable_creator_scope`` around the context."""
    return set_attributes(tf.compat.v1.get_default_graph(), _variable_creator_stack=[])


def find_captured_variables(graph: tf.Graph, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns the variables outside of a scratch graph that the graph uses, in order."""
    components = {
        id(component.handle): component
        for variable in graph._watched_variables
        for component in strategy.experimental_local_results(variable)
    }
    return [components[id(outer)] for outer, _ in graph.captures if id(outer) in components]


def find_written_resources(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the handles that a function's graph captures and does not only read."""
    written = set()
    for op in graph.get_operations():
        _, written_by_op = auto_control_deps_utils.get_read_write_resource_inputs(op)
        written |= {handle.name for handle in written_by_op}
    return [outer for outer, inner in graph.captures if inner.name in written]


def find_called_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an op calls, in the same order on each process."""
    names = []
    for _, attribute in sorted(op.node_def.attr.items()):
        if attribute.HasField("func"):
            names.append(attribute.func.name)
        names.extend(function.name for function in attribute.list.func)
    functions = [op.graph._get_function(name) for name in names]
    # Functions of an older kind, as in TensorFlow's CTC loss, have no graph. They call no hooks.
    return [function.graph for function in functions if hasattr(function, "graph")]


def add_called_ops(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields ops, each followed by those of the functions that it calls; each function once."""
    return _walk_ops(operations, {})


def _walk_ops(
    operations: Iterable[tf.Operation], visited: dict[int, tf.Graph]
) -> Iterator[tf.Operation]:
    """Yields ops; ``visited`` holds graphs by id, so that no other graph gets the same id."""
    for op in operations:
        yield op
        for graph in find_called_graphs(op):
            if id(graph) not in visited:
                visited[id(graph)] = graph
                yield from _walk_ops(graph.get_operations(), visited)


def read_translated_stack(error: BaseException) -> list[tuple[str, int]]:
    """Returns the source lines that an exception passed through in functions of AutoGraph."""
    metadata = getattr(error, "ag_error_metadata", None)
    stack = getattr(metadata, "translated_stack", ())
    return [(frame.filename, frame.lineno) for frame in reversed(stack)]


def leave_constants_unchecked() -> Scope:
    """Lets ``tf.debugging.enable_check_numerics`` ignore the NaN that code has written down.

    A deterministic ``sparse_softmax_cross_entropy_with_logits`` has a constant NaN, which it
    selects only for a label that does not exist. An op that computes with a NaN is still found.
    """
    names = (*check_numerics_callback.SAFE_OPS, b"Const", b"BroadcastTo")
    return set_attributes(check_numerics_callback, SAFE_OPS=names)


def keep_large_sums_whole() -> None:
    """Keeps TensorFlow, from now on, from splitting sums of large tensors to save memory.

    In a loop of a graph, the pieces of such a sum fail with AlreadyExistsError (TensorFlow's issue
    23780).
    """
    process_context = context.context()
    config = process_context._config or tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.memory_optimization = rewrites.SWAPPING_HEURISTICS
    process_context._config = config
    # TensorFlow creates these options again, from the configuration.
    process_context._thread_local_data.function_call_options = None
