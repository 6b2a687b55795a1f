"""Wraps private tf.data APIs for the stages of a pipeline and the position of an iterator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import interleave_op
from tensorflow.python.data.util import structure

from ctl_core.compat.graphs import FunctionGraph, find_distributed_variable
from ctl_core.compat.patches import Scope, wrap_function
from ctl_core.run.live_objects import list_objects

# The classes of stages that draw different random numbers in each pass. The saved position of an
# iterator contains the state of these stages.
_DRAWING_STAGES = {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}

# The classes of stages that keep the order of examples, and neither drop nor add one.
_ROW_STAGES = {
    "_MapDataset",
    "_ParallelMapDataset",
    "_BatchDataset",
    "_ParallelBatchDataset",
    "_PaddedBatchDataset",
    "_DenseToRaggedDataset",  # the first stage of ragged_batch
    "_PrefetchDataset",
    "_OptionsDataset",
}
_BATCH_STAGES = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset"}

# Finds the states of stages that draw random numbers, and of full caches, in the file of a saved
# position. The state of a stage is a serialized VariantTensorDataProto, which begins with a header:
# a type name and metadata. The pattern requires this header and excludes control characters.
# Therefore, it cannot match an element in a shuffle buffer, such as a string of the user.
_SAVED_DRAWS = re.compile(
    rb"""
    tensorflow::Iterator        # field 1 of the proto: the type name
    \x12..?                     # the tag of field 2, the metadata; their length as a varint
    Iterator::[^@\x00-\x1f]*    # the names of the stages from the last one of the pipeline to this
    (
        :Shuffle@@              # this stage is a shuffle,
      | :ShuffleAndRepeat@@
      | :Random@@               # or draws random numbers otherwise,
      | @@[\w@]*cache_completed # or has the key that a cache writes once it is full
    )
    """,
    re.DOTALL | re.VERBOSE,
)


def read_position(iterator: tf.data.Iterator) -> tf.Tensor:
    """Returns the position of an iterator.

    The position is a vector of dtype variant, which is serialized when the vector is written.
    """
    return iterator._serialize_to_tensors()["_STATE"]


def restore_position(iterator: tf.data.Iterator, position: tf.Tensor) -> None:
    """Moves an iterator to a position that ``read_position`` returned for another iterator."""
    iterator._restore_from_tensors({"_STATE": position})


def count_saved_draws(content: bytes) -> int:
    """Returns the number of stages whose state a saved position contains.

    Only stages that draw random numbers, and full caches in memory, are counted.

    Args:
        content: the content of the file to which the position was written
    """
    return len(_SAVED_DRAWS.findall(content))


def find_inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset reads directly."""
    return list(dataset._inputs())


def list_stages(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset, and all datasets that it reads directly or indirectly."""
    yield dataset
    for source in find_inputs(dataset):
        yield from list_stages(source)


def find_graphs(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """Returns the graphs of the functions that a stage of a pipeline calls."""
    return [function.function.graph for function in dataset._functions()]


def stops_on_empty_dataset(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage ends as soon as one of its inputs ends.

    Only a mixture of datasets (``sample_from_datasets``) can continue with its other inputs.
    """
    return getattr(stage, "_stop_on_empty_dataset", True) is not False


def read_cache_file(stage: tf.data.Dataset) -> str | None:
    """Returns the file of a cache stage, or "" for a cache in memory; None for any other stage."""
    if type(stage).__name__ != "CacheDataset":
        return None
    cache: Any = stage  # TensorFlow exports no name of its class
    file_name: bytes = tf.get_static_value(tf.convert_to_tensor(cache._filename))
    return file_name.decode()


def is_snapshot(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage of a pipeline is a snapshot."""
    return "Snapshot" in type(stage).__name__


def read_snapshot_folder(stage: tf.data.Dataset) -> str | None:
    """Returns the folder of a snapshot stage; None for any other stage."""
    if not is_snapshot(stage):
        return None
    snapshot: Any = stage  # TensorFlow exports no name of its class
    folder: bytes = tf.get_static_value(tf.convert_to_tensor(snapshot._path))
    return folder.decode()


def keeps_rows(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage keeps all examples and their order, see also ``is_batch``."""
    return type(stage).__name__ in _ROW_STAGES


def is_batch(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage is a ``batch`` or a ``padded_batch``."""
    return type(stage).__name__ in _BATCH_STAGES


def drops_remainder(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage drops the last elements if they do not fill a batch."""
    drop_remainder = getattr(stage, "_drop_remainder", None)
    return drop_remainder is not None and bool(tf.get_static_value(drop_remainder))


def is_padded_batch(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage pads the elements that it batches."""
    return type(stage).__name__ == "_PaddedBatchDataset"


def is_map(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage is a ``map``."""
    return type(stage).__name__ in ("_MapDataset", "_ParallelMapDataset")


def groups_by_window(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage groups elements, as ``bucket_by_sequence_length`` does."""
    return type(stage).__name__ == "_GroupByWindowDataset"


def name_stage(stage: tf.data.Dataset) -> str:
    """Returns the name of the method of ``tf.data.Dataset`` that creates a stage: ``flat_map``."""
    words = re.findall("[A-Z][a-z0-9]*", type(stage).__name__.removesuffix("Dataset"))
    return "_".join(words).lower()


def is_shuffle(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage of a pipeline shuffles elements."""
    return "Shuffle" in type(stage).__name__


def draws_random_numbers(stage: tf.data.Dataset) -> bool:
    """Returns True if a stage draws random numbers and its state is part of a saved position."""
    return type(stage).__name__ in _DRAWING_STAGES


def note_interleave_order() -> Scope:
    """Lets a parallel interleave remember its argument ``deterministic``, as other stages do."""
    return wrap_function(interleave_op._ParallelInterleaveDataset, "__init__", _create_interleave)


def _create_interleave(
    of_tensorflow: Callable[..., None], stage: Any, *args: Any, **options: Any
) -> None:
    of_tensorflow(stage, *args, **options)
    names = {None: "default", True: "true", False: "false"}
    stage._deterministic = names.get(options.get("deterministic"), "default")


def has_function(stage: tf.data.Dataset) -> bool:
    """Returns whether a stage calls a function for each element, as a map or an interleave does."""
    return getattr(stage, "_map_func", None) is not None


def call_function(stage: Any, element: Any) -> None:
    """Calls the function of a stage for an element, and reads the dataset that it may return."""
    (source,) = find_inputs(stage)
    results = stage._map_func.function(*structure.to_tensor_list(source.element_spec, element))
    for result in tf.nest.flatten(results):
        is_dataset = result.dtype == tf.variant and isinstance(
            stage._map_func.output_structure, tf.data.DatasetSpec
        )
        if is_dataset:
            for _ in tf.data.experimental.from_variant(result, stage.element_spec):
                pass


def has_free_order(dataset: tf.data.Dataset) -> bool:
    """Returns whether a parallel stage may return its elements in another order in each pass.

    This is the effect of ``deterministic=False``, as an argument or in ``tf.data.Options``. An
    interleave that was not created within ``note_interleave_order`` is not recognized.
    """
    is_free_by_default = dataset.options().deterministic is False
    for stage in list_stages(dataset):
        value = getattr(stage, "_deterministic", None)
        if value == "false" or (value == "default" and is_free_by_default):
            return True
        for graph in find_graphs(stage):
            nodes = (op.node_def.attr for op in graph.get_operations())
            if any(
                "deterministic" in node and node["deterministic"].s == b"false" for node in nodes
            ):
                return True
    return False


def is_tuned(dataset: tf.data.Dataset) -> bool:
    """Returns whether tf.data tunes the number of parallel calls in any stage of a pipeline."""
    for stage in list_stages(dataset):
        number = getattr(stage, "_num_parallel_calls", None)
        if number is not None and tf.get_static_value(number) == tf.data.AUTOTUNE:
            return True
    return False


def find_captured_iterators(
    graph: FunctionGraph, training_data: tf.data.Iterator | None
) -> list[tf.data.Iterator]:
    """Returns the iterators that a function's graph captures, except that of the training data."""
    known = {id(variable.handle) for variable in graph.variables}
    known.add(id(getattr(training_data, "_iterator_resource", None)))
    others = {
        id(outer)
        for outer, _ in graph.captures
        if outer.dtype == tf.resource
        and id(outer) not in known
        and find_distributed_variable(outer) is None
    }
    if not others:  # so that most runs need not search all objects
        return []
    return [
        iterator
        for iterator in list_objects(tf.data.Iterator)
        if id(getattr(iterator, "_iterator_resource", None)) in others
    ]
