"""A replica's share of a step where the last batch of a pass is kept: what it counts for.

The loss of a step is the mean over the examples that it has, however many: a replica weighs as much
as it has examples. One that has none works on a stand-in, so that all replicas make the same
exchanges, and nothing of that counts: its weight is 0, in what is exchanged it is left out, metrics
stay as they are, and so does what the forward pass writes to. How the data are dealt out is
last_batch.py's part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.errors import SetupError
from ctl_core.numerics.batch_norm import moving_statistics
from ctl_core.run_state.tracking import Found, tf_variable


@dataclasses.dataclass(frozen=True)
class _Share:
    """That of the replica which is traced.

    Attributes:
        examples: how many it has, an int64 scalar
        there: whether that is any, a bool scalar; None where each replica has some always
    """

    examples: tf.Tensor
    there: tf.Tensor | None


# Each replica is traced in a thread of its own, and waits for the others where they exchange.
_tracing = threading.local()


def weight_of_share(weight: tf.Tensor | None) -> tf.Tensor | None:
    """Returns what a replica's batch weighs: its examples, if nothing else; a stand-in nothing."""
    share: _Share | None = getattr(_tracing, "share", None)
    if share is None:
        return weight
    return of_share(tf.cast(share.examples, tf.float32) if weight is None else weight)


def of_share(value: tf.Tensor) -> tf.Tensor:
    """Returns a value that is worked out of a replica's batch; of a stand-in, 0."""
    share: _Share | None = getattr(_tracing, "share", None)
    if share is None or share.there is None:
        return value
    return tf.where(share.there, value, tf.zeros_like(value))


def if_counted(function: Callable[[], Any]) -> None:
    """Calls a function that changes something, but for a stand-in."""
    share: _Share | None = getattr(_tracing, "share", None)
    if share is None or share.there is None:
        function()
    else:

        def counted() -> None:
            function()  # whatever it returns: the other branch returns nothing

        tf.cond(share.there, counted, lambda: None)


class Shares:
    """What a step does with its shares.

    Attributes:
        own: what each replica writes to by its own examples or random numbers alone, so that
            replicas may come to differ; known once ``look_at`` was called
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, most: int, several: bool, processes: int
    ) -> None:
        """Takes what is known of the replicas.

        Args:
            strategy: of the replicas
            most: examples in a micro-batch of full size, over all replicas
            several: whether a step has several shares, so that some may be without examples
            processes: how many train together
        """
        self._strategy, self._most = strategy, most
        self._several, self._processes = several, processes
        self._statistics: dict[int, float] = {}
        self._alike: list[Any] = []
        self.own: list[Any] = []

    def look_at(self, writes: Iterable[Any], found: Found) -> None:
        """Takes what the forward pass writes to, before the first step is traced.

        Args:
            writes: what ``forward_writes`` returned
            found: the variables, layers and generators of the run
        """
        results = self._strategy.experimental_local_results
        for layer in found.layers:
            for statistic in moving_statistics([layer]):
                assert isinstance(layer, keras.layers.BatchNormalization)
                self._statistics[id(statistic)] = 1.0 / max(1.0 - layer.momentum, 1e-6)
        generators = {*map(id, found.generators)}
        generators |= {
            id(tf_variable(v))
            for v in found.variables.values()
            if isinstance(v, tf.random.Generator)
        }
        variables = [*map(tf_variable, found.variables.values()), *found.generators]
        for variable in {id(v): v for v in variables if isinstance(v, tf.Variable)}.values():
            handles = {id(p.handle) for p in results(variable) if isinstance(p, tf.Variable)}
            to_it = [write for write in writes if id(write.handle) in handles]
            if not to_it:
                continue
            by_itself = id(variable) in generators or any(write.differs for write in to_it)
            (self.own if by_itself else self._alike).append(variable)

    def counted(self, function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
        """Makes of a function of one replica's batch one of what ``Input.next_batch`` draws."""

        def on_share(drawn: Any) -> dict[str, Any]:
            (examples, together), batch = tf.unstack(drawn[0]), drawn[1]
            if not self._several:
                with _set(_Share(examples, None)):
                    return function(batch)
            there = examples > 0
            # Where nobody has examples, what is exchanged is of all stand-ins: that is no 0 / 0.
            with (
                self._kept(examples, together),
                self._exchanged(there | (together == 0)),
                _set(_Share(examples, there)),
            ):
                returned = function(batch)
            for name in {"output", "batch"} & {*returned}:
                returned[name] = tf.nest.map_structure(
                    lambda part: _first_rows(part, there), returned[name]
                )
            return returned

        return on_share

    @contextlib.contextmanager
    def _kept(self, examples: tf.Tensor, together: tf.Tensor) -> Iterator[None]:
        """Leaves what is written within as it was, as far as the examples call for that.

        What a replica writes by itself stays if it has no examples, and what all write alike, such
        as the statistics of a synchronized batch normalisation, if nobody has. Moving statistics
        that are not synchronized are averaged over the replicas: there, each replica's examples
        have the same part, by taking a longer step where it has more of them than the others. With
        r of R examples on one of N replicas, that step is N r / R times as long, at most as far as
        to the statistics of the batch.
        """
        replicas = self._strategy.num_replicas_in_sync

        def parts(variables: list[Any]) -> list[tuple[Any, Any, tf.Tensor]]:
            results = self._strategy.experimental_local_results
            own = [next(p for p in results(v) if p.handle is v.handle) for v in variables]
            return [(v, p, p.read_value()) for v, p in zip(variables, own, strict=True)]

        own, alike = parts(self.own), parts(self._alike)
        yield
        if not (own or alike):
            return

        def put_back() -> None:
            ratio = tf.math.divide_no_nan(
                tf.cast(replicas * examples, tf.float32), tf.cast(together, tf.float32)
            )
            for variable, part, before in own:
                after = part.read_value()
                if (furthest := self._statistics.get(id(variable))) is None:
                    part.assign(tf.where(examples > 0, after, before))
                else:
                    step = tf.cast(tf.minimum(ratio, furthest), after.dtype)
                    part.assign(before + step * (after - before))
            for _, part, before in alike:
                part.assign(tf.where(together > 0, part.read_value(), before))

        tf.cond(together == self._most, lambda: None, put_back)

    @contextlib.contextmanager
    def _exchanged(self, counts: tf.Tensor) -> Iterator[None]:
        """Leaves this replica out of what replicas exchange within, unless it counts."""
        context = tf.distribute.get_replica_context()
        all_reduce, all_gather = context.all_reduce, context.all_gather

        def masked(part: Any) -> Any:
            if isinstance(part, tf.IndexedSlices):
                return tf.IndexedSlices(masked(part.values), part.indices, part.dense_shape)
            return tf.where(counts, part, tf.zeros_like(part))

        def reduce(op: Any, value: Any, options: Any = None) -> Any:
            value = tf.nest.map_structure(masked, value)
            if op not in (tf.distribute.ReduceOp.MEAN, "MEAN", "mean"):
                return all_reduce(op, value, options)
            total, number = all_reduce(
                tf.distribute.ReduceOp.SUM, (value, tf.cast(counts, tf.float32)), options
            )
            return tf.nest.map_structure(
                lambda part: tf.math.scalar_mul(tf.cast(1.0 / number, part.dtype), part), total
            )

        def gather(value: Any, axis: int, options: Any = None) -> Any:
            if self._processes > 1:
                raise SetupError(
                    "last_batch: with keep, replicas may have batches of different sizes, which "
                    "all_gather cannot join between processes; leave it at drop."
                )
            value = tf.nest.map_structure(lambda part: _first_rows(part, counts, axis), value)
            return all_gather(value, axis, options)

        context.all_reduce, context.all_gather = reduce, gather
        try:
            yield
        finally:
            del context.all_reduce, context.all_gather


@contextlib.contextmanager
def _set(share: _Share) -> Iterator[None]:
    _tracing.share = share
    try:
        yield
    finally:
        _tracing.share = None


def _first_rows(part: Any, there: tf.Tensor, axis: int = 0) -> Any:
    """Returns a tensor, dense, ragged or sparse, with all of its rows or with none."""
    if not isinstance(part, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) or not part.shape.rank:
        return part
    if isinstance(part, tf.RaggedTensor):
        return part[: tf.where(there, part.nrows(), 0)]
    if isinstance(part, tf.SparseTensor):
        size = tf.where(there, part.dense_shape, tf.zeros_like(part.dense_shape))
        size = tf.concat([size[:1], part.dense_shape[1:]], 0)
        return tf.sparse.slice(part, tf.zeros_like(size), size)
    axis %= part.shape.rank
    shape = tf.unstack(tf.shape(part))
    shape[axis] = tf.where(there, shape[axis], 0)
    found = tf.slice(part, tf.zeros_like(shape), tf.stack(shape))
    sizes = part.shape.as_list()
    sizes[axis] = None
    return tf.ensure_shape(found, sizes)
