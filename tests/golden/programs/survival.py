"""Survival analysis with Cox' partial likelihood over the patients of a batch.

A patient who dies is compared with all patients of the batch who live at least as long. The loss is
divided by the number of deaths, which is 0 in one of the batches. The metric, the share of pairs in
the right order, is no sum over patients. See
https://github.com/mexchy1000/DeepSurv_Keras/issues/1.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.golden.catalogue import Program, Trained, whole_batches
from tests.golden.reference import RATE

FEATURES = 5
EVALUATED = 21  # not divisible by the batch size, so that the last batch is smaller
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(40, FEATURES)).astype("float32")
# Rounded, so that some patients have the same time.
TIME = RANDOM.exponential(np.exp(-INPUTS[:, 0])).round(1).astype("float32")
DEATH = (RANDOM.uniform(size=40) < 0.6).astype("float32")
DEATH[8:16] = 0.0
PATIENTS = (INPUTS, {"time": TIME, "death": DEATH})
create_dataset = small.slices(PATIENTS)
create_eval_dataset = small.slices(tf.nest.map_structure(lambda rows: rows[:EVALUATED], PATIENTS))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(1, use_bias=False)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def loss_pre(output: Any, batch: Any) -> Any:
    """Returns the risks and the patients of this replica, then those of all replicas."""
    risk = output[:, 0]
    return (risk, batch[1]), ctl_core.all_gather((risk, batch[1]["time"]))


def partial_likelihood(loss_input: Any) -> Any:
    (risk, patients), (all_risks, all_times) = loss_input
    order = tf.argsort(all_times, direction="DESCENDING", stable=True)
    sums = tf.math.cumulative_logsumexp(tf.gather(all_risks, order))
    times = tf.gather(all_times, order)
    last = tf.searchsorted(-times, -patients["time"], side="right") - 1
    return (tf.gather(sums, last) - risk) * patients["death"]


def batch_weight(batch: Any) -> Any:
    return tf.reduce_sum(batch[1]["death"])


class Concordance(keras.metrics.Metric):
    """Counts pairs of patients in a batch, and those in which the first to die has more risk."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = self.add_weight(name="pairs", initializer="zeros")
        self.right = self.add_weight(name="right", initializer="zeros")

    def update_state(self, time: Any, death: Any, risk: Any) -> None:
        is_pair = tf.cast(time[:, None] < time, tf.float32) * death[:, None]
        self.pairs.assign_add(tf.reduce_sum(is_pair))
        self.right.assign_add(tf.reduce_sum(is_pair * tf.cast(risk[:, None] > risk, tf.float32)))

    def result(self) -> Any:
        return self.right / self.pairs


def metric_pre(output: Any, batch: Any) -> Any:
    """Returns all patients on the first replica, and none on the others."""
    _, patients = batch
    gathered = ctl_core.all_gather((patients["time"], patients["death"], output[:, 0]))
    rows = tf.where(ctl_core.replica_id() == 0, tf.shape(gathered[0])[0], 0)
    return tuple(values[:rows] for values in gathered)


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_eval_dataset,
    create_model=create_model,
    create_loss=lambda: partial_likelihood,
    create_metrics=lambda: {"concordance": Concordance()},
    loss_pre=loss_pre,
    batch_weight=batch_weight,
    metric_pre=metric_pre,
)


def add_up(risk: Any, time: Any, death: Any) -> Any:
    """Returns the sum of the losses of all patients who die, one after another."""
    total = 0.0 * tf.reduce_sum(risk)
    for index in np.flatnonzero(death):
        total += tf.reduce_logsumexp(risk[time >= time[index]]) - risk[index]
    return total


def train_plainly() -> Trained:
    model = create_model()
    for inputs, patients in whole_batches(create_dataset):
        time, death = patients["time"].numpy(), patients["death"].numpy()
        with tf.GradientTape() as tape:
            loss = add_up(model(inputs)[:, 0], time, death) / max(death.sum(), 1.0)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.weights))
        small.create_opt(RATE).apply(list(gradients), model.weights)
    total = pairs = right = 0.0
    for inputs, patients in create_eval_dataset(8):
        time, death = patients["time"].numpy(), patients["death"].numpy()
        risk = model(inputs)[:, 0].numpy()
        total += float(add_up(risk, time, death))
        for index in np.flatnonzero(death):
            longer = time > time[index]
            pairs += longer.sum()
            right += (risk[longer] < risk[index]).sum()
    deaths = DEATH[:EVALUATED].sum()
    return model.weights, {"loss": total / deaths, "concordance": right / pairs}


# A micro-batch has fewer patients to compare with than the batch.
PROGRAM = Program(hooks, train_plainly, accumulates=False)
