"""Named tuples that hooks may return in place of plain ones, so that each value has its name."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf


class Objective(NamedTuple):
    """The result of ``grad_pre``: a loss to differentiate, and the variables to train by it.

    Example::

        def grad_pre(loss, train_model):
            return ctl.Objective(
                loss_per_batch=loss,
                extra_loss=ctl.regularization(train_model),
                variables=ctl.trainable_variables(train_model),
            )

    Attributes:
        loss_per_batch: a number for each example, of shape [b], or their sum; never a mean
        extra_loss: the terms that do not depend on the batch, a scalar
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
        update_gradients: the gradients that the optimizer applies, one for each it was given
        display_gradients: the gradients that host hooks are given to show
        skip: whether to leave out this update, a bool scalar; None applies it
    """

    update_gradients: Sequence[tf.Tensor | tf.IndexedSlices]
    display_gradients: Any
    skip: bool | tf.Tensor | None = None


class Checkpointing(NamedTuple):
    """The result of ``create_ckpt``.

    Attributes:
        ckpt: the objects that are saved
        manager: keeps the latest checkpoints, 2 or more
    """

    ckpt: tf.train.Checkpoint
    manager: tf.train.CheckpointManager


class EvalLoss(NamedTuple):
    """The result of ``eval_pre``.

    Attributes:
        loss_per_batch: a number for each example, of shape [b], or their sum; never a mean
        extra_loss: the terms that do not depend on the batch, a scalar
    """

    loss_per_batch: tf.Tensor
    extra_loss: float | tf.Tensor
