"""Copies of variables, made in one graph call, in which nothing passes between processes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf


def list_local_components(
    strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]
) -> list[tf.Variable]:
    """Returns the variables that this process's replicas have for the variables of a strategy."""
    return [
        component
        for variable in variables
        for component in strategy.experimental_local_results(variable)
    ]


def define_copy(
    originals: Sequence[tf.Variable], targets: Sequence[tf.Variable]
) -> Callable[[], None]:
    """Returns a graph function that assigns the values of variables to others.

    All values are read before the first one is assigned, so variables may be in both lists. The
    function is traced here. Otherwise, TensorFlow would mistake the functions for several lists for
    a single function that is retraced again and again, and print a warning.
    """

    @tf.function(autograph=False)
    def copy() -> None:
        values = [original.read_value() for original in originals]
        for value, target in zip(values, targets, strict=True):
            with tf.device(target.device):
                target.assign(value)

    return copy.get_concrete_function()  # type: ignore[no-any-return]


class ReplicaCopies:
    """Copies of the values that each of this process's replicas has in some variables.

    Attributes:
        values: the copies: for each variable, a variable for each replica
        put_back: gives each replica the copied values
    """

    def __init__(self, strategy: tf.distribute.Strategy, variables: list[tf.Variable]) -> None:
        components = list_local_components(strategy, variables)
        self.values = [
            tf.Variable(component.read_value(), trainable=False) for component in components
        ]
        self._take = define_copy(components, self.values)
        self.put_back = define_copy(self.values, components)

    @contextlib.contextmanager
    def put_back_after(self) -> Iterator[None]:
        """Copies the values, and puts them back after something has changed the variables."""
        self._take()
        try:
            yield
        finally:
            self.put_back()
