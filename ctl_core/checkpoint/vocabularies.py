"""What preprocessing layers have learnt from data: part of a checkpoint, like weights.

``adapt()`` in ``create_model``, or a list of words made there, gives another vocabulary once there
are more data: a word's number would then mean another row of the embedding that was trained.
"""

import functools
from typing import Any

import keras
import numpy as np

from ctl_core.compat import flatten_layers
from ctl_core.hooks.recording import IMPORTED
from ctl_core.model.state import State
from ctl_core.numerics.variables import walk
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError

_LOOKUPS = (  # within a TextVectorization, too
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    keras.layers.Discretization,
)
_LEARNING = (*_LOOKUPS, keras.layers.Normalization)  # which has variables where it is a model's


class Vocabularies:
    """What the layers of the models, and those that the data are read with, have learnt.

    The latter are those that the hooks which make data enclose, or have as globals, and all others
    that the hooks, or the import of callbacks.py, have made.
    """

    def __init__(self, state: State) -> None:
        models = _find_learning([state.train_model, state.components.eval_model])
        hooks = state.hooks
        of_data = hooks.create_dataset, hooks.make_batches, hooks.create_eval_dataset
        functions = [hook.function for hook in of_data if hook is not None]
        named = [value for one in functions for value in getattr(one, "__globals__", {}).values()]
        named = [value for value in named if isinstance(value, keras.Layer)]
        recorded = [layer for layer in state.recording.layers if isinstance(layer, _LOOKUPS)]
        others = _find_learning([*functions, *named, *(one() for one in IMPORTED), *recorded])
        data = [layer for layer in others if layer not in models]
        of_model = [layer for layer in models if isinstance(layer, _LOOKUPS)]
        self._layers = {
            f"{place}/{number}/{type(layer).__name__}": layer
            for place, layers in (("model", of_model), ("data", data))
            for number, layer in enumerate(layers)
        }

    @functools.cached_property
    def learnt(self) -> dict[str, dict[str, Any]]:
        """What each has learnt, which training does not change: as JSON has it."""
        return {path: _read_learnt(layer) for path, layer in self._layers.items()}

    def put_back(self, saved: dict[str, dict[str, Any]], console: Console) -> None:
        """Gives the layers what they had learnt when it was saved.

        Raises:
            SetupError: a layer that the data are read with has learnt something else.
        """
        for path, layer in self._layers.items():
            before, now = saved.get(path), self.learnt[path]
            if before is None or before == now:
                continue
            then, today = (len(next(iter(learnt.values()))) for learnt in (before, now))
            if path.startswith("data/"):
                raise SetupError(
                    f"{path}, with which the data are read, has learnt something else than when "
                    f"the run began ({then} entries then, {today} now); adapt it to the same, or "
                    "choose another run_name."
                )
            if isinstance(layer, keras.layers.Discretization):
                layer.bin_boundaries = before["bin_boundaries"]
            else:
                layer.set_vocabulary(**before)
            self.learnt[path] = before
            console.say(
                f"{layer.name} had {then} entries in the checkpoint, {today} as create_model made "
                "it: those of the checkpoint are used."
            )


def _find_learning(items: list[Any]) -> list[keras.Layer]:
    """Returns the layers that learn among those that objects hold, each once."""
    layers = [layer for item in walk(items) for layer in flatten_layers(item)]
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
