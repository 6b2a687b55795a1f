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
== no function
create_opt = 3
-> create_opt must be a function, got 3
== None
input_pre = None
-> input_pre must be a function, got None
== unknown argument
def input_pre(bacth):  # here
    return bacth[0]
-> input_pre asks for 'bacth'; did you mean 'batch'? | batch, lr, step, training, objective, turn
== an argument of another hook
def input_pre(*, optimizer):  # here
    pass
-> input_pre asks for 'optimizer'; it may name batch, lr, step, training, objective, turn
== two of three from grad_pre
def grad_pre(loss):  # here
    return loss, 0.0
-> grad_pre | returned 2 values, expected 3: loss_per_batch, extra_loss, trainable_vars
== nothing from grad_pre
def grad_pre(loss):  # here
    pass
-> grad_pre | expected 3
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
== one value from update_pre
def update_pre(gradients):  # here
    return (gradients,)
-> update_pre | returned 1 values, expected 2: update_gradients, display_gradients
== the bare gradients from update_pre
def update_pre(gradients):  # here
    return gradients
-> update_pre | update_gradients
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
== one value from eval_pre
create_eval_dataset = create_dataset
def eval_pre(loss):  # here
    return loss
-> eval_pre | expected 2: loss_per_batch, extra_loss
== eval_pre raises
create_eval_dataset = create_dataset
def eval_pre(loss):
    return loss.nothing  # here
-> eval_pre | AttributeError | 'nothing'
== too little for a metric
create_eval_dataset = create_dataset
def create_metrics():
    return {"mse": keras.metrics.MeanSquaredError()}
def metric_pre(batch):  # here
    return batch[0]
-> metric_pre | 'mse' | y_pred
== metrics that are no dict
create_eval_dataset = create_dataset
def create_metrics():  # here
    return ["accuracy"]
-> create_metrics | returned a list | dict
== metrics by another name than a text
create_eval_dataset = create_dataset
def create_metrics():  # here
    return {1: keras.metrics.Mean()}
-> create_metrics | 1 is an int
== an endless evaluation
def create_eval_dataset():  # here
    return data.batch(8).repeat()
-> create_eval_dataset | endless | repeat()
== no pair from create_ckpt
def create_ckpt(step):  # here
    return tf.train.Checkpoint(step=step)
-> create_ckpt | expected 2: ckpt, manager
== ckpt and manager swapped
def create_ckpt(step, ckpt_path):  # here
    ckpt = tf.train.Checkpoint(step=step)
    return tf.train.CheckpointManager(ckpt, ckpt_path, 3), ckpt
-> create_ckpt | returned a CheckpointManager and a Checkpoint, expected
== no dataset
def create_dataset():  # here
    return x
-> create_dataset | returned a ndarray, expected a tf.data.Dataset
== a list of batches
def create_dataset():  # here
    return [(x, y)]
-> create_dataset | returned a list, expected a tf.data.Dataset | return iter(batches)
== nothing from create_dataset
def create_dataset():  # here
    pass
-> create_dataset | returned nothing, expected a tf.data.Dataset
== batches of another size
def create_dataset():  # here
    return data.batch(5)
-> create_dataset | batches of 5 | expected batches of 8
== batches of another fixed size
def create_dataset():  # here
    return data.batch(4, True)
-> create_dataset | batches of 4 | expected batches of 8
== a batch of all there is, which is too little
def create_dataset():  # here
    return data.take(7).batch(8)
-> create_dataset | the dataset has 7 examples, fewer than the 8 of a global batch; take a smaller
-> --batch-size, keep them with --last-batch keep, add data, or call repeat() before batch()
== an evaluation of full batches only, of which there is none
def create_eval_dataset():  # here
    return data.take(7).batch(8, True)
-> create_eval_dataset | empty dataset; if there are examples, batch them without drop_remainder
== single examples
def create_dataset():  # here
    return tf.data.Dataset.range(99)
-> create_dataset | single examples | dataset.batch(per_replica_batch_size)
== make_batches with another size
def make_batches(dataset):  # here
    return dataset.unbatch().batch(3)
-> make_batches | batches of 3 | expected batches of 8
== make_batches that ends
def make_batches(dataset):  # here
    return dataset.take(4)
-> make_batches | ends after 4 elements
== an empty dataset
def create_dataset():  # here
    return data.take(0).batch(8)
-> create_dataset | empty dataset
== fewer examples than a batch
def create_dataset():  # here
    return data.take(7).batch(8, True)
-> create_dataset | fewer examples than one global batch
== a filter that leaves nothing
def create_dataset():  # here
    nothing = data.filter(lambda a, b: tf.reduce_sum(a) < 0)
    return nothing.batch(8, drop_remainder=True)
-> create_dataset | empty dataset
== an error in Dataset.map
def wrong(a, b):
    return a.nothing, b  # here
def create_dataset():
    return data.map(wrong).batch(8)
-> create_dataset | AttributeError | 'nothing'
== a Keras loss that averages
def create_loss():  # here
    return keras.losses.MeanSquaredError()
-> create_loss | MeanSquaredError | reduction="sum" or reduction="none"
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
== a loss that is nothing
def create_loss():  # here
    return lambda p: None
-> create_loss | the loss is nothing
== a loss that is a dict
def create_loss():  # here
    return lambda p: {"a": p[0]}
-> create_loss | the loss is a dict
== the class of a loss
def create_loss():  # here
    return keras.losses.MeanSquaredError
-> create_loss | returned the class MeanSquaredError
== the name of a loss
def create_loss():  # here
    return "mse"
-> create_loss | returned a str, expected train_loss, a callable
== no model
def create_model():  # here
    keras.Sequential()
-> create_model | returned nothing, expected train_model, a callable
== a model of other data
def create_model():  # here
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
-> train_model | create_model | expected axis -1 of input shape to have value 3
== the name of an optimizer
def create_opt():  # here
    return "adam"
-> create_opt | returned a str, expected an optimizer
== the class of an optimizer
def create_opt():  # here
    return keras.optimizers.Adam
-> create_opt | returned the class Adam | expected an optimizer
== an optimizer that refuses its arguments
def create_opt(lr):
    return keras.optimizers.SGD(lr, momentum=3)  # here
-> create_opt | ValueError | momentum
== objectives of other names
def create_opt():
    return {"a": keras.optimizers.SGD()}
-> grad_pre | create_opt | 'a' | the names must be the same
== every_steps with the key 0
every_steps = {0: lambda: None}
-> every_steps has the key 0 | whole number from 1 up
== every_steps with a negative key
every_steps = {-5: lambda: None}
-> every_steps has the key -5 | whole number from 1 up
== every_steps with a text as key
every_steps = {"10": lambda: None}
-> every_steps has the key '10' | whole number from 1 up
== every_steps with True as key
every_steps = {True: lambda: None}
-> every_steps has the key True | whole number from 1 up
== at_step with a fraction as key
at_step = {1.5: lambda: None}
-> at_step has the key 1.5 | whole number from 1 up
== every_steps that is no dict
every_steps = [print]
-> every_steps must be a dict {N: function}, got [<built-in function print>]
== a call in place of a function
every_steps = {7: ctl_core.nan_to_zero(1.0)}
-> every_steps[7] must be a function, got
== an unknown argument in every_steps
def show(los):  # here
    pass
every_steps = {7: [show]}
-> every_steps[7] asks for 'los'; did you mean 'loss'?
== a deferred function that needs a value
@ctl_core.deferred  # here
def show(loss):
    pass
every_steps = {7: show}
-> every_steps[7] | @deferred and asks for 'loss'
== *args
def input_pre(*args):  # here
    return args[0]
-> input_pre takes *args | by name | batch, lr
== **kwargs
def input_pre(**kwargs):  # here
    return kwargs
-> input_pre takes **kwargs | by name | batch, lr
== positional only
def input_pre(batch, /):  # here
    return batch[0]
-> input_pre takes batch by position | by name
== a builtin
every_steps = {7: print}
-> callbacks.py: every_steps[7] takes *args | by name
== a builtin without a signature
every_steps = {7: max}
-> callbacks.py: every_steps[7] has no signature | wrap it in a function
== a loss of two arguments
def create_loss():  # here
    return lambda y_true, y_pred, training=False: tf.reduce_sum((y_true - y_pred) ** 2)
-> create_loss | a function of y_true and y_pred, but train_loss is called with one argument, what
-> loss_pre returns, by default the pair (output, target): let it take one
== a loss of two arguments that is an object
class Loss:
    def __call__(self, y_true, y_pred):
        return tf.reduce_sum((y_true - y_pred) ** 2)
def create_loss():  # here
    return Loss()
-> create_loss | a function of y_true and y_pred, but train_loss is called with one argument
== a loss of two arguments that is a tf.function
def create_loss():  # here
    return tf.function(lambda y_true, y_pred: tf.reduce_sum((y_true - y_pred) ** 2))
-> create_loss | a function of y_true and y_pred, but train_loss is called with one argument
== TensorFlow in a functional model
def create_model():
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Dense(1)(tf.sqrt(inputs)))  # here
-> create_model | ValueError: A KerasTensor cannot be used as input to a TensorFlow function
== numpy() in the graph
def input_pre(batch):
    print(batch[0].numpy())  # here
    return batch[0]
-> input_pre | AttributeError: 'SymbolicTensor' object has no attribute 'numpy'
== NumPy in the graph
def update_pre(gradients):
    norm = np.mean(gradients[0])  # here
    return gradients, gradients
-> update_pre | NotImplementedError: Cannot convert a symbolic tf.Tensor | to a numpy array
== NumPy in Dataset.map
def scaled(a, b):
    return a / np.max(a), b  # here
def create_dataset():
    return data.map(scaled).batch(8)
-> create_dataset | Cannot convert a symbolic tf.Tensor | to a numpy array
== a tensor as a format
def grad_pre(loss, train_model):
    print(f"{loss:.3f}")  # here
    return loss, 0.0, train_model.trainable_variables
-> grad_pre | TypeError: unsupported format string | SymbolicTensor.__format__
== Python's if in a loss
def create_loss():
    return lambda pair: sum(pair[0]) if tf.reduce_sum(pair[0]) > 0 else sum(pair[1])  # here
-> create_loss | OperatorNotAllowedInGraphError: Using a symbolic | Python `bool` | not allowed
== a name that hparams does not have
def input_pre(batch, hparams):
    return batch[0] * hparams["scale"]  # here
-> input_pre | KeyError: 'scale' [batch:
== Python's if in a model
class Model(tf.Module):
    def __call__(self, inputs):
        return inputs if tf.reduce_sum(inputs) > 0 else -inputs  # here
create_model = Model
-> train_model | create_model | OperatorNotAllowedInGraphError | Python `bool`
== an error under AutoGraph
def input_pre(batch):
    inputs = batch[0]
    if tf.reduce_mean(inputs) > 0:
        inputs = inputs.nothing  # here
    return inputs
-> input_pre | 'nothing' | [batch: (float32[8, 2], float32[8, 1])]
== an error in a helper under AutoGraph
def helper(inputs):
    if tf.reduce_mean(inputs) > 0:
        inputs = inputs.nothing  # here
    return inputs
def input_pre(batch):
    return helper(batch[0])
-> input_pre | 'nothing'
== a batch that the default does not expect
def create_dataset():
    return data.map(lambda a, b: a).batch(8, True)
-> input_pre (the engine's default) | [batch: float32[8, 2]]
== numbers of classes for a loss of one-hot labels
def create_dataset():
    numbers = (np.arange(40) % 3).astype("int64")
    return tf.data.Dataset.from_tensor_slices((x, numbers)).batch(8)
def create_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
def create_loss():
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda pair: loss(pair[1], pair[0])  # here
-> create_loss | ValueError: Arguments `target` and `output` must have the same rank
== outputs in a dict and a loss that knows of none
def create_model():
    inputs = keras.Input((2,))
    return keras.Model(inputs, {"a": keras.layers.Dense(1)(inputs)})
def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2)  # here
-> train_loss | create_loss | TypeError
"""
)


@pytest.mark.parametrize("case", HOOKS)
def test_hooks(cli: Cli, case: str) -> None:
    code, words = HOOKS[case]
    source = source_of(own=code)
    outcome = cli(source)
    refused(outcome, where(source), *words)
    assert "\x1b" not in outcome.err


def test_required_hooks_that_are_missing(cli: Cli) -> None:
    missing = cli(source_of(create_loss=None))
    refused(
        missing,
        "callbacks.py: create_loss still to be written",
        "is def create_loss()",
        "train_loss",
    )
    misspelt = cli(source_of(create_model="def create_modell():\n    pass\n"))
    refused(misspelt, "create_model still to be written", "create_modell")


def test_a_batch_that_the_replicas_cannot_share(cli: Cli) -> None:
    refused(cli(source_of(), "--virtual-devices", "3"), "batch_size: 8", "3 replicas")


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


def test_no_length_of_training(cli: Cli) -> None:
    refused(cli(source_of(), command=("train",)), "steps: say how long to train")


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("every_step = {}", "every_steps"),
        ("at_steps = {}", "at_step"),
        ("def grad_prep(loss): pass", "grad_pre"),
        ("def create_optimizer(lr): pass", "create_opt"),
        ("def create_checkpoint(step): pass", "create_ckpt"),
        ("def create_layers(width): pass", None),
        ("every = 10", None),
        ("import collections as every_step", None),
    ],
)
def test_a_slip_in_a_name_gives_a_warning(cli: Cli, name: str, hook: str | None) -> None:
    outcome = cli(source_of(own=name), "--steps", "1")
    warnings = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    assert (outcome.code, outcome.err, len(warnings)) == (0, "", 0 if hook is None else 1)
    if hook is not None:
        assert f"is no hook and is not used; did you mean {hook}?" in warnings[0]
