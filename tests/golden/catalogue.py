"""The programs of the golden tests, each with a plain training loop on one device.

Most programs are compared with ``reference.py``, which calls their hooks on whole batches. The
others have their own loop. All weights are compared. Most programs use plain SGD, because an
adaptive optimizer would hide a wrong scale.
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
NO_WEIGHT = "(?!)"  # this pattern matches no weight
Trained = tuple[list[Any], Mapping[str, float]]  # the variables, and the values of an evaluation


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A program, and how to compare it.

    Attributes:
        hooks: returns a new set of the program's hooks
        plain: trains in the program's own loop, on one device, for ``STEPS`` steps of ``BATCH``
            examples; None for the loop in ``reference.py``
        weights: returns the variables of a trained state that are compared
        settings: settings in addition to the steps, the batch size and the learning rate
        accumulates: whether training in micro-batches must give the same weights
        compiles: whether XLA can compile the program
        ignored: pattern of weights that are not compared, because their true gradient is zero and
            they change by rounding errors only
        frozen: pattern of weights that training must not change
        tolerance: the relative tolerance of the comparison with the plain loop
        absolute: the absolute tolerance of that comparison, for numbers near zero
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
        """Asserts that the weights and the metrics are those of the plain loop."""
        expected, values = self.trained
        for weight, other in zip(weights, expected, strict=True):
            if not re.search(self.ignored, compare.find_path(other)):
                compare.assert_close([weight], [other], self.tolerance, self.absolute)
        for name, value in values.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)

    def assert_moved(self, before: Iterable[np.ndarray]) -> None:
        """Asserts that training changed each weight visibly.

        Otherwise, the comparison of the weights would prove nothing.
        """
        for old, new in zip(before, self.trained[0], strict=True):
            moved = np.abs(old - compare.read_numbers([new])[0]).max() >= 1e-4
            may_stay = re.search(f"{self.ignored}|{self.frozen}", compare.find_path(new))
            assert moved or may_stay, f"{compare.find_path(new)} stays where it is"


@functools.cache
def load_program(name: str) -> Program:
    """Imports a program. Each is imported only on demand, because some start TensorFlow."""
    file = name if name in MODULES else "basics"
    module = importlib.import_module(f"{programs.__name__}.{file}")
    program: Program = module.PROGRAM if name in MODULES else getattr(module, name)()
    return program


def whole_batches(create_dataset: Callable[[int], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns the first ``STEPS`` batches of ``BATCH`` examples of a dataset.

    A finite dataset has 40 to 47 examples. Each pass then has five batches, and the rest is
    dropped.
    """
    dataset = create_dataset(BATCH)
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.take(5).repeat()
    return dataset.take(STEPS)


def train_hooks(program: Program) -> Trained:
    """Trains and evaluates a program by calling its hooks in the loop of ``reference.py``."""
    keras.utils.set_random_seed(0)  # The default of the setting "seed", which shuffles depend on.
    hooks = program.hooks()
    batches = iter(whole_batches(hooks.create_dataset))
    rate = program.settings.get("learning_rate", RATE)
    trained = Reference(hooks, rate).train(batches, program.weights)
    evaluates = hasattr(hooks, "create_eval_dataset")
    metrics = trained.evaluate(hooks.create_eval_dataset(BATCH)) if evaluates else {}
    return list(program.weights(trained.parts)), metrics
