"""A step taken again from the state before it, watched op by op, to find where a NaN arose.

Forward and backward pass are traced once more, a micro-batch at a time, together with the gradients
of all that lies between; then the update. origin.py follows what is not finite through that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.checks.examples import examples_in
from ctl_core.cluster.strategy import distribute
from ctl_core.debugging.origin import (
    INFINITE,
    NAN,
    Kind,
    Origin,
    origin_of,
    origin_of_gradient,
    seen_through,
)
from ctl_core.nested import named
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.run_state.tracking import tf_variable, variable_name
from ctl_core.state import State
from ctl_core.step import forward_backward, make_update

_LAYER = re.compile(r"ctl_layer\.(\d+)")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a replica of this process takes at once.

    Attributes:
        drawn: as the input has dealt it out
        batch: the same as hooks get it
        examples: how many it holds, or None where that is not known
        first: the index of the first of them in the global batch
    """

    drawn: Any
    batch: Any
    examples: int | None
    first: int


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found on this process.

    Attributes:
        origin: the op; None: what is bad has no origin in the graph
        layer: the path of the Keras layer that it is part of, or None
        variable: the name of the variable that it reads, which is not finite itself, or None
        part: the name of the part of the batch that it is, or None
        examples: their indices in the global batch; none if it does not depend on them
        only: whether these are known to be the ones, or all that the replica has
        largest: the largest absolute value that the op takes, and that of a gradient that it gets
    """

    origin: Origin
    layer: str | None
    variable: str | None
    part: str | None
    examples: list[int]
    only: bool
    largest: float


def pieces_of(state: State, batches: list[Any]) -> list[list[Piece]]:
    """Returns what a step has taken by local replica and micro-batch.

    Replicas get their shares in turn, process by process. Every process of a cluster must call it.

    Args:
        state: of the run
        batches: the micro-batches of one local replica after the other's
    """
    context, task, data = state.context, state.cluster.task, state.data
    steps, numbers = context.accumulate_steps, [_examples(state, batch) for batch in batches]
    places = [
        (i % steps * data.replicas + i // steps) * task.processes for i in range(len(batches))
    ]
    firsts = [(place + task.index) * context.micro_batch_size for place in places]
    drawn = list(batches)
    if data.counted is not None:  # a share without examples has a stand-in: any other does
        counts = np.array([number or 0 for number in numbers]).reshape(-1, steps)
        together = state.cluster.gather(counts.sum(0).tolist()).sum(0)
        there = next((batch for batch, n in zip(batches, numbers, strict=True) if n), batches[0])
        drawn = [
            (tf.constant([n or 0, together[i % steps]], tf.int64), batch if n else there)
            for i, (batch, n) in enumerate(zip(batches, numbers, strict=True))
        ]
    pieces = [Piece(*one) for one in zip(drawn, batches, numbers, firsts, strict=True)]
    return [pieces[i : i + steps] for i in range(0, len(pieces), steps)]


def _examples(state: State, batch: Any) -> int | None:
    try:
        number = examples_in(state.hooks.count_examples, batch)
    except Exception:  # it counts in a graph only: then no example is named
        return None
    return None if number is None else int(number)


class _Watched:
    """Tensors of a graph, and what each turned out to have when it ran."""

    def __init__(self) -> None:
        self._tensors: dict[int, tf.Tensor] = {}
        self._rows: list[int] = []
        self._kinds: dict[int, Kind] = {}
        self._largest: dict[int, float] = {}
        self._bad_rows: dict[int, np.ndarray] = {}

    def outputs(self, tensors: list[Any], sizes: set[int | None]) -> tuple[tf.Tensor, list[Any]]:
        """Returns what the graph has to return of tensors.

        Args:
            tensors: any; what holds no floating-point numbers is left out
            sizes: how many examples micro-batches have; where the first dimension of a tensor may
                be that, it is told row by row
        """
        found = {id(one): one for one in map(_values, tensors) if one.dtype.is_floating}
        self._tensors, self._rows = found, []
        flags, rows = [], []
        for tensor in found.values():
            with tf.device(tensor.device):
                nan, size = tf.math.is_nan(tensor), tf.abs(tensor)
                largest = tf.reduce_max(tf.where(nan, tf.zeros_like(size), size))
                nans = tf.cast(tf.reduce_any(nan), tf.float64)
                # Of an empty tensor, the largest is -infinity.
                flags.append(tf.stack([nans, tf.maximum(tf.cast(largest, tf.float64), 0.0)]))
                if tensor.shape.rank and tensor.shape[0] in {None, *sizes}:
                    bad = tf.logical_not(tf.math.is_finite(tensor))
                    rows.append(tf.reduce_any(bad, axis=list(range(1, tensor.shape.rank))))
                    self._rows.append(id(tensor))
        return tf.stack(flags), rows

    def take(self, outputs: tuple[tf.Tensor, list[Any]]) -> None:
        """Takes what the graph has returned."""
        flags = outputs[0].numpy()
        kinds = [NAN if nan else INFINITE if np.isinf(size) else "" for nan, size in flags]
        self._kinds = dict(zip(self._tensors, kinds, strict=True))
        self._largest = dict(zip(self._tensors, flags[:, 1].tolist(), strict=True))
        rows = [one.numpy() for one in outputs[1]]
        self._bad_rows = dict(zip(self._rows, rows, strict=True))

    def kind(self, tensor: Any) -> Kind:
        """Says what a tensor has: NaN, an infinity, or neither."""
        return self._kinds.get(id(_values(tensor)), "")

    def largest(self, tensors: Iterable[Any]) -> float:
        """Returns the largest absolute value in some tensors, without NaN."""
        return max((self._largest.get(id(_values(one)), 0.0) for one in tensors), default=0.0)

    def rows(self, tensors: Any, size: int | None) -> np.ndarray | None:
        """Returns the rows of the first of the tensors that are not finite, if it has so many."""
        for tensor in tensors:
            rows = self._bad_rows.get(id(_values(tensor)))
            if rows is not None and len(rows) == size and rows.any():
                return np.flatnonzero(rows)
        return None


def _values(tensor: Any) -> tf.Tensor:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


@dataclasses.dataclass
class _Seen:
    """What ``forward_backward`` has shown of one replica."""

    forward: list[tf.Tensor] = dataclasses.field(default_factory=list)
    between: dict[str, dict[int, Any]] = dataclasses.field(default_factory=dict)
    loss: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: dict[str, list[Any]] = dataclasses.field(default_factory=dict)


class Replay:
    """Takes steps again; what it has traced once, it keeps.

    Attributes:
        pieces: the batch of the step, by local replica and micro-batch
    """

    def __init__(self, state: State, written: list[Any]) -> None:
        """``written`` is what a step writes to."""
        self._state = state
        self._written = written
        self._copies = ReplicaCopies(state.strategy, written)
        self._traced: dict[Any, Any] = {}
        self.pieces: list[list[Piece]] = []

    def find(self, step: int, pieces: list[list[Piece]], frozen: int) -> Finding | None:
        """Takes a step again in which something was not finite; the state is that before it.

        Every process of a cluster makes the same graph calls, whatever it finds.

        Args:
            step: its number
            pieces: its batch, by local replica and micro-batch
            frozen: the state of frozen layers as a number

        Returns:
            What was found first: in the forward or backward pass of a turn, or in its update. None
            if all is finite but, perhaps, the weights after it.
        """
        state, context = self._state, self._state.context
        number, self.pieces = tf.constant(step, tf.int64), pieces
        if context.rate_schedule is not None:
            context.rate_schedule.apply(number)
        found: Finding | None = None
        for _ in context.each_turn():
            key = (frozen, context.turn)
            with self._copies.put_back_after():
                passes = [self._pass(number, index, key) for index in range(len(pieces[0]))]
            update = self._update(number, key)
            found = _together([one for one in passes if one is not None]) or update
            if state.cluster.gather([found is not None]).any():
                break
        context.turn = None
        return found

    def _pass(self, step: tf.Tensor, index: int, key: tuple[int, int | None]) -> Finding | None:
        """Takes the forward and backward pass of the micro-batch of an index."""
        drawn = [several[index].drawn for several in self.pieces]
        flat = tf.nest.flatten(drawn, expand_composites=True)
        key = ("pass", key, tuple((one.dtype, tuple(one.shape)) for one in flat))  # type: ignore[assignment]
        if key not in self._traced:
            self._traced[key] = self._trace_pass(drawn)
        function, watched, seen, parts = self._traced[key]
        watched.take(function(step, flat))
        found = []
        for replica, one in enumerate(seen):
            for name, loss in one.loss.items():
                bad = next(filter(watched.kind, [loss, *one.gradients[name]]), None)
                if bad is None:
                    continue
                origin = None
                if bad is not loss:
                    origin = origin_of_gradient(one.forward, one.between[name], watched.kind)
                    origin = origin and seen_through(origin, watched.kind, watched.largest)
                # An op of TensorFlow's own between gradients is named where nothing else is.
                origin = origin or origin_of(_values(bad), watched.kind, watched.largest)
                place = replica, index
                found.append(self._finding(origin, watched, place, parts, function.graph))
        return _together(found)

    def _trace_pass(self, drawn: list[Any]) -> tuple[Any, ...]:
        state, context, watched = self._state, self._state.context, _Watched()
        seen = [_Seen() for _ in drawn]
        sizes = {several[0].examples for several in self.pieces}
        parts: dict[str, tuple[int, str]] = {}
        specs = tf.nest.map_structure(
            tf.type_spec_from_value, tf.nest.flatten(drawn, expand_composites=True)
        )

        def own() -> _Seen:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return seen[int(tf.get_static_value(replica)) % len(seen)]

        def look(tape: tf.GradientTape, scaled: dict[str, tf.Tensor]) -> None:
            operations = tf.compat.v1.get_default_graph().get_operations()
            outputs = [one for op in operations for one in op.outputs]
            own().forward = forward = [one for one in outputs if one.dtype.is_floating]
            for name, objective in scaled.items():
                gradients = zip(forward, tape.gradient(objective, forward), strict=True)
                own().between[name] = {id(t): g for t, g in gradients if g is not None}

        def contribute(batch: Any) -> None:
            returned = forward_backward(context, batch, frozenset())
            own().loss, own().gradients = returned["loss"], returned["gradients"]

        def on_replica(batch: Any) -> Any:
            return (context.shares.counted(counted) if context.shares else counted)(batch)

        def counted(batch: Any) -> dict[str, Any]:
            contribute(batch)
            return {}

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64), specs])
        def one_pass(step: tf.Tensor, flat: list[tf.Tensor]) -> Any:
            values = tf.nest.pack_sequence_as(drawn, flat, expand_composites=True)
            parts.update(_part_names(values, context.shares is not None))
            with context.taking_step(step), _layers_named(state.found.layers):
                state.strategy.run(on_replica, (distribute(state.strategy, values),))
            tensors = [one for own in seen for one in own.forward]
            for one in seen:
                tensors += [g for several in one.between.values() for g in several.values()]
                tensors += [*one.loss.values(), *itertools.chain(*one.gradients.values())]
            return watched.outputs(tensors, sizes)

        context.look = look
        try:
            return _concrete(one_pass), watched, seen, parts
        finally:
            context.look = None

    def _update(self, step: tf.Tensor, key: tuple[int, int | None]) -> Finding | None:
        """Makes the update, all of it as in the step."""
        drawn = [[piece.drawn for piece in several] for several in self.pieces]
        flat = tf.nest.flatten(drawn, expand_composites=True)
        key = ("update", key, tuple((one.dtype, tuple(one.shape)) for one in flat))  # type: ignore[assignment]
        if key not in self._traced:
            self._traced[key] = self._trace_update(drawn)
        function, watched, sinks = self._traced[key]
        watched.take(function(step, flat))
        for sink in sinks:
            if watched.kind(sink):
                origin = origin_of(_values(sink), watched.kind, watched.largest)
                return self._finding(origin, watched, (0, 0), {}, function.graph)
        return None

    def _trace_update(self, drawn: list[list[Any]]) -> tuple[Any, ...]:
        state, watched = self._state, _Watched()
        sinks: list[Any] = []
        fetches = frozenset({"gradients", "update_gradients"})
        specs = tf.nest.map_structure(
            tf.type_spec_from_value, tf.nest.flatten(drawn, expand_composites=True)
        )

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64), specs])
        def update(step: tf.Tensor, flat: list[tf.Tensor]) -> Any:
            values = tf.nest.pack_sequence_as(drawn, flat, expand_composites=True)

            def draw(index: Any = 0) -> Any:
                return distribute(state.strategy, [_chosen(several, index) for several in values])

            with state.context.taking_step(step), _layers_named(state.found.layers):
                found = make_update(state.context, state.strategy, draw, fetches, step)
            results = state.strategy.experimental_local_results
            for name in sorted(fetches):  # the gradients before what update_pre makes of them
                sinks.extend(results(one)[0] for one in tf.nest.flatten(found[name]))
            operations = tf.compat.v1.get_default_graph().get_operations()
            return watched.outputs([one for op in operations for one in op.outputs], set())

        return _concrete(update), watched, sinks

    def _finding(
        self, origin: Origin, watched: _Watched, place: tuple[int, int], parts: Any, graph: Any
    ) -> Finding:
        """Says what is known of an origin that a replica has come to; ``place``: it, its piece."""
        number = _LAYER.findall(origin.op.name)
        layer = self._state.found.layers[int(number[-1])] if number else None
        replicas, (replica, index) = _replicas(origin.op, parts), place
        if len(replicas) == 1:  # another one's, which an exchange in the forward pass has brought
            (replica,) = replicas
        piece = self.pieces[replica][index]
        rows = watched.rows(origin.way, piece.examples)
        examples = range(piece.examples or 0) if replicas else range(0)
        return Finding(
            origin,
            None if layer is None else layer.path,
            self._variable(origin.op, graph) if origin.op.type in _READS else None,
            parts.get(origin.op.name, (0, None))[1],
            [piece.first + int(row) for row in (examples if rows is None else rows)],
            rows is not None,
            watched.largest([*origin.op.inputs, *origin.way[-1:] * origin.backward]),
        )

    def _variable(self, op: tf.Operation, graph: Any) -> str | None:
        handles = {inner.name: id(outer) for outer, inner in graph.captures}
        results = self._state.strategy.experimental_local_results
        for variable in self._state.found.variables.values():
            own = [id(p.handle) for p in results(tf_variable(variable)) if hasattr(p, "handle")]
            if handles.get(op.inputs[0].name) in own:
                return variable_name(variable)
        return None


def _concrete(function: Any) -> Any:
    """Traces a function, and what tf.functions of the user's it calls op by op, if that works.

    They are called as plain Python then, which cannot be where they need AutoGraph.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        return function.get_concrete_function()
    except Exception:
        tf.config.run_functions_eagerly(before)
        return function.get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(before)


def _replicas(op: tf.Operation, parts: Mapping[str, tuple[int, str]]) -> set[int]:
    """Returns of which replicas' batches an op's output is worked out."""
    todo, seen, found = [op], {op.name}, set()
    while todo:
        if (one := todo.pop()).name in parts:
            found.add(parts[one.name][0])
        before = {tensor.op.name: tensor.op for tensor in one.inputs}
        todo += [before[name] for name in before.keys() - seen]
        seen |= before.keys()
    return found


def _together(found: list[Finding]) -> Finding | None:
    """Returns the first finding, with the examples of all that are of the same op."""
    if not found:
        return None
    first = found[0]
    same = [one for one in found if one.only == first.only]
    examples = sorted({number for one in same for number in one.examples})
    return dataclasses.replace(first, examples=examples)


def _chosen(several: list[Any], index: Any) -> Any:
    """Returns the micro-batch of an index, which a graph may work out."""
    if isinstance(index, int):
        return several[index]
    branches = [functools.partial(tf.nest.map_structure, tf.identity, one) for one in several]
    return tf.switch_case(index, branches)


def _part_names(values: list[Any], counted: bool) -> dict[str, tuple[int, str]]:
    """Names the placeholders of batches: of which local replica, and which part of its batch."""
    found = {}
    for replica, value in enumerate(values):
        for name, part in named(value[1] if counted else value, "batch", "batch").items():
            for tensor in tf.nest.flatten(part, expand_composites=True):
                found[tensor.op.name] = (replica, name)
    return found


@contextlib.contextmanager
def _layers_named(layers: list[keras.Layer]) -> Iterator[None]:
    """Within, the names of ops say which of the Keras layers made them."""

    def naming(call: Callable[..., Any], index: int) -> Callable[..., Any]:
        @functools.wraps(call)
        def named_call(*args: Any, **kwargs: Any) -> Any:
            with tf.name_scope(f"ctl_layer.{index}"):
                return call(*args, **kwargs)

        return named_call

    before = [vars(layer).get("call") for layer in layers]
    for index, layer in enumerate(layers):
        vars(layer)["call"] = naming(layer.call, index)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del vars(layer)["call"]
            else:
                vars(layer)["call"] = own
