"""What mistakes in hooks get: one line that says what, where and what to do, before training.

Each case is what a user adds to callbacks.py of a project that trains, the line to be named marked
by ``# here``, and after the arrow words of the message. The real command line runs in this process.
"""

from __future__ import annotations

import pytest

from tests.helpers.project import (
    PIECES,
    Cli,
    mistakes,
    refused,
    source_of,
    where,
)


def test_the_project_trains(cli: Cli) -> None:
    """Otherwise the tests below would test nothing."""
    outcome = cli(source_of())
    assert (outcome.code, outcome.err) == (0, "")
    assert "runs/a/ckpt/ckpt-10.index" in outcome.written


HOOKS = mistakes(
    """
== no list of variables from grad_pre
def grad_pre(loss):  # here
    return loss, 0.0, None
-> grad_pre | trainable_vars
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
== integer gradients from update_pre
def update_pre(gradients):  # here
    return [tf.cast(one, tf.int32) for one in gradients], gradients
-> update_pre | the gradient of | dense/kernel has type int32, expected
== an integer loss
def create_loss():  # here
    return lambda pair: tf.cast(pair[0][:, 0], tf.int64)
-> create_loss | type int64 | expected floating-point numbers
== ckpt and manager swapped
def create_ckpt(step, ckpt_path):  # here
    ckpt = tf.train.Checkpoint(step=step)
    return tf.train.CheckpointManager(ckpt, ckpt_path, 3), ckpt
-> create_ckpt | returned a CheckpointManager and a Checkpoint, expected
== batches of another fixed size
def create_dataset():  # here
    return data.batch(4, True)
-> create_dataset | batches of 4 | expected batches of 8
== a batch of all there is, which is too little
def create_dataset():  # here
    return data.take(7).batch(8)
-> create_dataset | the dataset has 7 examples, fewer than the 8 of a global batch; take a smaller
-> --batch-size, keep them with --last-batch keep, add data, or call repeat() before batch()
== make_batches with another size
def make_batches(dataset):  # here
    return dataset.unbatch().batch(3)
-> make_batches | batches of 3 | expected batches of 8
== make_batches that ends
def make_batches(dataset):  # here
    return dataset.take(4)
-> make_batches | ends after 4 elements
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
== a loss of another length
def create_loss():  # here
    return lambda p: p[0][:5, 0]
-> create_loss | shape (5,) | one per example (shape [8])
== a loss of whole numbers
def create_loss():  # here
    return lambda p: 3
-> create_loss | type int32 | floating-point
== objectives of other names
def create_opt():
    return {"a": keras.optimizers.SGD()}
-> grad_pre | create_opt | 'a' | the names must be the same
== every_steps with True as key
every_steps = {True: lambda: None}
-> every_steps has the key True | whole number from 1 up
== a deferred function that needs a value
@ctl_core.deferred  # here
def show(loss):
    pass
every_steps = {7: show}
-> every_steps[7] | @deferred and asks for 'loss'
== a loss of two arguments that is an object
class Loss:
    def __call__(self, y_true, y_pred):
        return tf.reduce_sum((y_true - y_pred) ** 2)
def create_loss():  # here
    return Loss()
-> create_loss | a function of y_true and y_pred, but train_loss is called with one argument
== Python's if in a loss
def create_loss():
    return lambda pair: sum(pair[0]) if tf.reduce_sum(pair[0]) > 0 else sum(pair[1])  # here
-> create_loss | OperatorNotAllowedInGraphError: Using a symbolic | Python `bool` | not allowed
"""
)


@pytest.mark.parametrize("case", HOOKS)
def test_hooks(cli: Cli, case: str) -> None:
    code, words = HOOKS[case]
    source = source_of(own=code)
    outcome = cli(source)
    refused(outcome, where(source), *words)
    assert "\x1b" not in outcome.err


def test_too_few_examples_for_the_replicas(cli: Cli) -> None:
    pieces = {"create_dataset": PIECES["create_dataset"].replace("data.", "data.take(6).")}
    outcome = cli(source_of(**pieces), "--batch-size", "16", "--virtual-devices", "4")
    refused(outcome, "create_dataset", "fewer than one global batch of 16", "batch_size")


@pytest.mark.parametrize("by", ["global", "per_replica"])
@pytest.mark.parametrize("length", ["--steps=1", "--epochs=1"])
@pytest.mark.parametrize("examples", [40, 10, 32])
def test_too_few_examples_in_batches_that_may_be_smaller(
    cli: Cli, by: str, length: str, examples: int
) -> None:
    """On two replicas; the 32 fill the batch of one of them."""
    hook = f"def create_dataset({by}_batch_size):  # here\n"
    hook += f"    return data.take({examples}).batch({by}_batch_size)\n"
    source = source_of(create_dataset=hook)
    flags = ("--run-name=a", "--batch-size=64", "--virtual-devices=2", length)
    outcome = cli(source, command=("train", *flags))
    there = f"the dataset has {examples} examples, fewer than the 64 of a global batch; take"
    refused(outcome, "create_dataset", where(source), there, "--batch-size")
