"""Programs, and the loop of one device that each is compared with.

Most programs are compared with what their hooks stand for (``reference.py``), on whole batches. The
others have a loop of their own, as people write it. All weights are compared;
plain SGD shows a wrong scale that an adaptive optimizer hides.
"""

import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import compare, programs
from tests.golden.reference import RATE, Reference

STEPS = 16
BATCH = 8
KILLED = 11
LAST_SAVED = 8
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
MODULES = [name for _, name, _ in pkgutil.iter_modules(programs.__path__) if name != "basics"]
NAMES = [*programs.BASICS, *MODULES]
NO_WEIGHT = "(?!)"  # matches nothing
Trained = tuple[list[Any], Mapping[str, float]]  # variables, and the values of an evaluation


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One program, and what is asked of it.

    Attributes:
        hooks: makes the hooks anew
        plain: a loop of its own, on one device, for ``STEPS`` steps of ``BATCH`` examples
        weights: of a trained state, the variables to compare
        settings: beside steps, batch size and learning rate
        accumulates: whether micro-batches have to give the same
        compiles: whether XLA can compile it
        ignored: pattern of weights whose true gradient is zero: what they get is rounding
        frozen: pattern of weights that training leaves where they are
        tolerance: relative, of the comparison with the plain loop
        absolute: how far numbers near zero may be from it
    """

    hooks: Callable[[], Any]
    plain: Callable[[], Trained] | None = None
    weights: Callable[[Any], Iterable[Any]] = lambda state: state.train_model.weights
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulates: bool = True
    compiles: bool = True
    ignored: str = NO_WEIGHT
    frozen: str = NO_WEIGHT
    tolerance: float = 1e-5
    absolute: float = 1e-6

    @functools.cached_property
    def trained(self) -> Trained:
        return self.plain() if self.plain else train_hooks(self)

    def assert_plain(self, weights: Iterable[Any], metrics: Mapping[str, Any]) -> None:
        """Compares what was trained, and its evaluation, with the plain loop's."""
        expected, values = self.trained
        for weight, other in zip(weights, expected, strict=True):
            if not re.search(self.ignored, compare.find_path(other)):
                compare.assert_close([weight], [other], self.tolerance, self.absolute)
        for name, value in values.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)

    def assert_moved(self, before: Iterable[np.ndarray]) -> None:
        """So that equal weights mean something: training has changed each of them visibly."""
        for old, new in zip(before, self.trained[0], strict=True):
            moved = np.abs(old - compare.read_numbers([new])[0]).max() >= 1e-4
            may_stay = re.search(f"{self.ignored}|{self.frozen}", compare.find_path(new))
            assert moved or may_stay, f"{compare.find_path(new)} stays where it is"


@functools.cache
def load_program(name: str) -> Program:
    """Imports a program only when it is asked for: some start TensorFlow."""
    file = name if name in MODULES else "basics"
    module = importlib.import_module(f"{programs.__name__}.{file}")
    program: Program = module.PROGRAM if name in MODULES else getattr(module, name)()
    return program


def whole_batches(create_dataset: Callable[[int], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns the ``STEPS`` batches of passes of 40 to 47 examples; what is left over is out."""
    dataset = create_dataset(BATCH)
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.take(5).repeat()
    return dataset.take(STEPS)


def train_hooks(program: Program) -> Trained:
    """Trains and evaluates by a program's hooks."""
    keras.utils.set_random_seed(0)  # the setting's default, from which shuffles start
    hooks = program.hooks()
    batches = iter(whole_batches(hooks.create_dataset))
    rate = program.settings.get("learning_rate", RATE)
    trained = Reference(hooks, rate).train(batches, program.weights)
    evaluates = hasattr(hooks, "create_eval_dataset")
    metrics = trained.evaluate(hooks.create_eval_dataset(BATCH)) if evaluates else {}
    return list(program.weights(trained.parts)), metrics
