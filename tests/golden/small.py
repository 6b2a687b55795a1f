"""A small program as hooks, as a plain loop on one device, and as a project's callbacks.py."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.golden.reference import RATE, Reference

EXAMPLES = 100
FEATURES = 5
BATCH = 16


def slow_but(*quick: Any, of: Iterable[Any]) -> list[Any]:
    """Returns test parameters, and marks all of them as slow except the given ones.

    The quick ones are representative of the others.
    """
    parameters: list[Any] = []
    for each in of:
        if each in quick:
            parameters.append(each)
        else:
            values = each if isinstance(each, tuple) else (each,)
            parameters.append(pytest.param(*values, marks=pytest.mark.slow))
    return parameters


def data(examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples with 5 features and a target.

    The default number of examples, 100, is not divisible by the batch size 16.
    """
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    target = (inputs @ random.normal(size=(FEATURES, 1)) + 0.5).astype("float32")
    return inputs[:examples], target[:examples]


def slices(arrays: Any, drop_remainder: bool = False) -> Callable[[int], tf.data.Dataset]:
    """Returns a ``create_dataset`` hook that reads arrays in order."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(arrays)
        return examples.batch(per_replica_batch_size, drop_remainder=drop_remainder)

    return create_dataset


create_dataset = slices(data(), drop_remainder=True)


# The last 37 examples, a number that is not divisible by any batch size.
create_eval_dataset = slices(tuple(array[-37:] for array in data()))


def create_model() -> keras.Model:
    return model_with()


def model_with(*layers: keras.layers.Layer) -> keras.Model:
    """Returns two dense layers with ``layers`` in between.

    The initial weights depend only on the shapes.
    """
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, "tanh", name="hidden"),
            *layers,
            keras.layers.Dense(1, name="out"),
        ]
    )
    random = np.random.default_rng(1)
    for layer in (model.layers[0], model.layers[-1]):
        layer.set_weights([random.normal(scale=0.3, size=w.shape) for w in layer.get_weights()])
    return model


def squared_error(pair: Any) -> tf.Tensor:
    return tf.reduce_sum((pair[0] - pair[1]) ** 2, axis=1)


def crossentropy(pair: Any) -> tf.Tensor:
    """Returns the cross-entropy of a pair of logits and class indices."""
    return keras.losses.sparse_categorical_crossentropy(pair[1], pair[0], from_logits=True)


def create_loss() -> Callable[[Any], tf.Tensor]:
    return squared_error


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    """Returns plain SGD, which does not hide a wrong scale."""
    return keras.optimizers.SGD(lr)


def update_pre(gradients: Any) -> Any:
    """Returns the gradients unchanged."""
    return gradients, gradients


HOOKS = (create_dataset, create_model, create_loss, create_opt, update_pre)


def hooks(**replaced: Any) -> SimpleNamespace:
    """Returns the hooks of the small program, without reports; arguments replace or add hooks."""
    base = {hook.__name__: hook for hook in HOOKS}
    return SimpleNamespace(**{**base, "every_steps": {}, **replaced})


def settings(steps: int, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "batch_size": BATCH, "learning_rate": RATE, **more}


def plain(
    steps: int,
    rate_at: Callable[[int], float] | None = None,
    model: Any = None,
    batches: Iterable[Any] | None = None,
    optimizer: Any = None,
) -> Any:
    """Trains on one device without the engine, and returns the model.

    Args:
        steps: the number of steps
        rate_at: returns the learning rate of a step, counted from 1; None for the optimizer's rate
        model: a Keras model; None for that of ``create_model``
        batches: the global batches; None for those of ``create_dataset``. A dataset is repeated.
        optimizer: the optimizer; None for plain SGD
    """
    program = hooks(create_model=lambda: model or create_model())
    program.create_opt = lambda lr: optimizer or create_opt(lr)
    batches = create_dataset(BATCH) if batches is None else batches
    repeated = batches.repeat() if isinstance(batches, tf.data.Dataset) else batches
    trained = Reference(program)
    for step, batch in zip(range(1, steps + 1), repeated, strict=False):
        if rate_at:
            trained.parts.optimizer.learning_rate = rate_at(step)
        trained.train([batch])
    return trained.parts.train_model


def errors(model: Any) -> dict[str, float]:
    """Returns the loss and the mean absolute error of a Keras model over the evaluation data."""
    inputs, target = data()
    difference = model(inputs[-37:], training=False).numpy() - target[-37:]
    return {"loss": float((difference**2).mean()), "error": float(abs(difference).mean())}


def read_files(folder: Path) -> dict[Path, bytes]:
    """Returns the contents of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The callbacks.py of a project, to which a test appends its own hooks.
CALLBACKS = """\
import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.golden.small import create_dataset, create_loss, create_model, create_opt, update_pre

every_steps = {}
"""
EVALUATED = """
create_eval_dataset = small.create_eval_dataset


def create_metrics():
    return {"error": keras.metrics.MeanAbsoluteError()}
"""
