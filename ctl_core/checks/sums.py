"""A loss that is one number is taken as the sum over the batch: tried before training.

The mean would make gradients B times too small, by another factor on another number of replicas.
Nothing tells the two apart but their values: taken over a batch twice, a sum doubles and a mean
stays as it is.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl_core.autograph import names_in
from ctl_core.console import Console
from ctl_core.numerics.joining import joined
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.run_state.tracking import written_variables
from ctl_core.scratch import Alone
from ctl_core.state import State
from ctl_core.step import loss_of, run_model

# Of each objective, by its name: the sum of the loss over the batch, and the extra loss.
Losses = dict[str, tuple[float, float]]


def check_sums(state: State, console: Console) -> None:
    """Tries the loss on a batch, and on the same batch twice over, without training.

    Costs two small graphs and one more call of ``create_dataset``, and nothing where the loss has
    one number per example. What cannot be tried, or draws random numbers, gives no verdict; all
    variables and the data are as before.

    Args:
        state: of the run
        console: for a warning of a loss that is divided twice

    Raises:
        SetupError: the loss is a mean.
    """
    if said := _divided_twice(state):
        console.warn(said)
    if not state.context.scalar_losses:
        return
    try:
        once, twice = _try(state)
    except Exception:  # the trial's own: a batch of this size may not do; training says what is
        return
    finally:
        state.renew_input()
    hook = state.hooks.grad_pre
    if hook.where == "the engine's default":
        hook = state.hooks.create_loss
    for name in state.context.scalar_losses:
        one, two = once[name][0], twice[name][0]
        if one != 0 and abs(two - one) <= 1e-5 * abs(one):
            raise hook.reject(
                f"the loss{f' of {name!r}' * bool(name)} is {one:.4g} "
                "for a batch, and the same for that batch twice over, so it is a mean over the "
                "batch; return one number per example, or their sum (tf.reduce_sum): the engine "
                "divides by the global batch size itself, or by what batch_weight says."
            )


def _divided_twice(state: State) -> str | None:
    """Warns of ``tf.nn.compute_average_loss``, whose result doubles with the batch as a sum does.

    It is found by its name, in the code of the loss and of ``grad_pre``.
    """
    hooks = state.hooks
    pairs = [(hook, hook.function) for hook in (hooks.create_loss, hooks.loss_pre, hooks.grad_pre)]
    for hook, function in [*pairs, (hooks.create_loss, state.train_loss)]:
        if "compute_average_loss" in names_in(function):
            return (
                f"{hook}: uses tf.nn.compute_average_loss, which divides by "
                "the global batch size, as the engine does itself; return the sum, or one number "
                "per example, in its place."
            )
    return None


def _try(state: State) -> list[Losses]:
    """Returns the losses of a batch, and of the same batch twice over."""
    batch = state.data.untagged(next(state.data.iterator))
    return tried(state, [batch, together(batch, batch)], Alone(state.strategy, _first(state)))


def tried(state: State, batches: list[Any], replica: tf.distribute.ReplicaContext) -> list[Losses]:
    """Returns the losses of batches, one after the other, without training.

    Raises:
        Exception: they cannot be tried.
    """
    traced = [_losses(state, one, replica) for one in batches]
    graphs = (function.graph for function in traced)
    touched, others = written_variables(state.strategy, state.found.variables.values(), *graphs)
    if others:
        raise ValueError("what the step writes to cannot be put back")
    with ReplicaCopies(state.strategy, touched).put_back_after():
        values = [function(one) for function, one in zip(traced, batches, strict=True)]
    return [{n: (float(a), float(b)) for n, (a, b) in losses.items()} for losses in values]


def together(one: Any, other: Any) -> Any:
    """Returns a batch of the examples of two."""
    return tf.nest.map_structure(
        lambda *parts: parts[0] if parts[0].shape.rank == 0 else joined(list(parts)), one, other
    )


def _first(state: State) -> int:
    return state.cluster.task.index * state.data.replicas


def _losses(state: State, batch: Any, replica: tf.distribute.ReplicaContext) -> Any:
    """Traces the losses of a batch; without Dropout and the like, whose numbers would differ."""
    context = state.context

    @tf.function(autograph=False)
    def losses(batch: Any) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
        with replica:
            named: dict[str, Any] = {}
            for _ in context.each_turn(again=False):
                output = run_model(context, batch, training=False, trained=True)
                loss = loss_of(context, batch, output, training=False)
                result = context.hooks.grad_pre.in_graph(
                    loss=loss, output=output, batch=batch, **context.hook_arguments()
                )
                named |= result if isinstance(result, dict) else {context.objective or "": result}
        return {name: (tf.reduce_sum(values[0]), values[1]) for name, values in named.items()}

    with state.strategy.scope():
        return losses.get_concrete_function(batch)
