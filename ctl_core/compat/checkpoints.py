"""Private names of checkpoints and of the objects that they hold."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.trackable.base import Trackable

from ctl_core.compat.patches import Scope, set_attributes
from ctl_core.run.files import format_checkpoint_list
from ctl_core.types import GraphFunction


class SavedObject(NamedTuple):
    """An object in a checkpoint.

    Attributes:
        children: the positions of its children in the list of all objects, by name
        shape: the shape of the value of a variable; None for any other object
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
        shape = None
        for value in node.attributes:
            if value.name == "VARIABLE_VALUE":
                shape = tuple(shapes[value.checkpoint_key])
                break
        objects.append(SavedObject(children, shape))
    return objects


def read_variables(checkpoint: str) -> list[tuple[str, np.ndarray]]:
    """Returns the name and value of each variable of a ``tf.train.Checkpoint`` or SavedModel.

    Nothing is run. A SavedModel is a program: loading it runs its initializers.

    Args:
        checkpoint: the prefix of the files
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
    """Temporarily makes a manager save another checkpoint than its own.

    Args:
        manager: the manager
        checkpoint: what it saves
        keep_all: whether it deletes no older checkpoint meanwhile
    """
    max_to_keep = None if keep_all else read_max_to_keep(manager)
    replaced: dict[str, Any] = {"_checkpoint": checkpoint, "_max_to_keep": max_to_keep}
    if type(manager)._record_state is tf.train.CheckpointManager._record_state:
        replaced["_record_state"] = functools.partial(write_list, manager)
    return set_attributes(manager, **replaced)


def write_list(manager: tf.train.CheckpointManager) -> None:
    """Writes the file ``checkpoint`` of a manager, which lists its checkpoints.

    The content is the same as TensorFlow's. A manager writes the file twice each time it saves, and
    with 50 checkpoints TensorFlow's way takes ten times as long.
    """
    folder = f"{manager.directory}{os.sep}"
    text = format_checkpoint_list(
        manager.latest_checkpoint.removeprefix(folder),
        {path.removeprefix(folder): time for path, time in manager._maybe_delete.items()},
        manager._last_preserved_timestamp,
    )
    target = Path(folder, "checkpoint")
    temporary = target.with_name(f"checkpoint.tmp{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(target)


class GraphCheckpoint(tf.train.Checkpoint):
    """A checkpoint that always has the same objects, so that its graph is traced only once.

    TensorFlow itself walks through all objects at each write, which takes several times as long as
    writing them.

    Attributes:
        children: the objects by name, in place of attributes
        in_graph: whether to trace at all; a graph would fix the state of objects that Python
            serializes
        device: the device of the variables; TensorFlow writes a file for each device
    """

    children: dict[str, Trackable]
    in_graph = True
    device: str | None = None
    _traced: GraphFunction | None = None

    def __init__(self) -> None:
        super().__init__()
        # An ordinary assignment would make the dict an object of the checkpoint.
        object.__setattr__(self, "children", {})

    def _trackable_children(self, *args: Any, **options: Any) -> dict[str, Trackable]:
        return {**super()._trackable_children(*args, **options), **self.children}

    def _write(
        self, file_prefix: str | tf.Tensor, options: tf.train.CheckpointOptions | None = None
    ) -> str | tf.Tensor:
        """Writes the files; ``save`` of a manager and ``write`` end up here."""
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
    """An object of a checkpoint that has nothing but children.

    The children are not attributes, because names in a loaded SavedModel can be those of
    attributes that TensorFlow uses itself.

    Attributes:
        children: the children by name
    """

    def __init__(self) -> None:
        self.children: dict[str, Trackable] = {}

    def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Trackable]:
        return self.children


def saves_itself(item: Trackable) -> bool:
    """Returns whether an object of a checkpoint has state besides variables, as a table has."""
    for name in ("_serialize_to_tensors", "_gather_saveables_for_checkpoint"):
        if getattr(type(item), name) is not getattr(Trackable, name):
            return True
    # A table of a loaded SavedModel has saveables without a method of its own.
    return bool(item._gather_saveables_for_checkpoint())
