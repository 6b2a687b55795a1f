"""Rejects a loss that uses the third element of a batch and is then multiplied by it as well.

By default, the third element of a batch (x, y, w) contains sample weights. If hooks use it as
something else, such as the returns of an agent, the element would have its effect twice.
"""

from __future__ import annotations

import tensorflow as tf

from ctl_core.hooks.defaults import find_sample_weight
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.model.loss_calls import locate_op
from ctl_core.model.value_flow import find_path
from ctl_core.run.errors import SetupError
from ctl_core.types import Batch, Structure


def refuse_weights_in_loss(hooks: Hooks, hook: Hook, batch: Batch, loss: Structure) -> None:
    """Rejects a loss that depends on the values by which a hook multiplies it.

    Args:
        hooks: the hooks of the run
        hook: ``grad_pre`` or ``eval_pre``, which has called ``weighted``
        batch: the batch, which consists of placeholders
        loss: the loss that was computed from the batch, before it was multiplied

    Raises:
        SetupError: the loss depends on the third element of the batch; the message has the line of
            the first op that uses it.
    """
    weight = find_sample_weight(batch)
    if weight is None:
        return
    tensors = filter(tf.is_symbolic_tensor, tf.nest.flatten(loss, expand_composites=True))
    operations = find_path(weight, tensors)
    if operations is None:
        return
    where = str(hooks.create_loss)
    if operations:
        where = locate_op(hooks, operations[0])
    product = "loss * batch[2]"
    if weight.shape.rank == 2:
        product += "[:, 0]"
    raise SetupError(
        f"{where}: the loss uses the third element of the batch, and {hook.name} multiplies the "
        "loss by it, as by sample weights; name the element in a dict, or write "
        f"{hook.name} with loss or {product} in place of ctl_core.weighted(loss, batch)."
    )
