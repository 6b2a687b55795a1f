"""Programs, and the loop of one device that each is compared with.

Most programs are compared with what their hooks stand for: ``train_hooks`` calls them step by step
on whole batches. The others have a loop of their own, as people write it. All weights are compared;
plain SGD shows a wrong scale that an adaptive optimizer hides.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import compare, programs

STEPS, BATCH, RATE = 16, 8, 0.05
KILLED, LAST_SAVED = 11, 8
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
NAMES = [name for _, name, _ in pkgutil.iter_modules(programs.__path__)]
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


def load_program(name: str) -> Program:
    """Imports a program only when it is asked for: some start TensorFlow."""
    module = importlib.import_module(f"{programs.__name__}.{name}")
    return module.PROGRAM  # type: ignore[no-any-return]


def whole_batches(create_dataset: Callable[[int], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns the ``STEPS`` batches of passes of 40 to 47 examples; what is left over is out."""
    dataset = create_dataset(BATCH)
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.take(5).repeat()
    return dataset.take(STEPS)


DEFAULTS: dict[str, Callable[..., Any]] = {
    "input_pre": lambda batch: batch[0],
    "loss_pre": lambda output, batch: (output, batch[1]),
    "batch_weight": lambda batch: len(tf.nest.flatten(batch)[0]),
    "update_pre": lambda gradients: (gradients, gradients),
    "update_post": lambda: None,
    "create_metrics": lambda: {},
    "metric_pre": lambda: {},
}


def train_hooks(program: Program) -> Trained:
    """Trains and evaluates by a program's hooks; each gets what it names."""
    hooks = program.hooks()

    def ask(name: str, **given: Any) -> Any:
        hook, given = getattr(hooks, name, None) or DEFAULTS[name], {**vars(parts), **given}
        return hook(**{each: given[each] for each in inspect.signature(hook).parameters})

    def find_losses(batch: Any, training: bool) -> tuple[Any, Any]:
        """Returns the output, and a loss for each example."""
        inputs = ask("input_pre", batch=batch)
        output = parts.train_model(inputs, **{"training": True} if training and is_keras else {})
        return output, parts.train_loss(ask("loss_pre", output=output, batch=batch))

    keras.utils.set_random_seed(0)  # the setting's default, from which shuffles start
    batches = iter(whole_batches(hooks.create_dataset))
    parts = SimpleNamespace(train_model=hooks.create_model(), train_loss=hooks.create_loss())
    model, is_keras = parts.train_model, isinstance(parts.train_model, keras.Model)
    optimizer = hooks.create_opt(program.settings.get("learning_rate", RATE))
    for batch in batches:
        with tf.GradientTape() as tape:
            output, losses = find_losses(batch, training=True)
            extra, own = sum(getattr(model, "losses", ())), program.weights(parts)
            variables = [one for one in own if one.trainable]
            if hasattr(hooks, "grad_pre"):
                losses, extra, variables = ask("grad_pre", loss=losses, output=output, batch=batch)
            loss = tf.reduce_sum(losses) / ask("batch_weight", batch=batch) + extra
        found = zip(tape.gradient(loss, variables), variables, strict=True)
        used = [(gradient, variable) for gradient, variable in found if gradient is not None]
        gradients = [tf.convert_to_tensor(gradient) for gradient, _ in used]
        update = ask("update_pre", gradients=gradients, output=output)[0]
        optimizer.apply(update, [variable for _, variable in used])
        ask("update_post")
    metrics, total, weights = ask("create_metrics"), 0.0, 0.0
    if not hasattr(hooks, "create_eval_dataset"):
        return list(program.weights(parts)), {}
    for batch in hooks.create_eval_dataset(BATCH):
        output, losses = find_losses(batch, training=False)
        weight = float(ask("batch_weight", batch=batch))
        weights += weight
        total += float(tf.reduce_sum(losses)) + weight * float(sum(getattr(model, "losses", ())))
        given = ask("metric_pre", output=output, batch=batch)
        for name, metric in metrics.items():
            values = given[name] if isinstance(given, dict) else given
            metric.update_state(*(values if isinstance(values, tuple) else (values,)))
    values = {name: float(metric.result()) for name, metric in metrics.items()}
    return list(program.weights(parts)), {"loss": total / weights, **values}
