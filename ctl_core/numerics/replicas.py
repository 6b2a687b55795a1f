"""What each replica has of its own, such as moving statistics, and copies of variables.

Each replica keeps moving statistics of its own batches. Training does not read them, and they are
linear in those of the batches, so averaging them before an evaluation or a checkpoint reads them
gives what averaging after every step would give, and costs nothing per step. Then each goes on with
its own: when a run was evaluated or saved must not change a bit of it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl_core.numerics.variables import unwrap


def find_moving_statistics(layers: list[keras.Layer]) -> list[Any]:
    """Returns the variables of the batch normalisations among layers that are moving statistics."""
    return [
        variable.value
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
        if variable.path.split("/")[-1].startswith(("moving_", "renorm_"))
    ]


def has_own_statistics(layer: keras.Layer) -> bool:
    """Whether a layer normalizes what each replica has of a batch by itself."""
    kind = keras.layers.BatchNormalization
    return isinstance(layer, kind) and layer.trainable and not layer.synchronized


def find_drawing_layers(layers: list[keras.Layer], drawn: set[int]) -> list[str]:
    """Returns the kinds of the layers that draw random numbers in training.

    Args:
        layers: the layers of a run
        drawn: the ids of the variables of generators that the forward pass reads. A layer may have
            a generator that it does not use, as a GRUCell without dropout has.
    """
    kinds = set()
    for layer in layers:
        for value in vars(layer).values():
            is_generator = isinstance(value, keras.random.SeedGenerator)
            if is_generator and id(unwrap(value.state)) in drawn:
                kinds.add(type(layer).__name__)
    return sorted(kinds)


def describe_nature(layers: list[keras.Layer], drawing_layers: Sequence[str]) -> str:
    """Describes why weights depend on the number of replicas; "" if no layer is known to cause it.

    Args:
        layers: the layers of a run
        drawing_layers: the kinds of layers that draw random numbers
    """
    reasons = []
    if drawing_layers:
        reasons.append(f"random numbers ({', '.join(drawing_layers)})")
    if any(map(has_own_statistics, layers)):
        reasons.append("batch statistics (BatchNormalization that is not synchronized)")
    if not reasons:
        return ""
    causes = " and ".join(reasons)
    return f" Weights depend on the number of replicas: each has {causes} of its own."


def encode_for_sum(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor of any dtype but string as float32, float64 or int64, without loss.

    These are the dtypes that every all-reduce can sum: NCCL knows neither bool nor complex numbers
    nor small integers, and TensorFlow sums int32 on the host, and nothing else together with it.
    Real and imaginary part of a complex number are in a new last axis.
    """
    dtype = value.dtype
    if dtype.is_complex:
        return tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)
    if dtype == tf.uint64:  # its largest numbers are none of int64
        return tf.bitcast(value, tf.int64)
    if dtype.is_bool or dtype.is_integer:
        return tf.cast(value, tf.int64)
    return value if dtype == tf.float64 else tf.cast(value, tf.float32)


def decode_sum(encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the tensor of a dtype that ``encode_for_sum`` has encoded."""
    if dtype.is_complex:
        return tf.complex(encoded[..., 0], encoded[..., 1])
    if dtype == tf.uint64:
        return tf.bitcast(encoded, tf.uint64)
    return tf.cast(encoded, dtype)


class ReplicaCopies:
    """What each of this process's replicas has in some variables, kept aside and put back.

    One graph call each, in which nothing passes between processes.

    Attributes:
        own: the copies, a variable for each replica's part of each variable
        put_back: gives each replica what was kept
    """

    def __init__(self, strategy: tf.distribute.Strategy, variables: list[Any]) -> None:
        local = strategy.experimental_local_results
        here = [part for variable in variables for part in local(variable)]
        self.own = [tf.Variable(part.read_value(), trainable=False) for part in here]
        self._take = define_copy(here, self.own)
        self.put_back = define_copy(self.own, here)

    @contextlib.contextmanager
    def put_back_after(self) -> Iterator[None]:
        """Around something that changes the variables, and must not."""
        self._take()
        try:
            yield
        finally:
            self.put_back()


def define_copy(sources: Sequence[Any], targets: Sequence[Any]) -> Any:
    """Returns a graph function that gives variables the values that others had before."""

    @tf.function(autograph=False)
    def copy() -> None:
        values = [source.read_value() for source in sources]
        for value, target in zip(values, targets, strict=True):
            with tf.device(target.device):
                target.assign(value)

    return copy


class MovingStatistics:
    """The moving statistics of the batch normalisations among the layers of a run.

    Attributes:
        copies: what each replica had before the mean
    """

    def __init__(
        self, layers: list[keras.Layer], strategy: tf.distribute.Strategy, others: Sequence[Any]
    ) -> None:
        """``others`` may differ between replicas, too, and are not averaged.

        So do random generators: a replica that had no examples in a step has drawn less.
        """
        several = strategy.num_replicas_in_sync > 1
        self._statistics = find_moving_statistics(layers) if several else []
        both = {id(one): one for one in [*self._statistics, *others] if several}
        self.copies = ReplicaCopies(strategy, list(both.values()))

        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            values = [statistic.read_value() for statistic in self._statistics]
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, values)
            for statistic, mean in zip(self._statistics, means, strict=True):
                statistic.assign(mean)

        self._average = tf.function(lambda: strategy.run(on_replica), autograph=False)

    def average(self) -> None:
        """Gives each replica the mean over all replicas, on every process of a cluster."""
        if self._statistics:
            self._average()

    @contextlib.contextmanager
    def hold_averages(self) -> Iterator[None]:
        """Gives each replica the mean while something reads it, and then its own back."""
        with self.copies.put_back_after() if self.copies.own else contextlib.nullcontext():
            self.average()
            yield

    @property
    def own(self) -> tf.train.Checkpoint | None:
        """What this process's replicas had before the mean, to be saved; None if it is the same."""
        return tf.train.Checkpoint(own=self.copies.own) if self.copies.own else None


class WeightAverage:
    """An average for each weight: ``average = decay * average + (1 - decay) * weight``.

    It begins with the weights themselves. Its values and those of the weights are exchanged for an
    evaluation, so that whatever is evaluated need not know of it.

    Attributes:
        begin: begins anew with the present weights
        swap: exchanges averages and weights
    """

    def __init__(self, decay: float, weights: list[Any], strategy: tf.distribute.Strategy) -> None:
        """Makes the averages; called in the strategy's scope."""
        self._decay = decay
        self._weights = [unwrap(weight) for weight in weights]
        self._averages = [
            tf.Variable(keras.ops.convert_to_numpy(weight), trainable=False) for weight in weights
        ]
        local = strategy.experimental_local_results
        own = [part for average in self._averages for part in local(average)]
        here = [part for weight in self._weights for part in local(weight)]
        self.begin = define_copy(here, own)
        self.swap = define_copy([*here, *own], [*own, *here])

    def update(self) -> None:
        """Takes one step; runs in a graph, for each replica with its own values."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.assign(self._decay * average + (1 - self._decay) * weight)

    @contextlib.contextmanager
    def replace_weights(self) -> Iterator[None]:
        """Within, the weights have the averaged values."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
