"""A plain training loop and an evaluation, which call hooks step by step on one device.

A hook receives the arguments that it names. The loop does not use the engine, and is not compiled.
"""

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

RATE = 0.05


def clip(gradients: Any) -> Any:
    """Replaces numbers that are not finite by zero, and clips the global norm to 10."""
    finite = [
        tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient))
        for gradient in gradients
    ]
    return tf.clip_by_global_norm(finite, 10.0)[0], gradients


DEFAULTS: dict[str, Callable[..., Any]] = {
    "input_pre": lambda batch: batch[0],
    "loss_pre": lambda output, batch: (output, batch[1]),
    "update_pre": clip,
    "update_post": lambda: None,
    "create_metrics": lambda: {},
    "metric_pre": lambda: {},
}


class Combined:
    """Variables that micro-batches write, each beginning with the values from before the step.

    Afterwards, a variable of floats has the mean of what they have written, weighted by their rows.
    Of all other variables, they have written the same value.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self._variables = list(variables)
        self._before = [variable.numpy() for variable in self._variables]
        self._rows: list[int] = []
        self._values: list[list[Any]] = []

    def begin(self) -> None:
        """Sets the variables for a micro-batch."""
        for variable, value in zip(self._variables, self._before, strict=True):
            variable.assign(value)

    def end(self, rows: int) -> None:
        """Notes what a micro-batch of a number of rows has written."""
        self._rows.append(rows)
        self._values.append([variable.numpy() for variable in self._variables])

    def combine(self) -> None:
        """Sets the variables to what all micro-batches together have written."""
        for variable, *values in zip(self._variables, *self._values, strict=True):
            value = values[0]
            if np.issubdtype(value.dtype, np.inexact):
                value = np.average(values, axis=0, weights=self._rows)
            variable.assign(value)


class Reference:
    """Trains and evaluates by calling hooks.

    Attributes:
        parts: a namespace of ``train_model``, ``train_loss`` and ``optimizer``
    """

    def __init__(self, hooks: Any, rate: float = RATE) -> None:
        self.hooks = hooks
        self.parts = SimpleNamespace(
            train_model=hooks.create_model(),
            train_loss=hooks.create_loss(),
            optimizer=hooks.create_opt(rate),
        )

    def ask(self, name: str, **arguments: Any) -> Any:
        """Calls a hook, or its default, with the arguments that it names."""
        hook = getattr(self.hooks, name, None) or DEFAULTS[name]
        arguments |= vars(self.parts)
        return hook(**{each: arguments[each] for each in inspect.signature(hook).parameters})

    def look(self, batch: Any, training: bool) -> tuple[Any, Any, Any, Any]:
        """Returns the output, the loss per example, the layers' losses and the batch's weight."""
        model = self.parts.train_model
        inputs = self.ask("input_pre", batch=batch)
        training_argument = {"training": training} if isinstance(model, keras.Model) else {}
        output = model(inputs, **training_argument)
        losses = self.parts.train_loss(self.ask("loss_pre", output=output, batch=batch))
        weight = len(losses)
        for name in ("batch_weight", "count_examples"):
            weight = self.ask(name, batch=batch) if hasattr(self.hooks, name) else weight
        extra = sum(getattr(model, "losses", ()))
        return output, losses, extra, tf.cast(weight, losses.dtype)

    def train(
        self,
        batches: Iterable[Any],
        find_variables: Callable[[Any], Iterable[Any]] = lambda trained: (
            trained.train_model.weights
        ),
        split: Callable[[Any], list[Any]] = lambda batch: [batch],
        find_written: Callable[[Any], Iterable[Any]] = lambda trained: (),
    ) -> Self:
        """Trains for one step on each batch.

        Args:
            batches: the global batches
            find_variables: returns variables of the parts, of which the trainable ones are trained
            split: splits a batch into micro-batches, for each of which the losses are computed
            find_written: returns the variables of the parts that a micro-batch writes. Each
                micro-batch begins with their values before the step, see ``Combined``
        """
        for batch in batches:
            written = Combined(find_written(self.parts))
            total = 0.0
            weights = 0.0
            outputs = list[Any]()
            with tf.GradientTape() as tape:
                for share in split(batch):
                    written.begin()
                    output, losses, extra, weight = self.look(share, training=True)
                    variables = [each for each in find_variables(self.parts) if each.trainable]
                    if hasattr(self.hooks, "grad_pre"):
                        arguments = {"loss": losses, "output": output, "batch": share}
                        losses, extra, variables = self.ask("grad_pre", **arguments)
                    total += tf.reduce_sum(losses) + weight * extra
                    weights += weight
                    outputs.append(output)
                    written.end(len(output))
                loss = total / weights
            computed = zip(tape.gradient(loss, variables), variables, strict=True)
            used = [(gradient, variable) for gradient, variable in computed if gradient is not None]
            written.combine()
            gradients = [tf.convert_to_tensor(gradient) for gradient, _ in used]
            output = outputs[0] if len(outputs) == 1 else tf.concat(outputs, 0)
            update, _ = self.ask("update_pre", gradients=gradients, output=output)
            self.parts.optimizer.apply(update, [variable for _, variable in used])
            self.ask("update_post")
        return self

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Returns the loss and the metrics over batches."""
        metrics = self.ask("create_metrics")
        total = 0.0
        weights = 0.0
        for batch in batches:
            output, losses, extra, weight = self.look(batch, training=False)
            total += float(tf.reduce_sum(losses) + weight * extra)
            weights += float(weight)
            arguments = self.ask("metric_pre", output=output, batch=batch)
            for name, metric in metrics.items():
                values = arguments[name] if isinstance(arguments, dict) else arguments
                metric.update_state(*(values if isinstance(values, tuple) else (values,)))
        values = {name: float(metric.result()) for name, metric in metrics.items()}
        return {"loss": total / weights, **values}
