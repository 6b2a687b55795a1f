"""Hooks and settings that act after an update and after an evaluation, all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

import ctl_core
from tests.helpers.cases import eval_hooks, make_hooks, small_model

STEERED: dict[str, Any] = {
    "steps": 40,
    "eval_every": 5,
    "log_every": 4,
    "ckpt_every": 0,
    "learning_rate": 0.1,
    "lr_schedule": "cosine",
    "warmup": 6,
    "ema": 0.9,
    "keep_best": "a/loss:max",
    "limit_eval": 2,
}


class Followed(keras.Model):
    """A network with a copy that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = small_model(), small_model()
        self.target.trainable = False

    def call(self, inputs: Any) -> Any:
        return self.online(inputs) + 0.1 * tf.stop_gradient(self.target(inputs))


def steered_hooks(ends: Callable[[int], bool]) -> SimpleNamespace:
    """Uses all that acts after an update or an evaluation; ends training when it is told to."""

    def create_eval_model(train_model: Any) -> Any:
        copy = Followed()
        copy.set_weights(train_model.get_weights())
        return copy

    def update_post(train_model: Any, eval_model: Any, step: Any) -> None:
        decay = tf.where(step % 5 == 0, 0.0, 0.9)
        pairs = zip(train_model.target.variables, train_model.online.variables, strict=True)
        for target, online in pairs:
            target.assign(decay * target + (1 - decay) * online)
        for average, weight in zip(eval_model.variables, train_model.variables, strict=True):
            average.assign(0.8 * average + 0.2 * weight)

    def create_eval_dataset(per_replica_batch_size: int) -> Any:
        sizes = {"a": 50, "b": 7}  # of the first, limit_eval takes two batches
        hooks = {name: eval_hooks(size) for name, size in sizes.items()}
        return {
            name: one.create_eval_dataset(per_replica_batch_size) for name, one in hooks.items()
        }

    def after_eval(metrics: Any, step: int, manager: Any, state: dict[str, Any]) -> None:
        state.setdefault("losses", []).extend(
            round(metrics[name], 4) for name in ("a/loss", "b/loss")
        )
        if step == 10:
            manager.save()
        if ends(step):
            raise ctl_core.StopTraining

    return make_hooks(
        create_model=Followed,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        update_post=update_post,
        after_eval=after_eval,
        create_train_metrics=lambda: {"mean": keras.metrics.Mean()},
        train_metric_pre=lambda loss: loss,
        create_eval_model=create_eval_model,
        create_eval_dataset=create_eval_dataset,
    )
