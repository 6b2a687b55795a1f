"""What the weights of a program are compared with.

Each program stands here twice: as hooks, and as the loop of one device that people write. All
weights are compared; plain SGD shows a wrong scale that an adaptive optimizer hides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

STEPS, BATCH, RATE = 16, 8, 0.05


def trained_weights(state: Any) -> Any:
    return state.train_model.weights


@dataclasses.dataclass(frozen=True)
class Program:
    """One program, and what is asked of it.

    Attributes:
        hooks: makes the hooks anew
        plain: trains as a plain loop on one device for ``STEPS`` steps of ``BATCH`` examples with
            ``RATE``; returns the model, or variables in the order of ``weights``
        weights: of a trained state, the variables to compare
        metrics: the values of the last evaluation, as the plain loop has them
        settings: beside steps, batch size and learning rate
        accumulates: whether micro-batches have to give the same
        compiles: whether XLA can compile it
        ignored: positions of weights whose true gradient is zero: what they get is rounding
        frozen: positions of weights that training leaves where they are
        tolerance: relative, of the comparison with the plain loop
        absolute: how far numbers near zero may be from it
    """

    hooks: Callable[[], Any]
    plain: Callable[[], Any]
    weights: Callable[[Any], Iterable[Any]] = trained_weights
    metrics: Callable[[], Mapping[str, float]] = dict
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulates: bool = True
    compiles: bool = True
    ignored: Callable[[], frozenset[int]] = frozenset
    frozen: Callable[[], frozenset[int]] = frozenset
    tolerance: float = 1e-5
    absolute: float = 1e-6

    def plain_weights(self) -> list[np.ndarray]:
        """Trains as a plain loop; returns the numbers that ``weights`` are compared with."""
        trained = self.plain()
        return read_numbers(getattr(trained, "weights", trained))


def read_numbers(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns the numbers of Keras or TensorFlow variables, or of arrays."""
    return [np.array(each.numpy() if hasattr(each, "numpy") else each) for each in variables]


def assert_close(
    found: Iterable[Any],
    expected: Iterable[Any],
    ignored: frozenset[int] = frozenset(),
    tolerance: float = 1e-5,
    absolute: float = 1e-6,
) -> None:
    """Compares a program's variables with the plain loop's, one after the other."""
    found = list(found)
    pairs = zip(read_numbers(found), read_numbers(expected), strict=True)
    for position, (value, other) in enumerate(pairs):
        if position not in ignored:
            name = getattr(found[position], "path", f"variable {position}")
            np.testing.assert_allclose(value, other, tolerance, absolute, err_msg=name)


def whole_batches(create_dataset: Callable[[int], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns the ``STEPS`` batches of passes of 40 to 47 examples; what is left over is out."""
    return create_dataset(BATCH).take(5).repeat().take(STEPS)


def train_plainly(
    model: Any,
    batches: Iterable[Any],
    mean_loss: Callable[[Any], Any],
    optimizer: keras.Optimizer | None = None,
    variables: Callable[[], list[Any]] | None = None,
) -> Any:
    """Trains as a plain loop on one device; returns the model.

    Args:
        batches: one for each step
        mean_loss: of a batch
        optimizer: plain SGD if it is not said
        variables: that are trained; without them all of the model's that can be
    """
    optimizer = optimizer or keras.optimizers.SGD(RATE)
    for batch in batches:
        with tf.GradientTape() as tape:
            loss = mean_loss(batch)
        trained = variables() if variables else model.trainable_variables
        gradients = [tf.convert_to_tensor(one) for one in tape.gradient(loss, trained)]
        optimizer.apply(gradients, trained)
    return model


def assert_moved(
    before: Iterable[Any], after: Iterable[Any], frozen: frozenset[int] = frozenset()
) -> None:
    """So that equal weights mean something: training has changed each of them visibly."""
    moves = [np.abs(one - other).max() for one, other in zip(before, after, strict=True)]
    still = [position for position, move in enumerate(moves) if move < 1e-4]
    assert set(still) <= frozen, f"these weights stay where they are: {still}"


def read_checkpoint(run: Path, step: int, part: str = "") -> dict[str, np.ndarray]:
    """Returns every tensor of the checkpoint of a step, by its key, read without the engine.

    Args:
        part: ``engine`` for what the engine saves beside the hooks' objects
    """
    reader = tf.train.load_checkpoint(str(run / "ckpt" / part / f"ckpt-{step}"))
    return {
        key: reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key != "_CHECKPOINTABLE_OBJECT_GRAPH" and "save_counter" not in key
    }


def assert_same_checkpoint(run: Path, other: Path, step: int) -> None:
    """Compares all that two runs have saved of a step, bit for bit."""
    saved, expected = (read_checkpoint(folder, step) for folder in (run, other))
    assert saved.keys() == expected.keys() and len(saved) > 1
    for key, value in expected.items():
        np.testing.assert_array_equal(saved[key], value, err_msg=key)
