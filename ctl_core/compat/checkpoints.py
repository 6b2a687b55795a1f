"""Wraps private TensorFlow APIs for checkpoints and for the objects in a checkpoint."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.trackable.base import Trackable

from ctl_core.compat.patches import Scope, set_attributes
from ctl_core.run.files import format_checkpoint_list
from ctl_core.types import GraphFunction

# The path of a checkpoint, which is a tensor in a graph.
PathT = TypeVar("PathT", str, tf.Tensor)


class SavedObject(NamedTuple):
    """An object in a checkpoint.

    Attributes:
        children: the index of each child in the list of all objects, by the name of the child
        shape: the shape of the value of a variable; None for any other object
    """

    children: dict[str, int]
    shape: tuple[int, ...] | None


def read_object_graph(checkpoint: str) -> list[SavedObject]:
    """Returns the objects of a ``tf.train.Checkpoint``. The first object is the root.

    Args:
        checkpoint: the prefix of the checkpoint's files
    """
    reader = tf.train.load_checkpoint(checkpoint)
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    )
    shapes = reader.get_variable_to_shape_map()
    objects: list[SavedObject] = []
    for node in graph.nodes:
        children = {child.local_name: child.node_id for child in node.children}
        shape = None
        for value in node.attributes:
            if value.name == "VARIABLE_VALUE":
                shape = tuple(shapes[value.checkpoint_key])
                break
        objects.append(SavedObject(children, shape))
    return objects


def read_variables(checkpoint: str) -> list[tuple[str, np.ndarray]]:
    """Returns the name and value of each variable of a ``tf.train.Checkpoint`` or SavedModel.

    This function runs no code of a SavedModel. If the SavedModel were loaded instead, TensorFlow
    would run its initializers.

    Args:
        checkpoint: the prefix of the checkpoint's files
    """
    reader = tf.train.load_checkpoint(checkpoint)
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    )
    return [
        (value.full_name, reader.get_tensor(value.checkpoint_key))
        for node in graph.nodes
        for value in node.attributes
        if value.name == "VARIABLE_VALUE"
    ]


def read_max_to_keep(manager: tf.train.CheckpointManager) -> int | None:
    """Returns how many checkpoints a manager keeps; None if it keeps all."""
    return getattr(manager, "_max_to_keep", None)


def hold_objects(
    manager: tf.train.CheckpointManager, checkpoint: tf.train.Checkpoint, keep_all: bool = False
) -> Scope:
    """Temporarily makes a manager save a different checkpoint object.

    Args:
        manager: the manager
        checkpoint: the checkpoint object that the manager saves
        keep_all: whether the manager keeps all older checkpoints within the context
    """
    max_to_keep = None if keep_all else read_max_to_keep(manager)
    replaced: dict[str, Any] = {"_checkpoint": checkpoint, "_max_to_keep": max_to_keep}
    if type(manager)._record_state is tf.train.CheckpointManager._record_state:
        replaced["_record_state"] = functools.partial(write_list, manager)
    return set_attributes(manager, **replaced)


def write_list(manager: tf.train.CheckpointManager) -> None:
    """Writes the file ``checkpoint``, which lists the checkpoints of a manager.

    TensorFlow writes the same content, but with 50 checkpoints it takes ten times as long. A
    manager writes this file twice for each checkpoint.
    """
    folder = f"{manager.directory}{os.sep}"
    latest = manager.latest_checkpoint
    assert latest is not None  # the list is written after a checkpoint was saved
    text = format_checkpoint_list(
        latest.removeprefix(folder),
        {path.removeprefix(folder): time for path, time in manager._maybe_delete.items()},
        manager._last_preserved_timestamp,
    )
    target = Path(folder, "checkpoint")
    temporary = target.with_name(f"checkpoint.tmp{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(target)


class GraphCheckpoint(tf.train.Checkpoint):
    """A checkpoint that always has the same objects, so that its graph is traced only once.

    By default, TensorFlow walks through all objects each time it writes a checkpoint. This takes
    several times as long as writing the objects.

    Attributes:
        children: the objects in the checkpoint, by name. They are not stored as attributes
        in_graph: whether to write the checkpoint in a graph. If Python code serializes an object,
            this must be False, because the graph would write the object's state at tracing time
        device: the device of the variables; TensorFlow writes one file for each device
    """

    children: dict[str, Trackable]
    in_graph = True
    device: str | None = None
    _traced: GraphFunction | None = None

    def __init__(self) -> None:
        super().__init__()
        # An ordinary assignment would add the dict itself to the objects in the checkpoint.
        object.__setattr__(self, "children", {})

    def _trackable_children(self, *args: Any, **options: Any) -> dict[str, Trackable]:
        return {**super()._trackable_children(*args, **options), **self.children}

    def _write(
        self, file_prefix: PathT, options: tf.train.CheckpointOptions | None = None
    ) -> PathT:
        """Writes the files. ``CheckpointManager.save`` and ``write`` both call this method."""
        if not (self.in_graph and tf.executing_eagerly()):
            return super()._write(file_prefix, options)
        if self._traced is None:

            @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
            def write_in_graph(path: tf.Tensor) -> None:
                with tf.device(self.device):
                    self.write(path)

            self._traced = write_in_graph
        self._traced(tf.constant(file_prefix))
        for callback in getattr(options, "experimental_write_callbacks", None) or ():
            callback(file_prefix)
        return file_prefix


class Node(Trackable):  # type: ignore[misc]
    """An object in a checkpoint that has children, but no state of its own.

    The children are not stored as attributes, because in a loaded SavedModel a child may have the
    same name as an attribute that TensorFlow uses internally.

    Attributes:
        children: the children by name
    """

    def __init__(self) -> None:
        self.children: dict[str, Trackable] = {}

    def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Trackable]:
        return self.children


def saves_itself(item: Trackable) -> bool:
    """Returns whether an object has state that is not a variable, such as a table's content."""
    for name in ("_serialize_to_tensors", "_gather_saveables_for_checkpoint"):
        if getattr(type(item), name) is not getattr(Trackable, name):
            return True
    # The class of a table in a loaded SavedModel overrides none of these methods, but the table has
    # saveables.
    return bool(item._gather_saveables_for_checkpoint())
