"""Named tuples that hooks may return instead of plain tuples, so that each value has a name."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf


class Objective(NamedTuple):
    """The result of ``grad_pre``: a loss to differentiate, and the variables to train with it.

    Example::

        def grad_pre(loss, train_model):
            return ctl.Objective(
                loss_per_batch=loss,
                extra_loss=ctl.regularization(train_model),
                variables=ctl.trainable_variables(train_model),
            )

    Attributes:
        loss_per_batch: one number per example, of shape [b], or the sum of these numbers; never a
            mean
        extra_loss: the sum of the loss terms that do not depend on the batch, a scalar
        variables: the variables to train
        logged: tensors to log every ``log_every`` steps, by name
    """

    loss_per_batch: tf.Tensor
    extra_loss: float | tf.Tensor
    variables: Sequence[Any]
    logged: Mapping[str, tf.Tensor] = types.MappingProxyType({})


class Update(NamedTuple):
    """The result of ``update_pre``.

    Attributes:
        update_gradients: the gradients that the optimizer applies, one for each gradient that was
            passed to ``update_pre``
        display_gradients: the gradients that are passed to host hooks, for display
        skip: whether to skip this update, a bool scalar; with None, the update is applied
    """

    update_gradients: Sequence[tf.Tensor | tf.IndexedSlices]
    display_gradients: Any
    skip: bool | tf.Tensor | None = None


class Checkpointing(NamedTuple):
    """The result of ``create_ckpt``.

    Attributes:
        ckpt: the objects that are saved
        manager: the manager, which keeps the latest checkpoints; it has to keep at least 2
    """

    ckpt: tf.train.Checkpoint
    manager: tf.train.CheckpointManager


class EvalLoss(NamedTuple):
    """The result of ``eval_pre``.

    Attributes:
        loss_per_batch: one number per example, of shape [b], or the sum of these numbers; never a
            mean
        extra_loss: the sum of the loss terms that do not depend on the batch, a scalar
    """

    loss_per_batch: tf.Tensor
    extra_loss: float | tf.Tensor
