"""Loads the initial weights of a run from another run, a Keras file or a SavedModel.

The setting ``init_from`` names the source. Variables that match ``init_skip`` are not loaded. All
other variables must be in the source, with the same shape.
"""

import collections
import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import keras
import numpy as np
import tensorflow as tf

from ctl_core.checkpoint.position import UNREADABLE
from ctl_core.checkpoint.record import find_user_part
from ctl_core.checkpoint.source import is_model, read_source
from ctl_core.compat import SavedObject, read_object_graph, read_variables
from ctl_core.hooks.hooks import Hook
from ctl_core.numerics.variables import make_trackable, name_variable, unwrap, walk
from ctl_core.run.errors import SetupError, format_error
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config
from ctl_core.types import Model, Trackable, Variable

# The maximum number of variables, and of flags, that a message lists.
_MOST_NAMES = 20
_MOST_FLAGS = 6
_Shape: TypeAlias = tuple[int, ...]
# The values of a layer in a Keras file, by name.
_LayerStore: TypeAlias = Any


@dataclasses.dataclass
class InitialWeights:
    """The variables of a model that were loaded, and those that were not.

    Attributes:
        source: a description of the run or file
        paths: the paths of the model's variables, by the ``id`` of the variable
        skipped: the ids of the variables that ``init_skip`` leaves out
        misfits: the reasons why variables cannot be loaded, by id; ``compare`` adds them
    """

    source: str
    paths: dict[int, str]
    skipped: frozenset[int]
    misfits: dict[int, str] = dataclasses.field(default_factory=dict)

    def is_skipped(self, variable: Variable) -> bool:
        """Returns whether a variable keeps its initial value."""
        return id(unwrap(variable)) in self.skipped

    def compare(self, variable: Variable, saved: _Shape | None) -> None:
        """Compares a variable with its saved value, and updates ``misfits``.

        Args:
            variable: a variable of the model
            saved: the shape of the saved value; None if the source has no value for the variable
        """
        key = id(unwrap(variable))
        shape = tuple(variable.shape)
        self.misfits.pop(key, None)
        if saved is None:
            self.misfits[key] = "not in the source"
        elif saved != shape:
            self.misfits[key] = f"shape {shape}, {saved} in the source"

    def list_errors(self) -> list[str]:
        """Returns a description of each variable that does not fit and is not skipped."""
        return [self._describe(key) for key in self.misfits if key not in self.skipped]

    def list_skipped(self) -> list[str]:
        """Returns a description of each variable that is skipped."""
        return [self._describe(key) for key in self.paths if key in self.skipped]

    def suggest_patterns(self) -> list[str]:
        """Returns patterns for ``init_skip`` that match exactly the variables that do not fit.

        If no variable of a layer fits, a pattern such as ``head/*`` matches the whole layer. Any
        other variable that does not fit is listed by its path.
        """
        fitting = [path for key, path in self.paths.items() if key not in self.misfits]
        patterns: list[str] = []
        for key in self.misfits:
            path = self.paths[key]
            layer, slash, _ = path.rpartition("/")
            is_whole = slash and not any(other.startswith(f"{layer}/") for other in fitting)
            pattern = path
            if is_whole:
                pattern = f"{layer}/*"
            if key not in self.skipped and pattern not in patterns:
                patterns.append(pattern)
        return patterns

    def describe(self) -> list[str]:
        """Returns the lines for the console: how many variables were loaded, and which were not."""
        count = len(self.paths)
        if not self.skipped:
            return [f"init_from: all {count} variables are loaded from {self.source}."]
        skipped = len(self.skipped)
        return [
            f"init_from: {count - skipped} of {count} variables are loaded from {self.source}.",
            f"init_skip: {skipped} of {count} variables keep their initial values: "
            f"{_join(self.list_skipped())}.",
        ]

    def _describe(self, key: int) -> str:
        path = self.paths[key]
        if key in self.misfits:
            return f"{path} ({self.misfits[key]})"
        return path


def load_initial_weights(model: Model, hook: Hook, config: Config) -> InitialWeights:
    """Loads the weights that ``init_from`` names into the variables of a model.

    In a cluster, every process loads the weights for its own replicas. The states of random
    generators are not loaded.

    Args:
        model: a model whose variables exist
        hook: the hook that created the model, for messages
        config: the settings, with ``init_from`` and ``init_skip``

    Returns:
        The variables that were loaded, and those that were skipped.

    Raises:
        SetupError: the weights cannot be read, or a variable that is not skipped does not fit.
    """
    assert config.init_from is not None
    paths = _find_paths(model)
    skipped = frozenset(
        key
        for key, path in paths.items()
        if any(_matches(path, pattern, model) for pattern in config.init_skip or [])
    )
    path = Path(config.init_from)
    if is_model(config.init_from):
        weights = InitialWeights(relative_path(path), paths, skipped)
        load: Callable[[], None] = _FileLoader(weights, model, hook, path).load
    else:
        run = read_source("init_from", config.init_from, config.runs_dir)
        step = run.find_steps()[0]
        weights = InitialWeights(f"{relative_path(run.run)}, step {step}", paths, skipped)
        checkpoint = find_user_part(run.folder, step)
        load = _RunLoader(weights, model, hook, str(checkpoint)).load
    try:
        load()
    except SetupError:
        check_patterns(model, config)  # a misspelled pattern is the probable cause
        raise
    return weights


def check_patterns(model: Model, config: Config) -> None:
    """Raises an error if a pattern of ``init_skip`` matches no variable of a model.

    All variables of the model must have been created.

    Raises:
        SetupError: a pattern matches no variable; the message lists the paths of the variables.
    """
    paths = list(_find_paths(model).values())
    for pattern in config.init_skip or []:
        if not any(_matches(path, pattern, model) for path in paths):
            raise SetupError(
                f"init_skip: {pattern!r} matches no variable of create_model; its variables are "
                f"{_join(paths)}."
            )


def _find_paths(model: Model) -> dict[int, str]:
    """Returns the paths of a model's variables, such as ``head/kernel``, by the variables' ids.

    Some models put their name before each path. This prefix is removed.
    """
    prefix = _name_model(model)
    return {
        id(unwrap(variable)): name_variable(variable).removeprefix(prefix)
        for variable in list_weights(model)
    }


def _matches(path: str, pattern: str, model: Model) -> bool:
    """Returns whether a glob pattern, with or without the model's name, matches a path."""
    return fnmatch.fnmatchcase(path, pattern.removeprefix(_name_model(model)))


def _name_model(model: Model) -> str:
    if isinstance(model, keras.Model):
        return f"{model.name}/"
    return ""


def _join(names: Sequence[str]) -> str:
    """Joins names for a message; a long list ends with the number of omitted names."""
    text = ", ".join(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        text += f" and {len(names) - _MOST_NAMES} more"
    return text


def list_weights(model: Model) -> list[Variable]:
    """Returns the variables of a model, except Keras' metrics and random generators."""
    left_out = _find_left_out(model)
    # TrackableView does not keep its root alive, so a variable must refer to the root.
    trackable = make_trackable(model)
    descendants = tf.train.TrackableView(trackable).descendants()
    variables = {id(unwrap(item)): item for item in descendants if _is_variable(item)}
    return [variable for key, variable in variables.items() if key not in left_out]


def _find_left_out(model: Model) -> set[int]:
    """Returns the ids of Keras variables that are not weights, such as those of metrics."""
    left_out: set[int] = set()
    for layer in walk(model):
        if isinstance(layer, keras.Layer):
            left_out |= {id(unwrap(variable)) for variable in layer.variables}
            left_out -= {id(unwrap(variable)) for variable in layer.weights}
    return left_out


def _is_variable(trackable: Trackable) -> bool:
    return isinstance(trackable, tf.Variable | keras.Variable)


def _refuse_misfits(weights: InitialWeights, hook: Hook) -> None:
    """Raises an error if a variable neither fits the source nor is skipped.

    Raises:
        SetupError: there is such a variable; the message suggests patterns for ``init_skip``.
    """
    errors = weights.list_errors()
    if errors:
        patterns = weights.suggest_patterns()
        flags = [f"--init-skip '{pattern}'" for pattern in patterns[:_MOST_FLAGS]]
        if len(patterns) > _MOST_FLAGS:
            flags.append("and so on")
        raise SetupError(
            f"init_from: {weights.source} does not fit {hook}: {_join(errors)}. To keep their "
            f"initial values instead, add {' '.join(flags)}."
        )


@dataclasses.dataclass
class _FileLoader:
    """Loads a ``.keras`` or ``.weights.h5`` file, or a SavedModel."""

    weights: InitialWeights
    model: Model
    hook: Hook
    path: Path

    def load(self) -> None:
        model = self.model
        source = self.weights.source
        if not isinstance(model, keras.Model):
            raise SetupError(
                f"init_from: {source} contains a Keras model, but {self.hook} does not return "
                "one; pass a run instead."
            )
        if self.path.is_dir():
            self._load_saved_model(model)
            return
        self._refuse_adapters(model)
        if self.path.suffix in (".h5", ".hdf5") and not self.path.name.endswith(".weights.h5"):
            self._load_old_file(model)
            return
        kept = [
            (weight, keras.ops.convert_to_numpy(weight))
            for weight in model.weights
            if self.weights.is_skipped(weight)
        ]
        try:
            with _WatchedLayers(model, self.weights):
                model.load_weights(self.path)
        except Exception as error:
            _refuse_misfits(self.weights, self.hook)
            raise SetupError(
                f"init_from: {source} does not fit {self.hook}: {format_error(error)}"
            ) from error
        for weight, value in kept:  # Keras has set the adapters of LoRA layers to 0
            weight.assign(value)

    def _load_saved_model(self, model: keras.Model) -> None:
        values = _read_saved_model(self.path)
        for weight in model.weights:
            self.weights.compare(weight, _find_shape(values.get(weight.path)))
        _refuse_misfits(self.weights, self.hook)
        for weight in model.weights:
            if not self.weights.is_skipped(weight):
                weight.assign(values[weight.path])

    def _load_old_file(self, model: keras.Model) -> None:
        """Loads an HDF5 file of a whole model, as Keras 2 wrote it.

        As in Keras, the layers of the model are matched with those of the file by their order, or
        by their names if the numbers of layers differ.
        """
        layers = [layer for layer in model.layers if _list_old_weights(layer)]
        try:
            saved_layers = _read_old_file(self.path)
        except (OSError, KeyError) as error:
            raise SetupError(
                f"init_from: {self.weights.source} cannot be read: {format_error(error)}"
            ) from error
        by_name = dict(saved_layers)
        if len(layers) == len(saved_layers):
            by_name = {
                layer.name: values for layer, (_, values) in zip(layers, saved_layers, strict=True)
            }
        loaded = []
        for layer in layers:
            weights = _list_old_weights(layer)
            values = by_name.get(layer.name, [])
            for weight, value in itertools.zip_longest(weights, values[: len(weights)]):
                self.weights.compare(weight, _find_shape(value))
                loaded.append((weight, value))
        _refuse_misfits(self.weights, self.hook)
        for weight, value in loaded:
            if not self.weights.is_skipped(weight):
                weight.assign(value)

    def _refuse_adapters(self, model: keras.Model) -> None:
        """Raises an error if the model has LoRA matrices that are not skipped.

        A Keras file contains the sum of a kernel and its adapter. When Keras loads the file, it
        sets both matrices of the adapter to 0. Their gradients would then always be 0, so the
        adapter would never be trained.
        """
        for weight in model.weights:
            if weight.name.startswith(("lora_kernel_", "lora_embeddings_")):
                self.weights.compare(weight, None)
        _refuse_misfits(self.weights, self.hook)


def _list_old_weights(layer: keras.Layer) -> list[Variable]:
    """Returns the weights of a layer in the order in which Keras 2 saved them."""
    return [*layer.trainable_weights, *layer.non_trainable_weights]


def _read_old_file(path: Path) -> list[tuple[str, list[np.ndarray]]]:
    """Returns the name and the values of each layer with weights in an HDF5 file of Keras 2."""
    layers = []
    with h5py.File(path, "r") as file:
        group = file.get("model_weights", file)
        for name in _read_names(group, "layer_names"):
            weight_names = _read_names(group[name], "weight_names")
            if weight_names:
                values = [np.asarray(group[name][weight_name]) for weight_name in weight_names]
                layers.append((name, values))
    return layers


def _read_names(group: Any, attribute: str) -> list[str]:
    """Returns a list of names; Keras divides a long one into ``attribute0``, ``attribute1``, ..."""
    attributes = [attribute]
    if attribute not in group.attrs:
        numbered = (f"{attribute}{number}" for number in itertools.count())
        attributes = list(itertools.takewhile(group.attrs.__contains__, numbered))
    names = itertools.chain.from_iterable(group.attrs[name] for name in attributes)
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


class _WatchedLayers:
    """Compares each layer with a Keras file while Keras loads it; skipped variables do not change.

    Each layer chooses the names of its values in a file, in its ``save_own_variables`` method. This
    context calls the method to get the variables by these names. For skipped variables, it then
    passes the current values to the layer instead of the values in the file.
    """

    def __init__(self, model: keras.Model, weights: InitialWeights) -> None:
        descendants = tf.train.TrackableView(model).descendants()
        self._layers = [item for item in descendants if isinstance(item, keras.Layer)]
        self._weights = weights

    def __enter__(self) -> None:
        for layer in self._layers:
            vars(layer)["load_own_variables"] = self._watch(layer)

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del vars(layer)["load_own_variables"]

    def _watch(self, layer: keras.Layer) -> Callable[[_LayerStore], None]:
        """Returns a replacement for the ``load_own_variables`` method of a layer."""
        load = layer.load_own_variables
        weights = self._weights

        def load_own_variables(store: _LayerStore) -> None:
            current: dict[str, Variable] = {}
            layer.save_own_variables(current)
            values = {name: store[name] for name in store.keys()}  # noqa: SIM118
            for name, variable in current.items():
                if id(unwrap(variable)) not in weights.paths:
                    continue
                weights.compare(variable, _find_shape(values.get(name)))
                if weights.is_skipped(variable):
                    values[name] = variable
            load(values)

        return load_own_variables


def _find_shape(value: np.ndarray | None) -> _Shape | None:
    """Returns the shape of a saved value, or None if there is no such value."""
    if value is None:
        return None
    return tuple(value.shape)


def _read_saved_model(path: Path) -> dict[str, np.ndarray]:
    """Returns the values of the variables in a SavedModel, by name.

    A name is left out if several variables with different values have it. Only the files with the
    variables are read, because loading a complete SavedModel from another person could run code.

    Raises:
        SetupError: the SavedModel cannot be read.
    """
    try:
        pairs = read_variables(str(path / "variables" / "variables"))
    except (OSError, *UNREADABLE) as error:
        raise SetupError(
            f"init_from: {relative_path(path)} cannot be read: {format_error(error)}"
        ) from error
    values = dict(pairs)
    doubtful = {name for name, value in pairs if not np.array_equal(values[name], value)}
    return {name: value for name, value in pairs if name not in doubtful}


@dataclasses.dataclass
class _RunLoader:
    """Loads the weights of the model in a checkpoint of a run."""

    weights: InitialWeights
    model: Model
    hook: Hook
    checkpoint: str

    def load(self) -> None:
        trackable = make_trackable(self.model)
        try:
            objects = read_object_graph(self.checkpoint)
            name = self._find_model(trackable, objects)
            pairs = _pair_variables(trackable, objects[0].children[name], objects)
            for variable, position in pairs:
                if id(unwrap(variable)) not in self.weights.paths:
                    continue
                shape = None
                if position is not None:
                    shape = objects[position].shape
                self.weights.compare(variable, shape)
            _refuse_misfits(self.weights, self.hook)
            left_out = self.weights.skipped | _find_left_out(self.model)
            root = tf.train.Checkpoint(**{name: _leave_out(trackable, left_out)})
            status = root.read(self.checkpoint)
            status.assert_existing_objects_matched()
            status.expect_partial()  # the rest of the checkpoint is not needed
        except (ValueError, AssertionError, *UNREADABLE) as error:
            raise SetupError(
                f"init_from: {self.weights.source} does not fit {self.hook}: {format_error(error)}"
            ) from error

    def _find_model(self, trackable: Trackable, objects: list[SavedObject]) -> str:
        """Returns the name under which the ``create_ckpt`` of another run saved the model.

        Raises:
            SetupError: no object or several objects of the checkpoint have all the variables that
                are not skipped.
        """
        names = sorted(name for name in objects[0].children if not name.startswith("_"))
        if "train_model" in names:
            return "train_model"
        fitting = [
            name
            for name in names
            if self._has_variables(trackable, objects[0].children[name], objects)
        ]
        if not fitting:
            raise SetupError(
                f"init_from: {self.weights.source} contains {', '.join(names)}, none of which "
                "has the variables of train_model; to keep the initial values of some "
                "variables, add --init-skip 'head/*'."
            )
        if len(fitting) > 1:
            raise SetupError(
                f"init_from: {self.weights.source} contains several models that fit: "
                f"{', '.join(fitting)}; load one of them in create_model with "
                "tf.train.Checkpoint(NAME=model).read(...)."
            )
        return fitting[0]

    def _has_variables(
        self, trackable: Trackable, position: int, objects: list[SavedObject]
    ) -> bool:
        """Returns whether a saved object has all variables to be loaded, at the same paths."""
        to_load = self.weights.paths.keys() - self.weights.skipped
        return all(
            saved is not None
            for variable, saved in _pair_variables(trackable, position, objects)
            if id(unwrap(variable)) in to_load
        )


def _pair_variables(
    trackable: Trackable, position: int, objects: list[SavedObject]
) -> list[tuple[Variable, int | None]]:
    """Returns each variable of an object with the position of its saved value.

    Args:
        trackable: the object with variables
        position: the position of the saved object in ``objects``
        objects: the objects of the checkpoint

    Returns:
        Pairs of a variable and the position of its saved value in ``objects``. The position is None
        if no path to the variable leads to a saved value.
    """
    pairs: dict[int, tuple[Trackable, int | None]] = {}
    # Maps the position of each saved object to the id of the first object that was found for it.
    # Other objects cannot have the same saved object.
    owners: dict[int, int] = {}
    waiting: collections.deque[tuple[Trackable, int | None]] = collections.deque(
        [(trackable, position)]
    )
    while waiting:
        item, saved = waiting.popleft()
        # A variable can be reached through an attribute of its layer, and through lists of the
        # layer's variables. If the order of a list has changed, its index leads to the saved value
        # of another variable, which was already found through the attribute.
        if saved is not None and owners.setdefault(saved, id(item)) != id(item):
            saved = None
        if id(item) in pairs and (saved is None or pairs[id(item)][1] is not None):
            continue
        pairs[id(item)] = (item, saved)
        saved_children: dict[str, int] = {}
        if saved is not None:
            saved_children = objects[saved].children
        for name, child in tf.train.TrackableView.children(item).items():
            waiting.append((child, saved_children.get(name)))
    return [(item, saved) for item, saved in pairs.values() if _is_variable(item)]


def _leave_out(trackable: Trackable, left_out: Collection[int]) -> Trackable:
    """Returns an object with the same children at the same paths, but without some variables.

    Objects that contain none of these variables are not copied.

    Args:
        trackable: an object that a ``tf.train.Checkpoint`` can contain
        left_out: the ids of the variables to leave out
    """
    items = tf.train.TrackableView(trackable).descendants()
    children = {id(item): tf.train.TrackableView.children(item) for item in items}
    parents: dict[int, list[int]] = collections.defaultdict(list)
    for parent, named in children.items():
        for child in named.values():
            parents[id(child)].append(parent)
    waiting = [id(item) for item in items if id(unwrap(item)) in left_out]
    removed = set(waiting)
    replaced: dict[int, tf.train.Checkpoint] = {}
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in replaced:
                replaced[parent] = tf.train.Checkpoint()
                waiting.append(parent)
    for parent, replacement in replaced.items():
        for name, child in children[parent].items():
            if id(child) not in removed:
                setattr(replacement, name, replaced.get(id(child), child))
    return replaced.get(id(trackable), trackable)
