"""Other weights to begin with: ``init_from`` takes those of a run, a Keras file or a SavedModel."""

from __future__ import annotations

import collections
import dataclasses
import functools
import tempfile
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.compat import checkpointed_below, checkpointed_names
from ctl_core.console import Console
from ctl_core.errors import SetupError, brief
from ctl_core.files import from_here
from ctl_core.model.variables import plain_variable, variable_name
from ctl_core.sources import read_source, record_of, saved_model
from ctl_core.state import State

# What Keras calls the states of random layers, which are no weights: a run has those of its seed.
_RANDOM = "seed_generator_state"
# Where a file of a model that was compiled holds its optimizer, which is none of its weights.
_OPTIMIZER = "optimizer/"


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight that is offered.

    Attributes:
        name: such as dense/kernel
        place: the attributes that lead to it from the model, or ""
        shape: its sizes
        read: returns its value
    """

    name: str
    place: str
    shape: list[int]
    read: Callable[[], Any]


def load_initial_weights(state: State, console: Console) -> None:
    """Gives the model of a run that begins the weights of ``init_from``, and says which.

    A run is taken with its weights as they were trained, without its optimizer; ``fork`` takes all.

    Raises:
        SetupError: there is nothing to be read; or it does not fit.
    """
    text = state.config.init_from
    if text is None:
        return
    path = Path(text)
    if path.is_file():
        what, fit = from_here(path), _of_keras_file(state, path)
    else:
        what, offered = _offered(state, text)
        offered = [weight for weight in offered if not weight.name.endswith(_RANDOM)]
        fit = _by_name(_wanted(state), _places(state.train_model), offered)
    _take(state, console, what, fit)
    if state.parts.average:
        state.parts.average.begin()


@dataclasses.dataclass(frozen=True)
class _Fit:
    """What fits.

    Attributes:
        taken, wanted: how many weights are taken, and how many the model has
        how: what they were matched by
        different: those that the model has otherwise, or alone, in words
        unused: those that it has not
        take: gives the model what fits
    """

    taken: int
    wanted: int
    how: str
    different: list[str]
    unused: list[str]
    take: Callable[[], None]


def _take(state: State, console: Console, what: str, fit: _Fit) -> None:
    """Takes the weights, and says so.

    Raises:
        SetupError: not all of them fit.
    """
    others = [*fit.different, *(f"{name} is of no use here" for name in fit.unused)]
    said = "; ".join(others[:5]) + f"; and {len(others) - 5} more" * (len(others) > 5)
    if others:
        cure = " Load what fits in create_model." if fit.taken else ""
        raise SetupError(
            f"init_from: {what} fits {fit.taken} of the {fit.wanted} weights of "
            f"{state.hooks.create_model}: {said}.{cure}"
        )
    fit.take()
    console.say(f"init_from: {fit.taken} of {fit.wanted} weights of {what}, by {fit.how}.")


def _wanted(state: State) -> dict[str, Any]:
    """Returns the tf.Variables of the model that hold weights, by name."""
    model = state.train_model
    if isinstance(model, keras.Layer):
        return {weight.path: plain_variable(weight) for weight in model.weights}
    generators = set(map(id, state.recording.generators))
    return {
        name.removeprefix("create_model/"): variable
        for name, variable in state.recording.variables.items()
        if name.startswith("create_model/") and id(variable) not in generators
    }


def _offered(state: State, text: str) -> tuple[str, list[_Weight]]:
    """Returns what a run or a SavedModel is called, and its weights.

    Raises:
        SetupError: there is neither.
    """
    if (folder := saved_model(text)) is not None:
        loaded = _read(folder, tf.saved_model.load)
        found = getattr(loaded, "variables", None)  # Keras' own list names each once
        found = found or tf.train.TrackableView(loaded).descendants()
        return from_here(folder), [
            _Weight(variable_name(item), "", item.shape.as_list(), item.numpy)
            for item in found
            if isinstance(item, tf.Variable)
        ]
    source = read_source("init_from", text, state.config.runs_dir)
    record = record_of("init_from", source)
    path = source.folder / record.path
    reader = _read(path, tf.train.load_checkpoint)
    names, shapes = checkpointed_names(reader), reader.get_variable_to_shape_map()
    return f"{from_here(source.run)}, step {record.step}", [
        _Weight(
            names.get(key) or place,
            place,
            list(shapes[key]),
            functools.partial(reader.get_tensor, key),
        )
        for key, place in checkpointed_below(reader, "train_model").items()
        if key in shapes
    ]


def _read(path: Path, read: Callable[[str], Any]) -> Any:
    """Reads something.

    Raises:
        SetupError: it cannot be read.
    """
    try:
        return read(str(path))
    except Exception as error:
        why = brief(error)
        raise SetupError(f"init_from: {from_here(path)} cannot be read: {why}") from error


def _by_name(wanted: dict[str, Any], places: dict[int, str], offered: list[_Weight]) -> _Fit:
    """Matches weights by their names, or by what fits more of them.

    That is names without the model's own, the object's place in the model, or, where all shapes
    are the same in their order, that order.
    """
    ways: list[tuple[str, dict[str, _Weight]]] = []
    for how, name_of in (("name", str), ("name below the model's", _below)):
        there = _unique((name_of(weight.name), weight) for weight in offered)
        ways.append((how, {n: there[name_of(n)] for n in wanted if name_of(n) in there}))
    by_place = _unique((weight.place, weight) for weight in offered if weight.place)
    keys = {name: places.get(id(variable)) for name, variable in wanted.items()}
    ways.append(("place", {n: by_place[key] for n, key in keys.items() if key in by_place}))
    shapes = [variable.shape.as_list() for variable in wanted.values()]
    if [weight.shape for weight in offered] == shapes:
        ways.append(("order", dict(zip(wanted, offered, strict=True))))

    def fitting(pairs: dict[str, _Weight]) -> dict[str, _Weight]:
        return {n: w for n, w in pairs.items() if wanted[n].shape.as_list() == w.shape}

    how, pairs = max(ways, key=lambda way: len(fitting(way[1])))
    taken = fitting(pairs)
    offered_shapes = {name: weight.shape for name, weight in pairs.items()}
    different = _describe_others(dict(zip(wanted, shapes, strict=True)), offered_shapes, taken)
    used = {id(weight) for weight in pairs.values()}
    unused = [weight.name for weight in offered if id(weight) not in used]

    def take() -> None:
        for name, weight in taken.items():
            wanted[name].assign(weight.read())

    return _Fit(len(taken), len(wanted), how, different, unused, take)


def _describe_others(
    wanted: Mapping[str, Any], there: Mapping[str, Any], taken: Container[str]
) -> list[str]:
    """Says of each weight that is not taken how its shape differs, or that it is not there."""
    return [
        f"{name} has shape {list(shape)}, there {list(there[name])}"
        if name in there
        else f"{name} is not there"
        for name, shape in wanted.items()
        if name not in taken
    ]


def _places(model: Any) -> dict[int, str]:
    """Returns by which attributes a model's variables are reached, as TensorFlow tracks them."""
    try:
        view = tf.train.TrackableView(tf.train.Checkpoint(train_model=model))
    except ValueError:  # nothing that it tracks
        return {}
    found: dict[int, str] = {}
    queue: collections.deque[tuple[str, Any]] = collections.deque([("", model)])
    seen = {id(model)}
    while queue:
        path, item = queue.popleft()
        if isinstance(variable := plain_variable(item), tf.Variable):
            found.setdefault(id(variable), path[1:])
        for name, child in view.children(item).items():
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((f"{path}/{name}", child))
    return found


def _of_keras_file(state: State, path: Path) -> _Fit:
    """Compares the weights of a ``.keras`` or ``.weights.h5`` file with those of the model.

    Raises:
        SetupError: it cannot be read, or the model is none of Keras'.
    """
    model = state.train_model
    if not isinstance(model, keras.Model):
        raise SetupError(
            f"init_from: {from_here(path)} is for a Keras model, and {state.hooks.create_model} "
            "returns another; take a run or a SavedModel."
        )
    folder = tempfile.TemporaryDirectory(prefix="ctl_core-")
    file, own = path, Path(folder.name) / "own.weights.h5"
    if path.suffix == ".keras":  # its weights only: what else is in it may need code of others
        file = Path(folder.name) / "there.weights.h5"
        content = _read(path, lambda name: zipfile.ZipFile(name).read("model.weights.h5"))
        file.write_bytes(content)
    model.save_weights(own)
    wanted, there = _read(own, _shapes), _read(file, _shapes)
    taken = [name for name, shape in wanted.items() if there.get(name) == shape]
    different = _describe_others(wanted, there, taken)
    # Keras' files hold a kernel with its adapter added up, and reading one makes both matrices of
    # the adapter 0, of which no gradient would ever move any: so none fits.
    adapters = [variable for layer in state.recording.layers for variable in adapter_of(layer)]
    different += [f"{variable.path} is not there" for variable in adapters]
    kept = state.recording.generators  # random numbers are of this run's seed

    def take() -> None:
        before = [variable.numpy() for variable in kept]
        with folder:
            model.load_weights(file)
        for variable, value in zip(kept, before, strict=True):
            variable.assign(value)

    unused = [name for name in there if name not in wanted]
    return _Fit(len(taken), len(wanted) + len(adapters), "layer", different, unused, take)


def adapter_of(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the two matrices that ``enable_lora`` has added to a layer, if it has."""
    if not getattr(layer, "lora_enabled", False):
        return []
    return [variable for variable in layer.weights if variable.name.startswith("lora_")]


def _shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights that a ``.weights.h5`` file holds, by name."""
    import h5py  # Keras needs it, too

    found: dict[str, tuple[int, ...]] = {}

    def note(name: str, item: Any) -> None:
        is_weight = "seed_generator" not in name and not name.startswith(_OPTIMIZER)
        if is_weight and isinstance(item, h5py.Dataset):
            found[name] = item.shape

    with h5py.File(path) as file:
        file.visititems(note)
    return found


def _below(name: str) -> str:
    return name.partition("/")[2] or name


def _unique(pairs: Iterable[tuple[str, _Weight]]) -> dict[str, _Weight]:
    """Returns a dict of what is there once; of the others, nobody knows which is meant."""
    found: dict[str, _Weight] = {}
    twice = set()
    for name, weight in pairs:
        twice |= {name} & found.keys()
        found[name] = weight
    return {name: weight for name, weight in found.items() if name not in twice}
