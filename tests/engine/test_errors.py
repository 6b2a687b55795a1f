"""What mistakes in hooks get: one line that says what, where and what to do.

Each case is what a user adds to callbacks.py of a project that trains, the line to be named marked
by ``# here``, and after the arrow words of the message. The real command line runs in this process;
the commonest mistakes are in tests/golden/test_mistakes.py.
"""

from __future__ import annotations

import pytest

import ctl_core
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.project import Cli, failed, line_of, mistakes, refused, source_of, where

HOOKS = mistakes(
    """
== a vector as extra_loss
def grad_pre(loss):  # here
    return loss, [1.0, 2.0], []
-> grad_pre | extra_loss, a number
== a gradient too few from update_pre
def update_pre(gradients):  # here
    return gradients[:1], gradients
-> update_pre | returned 1 update_gradients | for 2 gradients
== gradients of another shape from update_pre
def update_pre(gradients):  # here
    return [gradients[0][0]] * 2, gradients
-> update_pre | [1] | of its shape
== make_batches that ends
def make_batches(dataset):  # here
    return dataset.take(4)
-> make_batches | ends; repeat it
== a Keras loss as it is
def create_loss():  # here
    return keras.losses.MeanSquaredError(reduction="none")
-> create_loss | a MeanSquaredError | lambda pair: loss(pair[1], pair[0])
== a loss over two dimensions
def create_loss():  # here
    return lambda p: (p[0] - p[1]) ** 2
-> create_loss | float32[8, 1] | one per example (shape [8]) | sum (shape [])
== objectives of other names
def create_opt():  # here
    return {"a": keras.optimizers.SGD()}
-> create_opt | 'a' | grad_pre | the names must be the same
"""
)


@pytest.mark.parametrize("case", HOOKS)
def test_hooks(cli: Cli, case: str) -> None:
    code, words = HOOKS[case]
    source = source_of(own=code)
    outcome = cli(source)
    refused(outcome, where(source), *words)
    assert "\x1b" not in outcome.err


# ---- What fails while it runs ------------------------------------------------------------------


def test_a_failing_op_of_the_evaluation(cli: Cli) -> None:
    own = (
        "def check(a, b):\n"
        '    tf.debugging.assert_less(a, 0.5, message="too bright")\n'
        "    return a, b\n\n"
        "def create_eval_dataset():\n"
        "    return data.batch(8).map(check)\n"
    )
    source = source_of(own=own)
    where = f"create_eval_dataset (callbacks.py:{line_of(source, 'def create_eval_dataset')})"
    failed(cli(source), where, "too bright")


def test_from_python_the_same_errors_are_exceptions(train: Train) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"grad_pre \(test_errors.py:\d+\): returned a t"):
        train(make_hooks(grad_pre=lambda loss: (loss, 0.0)))

    def fail(step: int) -> None:
        raise LookupError(step)

    with pytest.raises(ctl_core.RunError, match=r"at_step\[2\] .*: LookupError: 2") as caught:
        train(make_hooks(at_step={2: fail}), run_name="other")
    assert isinstance(caught.value.__cause__, LookupError)
