"""What preprocessing layers have learnt from data: part of a checkpoint, like weights.

``adapt()`` in ``create_model``, or a list of words made there, gives another vocabulary once there
are more data: a word's number would then mean another row of the embedding that was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import flatten_layers
from ctl_core.hooks.hooks import Hooks
from ctl_core.hooks.recording import IMPORTED
from ctl_core.numerics.variables import walk
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError

_LEARNING = (
    keras.layers.StringLookup,  # within a TextVectorization, too
    keras.layers.IntegerLookup,
    keras.layers.Discretization,
    keras.layers.Normalization,  # a model's has variables
)


class Vocabularies:
    """What the layers of a run, and those that its data are read with, have learnt.

    Attributes:
        text: a variable that holds it, as JSON: part of each checkpoint
    """

    def __init__(self, layers: Iterable[keras.Layer], hooks: Hooks) -> None:
        of_model = [layer for layer in layers if isinstance(layer, _LEARNING[:-1])]
        of_data = [layer for layer in _find_of_data(hooks) if layer not in of_model]
        self._layers = {f"{number}/{layer.name}": layer for number, layer in enumerate(of_model)}
        self._of_data = {
            f"data/{number}/{type(layer).__name__}": layer for number, layer in enumerate(of_data)
        }
        with tf.device("CPU:0"):
            self.text = tf.Variable("", dtype=tf.string, trainable=False)

    def _read(self) -> dict[str, dict[str, Any]]:
        layers = {**self._layers, **self._of_data}
        return {path: _read_learnt(layer) for path, layer in layers.items()}

    def fill(self) -> None:
        """Makes ``text`` what the layers have learnt, which training does not change."""
        if not self.text.numpy():
            self.text.assign(json.dumps(self._read()))

    def put_back(self, console: Console) -> None:
        """Gives the layers what ``text`` says that they had learnt.

        Raises:
            SetupError: a layer that the data are read with has learnt something else.
        """
        saved, present = json.loads(self.text.numpy() or "{}"), self._read()
        for path in present:
            if saved.get(path, present[path]) == present[path]:
                continue
            before, now = _count(saved[path]), _count(present[path])
            if path in self._of_data:
                raise SetupError(
                    f"{path}, with which the data are read, has learnt something else than it had "
                    f"when the run began ({before} then, {now} now); make it from the same, or "
                    "choose another run_name."
                )
            layer = self._layers[path]
            _teach(layer, saved[path])
            console.say(
                f"{layer.name} had {before} in the checkpoint, {now} as create_model made it: "
                "those of the checkpoint are used."
            )
        self.text.assign("")  # there may be more layers now


def _find_of_data(hooks: Hooks) -> list[keras.Layer]:
    """Returns the layers that learn and that hooks which make data can reach.

    Those that they enclose, or have as globals; and all that the import of callbacks.py has made.
    """
    items: list[Any] = []
    for function in hooks.data_functions():
        named = getattr(function, "__globals__", {}).values()
        items += [*walk(function), *(value for value in named if isinstance(value, keras.Layer))]
    items += [layer() for layer in IMPORTED]
    layers = [layer for item in items for layer in flatten_layers(item)]
    return list({id(layer): layer for layer in layers if isinstance(layer, _LEARNING)}.values())


def _read_learnt(layer: keras.Layer) -> dict[str, Any]:
    """Returns what a layer has learnt, lists by the names that its class has for them."""
    if isinstance(layer, keras.layers.Normalization):
        return {name: np.ravel(getattr(layer, name)).tolist() for name in ("mean", "variance")}
    if isinstance(layer, keras.layers.Discretization):
        return {"bin_boundaries": np.ravel(layer.bin_boundaries).tolist()}
    learnt = {"vocabulary": np.asarray(layer.get_vocabulary()).tolist()}
    if layer.output_mode == "tf_idf":
        learnt["idf_weights"] = layer.idf_weights.numpy().tolist()
    return learnt


def _teach(layer: keras.Layer, learnt: dict[str, Any]) -> None:
    if isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = learnt["bin_boundaries"]
    else:
        layer.set_vocabulary(**learnt)


def _count(learnt: dict[str, Any]) -> str:
    return f"{len(next(iter(learnt.values())))} entries"
