"""Finds the ops of a step that keep a state outside of variables, which no checkpoint contains.

Each op that TensorFlow marks as stateful, or that takes the handle of a resource, belongs to one of
these classes:

- its state is in the checkpoint, or checkpoints.py checks whether it is: variables, lookup tables,
  the training data
- it has no state that affects later steps: assertions, summaries, collectives, control flow
- it draws random numbers, see ``find_random_ops``
- it keeps values from one step for a later one, such as a queue: ``find_keeping_op``
- unknown; this includes Python functions: ``find_unknown_ops``
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import tensorflow as tf

from ctl_core.compat import add_called_ops

# Queues, barriers, staging areas, accumulators of gradients, and readers that advance.
_KEEPING = re.compile(
    r"(Queue|Barrier)[A-Z].*"
    r"|(FIFO|PaddingFIFO|Priority|RandomShuffle)Queue(V2)?"
    r"|(Map|OrderedMap)?(Stage|Unstage|UnstageNoKey)"
    r"|(Map|OrderedMap|Stage)(Peek|Size|IncompleteSize|Clear)"
    r"|(Resource|Sparse)?(Conditional)?Accumulator([A-Z].*)?"
    r"|Reader[A-Z].*"
)
_HARMLESS = re.compile(
    # Functions and control flow
    r"(Stateful|Stateless|TPU)?PartitionedCall|(Stateless)?(If|While|Case)|RemoteCall|_?Xla.*"
    # Variables and random generators, whose states are variables
    r"|.*VariableOp|VarHandleOp|VarIsInitializedOp|VariableShape|Resource(Gather|Scatter|Apply"
    r"|SparseApply|StridedSlice|CountUpTo).*|_ReadVariablesOp|DisableCopyOnRead|Rng(Read)?(AndSkip"
    r"|Skip)|Stateful(Standard|Truncated|Uniform|Random).*"
    # Lookup tables, see ``_find_unsaved_tables``
    r"|LookupTable.*|.*HashTable.*|InitializeTable.*"
    # Arrays and stacks of a single step
    r"|TensorArray.*|Stack.*|Empty|TemporaryVariable|DestroyTemporaryVariable"
    # Checks and output
    r"|Assert|CheckNumerics.*|Debug.*|Print.*|.*Summary.*|Timestamp|Sleep.*|WriteFile|Save.*"
    r"|Restore.*|MergeV2Checkpoints|Mutex.*|ConsumeMutexLock"
    # Exchanges between devices
    r"|Collective.*|Nccl.*|_?(Host)?(Send|Recv)|Configure.*|SyncDevice"
    # Datasets: the training data, and datasets that are read to their end within a step
    r"|.*Dataset.*|.*Iterator.*|.*SeedGenerator|.*MemoryCache"
    # Facts about the process
    r"|DeviceIndex|GraphDefVersion|DtypeWithDefaultOp|IsTensorFloat32Enabled|GuaranteeConst"
    r"|StatelessRandomGetAlg|Placeholder.*|_(Arg|Retval|DeviceArg|DeviceRetval)"
)


def list_stateful_ops(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops, also of called functions, that are stateful or take a resource."""
    return [
        op
        for op in add_called_ops(graph.get_operations())
        if op.op_def.is_stateful or any(tensor.dtype == tf.resource for tensor in op.inputs)
    ]


def find_keeping_op(stateful_ops: Iterable[tf.Operation]) -> tf.Operation | None:
    """Returns the first op that keeps values for later steps outside of variables, or None."""
    for op in stateful_ops:
        if _KEEPING.fullmatch(op.type):
            return op
    return None


def find_unknown_ops(stateful_ops: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns an op of each type that may have a state that no checkpoint contains."""
    unknown: dict[str, tf.Operation] = {}
    for op in stateful_ops:
        is_random = "seed" in op.node_def.attr  # such ops have their own message
        if not is_random and not _HARMLESS.fullmatch(op.type):
            unknown.setdefault(op.type, op)
    return list(unknown.values())
