"""``detect_anomaly``: looks at each step whether it is finite, and finds out where it is not.

The look is a cheap one, at loss, gradients and weights. A step that is not finite is taken
again from the state before it (replay.py), which shows where that arose, and training ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.compat import iterator_handle
from ctl_core.debugging.looks import traced
from ctl_core.debugging.replay import Finding, Piece, Replay, pieces_of
from ctl_core.debugging.words import describe_finding, describe_update
from ctl_core.errors import RunError, reason
from ctl_core.files import from_here, written_whole
from ctl_core.nested import named
from ctl_core.numerics.precision import LEAST, all_finite
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.predict import gather_outputs
from ctl_core.run_state.remainder import own_variables
from ctl_core.run_state.tracking import (
    plain_variable,
    tf_variable,
    variable_name,
    written_variables,
)
from ctl_core.state import State

# What a step has to return to be looked at. Not the update, which shows in the weights: a graph
# that returns it rounds otherwise than one that does not.
LOOKED_AT = ("loss", "gradients")
# The variables whose values count; what metrics and others hold may be anything.
_ROOTS = ("train_model", "optimizer")


class Anomalies:
    """Looks at steps; of the first that is not finite, says where that arose.

    Costs a copy of what a step writes to, and a graph call that looks at it.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._graph: Any = None
        self._check: Any = None
        self._weights: list[Any] = []

    def before(self, graph: Any) -> None:
        """Keeps the state before a step of a graph."""
        if graph is not self._graph:
            self._graph = graph
            state, found = self._state, self._state.found.variables
            written, _ = written_variables(
                state.strategy,
                [*found.values(), *own_variables(state)],
                graph,
                but=iterator_handle(state.data.iterator),
            )
            ids = set(map(id, written))
            self._weights = [
                variable
                for path, variable in found.items()
                if path.split("/")[0] in _ROOTS and id(tf_variable(variable)) in ids
            ]
            self._before = ReplicaCopies(state.strategy, written)
            self._after = ReplicaCopies(state.strategy, written)
            self._replay = Replay(state, written)
            self._check = None
        self._before.take()

    def after(self, found: dict[str, Any], batches: Sequence[Any], frozen: int) -> None:
        """Looks at the step that was taken.

        Args:
            found: its loss and gradients
            batches: its micro-batches, of one local replica after the other
            frozen: the state of frozen layers as a number

        Raises:
            RunError: something is not finite; the message says where that arose.
        """
        cluster = self._state.cluster
        well = self._finite(tuple(found[name] for name in LOOKED_AT)).numpy()
        bad = cluster.gather([not one for one in well]).max(0).astype(bool)
        if not bad.any():
            return
        loss, gradients, weights = bad.tolist()
        step, scale = self._state.step, self._state.context.loss_scale
        weight = self._worst() if weights and not (loss or gradients) else None
        pieces = pieces_of(self._state, list(batches))
        if scale is not None and gradients and not (loss or weights):
            with self._after.put_back_after():
                self._before.put_back()
                scale.scale.assign(LEAST)
                finding = self._replay.find(step, pieces, frozen)
            if not cluster.gather([finding is not None]).any():
                return  # the scale was too large, as it is now and then
        else:
            self._before.put_back()
            finding = self._replay.find(step, pieces, frozen)
        said, somewhere = "", cluster.gather([finding is not None]).any()
        # What another process has sent in the forward pass arose there.
        own = finding is not None and not finding.origin.op.type.startswith("Collective")
        if cluster.gather([own]).any():
            finding = finding if own else None
        if finding is not None or (cluster.task.chief and not somewhere):
            file = self._keep(step, pieces, finding)
            if finding is not None:
                said = describe_finding(finding, self._state.hooks, file, self._state.data.pipeline)
            elif weight is not None:
                norm = float(tf.linalg.global_norm(tf.nest.flatten(found["gradients"])))
                rate = float(self._state.lr.variable.read_value())
                said = describe_update(*weight, norm, rate, self._state.hooks)
            else:
                said = (
                    f"{'the loss' if loss else 'a gradient'} is not "
                    f"finite, but all is when the step is taken again on its batch, which is in "
                    f"{file}: something random that no checkpoint holds has a part in it."
                )
        raise RunError(f"step {step}: {self._told(said)}")

    def _finite(self, values: tuple[Any, ...]) -> tf.Tensor:
        """Says of loss, gradients and weights whether they are finite, three bools."""
        results = self._state.strategy.experimental_local_results
        variables = [plain_variable(variable) for variable in self._weights]
        floating = [one for one in variables if one.dtype.is_floating]

        def finite(*values: Any) -> tf.Tensor:
            weights = [part.read_value() for one in floating for part in results(one)]
            return tf.stack([all_finite([one, tf.zeros([])]) for one in (*values, weights)])

        if self._check is None:
            self._check = traced(finite, values)
        return self._check(*values)  # type: ignore[no-any-return]

    def _worst(self) -> tuple[str, str] | None:
        """Returns the first variable that is not finite, and what it has."""
        results = self._state.strategy.experimental_local_results
        for variable in self._weights:
            for part in results(plain_variable(variable)):
                if part.dtype.is_floating and not np.isfinite(value := part.numpy()).all():
                    return variable_name(variable), "NaN" if np.isnan(value).any() else "infinity"
        return None

    def _keep(self, step: int, pieces: list[list[Piece]], finding: Finding | None) -> str:
        """Writes the part of the batch that this process has; returns the file for messages."""
        index = self._state.cluster.task.index
        name = f"anomaly-{step}.npz" if index == 0 else f"anomaly-{step}-worker-{index}.npz"
        path = Path(self._state.run_dir) / name
        try:
            own = sorted((one for row in pieces for one in row), key=lambda p: p.first)
            arrays = gather_outputs(named(piece.batch, "batch", "batch") for piece in own)
            numbers = [np.arange(p.first, p.first + (p.examples or 0)) for p in own]
            arrays["anomaly.examples"] = np.concatenate(numbers)
            found = [] if finding is None or not finding.only else finding.examples
            arrays["anomaly.found"] = np.array(found, np.int64)
            with written_whole(path) as beside, beside.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        except (OSError, RunError, tf.errors.OpError) as error:
            return f"no file ({reason(error)})"
        return from_here(path)

    def _told(self, said: str) -> str:
        """Returns what the first process says that has something to say."""
        cluster, most = self._state.cluster, 1024
        if cluster.task.processes == 1:
            return said
        table = cluster.gather(list(said.encode()[:most].ljust(most, b"\0")))
        texts = (bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in table)
        return next(filter(None, texts))
