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


def test_the_project_trains(cli: Cli) -> None:
    """Otherwise the tests below would test nothing."""
    outcome = cli(source_of())
    assert (outcome.code, outcome.err) == (0, "")
    assert "runs/a/ckpt/ckpt-10.index" in outcome.written


HOOKS = mistakes(
    """
== a vector as extra_loss
def grad_pre(loss):  # here
    return loss, [1.0, 2.0], []
-> grad_pre | extra_loss must be a scalar
== a loss for each example from add_loss
class Sparse(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.abs(x))
        return x
def create_model():  # here
    inner = keras.Sequential([Sparse(name='sparse'), keras.layers.Dense(1)])
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), inner])
-> create_model | the layer | sparse adds a loss of shape (8, 1) by add_loss; expected one number
-> such as the mean over its batch: self.add_loss(tf.reduce_mean(loss)).
== a gradient too few from update_pre
def update_pre(gradients):  # here
    return gradients[:1], gradients
-> update_pre | returned 1 update_gradients for 2 gradients
== gradients of another shape from update_pre
def update_pre(gradients):  # here
    return [gradients[0][0]] * 2, gradients
-> update_pre | dense/kernel | (2, 1)
== an integer in trainable_vars
count = tf.Variable(0, name='count')
def grad_pre(loss, train_model):  # here
    return loss, 0.0, [*train_model.trainable_variables, count]
-> grad_pre | trainable_vars has count of type int32 | leave it out
== an integer loss
def create_loss():  # here
    return lambda pair: tf.cast(pair[0][:, 0], tf.int64)
-> create_loss | type int64 | expected floating-point numbers
== make_batches that ends
def make_batches(dataset):  # here
    return dataset.take(4)
-> make_batches | ends; repeat it
== a filter that leaves nothing
def create_dataset():  # here
    nothing = data.filter(lambda a, b: tf.reduce_sum(a) < 0)
    return nothing.batch(8, drop_remainder=True)
-> create_dataset | empty dataset
== a Keras loss as it is
def create_loss():  # here
    return keras.losses.MeanSquaredError(reduction="none")
-> create_loss | MeanSquaredError | y_true | return lambda pair: loss(pair[1], pair[0])
== a loss over two dimensions
def create_loss():  # here
    return lambda p: (p[0] - p[1]) ** 2
-> create_loss | shape (8, 1) | one per example (shape [8]) | sum (shape [])
== objectives of other names
def create_opt():
    return {"a": keras.optimizers.SGD()}
-> grad_pre | create_opt | 'a' | the names must be the same
== a deferred function that needs a value
@ctl_core.deferred  # here
def show(loss):
    pass
every_steps = {7: show}
-> every_steps[7] | @deferred and asks for 'loss'
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


def test_a_metric_that_is_no_number(cli: Cli) -> None:
    own = (
        "create_eval_dataset = create_dataset\n"
        "def create_metrics():\n    return {'f1': keras.metrics.F1Score()}\n\n"
        "def metric_pre(batch):\n    return tf.one_hot([0, 1], 3), tf.one_hot([0, 1], 3)\n"
    )
    failed(cli(source_of(own=own)), "create_metrics", "'f1'", "shape [3]")


def test_from_python_the_same_errors_are_exceptions(train: Train) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"grad_pre \(test_errors.py:\d+\): returned 2"):
        train(make_hooks(grad_pre=lambda loss: (loss, 0.0)))

    def fail(step: int) -> None:
        raise LookupError(step)

    with pytest.raises(ctl_core.RunError, match=r"at_step\[2\] .*: LookupError: 2") as caught:
        train(make_hooks(at_step={2: fail}), run_name="other")
    assert isinstance(caught.value.__cause__, LookupError)
