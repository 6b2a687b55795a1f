"""The training loops that are compared. Each trains a workload until its ``Pace`` ends it.

Each loop is a function of the type ``Peer``. It creates the model, the data and the optimizer, and
then takes steps. It reads the loss on the host every ``every`` steps, and calls ``pace.stop`` after
each step that is due.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

import ctl_core
from benchmarks.pace import CHECKED, Over, Pace
from benchmarks.report import COMPILED, FIT, FLOOR, INPUT, MANY, TEXTBOOK, UNCOMPILED
from benchmarks.workloads import LEARNING_RATE, Workload, losses

EVALUATED = 300  # batches, about 10,000 examples

Peer = Callable[[Workload, tf.distribute.Strategy, int, Pace], None]


def callbacks(work: Workload, **hooks: Any) -> SimpleNamespace:
    """Returns the hooks that train a workload; ``hooks`` replaces or adds some."""

    base = {
        "create_dataset": lambda per_replica_batch_size: work.dataset(per_replica_batch_size),
        "create_model": work.create_model,
        "create_loss": lambda: lambda loss_input: losses(loss_input[1], loss_input[0]),
        "create_opt": lambda lr: work.create_opt(lr),
        "update_pre": lambda gradients: (clipped(work, gradients), gradients),
        "every_steps": {},
    }
    return SimpleNamespace(**{**base, **hooks})


def settings(work: Workload, folder: str, **others: Any) -> ctl_core.Config:
    """Returns the settings of a run without periodic checkpoints and evaluations."""
    base = {"batch_size": work.batch_size, "learning_rate": LEARNING_RATE, "runs_dir": folder}
    quiet = {"ckpt_every": 0, "eval_every": 0, "precision": work.policy.removeprefix("mixed_")}
    return ctl_core.Config(**{"steps": 2**40, **base, **quiet, **others})


def train_in_turns(hooks: SimpleNamespace, config: ctl_core.Config) -> None:
    """Trains as ``ctl_core.train`` does, which would refuse a second training beside this one."""
    # Imported here, because ``benchmarks.engines`` compares older engines, which lack these names.
    from ctl_core.commands.train import Start, train_in_turn

    train_in_turn(hooks, config, Start(time.monotonic()))


def engine(
    work: Workload,
    strategy: tf.distribute.Strategy,
    every: int,
    pace: Pace,
    train: Callable[[SimpleNamespace, ctl_core.Config], Any] = train_in_turns,
    **others: Any,
) -> None:
    """Trains with this engine; a host hook reads the loss."""

    def create_model() -> keras.Model:
        model = work.create_model()
        pace.weights = model.get_weights
        return model

    def read(loss: Any) -> None:
        float(loss)

    def stop() -> None:
        try:
            pace.stop()
        except Over:
            raise ctl_core.StopTraining from None

    # ``stop`` is called last, so that the time of reading the loss belongs to the segment.
    every_steps: dict[int, Any] = {every: [read]}
    every_steps.setdefault(pace.segment, []).append(stop)
    at_step = {CHECKED: stop} if pace.segment > CHECKED else {}
    hooks = callbacks(work, create_model=create_model, every_steps=every_steps, at_step=at_step)
    replicas = strategy.num_replicas_in_sync
    with tempfile.TemporaryDirectory() as folder:
        train(hooks, settings(work, folder, virtual_devices=replicas, **others))
    raise Over


def compiled(work: Workload, steps_per_call: int, **others: Any) -> keras.Model:
    """Returns a compiled Keras model, which scales the loss if its precision requires that."""
    keras.config.set_dtype_policy(work.policy)
    optimizer = work.create_opt(LEARNING_RATE)
    optimizer.global_clipnorm = work.clip
    model = work.create_model()
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps_per_call,
        **others,
    )
    return model


def evaluate(work: Workload, pace: Pace, **others: Any) -> None:
    """Evaluates with this engine, again and again; each evaluation is a segment."""
    hooks = callbacks(
        work,
        create_eval_dataset=lambda per_replica_batch_size: evaluated(work, per_replica_batch_size),
        create_metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )
    with tempfile.TemporaryDirectory() as folder:
        state = ctl_core.train(hooks, settings(work, folder, steps=0, **others))
    assert state.evaluation is not None
    while True:
        values = state.evaluation.evaluate() or {}
        pace.weights = lambda values=values: list(values.values())
        pace.stop()


def evaluated(work: Workload, batch_size: int) -> tf.data.Dataset:
    """Returns the data of an evaluation."""
    return work.dataset(batch_size).repeat().take(EVALUATED)


def fit(
    work: Workload, strategy: tf.distribute.Strategy, every: int, pace: Pace, per_call: int = 1
) -> None:
    """Trains with Keras ``fit``, without its progress bar. A callback reads the loss.

    Each epoch is a segment.
    """

    def read(batch: int, logs: Any) -> None:
        if (batch + 1) % every == 0:
            float(logs["loss"])

    def stop(_epoch: int, _logs: Any) -> None:
        pace.stop()

    with strategy.scope():
        model = compiled(work, per_call)
    pace.weights = model.get_weights
    calls = [keras.callbacks.LambdaCallback(on_train_batch_end=read, on_epoch_end=stop)]
    data = work.endless()
    quiet = {"callbacks": calls, "verbose": 0, "shuffle": False}  # the default warns
    model.fit(data, steps_per_epoch=CHECKED, **quiet)
    model.fit(data, steps_per_epoch=pace.segment, epochs=2**40, **quiet)


def fit_many(work: Workload, strategy: tf.distribute.Strategy, every: int, pace: Pace) -> None:
    """Trains with ``fit`` and 50 steps per call, or fewer if the loss is read more often."""
    fit(work, strategy, every, pace, math.gcd(every, CHECKED))


def clipped(work: Workload, gradients: Any) -> Any:
    """Returns the gradients, clipped as the workload requires."""
    return gradients if work.clip is None else tf.clip_by_global_norm(gradients, work.clip)[0]


def textbook(work: Workload, strategy: tf.distribute.Strategy, every: int, pace: Pace) -> None:
    """Trains with the loop of TensorFlow's guides, which calls a ``tf.function`` for each step."""
    with strategy.scope():
        model = work.create_model()
        optimizer = work.create_opt(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    pace.weights = model.get_weights
    data = work.endless()
    is_distributed = strategy.num_replicas_in_sync > 1
    if is_distributed:
        data = strategy.experimental_distribute_dataset(data)

    def on_replica(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(labels, model(inputs, training=True))) / work.batch_size
        gradients = clipped(work, tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(inputs: Any, labels: Any) -> Any:
        if not is_distributed:
            return on_replica(inputs, labels)
        loss = strategy.run(on_replica, (inputs, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)

    for step, (inputs, labels) in enumerate(data, start=1):
        loss = train_step(inputs, labels)
        if step % every == 0:
            float(loss)
        if pace.due(step):
            pace.stop()


def floor(work: Workload, _: tf.distribute.Strategy, _every: int, pace: Pace) -> None:
    """Trains with a bare loop in the graph, whose batches are already in memory."""
    model = work.create_model()
    optimizer = work.create_opt(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    pace.weights = model.get_weights
    batches = list(work.dataset(work.batch_size))
    all_inputs, all_labels = (tf.stack(tensors) for tensors in zip(*batches, strict=True))

    def take(step: Any) -> None:
        index = step % len(batches)
        with tf.GradientTape() as tape:
            logits = model(tf.gather(all_inputs, index), training=True)
            loss = tf.reduce_sum(losses(tf.gather(all_labels, index), logits)) / work.batch_size
        gradients = clipped(work, tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    _loop_in_graph(take, pace)


def drain(work: Workload, _: tf.distribute.Strategy, _every: int, pace: Pace) -> None:
    """Measures the input: reads batches in a loop in the graph, and trains nothing."""
    iterator = iter(work.endless())
    _loop_in_graph(lambda _: next(iterator), pace)


def _loop_in_graph(take: Callable[[Any], Any], pace: Pace) -> None:
    """Calls ``take`` for each step; a segment is one graph call."""

    def body(step: Any) -> Any:
        take(step)
        return (step + 1,)

    @tf.function(autograph=False)
    def run(first: Any, last: Any) -> None:
        tf.while_loop(lambda step: step < last, body, (first,))

    step = 0
    while True:
        last = CHECKED if step == 0 else step - step % pace.segment + pace.segment
        run(tf.constant(step), tf.constant(last))
        step = last
        pace.stop()


PEERS: dict[str, Peer] = {
    "engine": engine,
    COMPILED: functools.partial(engine, jit_compile=True),
    UNCOMPILED: functools.partial(engine, jit_compile=False),
    FIT: fit,
    MANY: fit_many,
    TEXTBOOK: textbook,
    FLOOR: floor,
    INPUT: drain,
}
