"""What preprocessing layers have learnt from data: part of a checkpoint, like weights.

``adapt()`` in ``create_model``, or a list of words made there, gives another vocabulary once there
are more data: a word's number would then mean another row of the embedding that was trained. So
the vocabularies are written beside the checkpoints, once for each that there is, and put back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ctl_core.compat import flatten_layers
from ctl_core.console import Console
from ctl_core.errors import SetupError, brief
from ctl_core.files import written_whole
from ctl_core.hooks import Hooks
from ctl_core.model.variables import walk

ADAPTED = (
    keras.layers.StringLookup,  # within a TextVectorization, too
    keras.layers.IntegerLookup,
    keras.layers.Discretization,
    keras.layers.Normalization,
)


class Vocabularies:
    """What the layers of a run, and those that its data are read with, have learnt."""

    def __init__(self, adapted: Mapping[str, keras.Layer], hooks: Hooks) -> None:
        self._layers = {
            # Its mean and variance are variables.
            path: layer
            for path, layer in adapted.items()
            if not isinstance(layer, keras.layers.Normalization)
        }
        mine = set(map(id, adapted.values()))
        of_data = [layer for layer in _layers_of_data(hooks) if id(layer) not in mine]
        self._of_data = {
            f"data/{number}/{type(layer).__name__}": layer for number, layer in enumerate(of_data)
        }
        self._text: str | None = None

    def __bool__(self) -> bool:
        return bool(self._layers or self._of_data)

    def save(self, folder: Path) -> str | None:
        """Writes them to a file, unless it is there; returns its name, None if there are none."""
        if not self:
            return None
        if self._text is None:
            self._text = json.dumps(_learnt({**self._layers, **self._of_data}))
        name = f"vocabularies-{hashlib.sha256(self._text.encode()).hexdigest()[:16]}.json"
        if not (folder / name).exists():
            with written_whole(folder / name) as beside:
                beside.write_text(self._text, encoding="utf-8")
        return name

    def put_back(self, file: Path, console: Console) -> list[str]:
        """Gives the layers what a checkpoint's file says.

        Returns:
            What was otherwise, for a message about a model that does not fit.

        Raises:
            OSError, ValueError: the file cannot be read.
            SetupError: a layer that the data are read with has learnt something else, or a
                vocabulary does not fit its layer.
        """
        saved: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        present = _learnt({**self._layers, **self._of_data})
        changed = [path for path in present if saved.get(path, present[path]) != present[path]]
        said = []
        for path in changed:
            before, now = _size(saved[path]), _size(present[path])
            if path in self._of_data:
                raise SetupError(
                    f"{path}, with which the data are read, has learnt something else than it had "
                    f"when the run began ({before} then, {now} now); make it from what {file} "
                    "says, or choose another run_name."
                )
            name = self._layers[path].name
            said.append(f"{name} had {before} in the checkpoint, {now} as create_model made it")
            try:
                _teach(self._layers[path], saved[path])
            except ValueError as error:
                raise SetupError(
                    f"{said[-1]}, and cannot have the former: {brief(error)}"
                ) from error
        if said:
            console.say(f"{'; '.join(said)}: those of the checkpoint are used.")
        self._text = None
        return said


def _layers_of_data(hooks: Hooks) -> list[keras.Layer]:
    """Returns the adapted layers that the hooks which make data enclose or have as globals."""
    found: dict[int, keras.Layer] = {}
    for function in hooks.data_functions():
        named = getattr(function, "__globals__", {}).values()
        named = [value for value in named if isinstance(value, keras.Layer)]
        layers = [layer for item in (*walk(function), *named) for layer in flatten_layers(item)]
        found |= {id(layer): layer for layer in layers if isinstance(layer, ADAPTED)}
    return list(found.values())


def _learnt(layers: Mapping[str, keras.Layer]) -> dict[str, Any]:
    return {path: _of_layer(layer) for path, layer in layers.items()}


def _of_layer(layer: keras.Layer) -> dict[str, Any]:
    if isinstance(layer, keras.layers.Normalization):
        return {"mean": _numbers(layer.mean), "variance": _numbers(layer.variance)}
    if isinstance(layer, keras.layers.Discretization):
        return {"bin_boundaries": _numbers(layer.bin_boundaries)}
    words = [word if isinstance(word, str) else int(word) for word in layer.get_vocabulary()]
    weights = getattr(layer, "idf_weights_const", None)
    return {"vocabulary": words, "idf_weights": _numbers(weights)}


def _numbers(values: Any) -> list[float]:
    return [] if values is None else np.asarray(values, np.float64).ravel().tolist()


def _teach(layer: keras.Layer, learnt: Mapping[str, Any]) -> None:
    if isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = learnt["bin_boundaries"]
        return
    layer.set_vocabulary(learnt["vocabulary"], learnt["idf_weights"] or None)


def _size(learnt: Mapping[str, Any]) -> str:
    if "vocabulary" in learnt:
        return f"{len(learnt['vocabulary'])} entries"
    name = next(iter(learnt))
    return f"{name.replace('_', ' ')} {np.round(learnt[name][:3], 4).tolist()}"
