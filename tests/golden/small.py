"""A small program: hooks, the plain loop of one device beside them, a project's callbacks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES, FEATURES, BATCH, RATE = 100, 5, 16, 0.05


def data(examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples of 5 features and a target each; of 100, batches of 16 leave a remainder."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    target = (inputs @ random.normal(size=(FEATURES, 1)) + 0.5).astype("float32")
    return inputs[:examples], target[:examples]


def slices(arrays: Any, drop_remainder: bool = False) -> Callable[[int], tf.data.Dataset]:
    """Returns a create_dataset that reads arrays in their order."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(arrays)
        return examples.batch(per_replica_batch_size, drop_remainder=drop_remainder)

    return create_dataset


create_dataset = slices(data(), drop_remainder=True)


def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    """The last 37 examples, which no batch divides."""
    inputs, target = data()
    return tf.data.Dataset.from_tensor_slices((inputs[-37:], target[-37:])).batch(
        per_replica_batch_size
    )


def create_model() -> keras.Model:
    return model_with()


def model_with(*layers: keras.layers.Layer) -> keras.Model:
    """Two dense layers with ``layers`` between them; weights that depend on shapes alone."""
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


def create_loss() -> Callable[[Any], tf.Tensor]:
    return squared_error


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    """Plain SGD, which shows a wrong scale."""
    return keras.optimizers.SGD(lr)


def update_pre(gradients: Any) -> Any:
    """Neither clips nor replaces anything."""
    return gradients, gradients


HOOKS = (create_dataset, create_model, create_loss, create_opt, update_pre)


def hooks(**own: Any) -> SimpleNamespace:
    """The hooks above, quiet; what is named replaces them."""
    base = {hook.__name__: hook for hook in HOOKS}
    return SimpleNamespace(**{**base, "every_steps": {}, **own})


def settings(steps: int, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "batch_size": BATCH, "learning_rate": RATE, **more}


def mean_error(model: Any, batch: Any) -> tf.Tensor:
    """The mean squared error, and what the model's layers add."""
    error = squared_error((model(batch[0], training=True), batch[1]))
    return tf.reduce_mean(error) + sum(model.losses)


def plain(
    steps: int,
    rate_at: Callable[[int], float] | None = None,
    model: Any = None,
    batches: Iterable[Any] | None = None,
    mean_loss: Callable[[Any, Any], tf.Tensor] = mean_error,
    optimizer: Any = None,
) -> Any:
    """Trains without the engine on one device; returns the model.

    Args:
        rate_at: the learning rate of a step, from 1 up; without it the optimizer's own
        model: a Keras model; without one that of ``create_model``
        batches: without them those of ``create_dataset``; a dataset is of one pass
        mean_loss: of the model and a batch
        optimizer: plain SGD if it is not said
    """
    model, optimizer = model or create_model(), optimizer or create_opt(RATE)
    batches = create_dataset(BATCH) if batches is None else batches
    repeated = batches.repeat() if isinstance(batches, tf.data.Dataset) else batches
    for step, batch in zip(range(1, steps + 1), repeated, strict=False):
        if rate_at:
            optimizer.learning_rate = rate_at(step)
        with tf.GradientTape() as tape:
            loss = mean_loss(model, batch)
        variables = model.trainable_variables
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        optimizer.apply(list(gradients), variables)
    return model


def errors(model: Any) -> dict[str, float]:
    """The loss and the mean absolute error of a Keras model over the evaluation's examples."""
    inputs, target = data()
    difference = model(inputs[-37:], training=False).numpy() - target[-37:]
    return {"loss": float((difference**2).mean()), "error": float(abs(difference).mean())}


def read_files(folder: Path) -> dict[Path, bytes]:
    """What is in the files of a folder, at any depth."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# A project's callbacks.py; what a test adds goes below it.
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
