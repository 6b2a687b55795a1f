"""EDIT THIS FILE: all hooks. Write the three that are required; the others have defaults.

The engine calls these functions, the *hooks*, by name, and passes the arguments that they declare.
A hook may declare more arguments than it does here: `python -m ctl_core hooks NAME` lists them.
After an edit, `./train.sh --check` tries every hook. With a small model, this takes half a minute.
"""

import keras
import tensorflow as tf

import ctl_core as ctl

# ---- Required: remove the # and write your own ---------------------------------------------------


# The training data, one pass, which the engine repeats. Each process of a cluster reads all of the
# data and takes its rows of each batch.
#
# def create_dataset(global_batch_size, config):
#     examples = tf.data.Dataset.from_tensor_slices((inputs, targets))
#     return examples.shuffle(1000, seed=config.seed).batch(global_batch_size)


# The model, built under the strategy's scope.
#
# def create_model(hparams):
#     hidden = keras.layers.Dense(hparams["width"], activation="relu")
#     return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])


# The loss, one number per example or their sum. The engine divides the sum by the global batch
# size, so never return a mean. train_loss may also take training, a bool.
#
# def create_loss():
#     loss = keras.losses.MeanSquaredError(reduction="none")
#     return lambda pair: loss(pair[1], pair[0])  # pair: output and target


# ---- Optional: code is the default, so deleting it changes nothing; comments are examples --------


def make_batches(dataset):
    """Returns the dataset, which repeats endlessly, as it is."""
    return dataset


def count_examples(batch):
    """Returns the number of rows. Of graphs, it would be tf.shape(labels)[0]."""
    return ctl.leading_dimension(batch)


# The model that evaluation, prediction and export use in place of train_model. Default: the value
# of create_model.
#
# def create_eval_model(train_model):
#     average = keras.models.clone_model(train_model)
#     average.set_weights(train_model.get_weights())
#     return average


# The model that load, predict and export use. Default: the model that is evaluated.
#
# def create_inference_model(model):
#     return lambda inputs: tf.nn.softmax(model(inputs))


# Turns a client's request into the model's input. Default: input_pre, applied to the part of a
# batch that it uses.
#
# @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
# def serve(inputs):
#     return tf.io.decode_raw(inputs, tf.uint8, fixed_length=128)


def create_opt(lr):
    """Creates the optimizer.

    lr is an object, not a number: SGD(lr * 0.1) works, and host hooks may call lr.assign(0.01).
    """
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


def create_ckpt(ckpt_path, step, lr, optimizer, train_model, train_loss, config):
    """Returns what a checkpoint holds, and a manager, which keeps the newest."""
    ckpt = tf.train.Checkpoint(
        step=step, lr=lr, optimizer=optimizer, train_model=train_model, train_loss=train_loss
    )
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=config.keep)


def input_pre(batch):
    """Returns the inputs of (inputs, targets) or (inputs, targets, weights)."""
    inputs, _, _ = ctl.unpack(batch)
    return inputs


def loss_pre(output, batch):
    """Returns the argument of train_loss: the output and the targets."""
    _, target, _ = ctl.unpack(batch)
    return output, target


# The number that the summed loss is divided by, in training and evaluation. Default: the number of
# examples.
#
# def batch_weight(batch):
#     return tf.reduce_sum(tf.cast(batch[0] != 0, tf.float32))  # tokens that are not padding


def grad_pre(loss, batch, train_model):
    """Returns the loss per example, the regularization, and the variables."""
    return (
        ctl.weighted(loss, batch),
        ctl.regularization(train_model),
        ctl.trainable_variables(train_model),
    )


def update_pre(gradients):
    """Returns the gradients to apply, which are clipped, and those to show."""
    # They are sums over all replicas.
    gradients = [ctl.nan_to_zero(gradient) for gradient in gradients]
    clipped, _ = ctl.clip_by_global_norm(gradients, 10.0)
    return clipped, gradients


# Runs after each update, on each replica and its own variables. Default: nothing is done.
#
# def update_post(train_model, eval_model):
#     for average, weight in zip(eval_model.variables, train_model.variables, strict=True):
#         average.assign(0.999 * average + 0.001 * weight)


# Objectives that are trained in turns. Default: one forward pass, then all objectives at once.
#
# turns = 3 * ["critic"] + ["generator"]


def create_train_metrics():
    """Returns Keras metrics by name, such as {"mean": keras.metrics.Mean()}."""
    return {}


# The arguments of the train metrics' update_state. Default: metric_pre; of a dict that it returns,
# the values for the train metrics.
#
# def train_metric_pre(loss):
#     return {"mean_loss": loss}


@ctl.deferred
def print_step(step):
    """Shows the step. Deferred: it only observes, so training does not wait."""
    ctl.show_step(step)


def print_loss(step, loss):
    """Prints the loss, and writes it to metrics.jsonl and TensorBoard."""
    ctl.report(step, loss=loss)


# {N: function or list of functions}, run after every N-th step.
every_steps = {1: print_step, 10: print_loss}


# {N: function or list of functions}, run once after step N.
at_step = {}


# The evaluation data, one pass. Default: no evaluation.
#
# def create_eval_dataset(global_batch_size):
#     return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(global_batch_size)


def create_metrics():
    """Returns Keras metrics by name, such as {"auc": keras.metrics.AUC()}."""
    return {}


def metric_pre(output, batch):
    """Returns the arguments of the metrics' update_state."""
    _, target, weight = ctl.unpack(batch)
    return (target, output) if weight is None else (target, output, weight)


def eval_pre(loss, batch, train_model):
    """Returns the loss per example of an evaluation, and the regularization."""
    return ctl.weighted(loss, batch), ctl.regularization(train_model)


# A function or a list of functions, run after each evaluation. Default: nothing is done.
#
# def after_eval(metrics, lr):
#     if metrics["loss"] > 1.0:
#         lr.assign(lr * 0.5)


# A function or a list of functions, run once after training has ended and everything is saved.
# Default: nothing is done.
#
# def at_end(reason, metrics, chief):
#     if chief:
#         print(f"{reason}: {metrics}")
