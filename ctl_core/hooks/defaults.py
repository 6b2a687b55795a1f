"""The default of every hook, and the functions that the defaults call.


The default hooks are shown to users word for word, by ``python -m ctl_core hooks --stub`` and in
the documentation. They therefore call public functions through the name ``ctl``, even functions of
this module such as ``unpack``. Although ``ctl_core`` imports this module, the circular import
works, because the functions are looked up only when a hook runs.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import ctl_core as ctl
from ctl_core.numerics.not_finite import compute_global_norm
from ctl_core.numerics.reduction import multiply
from ctl_core.types import AnyTensor, Batch, Count, Gradient, Gradients, ModelInput, Structure


@tf.autograph.experimental.do_not_convert
def nan_to_zero(gradient: Gradient) -> Gradient:
    """Returns the gradient with each NaN entry replaced by 0; works on sparse gradients too."""
    if isinstance(gradient, tf.IndexedSlices):
        values = _replace_nan(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return _replace_nan(gradient)


def _replace_nan(tensor: tf.Tensor) -> tf.Tensor:
    is_nan = tf.math.is_nan(tf.math.real(tensor))
    if tensor.dtype.is_complex:
        is_nan |= tf.math.is_nan(tf.math.imag(tensor))
    return tf.where(is_nan, tf.zeros_like(tensor), tensor)


@tf.autograph.experimental.do_not_convert
def clip_by_global_norm(
    gradients: Sequence[Gradient], clip_norm: float
) -> tuple[Gradients, tf.Tensor]:
    """Clips gradients by their global norm; they may be complex, or differ in dtype.

    For other gradients, the result is the same as that of ``tf.clip_by_global_norm``.

    Args:
        gradients: the gradients, dense or sparse
        clip_norm: the maximum of their common norm

    Returns:
        The clipped gradients, and the norm before clipping.
    """
    dtypes = {gradient.dtype for gradient in gradients}
    if len(dtypes) == 1 and not next(iter(dtypes)).is_complex:
        clipped, norm = tf.clip_by_global_norm(gradients, clip_norm)
        return clipped, norm
    norm = compute_global_norm(gradients)
    factor = clip_norm / tf.maximum(norm, clip_norm)
    factor += norm - norm  # an infinite norm makes all gradients NaN, as in TensorFlow
    return multiply(list(gradients), factor), norm


class DifferentRowsError(ValueError):
    """The tensors of a batch differ in their first dimension."""


@tf.autograph.experimental.do_not_convert
def leading_dimension(batch: Batch) -> Count | None:
    """Returns the first dimension of a batch's tensors, which has to be the same for all of them.

    Scalars are ignored.

    Returns:
        An int if the shapes are static; otherwise a scalar int64 tensor, which is -1 if the tensors
        differ at run time. None if the batch contains only scalars.

    Raises:
        DifferentRowsError: the static shapes of the tensors differ.
    """
    tensors = [tensor for tensor in tf.nest.flatten(batch) if tensor.shape.rank != 0]
    sizes = [get_first_dimension(tensor) for tensor in tensors]
    fixed = {size for size in sizes if isinstance(size, int)}
    if len(fixed) > 1:
        raise DifferentRowsError(explain_different_rows(batch))
    if all(isinstance(size, int) for size in sizes):
        return next(iter(fixed), None)
    first, *others = (tf.cast(size, tf.int64) for size in sizes)
    same = tf.reduce_all([other == first for other in others])
    return tf.where(same, first, tf.constant(-1, tf.int64))


def explain_different_rows(batch: Batch, examples: int | None = None) -> str:
    """Explains how to fix a batch whose tensors differ in their first dimension.

    Args:
        batch: a structure of tensors
        examples: the number of examples that the batch should have; if a tensor has this number of
            rows, the explanation suggests it for ``count_examples``
    """
    cure = "return the number of examples from count_examples"
    for path, tensor in list_paths(batch):
        if tensor.shape.rank and examples is not None and tensor.shape[0] == examples:
            cure = f"define def count_examples(batch): return tf.shape({path})[0]"
            break
    return (
        "the tensors of a batch differ in their first dimension; call zip() before batch(), "
        f"or, if examples can have any number of rows, {cure}"
    )


def list_paths(structure: Structure, path: str = "batch") -> Iterator[tuple[str, AnyTensor]]:
    """Yields a Python expression and a tensor for each tensor of a structure.

    The expression evaluates to the tensor. It starts with ``path``, as in ``batch['image']``.
    """
    if isinstance(structure, Mapping):
        for key, value in structure.items():
            yield from list_paths(value, f"{path}[{key!r}]")
    elif isinstance(structure, tuple | list):
        for index, value in enumerate(structure):
            yield from list_paths(value, f"{path}[{index}]")
    else:
        yield path, structure


def get_first_dimension(tensor: AnyTensor) -> Count:
    """Returns a tensor's first dimension: an int if it is static, otherwise an int64 scalar."""
    if tensor.shape.rank and tensor.shape[0] is not None:
        return tensor.shape[0]
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int64)
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.shape(tensor, tf.int64)[0]


@tf.autograph.experimental.do_not_convert
def unpack(batch: Batch) -> tuple[ModelInput, Structure, tf.Tensor | None]:
    """Returns the inputs, targets and sample weights of a batch (x, y) or (x, y, w).

    The sample weights of a batch (x, y) are None.

    Raises:
        ValueError: the batch has another structure, or its third element cannot be sample weights.
    """
    weight = find_sample_weight(batch)
    size = 3
    if weight is None:
        size = 2
    if not isinstance(batch, tuple | list) or len(batch) != size:
        raise ValueError(
            "expected (inputs, targets) or (inputs, targets, weights), with weights of shape "
            "[b] or [b, 1]; for other batches write input_pre, loss_pre, metric_pre"
        )
    return batch[0], batch[1], weight


def find_sample_weight(batch: Batch) -> tf.Tensor | None:
    """Returns the sample weights of a batch, or None.

    They are the third of the batch's three elements, if this is a floating-point tensor of shape
    [b] or [b, 1].
    """
    if not isinstance(batch, tuple | list) or len(batch) != 3:
        return None
    weight = batch[2]
    if not isinstance(weight, tf.Tensor) or not weight.dtype.is_floating:
        return None
    if weight.shape.rank in (1, None) or weight.shape[1:] == [1]:
        return weight
    return None


class _Weighing(threading.local):
    """The sample weights that were used in a thread; each replica is traced in its own thread."""

    def __init__(self) -> None:
        self.weights: list[tf.Tensor] = []


_weighing = _Weighing()


@contextlib.contextmanager
def note_weighted() -> Iterator[list[tf.Tensor]]:
    """Yields a list that collects the sample weights that ``weighted`` uses in this thread."""
    before = _weighing.weights
    _weighing.weights = []
    try:
        yield _weighing.weights
    finally:
        _weighing.weights = before


def uses_weights(batch: Batch, weights: list[tf.Tensor]) -> bool:
    """Returns whether the sample weights of a batch are among those that ``weighted`` used."""
    sample_weight = find_sample_weight(batch)
    return any(weight is sample_weight for weight in weights)


@tf.autograph.experimental.do_not_convert
def weighted(loss: tf.Tensor, batch: Batch) -> tf.Tensor:
    """Multiplies the loss of each example by its sample weight, if the batch contains weights.

    The weights are the third element of a batch (x, y, w). For any other batch, the loss is
    returned unchanged.

    Raises:
        ValueError: the batch contains weights, but the loss is one number for the whole batch.
    """
    weight = find_sample_weight(batch)
    if weight is None:
        return loss
    _weighing.weights.append(weight)
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank == 0:
        raise ValueError(
            "sample weights need one loss per example, not one number for the whole batch "
            "(reduction='none'); if the third element of the batch is something else, name it in a "
            "dict, or write this hook with loss in place of ctl_core.weighted(loss, batch)"
        )
    return loss * tf.cast(tf.reshape(weight, [-1]), loss.dtype)


def deferred(hook: Callable[..., None]) -> Callable[..., None]:
    """Marks an ``every_steps`` function that only observes training, such as ``print_step``.

    The function may take the arguments ``step``, ``dev``, ``chief``, ``config`` and ``hparams``,
    and must not change anything that training uses. Such a function does not interrupt the graph:
    the engine calls it when the current graph call ends, about a second later at most, once for
    each step of the call at which the function is due.
    """
    hook.deferred = True  # type: ignore[attr-defined]
    return hook


# ---- The hooks, which `python -m ctl_core hooks --stub` prints -----------------------------------


def make_batches(dataset):
    """Returns the dataset, which repeats endlessly, as it is."""
    return dataset


def count_examples(batch):
    """Returns the number of rows. Of graphs, it would be tf.shape(labels)[0]."""
    return ctl.leading_dimension(batch)


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


@ctl.deferred
def print_step(step):
    """Shows the step. Deferred: it only observes, so training does not wait."""
    ctl.show_step(step)


def print_loss(step, loss):
    """Prints the loss, and writes it to metrics.jsonl and TensorBoard."""
    ctl.report(step, loss=loss)


every_steps = {1: print_step, 10: print_loss}
at_step: dict[int, Any] = {}
turns: list[str] = []


def create_train_metrics():
    """Returns Keras metrics by name, such as {"mean": keras.metrics.Mean()}."""
    return {}


def create_metrics():
    """Returns Keras metrics by name, such as {"auc": keras.metrics.AUC()}."""
    return {}


def metric_pre(output, batch):
    """Returns the arguments of the metrics' update_state."""
    _, target, weight = ctl.unpack(batch)
    return (target, output) if weight is None else (target, output, weight)


train_metric_pre = metric_pre


def eval_pre(loss, batch, train_model):
    """Returns the loss per example of an evaluation, and the regularization."""
    return ctl.weighted(loss, batch), ctl.regularization(train_model)
