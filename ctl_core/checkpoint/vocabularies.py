"""Saves and restores the values that preprocessing layers have learned from data.

A hook may compute a vocabulary each time a run starts, for example with ``adapt()`` in
``create_model``. If there are more data than at the first start, the result is another vocabulary.
The index of a word would then select the wrong row of the trained embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from ctl_core.checkpoint.record import LearnedName
from ctl_core.compat import flatten_layers
from ctl_core.hooks.recording import IMPORTED
from ctl_core.model.state import State
from ctl_core.numerics.variables import walk
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError

# The values that a layer has learned, as lists, by the names that the class of the layer uses.
Learned: TypeAlias = dict[LearnedName, list[str | int | float]]

Lookup: TypeAlias = (
    keras.layers.StringLookup | keras.layers.IntegerLookup | keras.layers.Discretization
)
# A layer that can learn values.
Learning: TypeAlias = Lookup | keras.layers.Normalization

# The layers whose values are restored. This includes the StringLookup in a TextVectorization.
_LOOKUPS = (
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    keras.layers.Discretization,
)
# The layers that can learn values. A Normalization is not one of the lookups: in a model, its
# values are variables, which every checkpoint contains anyway.
_LEARNING = (*_LOOKUPS, keras.layers.Normalization)


class Vocabularies:
    """The preprocessing layers of the models and of the data.

    The layers of the data are those in the closures and globals of the data hooks, and all
    remaining layers that were created by hooks or while callbacks.py was imported.
    """

    def __init__(self, state: State) -> None:
        in_models = _find_learning([state.train_model, state.components.eval_model])
        in_data = [layer for layer in _find_data_layers(state) if layer not in in_models]
        lookups = [layer for layer in in_models if isinstance(layer, _LOOKUPS)]
        self._layers = {**_name_layers("model", lookups), **_name_layers("data", in_data)}

    @functools.cached_property
    def learnt(self) -> dict[str, Learned]:
        """The learned values of each layer, as JSON types; training does not change the values."""
        return {path: _read_learned(layer) for path, layer in self._layers.items()}

    def put_back(self, saved: dict[str, Learned], console: Console) -> None:
        """Restores the values that the layers had learned when a checkpoint was saved.

        Raises:
            SetupError: a layer of the data has learned values that differ from the checkpoint.
        """
        for path, layer in self._layers.items():
            before = saved.get(path)
            now = self.learnt[path]
            if before is None or before == now:
                continue
            entries_before = _count_entries(before)
            entries_now = _count_entries(now)
            if path.startswith("data/"):
                raise SetupError(
                    f"{path}, which the input pipeline uses, has learned other values than "
                    f"when the run was started ({entries_before} entries then, {entries_now} "
                    "now); adapt it to the same data, or choose another run_name."
                )
            assert not isinstance(layer, keras.layers.Normalization)  # its values are variables
            if isinstance(layer, keras.layers.Discretization):
                layer.bin_boundaries = before["bin_boundaries"]
            else:
                layer.set_vocabulary(**before)
            self.learnt[path] = before
            console.say(
                f"{layer.name} had {entries_before} entries in the checkpoint, but "
                f"{entries_now} when create_model returned it: the entries of the checkpoint "
                "are used."
            )


def _find_data_layers(state: State) -> list[Learning]:
    """Returns the layers that hooks may use to preprocess the data, without duplicates."""
    hooks = state.hooks
    data_hooks = [hooks.create_dataset, hooks.make_batches, hooks.create_eval_dataset]
    functions = [hook.function for hook in data_hooks if hook is not None]
    global_layers = [
        value
        for function in functions
        for value in getattr(function, "__globals__", {}).values()
        if isinstance(value, keras.Layer)
    ]
    imported = [reference() for reference in IMPORTED]
    recorded = [layer for layer in state.recording.layers if isinstance(layer, _LOOKUPS)]
    return _find_learning([*functions, *global_layers, *imported, *recorded])


def _find_learning(objects: Iterable[Any]) -> list[Learning]:
    """Searches objects for layers that can learn values, and returns each of them once."""
    layers = [layer for item in walk(list(objects)) for layer in flatten_layers(item)]
    return list({id(layer): layer for layer in layers if isinstance(layer, _LEARNING)}.values())


def _name_layers(place: str, layers: Sequence[Learning]) -> dict[str, Learning]:
    """Returns the layers by names such as ``model/0/StringLookup``."""
    return {
        f"{place}/{number}/{type(layer).__name__}": layer for number, layer in enumerate(layers)
    }


def _read_learned(layer: Learning) -> Learned:
    """Returns the values that a layer has learned."""
    if isinstance(layer, keras.layers.Normalization):
        return {name: np.ravel(getattr(layer, name)).tolist() for name in ("mean", "variance")}
    if isinstance(layer, keras.layers.Discretization):
        return {"bin_boundaries": np.ravel(layer.bin_boundaries).tolist()}
    learned: Learned = {"vocabulary": np.asarray(layer.get_vocabulary()).tolist()}
    if layer.output_mode == "tf_idf":
        learned["idf_weights"] = layer.idf_weights.numpy().tolist()
    return learned


def _count_entries(learned: Learned) -> int:
    return len(next(iter(learned.values())))
