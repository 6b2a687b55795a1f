"""Copies variables in a single graph call, without communication between processes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf


def list_local_components(
    strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]
) -> list[tf.Variable]:
    """Returns the components of a strategy's variables on the replicas of this process.

    A variable of the strategy has a component on each replica.
    """
    return [
        component
        for variable in variables
        for component in strategy.experimental_local_results(variable)
    ]


def define_copy(
    originals: Sequence[tf.Variable], targets: Sequence[tf.Variable]
) -> Callable[[], None]:
    """Returns a graph function that assigns the values of some variables to other variables.

    All values are read before the first one is assigned, so a variable may be in both lists. The
    graph function is traced immediately. Otherwise, TensorFlow would treat all functions that this
    returns as a single function that is retraced too often, and would print a warning.
    """

    @tf.function(autograph=False)
    def copy() -> None:
        values = [original.read_value() for original in originals]
        for value, target in zip(values, targets, strict=True):
            with tf.device(target.device):
                target.assign(value)

    return copy.get_concrete_function()


class ReplicaCopies:
    """Copies of the values that some variables have on each replica of this process.

    Attributes:
        values: the variables that contain the copies, one for each variable and replica
        take: a function that copies the values
        put_back: a function that gives each replica the copied values back
    """

    def __init__(self, strategy: tf.distribute.Strategy, variables: list[tf.Variable]) -> None:
        components = list_local_components(strategy, variables)
        self.values = [
            tf.Variable(component.read_value(), trainable=False, shape=component.shape)
            for component in components
        ]
        self.take = define_copy(components, self.values)
        self.put_back = define_copy(self.values, components)

    @contextlib.contextmanager
    def put_back_after(self) -> Iterator[None]:
        """Copies the values, and restores them when the context ends."""
        self.take()
        try:
            yield
        finally:
            self.put_back()
