"""What mistakes in hooks get: one line that says what, where and what to do.

Each case is what a user adds to callbacks.py of a project that trains, the line to be named marked
by ``# here``, and after the arrow words of the message. The real command line runs in this process;
the commonest mistakes are in tests/golden/test_mistakes.py.
"""

from __future__ import annotations

import pytest

import ctl_core
from tests.golden.engine import locate, read_table
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.project import Cli, read_hooks_source, refused

HOOKS = read_table(
    """
== a vector as extra_loss -> grad_pre | extra_loss, a number
def grad_pre(loss):  # here
    return loss, [1.0, 2.0], []
== a gradient too few from update_pre -> update_pre | returned 1 update_gradients | for 2 gradients
def update_pre(gradients):  # here
    return gradients[:1], gradients
== gradients of another shape from update_pre -> update_pre | [1] | of its shape
def update_pre(gradients):  # here
    return [gradients[0][0]] * 2, gradients
== make_batches that ends -> make_batches | ends; repeat it
def make_batches(dataset):  # here
    return dataset.take(4)
== a Keras loss as it is -> create_loss | a MeanSquaredError | lambda pair: loss(pair[1], pair[0])
def create_loss():  # here
    return keras.losses.MeanSquaredError(reduction="none")
== a loss over two dimensions -> create_loss | float32[8, 1] | one per example (shape [8])
def create_loss():  # here
    return lambda p: (p[0] - p[1]) ** 2
== objectives of other names -> create_opt | 'a' | grad_pre | the names must be the same
def create_opt():  # here
    return {"a": keras.optimizers.SGD()}
== a variable in no group -> create_opt | dense/bias is in no group, expected one
def create_opt(lr, train_model):  # here
    return [(keras.optimizers.SGD(lr), train_model.trainable_variables[:1])]
== a variable in two groups -> create_opt | dense/bias is in 2 groups, expected one
def create_opt(lr, train_model):  # here
    variables = train_model.trainable_variables
    return [(keras.optimizers.SGD(lr), group) for group in (variables, variables[1:])]
== a single checkpoint, which a kill at the next would cost -> create_ckpt | keeps 2 or more
def create_ckpt(ckpt_path, train_model):  # here
    ckpt = tf.train.Checkpoint(train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=1)
== a manager of another folder -> create_ckpt | a manager that does not use
def create_ckpt(train_model):  # here
    ckpt = tf.train.Checkpoint(train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, "elsewhere", max_to_keep=3)
"""
)


@pytest.mark.parametrize("case", HOOKS)
def test_hooks(cli: Cli, case: str) -> None:
    code, words = HOOKS[case]
    source = read_hooks_source(own=code)
    outcome = cli(source)
    refused(outcome, *locate(source), *words)
    assert "\x1b" not in outcome.err


def test_from_python_the_same_errors_are_exceptions(train: Train) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"grad_pre \(test_errors.py:\d+\): returned a t"):
        train(make_hooks(grad_pre=lambda loss: (loss, 0.0)))

    def fail(step: int) -> None:
        raise LookupError(step)

    with pytest.raises(ctl_core.RunError, match=r"at_step\[2\] .*: LookupError: 2") as caught:
        train(make_hooks(at_step={2: fail}), run_name="other")
    assert isinstance(caught.value.__cause__, LookupError)
