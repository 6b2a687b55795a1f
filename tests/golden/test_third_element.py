"""The third element of a batch is a sample weight, unless the hooks use it as something else."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.reference import Reference

LINE = "the third element of each batch multiplies the losses"


def data() -> tuple[np.ndarray, ...]:
    return *small.data(96), np.random.default_rng(3).uniform(0.5, 2.0, 96).astype("float32")


def with_three(**replaced: Any) -> SimpleNamespace:
    """Returns hooks whose batches have a third element, which ``loss_pre`` passes to the loss."""
    base = {
        "create_dataset": small.slices(data()),
        "input_pre": lambda batch: batch[0],
        "loss_pre": lambda output, batch: (output, batch[1], batch[2]),
    }
    return small.hooks(**base | replaced)


def loss_with(change: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Returns a ``create_loss`` that changes the errors, given them and the third element."""

    def create_loss() -> Any:
        return lambda three: change(small.squared_error(three[:2]), three[2])

    return create_loss


@tf.function
def multiply_in_a_branch(errors: Any, third: Any) -> Any:
    if tf.reduce_sum(errors) > 0.0:
        errors = errors * third
    return errors


def multiply_in_a_loop(errors: Any, third: Any) -> Any:
    factor = tf.ones_like(errors)
    for _ in tf.range(2):
        errors = errors * factor
        factor = third
    return errors


@tf.custom_gradient
def multiply_with_a_gradient(errors: Any, third: Any) -> Any:
    return errors * third, lambda upstream: (upstream * third, tf.zeros_like(third))


def select(errors: Any, third: Any) -> Any:
    return tf.where(third > 1.0, errors, 0.0)


def add_to_output(output: Any, batch: Any) -> Any:
    return output + batch[2][:, None], batch[1], batch[2]


ONLY_ERRORS = loss_with(lambda errors, _: errors)
USES = {
    "in the loss": with_three(create_loss=loss_with(lambda errors, third: errors * third)),
    "in a branch": with_three(create_loss=loss_with(multiply_in_a_branch)),
    "in a loop": with_three(create_loss=loss_with(multiply_in_a_loop)),
    "with a gradient": with_three(create_loss=loss_with(multiply_with_a_gradient)),
    "in a comparison": with_three(create_loss=loss_with(select)),
    "in loss_pre": with_three(create_loss=ONLY_ERRORS, loss_pre=add_to_output),
    "in input_pre": with_three(
        create_loss=ONLY_ERRORS, input_pre=lambda batch: batch[0] * batch[2][:, None]
    ),
}


def copied(loss: Any, batch: Any, train_model: Any) -> Any:
    """Returns the results of the default, as they are written out in callbacks.py."""
    extra_loss = ctl_core.regularization(train_model)
    return ctl_core.weighted(loss, batch), extra_loss, ctl_core.trainable_variables(train_model)


def refactored(batch: Any, loss: Any, train_model: Any) -> Any:
    weighed = ctl_core.weighted(loss, batch)
    return weighed, 0.0, train_model.trainable_variables


def assert_refused(train: engine.Train, hooks: Any, *words: str) -> None:
    with pytest.raises(ctl_core.SetupError) as error:
        train(hooks)
    message = str(error.value)
    assert "\n" not in message
    for word in ("test_third_element.py:", "third element", "in a dict", "loss * batch[2]", *words):
        assert word in message


@pytest.mark.parametrize("name", USES)
def test_a_loss_that_contains_the_third_element_is_refused(
    train_small: engine.Train, name: str
) -> None:
    hook = name.removeprefix("in ") if "_pre" in name else "create_loss"
    assert_refused(train_small, USES[name], f"{hook} (", "write grad_pre")


@pytest.mark.parametrize("grad_pre", [copied, refactored])
def test_a_copy_of_the_default_is_refused(train_small: engine.Train, grad_pre: Any) -> None:
    hooks = SimpleNamespace(**vars(USES["in the loss"]), grad_pre=grad_pre)
    assert_refused(train_small, hooks, "create_loss (", "write grad_pre")


def test_the_check_refuses_it_too(runs: Path) -> None:
    config = ctl_core.Config(**small.settings(2), run_name="run", runs_dir=str(runs))
    with pytest.raises(ctl_core.SetupError, match="third element"):
        ctl_core.check(USES["in the loss"], config)


def grad_pre_twice(loss: Any, batch: Any, train_model: Any) -> Any:
    return loss * batch[2], 0.0, train_model.trainable_variables


@pytest.mark.parametrize("devices", [1, 3])
def test_an_explicit_product_multiplies(
    train_small: engine.Train, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = SimpleNamespace(**vars(USES["in the loss"]), grad_pre=grad_pre_twice)
    state = train_small(hooks, virtual_devices=devices)
    plain = Reference(hooks).train(hooks.create_dataset(small.BATCH).take(6))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)
    assert LINE not in capsys.readouterr().out


def test_a_default_evaluation_of_such_a_loss_is_refused(train_small: engine.Train) -> None:
    hooks = SimpleNamespace(
        **vars(USES["in the loss"]),
        grad_pre=grad_pre_twice,
        create_eval_dataset=small.slices(data()),
        metric_pre=lambda output, batch: (batch[1], output),
    )
    assert_refused(train_small, hooks, "create_loss (", "write eval_pre")
    hooks.eval_pre = lambda loss: (loss, 0.0)
    state = train_small(hooks)
    evaluated = Reference(hooks)
    evaluated.parts.train_model.set_weights(state.train_model.get_weights())
    expected = evaluated.evaluate(hooks.create_eval_dataset(small.BATCH))
    assert state.metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@tf.function
def ignore(errors: Any, third: Any) -> Any:
    """Returns the errors; a branch and a loop carry the third element along."""
    for _ in tf.range(2):
        third = third + 1.0
        if tf.reduce_sum(errors) < 0.0:
            third = 2.0 * third
            errors = -errors
    return errors


@tf.custom_gradient
def ignore_with_a_gradient(errors: Any, third: Any) -> Any:
    return tf.identity(errors), lambda upstream: (upstream, tf.zeros_like(third))


def use_the_shape(errors: Any, third: Any) -> Any:
    tf.debugging.assert_non_negative(third)
    rows = tf.cast(tf.shape(third)[0], tf.float32)
    errors = ignore_with_a_gradient(ignore(errors, third), third)
    return errors * rows / tf.cast(tf.size(errors), tf.float32) + tf.zeros_like(third)


def test_a_loss_that_uses_only_the_shape_is_multiplied_by_sample_weights(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = with_three(
        create_loss=loss_with(use_the_shape), create_eval_dataset=small.slices(data())
    )
    state = train_small(hooks, virtual_devices=3)
    plain = with_three(create_loss=ONLY_ERRORS, grad_pre=grad_pre_twice)
    expected = Reference(plain).train(hooks.create_dataset(small.BATCH).take(6))
    compare.assert_close(state.train_model.weights, expected.parts.train_model.weights)
    printed = capsys.readouterr().out
    assert f"{LINE} of its examples, as sample weights, in training and evaluations." in printed
