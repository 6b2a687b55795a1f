"""Short programs, one per function, with different inputs, losses, weights and gradients."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program, whole_batches
from tests.golden.reference import RATE


def clip_at(limit: float, gradients: Any) -> Any:
    clipped, norm = tf.clip_by_global_norm(gradients, limit)
    if tf.executing_eagerly():  # true in the plain loop only
        assert norm > limit, "the clip has to clip"
    return clipped, gradients


def batch_norm() -> Program:
    """Returns a program with batch normalization over the global batch and moving statistics."""
    inputs, target = small.data(44)
    read = small.slices((2.0 * inputs + 1.0, target))
    norm = functools.partial(keras.layers.BatchNormalization, momentum=0.9, synchronized=True)
    hooks: dict[str, Any] = {
        "create_dataset": read,
        "create_eval_dataset": read,
        "create_model": lambda: small.model_with(norm()),
    }
    # Micro-batches have different statistics.
    return Program(lambda: small.hooks(**hooks), accumulates=False)


def l2() -> Program:
    """Returns a program with L2 regularization, the default optimizer and clipped gradients."""

    def create_model() -> keras.Model:
        model: Any = small.create_model()
        for layer in model.layers:
            layer.kernel.regularizer = keras.regularizers.L2(0.01)
        return model

    hooks = {
        "create_dataset": small.slices(small.data(44)),
        "create_eval_dataset": small.slices(small.data(44)),
        "create_model": create_model,
        "create_opt": lambda lr: keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001),
        "update_pre": lambda gradients: clip_at(0.05, gradients),
    }
    return Program(lambda: small.hooks(**hooks))


def lazy_penalty() -> Program:
    """Returns a program that penalizes the output's slope every third step, after StyleGAN2."""

    def grad_pre(loss: Any, batch: Any, train_model: Any, step: Any) -> Any:
        if step % 3 == 0:
            loss += 1.5 * steepness(train_model, batch[0])
        return loss, 0.0, train_model.trainable_variables

    def train_plainly() -> Any:
        model = small.create_model()
        for step, (inputs, target) in enumerate(whole_batches(read), 1):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum((model(inputs) - target) ** 2, axis=1))
                if step % 3 == 0:
                    loss += 3 * 0.5 * tf.reduce_mean(steepness(model, inputs))
            keras.optimizers.SGD(RATE).apply(tape.gradient(loss, model.weights), model.weights)
        return model.weights, {}

    read = small.slices(small.data(44))
    hooks = {"create_dataset": read, "grad_pre": grad_pre}
    return Program(lambda: small.hooks(**hooks), train_plainly)


def steepness(model: Any, inputs: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = model(inputs)
    return tf.reduce_sum(tape.gradient(output, inputs) ** 2, axis=1)


NUMBERS = np.random.default_rng(3).integers(0, 7, (44, 3)).astype("int32")
WORDS = NUMBERS, NUMBERS.sum(1, keepdims=True).astype("float32")


def embed_words() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def embedding() -> Program:
    """Returns a program with an embedding.

    Its gradient is sparse, and all gradients are clipped by their global norm.
    """
    hooks = {
        "create_dataset": small.slices(WORDS),
        "create_model": embed_words,
        "update_pre": lambda gradients: clip_at(2.0, gradients),
    }
    return Program(lambda: small.hooks(**hooks))


def two_by_two() -> Program:
    """Returns a program whose inputs and outputs are dicts.

    The loss of an example is a sum over two outputs. It does not depend on the layer ``unused``,
    which must not change.
    """
    random = np.random.default_rng(0)
    inputs = {name: random.normal(size=(44, 5)).astype("float32") for name in ("left", "right")}
    total = inputs["left"].sum(axis=1, keepdims=True) + 0.5
    target = {"sum": total, "product": np.concatenate([total, inputs["right"][:, :1]], axis=1)}

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        left = keras.Input((5,), name="left")
        right = keras.Input((5,), name="right")
        both = keras.layers.Concatenate()([left, right])
        hidden = keras.layers.Dense(6, activation="tanh")(both)
        sizes = {"sum": 1, "product": 2, "unused": 1}
        outputs = {name: keras.layers.Dense(n, name=name)(hidden) for name, n in sizes.items()}
        return keras.Model({"left": left, "right": right}, outputs)

    def squared_errors(pair: Any) -> Any:
        errors = {name: small.squared_error((pair[0][name], pair[1][name])) for name in target}
        return errors["sum"] + 0.5 * errors["product"]

    hooks = {
        "create_dataset": small.slices((inputs, target)),
        "create_model": create_model,
        "create_loss": lambda: squared_errors,
    }
    return Program(lambda: small.hooks(**hooks), frozen="unused")


class UncertaintyLoss(tf.Module):
    """A loss that learns a weight for each of several tasks.

    For each example, it is the sum over the tasks of exp(-s) L + s, where L is the loss of a task,
    and s is a trained variable.
    """

    def __init__(self) -> None:
        super().__init__()
        starts = {"depth": 0.0, "kind": 0.5}
        self.log_variance = {name: tf.Variable(start, name=name) for name, start in starts.items()}
        self.tasks = {
            "depth": keras.losses.MeanSquaredError(reduction="none"),
            "kind": keras.losses.SparseCategoricalCrossentropy(True, reduction="none"),
        }

    def __call__(self, loss_input: Any) -> Any:
        output, target = loss_input
        total = 0.0
        for name, loss in self.tasks.items():
            s = self.log_variance[name]
            total += tf.exp(-s) * loss(target[name], output[name]) + s
        return total


def multi_task() -> Program:
    """Returns a program with two tasks whose weights are learned.

    Each task's loss is weighted by the inverse of a variance, after Kendall, Gal and Cipolla 2018.
    The logarithms of the variances are variables of the loss. ``grad_pre`` returns them among the
    trained variables.
    """
    points, depth = small.data(44)
    kind = np.random.default_rng(0).integers(0, 3, size=44)

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(2)
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        outputs = {"depth": keras.layers.Dense(1)(hidden), "kind": keras.layers.Dense(3)(hidden)}
        return keras.Model(inputs, outputs)

    def find_weights(model: Any, loss: Any) -> list[Any]:
        return [*model.trainable_variables, *loss.trainable_variables]

    def grad_pre(loss: Any, train_model: Any, train_loss: Any) -> Any:
        return loss, 0.0, find_weights(train_model, train_loss)

    hooks = {
        "create_dataset": small.slices((points, {"depth": depth, "kind": kind})),
        "create_model": create_model,
        "create_loss": UncertaintyLoss,
        "grad_pre": grad_pre,
    }
    return Program(
        lambda: small.hooks(**hooks),
        weights=lambda state: find_weights(state.train_model, state.train_loss),
    )


class Sums(tf.Module):
    """Predicts two numbers for each row; each is a sum over the row's values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable([0.3, -0.2])
        self.shift = tf.Variable([0.1, 0.2])

    def __call__(self, rows: Any) -> Any:
        hidden = tf.tanh(rows.values[:, None] * self.scale + self.shift)
        sums = tf.math.segment_sum(hidden, rows.value_rowids())
        return {"sum": sums[:, 0], "length": sums[:, 1], "rows": rows}


def ragged() -> Program:
    """Returns a program with a dict of ragged rows; the loss uses two of the model's outputs."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 5, size=44)
    values = random.normal(size=lengths.sum()).astype("float32")

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        rows = tf.RaggedTensor.from_row_lengths(values, lengths)
        data = {"rows": rows, "sum": tf.reduce_sum(rows, axis=1), "length": lengths}
        return small.slices(data)(per_replica_batch_size)

    def squared_error(pair: Any) -> Any:
        output, batch = pair
        length = tf.cast(batch["length"], tf.float32)
        return (output["sum"] - batch["sum"]) ** 2 + 0.1 * (output["length"] - length) ** 2

    hooks = {
        "create_dataset": create_dataset,
        "create_model": Sums,
        "create_loss": lambda: squared_error,
        "input_pre": lambda batch: batch["rows"],
        "loss_pre": lambda output, batch: (output, batch),
    }
    # XLA does not support rows of unknown length.
    weights = lambda state: state.train_model.variables  # noqa: E731
    return Program(lambda: small.hooks(**hooks), weights=weights, compiles=False)
