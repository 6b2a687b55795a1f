"""Hooks whose update reads and writes whatever an update can, and their plain loop.

``update_pre`` reads weights, gradients, outputs, the learning rate and the count of updates. It
writes variables, skips some updates, and exchanges values between replicas. The optimizers decay
weights and replace them with moving averages, and ``update_post`` clips them.
"""

from typing import Any

import keras
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.golden.reference import RATE

BATCH = 10  # has shares of different sizes on 3 and on 4 replicas
create_dataset = small.slices(small.data(), drop_remainder=True)
create_eval_dataset = small.create_eval_dataset
create_loss = small.create_loss
every_steps: dict[int, Any] = {}


def create_metrics() -> dict[str, keras.Metric]:
    return {"error": keras.metrics.MeanAbsoluteError()}


def create_model() -> keras.Model:
    model = small.create_model()
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    model.calls = tf.Variable(0, trainable=False, name="calls", aggregation=first)
    model.spent = tf.Variable(
        0.0, trainable=False, name="spent", aggregation=tf.VariableAggregation.MEAN
    )
    model.updates = tf.Variable(0, trainable=False, name="updates", aggregation=first)
    return model


def create_opt(lr: Any) -> dict[str, keras.Optimizer]:
    return {
        "hidden": keras.optimizers.SGD(lr, weight_decay=0.05),
        "out": keras.optimizers.SGD(lr, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    }


def grad_pre(loss: Any, train_model: Any) -> dict[str, Any]:
    hidden, out = train_model.layers
    return {
        "hidden": (loss, 0.0, hidden.trainable_variables),
        "out": (2.0 * loss, 0.0, out.trainable_variables),
    }


def update_pre(
    gradients: Any,
    variables: Any,
    all_gradients: Any,
    output: Any,
    optimizer: Any,
    train_model: Any,
) -> Any:
    largest = tf.reduce_max(tf.abs(ctl_core.all_gather(output)))
    energy = ctl_core.all_reduce(tf.reduce_sum(output**2))
    norm = tf.linalg.global_norm([each for some in all_gradients.values() for each in some])
    progress = tf.cast(optimizer.learning_rate, tf.float32) * tf.cast(
        optimizer.iterations, tf.float32
    )
    factor = (1.0 + progress) / (1.0 + 0.1 * norm + 0.01 * energy + largest)
    train_model.spent.assign_add(factor)
    train_model.calls.assign_add(1)
    limits = [tf.maximum(tf.norm(variable), 0.1) for variable in variables]
    clipped = [
        tf.clip_by_norm(gradient, limit) * factor / (0.1 + train_model.spent)
        for gradient, limit in zip(gradients, limits, strict=True)
    ]
    # The update of both optimizers is skipped in step 3, and one of them in steps 2 and 5.
    is_skipped = tf.reduce_any(tf.equal(train_model.calls, [4, 5, 6, 9]))
    return clipped, gradients, is_skipped


def update_post(train_model: Any) -> None:
    train_model.updates.assign_add(1)
    for variable in train_model.trainable_variables:
        variable.assign(tf.clip_by_value(variable, -0.5, 0.5))


def train_plainly(steps: int) -> keras.Model:
    """Trains on one device, in a plain loop, and returns the model."""
    model = create_model()
    loss = create_loss()
    optimizers = create_opt(RATE)
    for inputs, target in create_dataset(BATCH).repeat().take(steps):
        with tf.GradientTape(persistent=True) as tape:
            output = model(inputs)
            objectives = grad_pre(tf.reduce_mean(loss((output, target))), model)
        gradients = {
            name: tape.gradient(objective, variables)
            for name, (objective, _, variables) in objectives.items()
        }
        updates = {
            name: update_pre(gradients[name], variables, gradients, output, optimizers[name], model)
            for name, (_, _, variables) in objectives.items()
        }
        for name, (clipped, _, is_skipped) in updates.items():
            if not is_skipped:
                optimizers[name].apply(clipped, objectives[name][2])
        if not all(is_skipped for _, _, is_skipped in updates.values()):
            update_post(model)
    return model
