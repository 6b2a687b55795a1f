"""Wraps private APIs of Keras optimizers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from ctl_core.compat.patches import Scope, replace_attribute, set_attributes, wrap_function
from ctl_core.run.errors import SetupError
from ctl_core.types import Gradient, Optimizer, Variable

GradientsAndVariables = list[tuple[Gradient, Variable]]
Reduce = Callable[[GradientsAndVariables], GradientsAndVariables]
Owns = Callable[[tf.Variable], bool]


class _ThreadState(threading.local):
    """The state of a thread. Each replica is traced in its own thread.

    Attributes:
        reduce: a function that replaces the sum of gradients over replicas in Keras optimizers;
            None if the sum is not replaced
        device: the object that replaces the strategy in Keras optimizers; None if the strategy is
            not replaced
    """

    reduce: Reduce | None = None
    device: _DeviceUpdate | None = None


_thread = _ThreadState()


def read_rate(optimizer: Optimizer) -> Any:
    """Returns the schedule or variable that a Keras optimizer was created with, or None."""
    if isinstance(optimizer, keras.Optimizer):
        return optimizer._learning_rate
    return None


def skip_reduction() -> Scope:
    """Prevents Keras optimizers in this thread from summing gradients over replicas.

    The gradients that the engine passes to an optimizer have been summed already.
    """
    return _reduce_gradients_by(lambda grads_and_vars: grads_and_vars)


def refuse_optimizers(message: str) -> Scope:
    """Makes Keras optimizers in this thread raise a SetupError when they are applied."""

    def refuse(_: GradientsAndVariables) -> NoReturn:
        raise SetupError(message)

    return _reduce_gradients_by(refuse)


@contextlib.contextmanager
def _reduce_gradients_by(reduce: Reduce) -> Iterator[None]:
    """Makes all Keras optimizers in this thread call ``reduce`` to sum gradients over replicas."""
    method = wrap_function(
        keras.optimizers.Optimizer, "_all_reduce_sum_gradients", _all_reduce_sum_gradients
    )
    with method, set_attributes(_thread, reduce=reduce):
        yield


def _all_reduce_sum_gradients(
    of_keras: Callable[..., Any],
    optimizer: keras.Optimizer,
    grads_and_vars: GradientsAndVariables,
) -> Any:
    if _thread.reduce is None:
        return of_keras(optimizer, grads_and_vars)
    return _thread.reduce(grads_and_vars)


class _DeviceUpdate:
    """Replaces the strategy in a Keras optimizer that updates the variables of one device."""

    def __init__(
        self, strategy: tf.distribute.Strategy, index: int, device: str | None, owns: Owns
    ) -> None:
        """Selects a device; see ``update_device`` for the arguments."""
        self._strategy = strategy
        self._index = index
        self._device = device
        self._owns = owns

    @property
    def extended(self) -> _DeviceUpdate:
        return self

    def update(
        self,
        variable: tf.Variable,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        group: bool = True,
    ) -> Any:
        """Calls a function with the component of a variable that is on the selected device.

        Does nothing if another device updates this variable.
        """
        if not self._owns(variable):
            return None
        component = self._strategy.experimental_local_results(variable)[self._index]
        with tf.device(self._device):
            return function(component, *args)


@contextlib.contextmanager
def update_device(
    strategy: tf.distribute.Strategy, index: int, device: str | None, owns: Owns
) -> Iterator[None]:
    """Makes this thread's Keras optimizers update the variables of one device, and no others.

    This is used inside ``enter_update``. Normally, a Keras optimizer synchronizes all
    replicas before an update (``merge_call``). This is impossible inside a condition (``tf.cond``),
    so the optimizer could neither skip an update nor average its weights at every tenth step.

    Args:
        strategy: the strategy of the variables
        index: the index of the device among the devices of this process
        device: the name of the device; None if the ops have no device, because they are in a
            function that several devices call
        owns: returns whether the device updates a variable; the optimizer leaves out all others
    """
    meeting = wrap_function(
        tf.__internal__.distribute.interim, "maybe_merge_call", _maybe_merge_call
    )
    strategy_property = property(_get_strategy, _set_strategy)
    strategy_of_optimizer = replace_attribute(
        keras.optimizers.Optimizer, "_distribution_strategy", lambda _: strategy_property
    )
    by_variable = wrap_function(keras.optimizers.MultiOptimizer, "apply", _apply_by_variable)
    update = _DeviceUpdate(strategy, index, device, owns)
    with meeting, strategy_of_optimizer, by_variable, set_attributes(_thread, device=update):
        yield


def place_slots(enter_place: Callable[[Variable], Scope]) -> Scope:
    """Makes Keras optimizers create their slots inside a context that depends on the variable.

    A slot is a variable that an optimizer keeps for each variable that it trains.

    Args:
        enter_place: returns the context in which the slots of a variable are created
    """

    def add_in_place(
        of_keras: Callable[..., Any],
        optimizer: keras.Optimizer,
        reference_variable: Variable,
        *args: Any,
        **options: Any,
    ) -> Any:
        with enter_place(reference_variable):
            return of_keras(optimizer, reference_variable, *args, **options)

    # The method is inherited, so it is wrapped in the class that defines it.
    owner = next(
        base
        for base in keras.optimizers.Optimizer.__mro__
        if "add_variable_from_reference" in vars(base)
    )
    return wrap_function(owner, "add_variable_from_reference", add_in_place)


def _maybe_merge_call(
    of_tensorflow: Callable[..., Any],
    function: Callable[..., Any],
    strategy: tf.distribute.Strategy,
    *args: Any,
    **options: Any,
) -> Any:
    if _thread.device is None:
        return of_tensorflow(function, strategy, *args, **options)
    return function(_thread.device, *args, **options)


def _get_strategy(optimizer: keras.Optimizer) -> tf.distribute.Strategy | _DeviceUpdate:
    return _thread.device or vars(optimizer)["_distribution_strategy"]


def _set_strategy(optimizer: keras.Optimizer, value: tf.distribute.Strategy) -> None:
    vars(optimizer)["_distribution_strategy"] = value


def _apply_by_variable(
    of_keras: Callable[..., None],
    optimizer: keras.optimizers.MultiOptimizer,
    grads: Sequence[Gradient],
    trainable_variables: Sequence[Variable] | None = None,
) -> None:
    """Replaces ``MultiOptimizer.apply``, but accepts gradients for only some of its variables.

    Keras' own method requires a gradient for each variable that the optimizer was built with, even
    for a frozen variable.
    """
    if trainable_variables is None or not optimizer.built:
        of_keras(optimizer, grads, trainable_variables)
        return
    pairs_by_optimizer: dict[int, GradientsAndVariables] = {}
    for gradient, variable in zip(grads, trainable_variables, strict=True):
        index = optimizer._var_to_optimizer_idx[optimizer._var_key(variable)]
        pairs_by_optimizer.setdefault(index, []).append((gradient, variable))
    for index, pairs in sorted(pairs_by_optimizer.items()):
        gradients, variables = zip(*pairs, strict=True)
        optimizer.optimizers[index].apply(list(gradients), list(variables))
    optimizer.iterations.assign_add(1)
