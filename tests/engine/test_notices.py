"""What would go wrong without a word is said before training."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.helpers.cases import make_hooks, squared_error
from tests.helpers.fixtures import Train

Output = pytest.CaptureFixture[str]


def warnings(capsys: Output) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rate_that_reaches_nobody(train: Train, capsys: Output, replicas: int) -> None:
    hooks = make_hooks(create_opt=lambda: keras.optimizers.SGD(0.1))
    train(hooks, steps=1, virtual_devices=replicas)
    (warning,) = warnings(capsys)
    assert "create_opt (test_notices.py" in warning and "makes no use of lr" in warning
    within = make_hooks(
        create_opt=lambda lr: keras.optimizers.SGD(0.1),
        update_pre=lambda gradients, lr: ([g * lr for g in gradients], gradients),
    )
    train(within, steps=1, run_name="within", virtual_devices=replicas)
    assert not warnings(capsys)


class WeightedLoss:
    """Learns the weight of a task."""

    def __init__(self) -> None:
        self.log_variance = keras.Variable(0.1, name="log_variance")

    def __call__(self, loss_input: Any) -> Any:
        return squared_error(loss_input) * tf.exp(-self.log_variance) + self.log_variance


def test_variables_that_nobody_trains(train: Train, capsys: Output) -> None:
    train(make_hooks(create_loss=WeightedLoss), steps=1, virtual_devices=2)
    (warning,) = warnings(capsys)
    assert "train_loss/log_variance, trainable but trained by no objective" in warning


def test_a_weight_of_the_loss_is_trained_if_grad_pre_names_it(train: Train, capsys: Output) -> None:
    hooks = make_hooks(
        create_loss=WeightedLoss,
        grad_pre=lambda loss, train_model, train_loss: (
            loss,
            0.0,
            [*train_model.trainable_variables, train_loss.log_variance],
        ),
    )
    state = train(hooks, steps=5)
    assert float(state.train_loss.log_variance) != pytest.approx(0.1)
    assert not warnings(capsys)


def test_hooks_may_be_in_a_dict(train: Train) -> None:
    class Addict(dict):  # type: ignore[type-arg]
        """Has every attribute, as addict's Dict."""

        def __getattr__(self, name: str) -> Any:
            return self.setdefault(name, Addict())

    for callbacks in (vars(make_hooks()), Addict(vars(make_hooks()))):
        assert train(callbacks, steps=1, run_name=type(callbacks).__name__).step == 1
