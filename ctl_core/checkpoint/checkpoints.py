"""Checkpoints: the user's part, the engine's part beside it, and a record that makes it count.

A checkpoint of step 300 is, in runs/NAME/ckpt:

    ckpt-300.index, .data-*             what ``create_ckpt`` names
    engine/ckpt-300.index, .data-*      every other variable that the hooks have created, and what
                                        preprocessing layers have learnt
    engine/input-300.index, .data-*     the position in the training data
    engine/statistics-300-0.index, ...  what each of its replicas has for itself: random generators,
                                        sums, and batch normalisations before their mean
    engine/ckpt-300.json                the record, written last: without it, nothing counts
    best/                               the same files of the checkpoint that ``keep_best`` keeps

so that a process killed at any moment leaves either a whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from ctl_core.checkpoint.divergence import Divergence
from ctl_core.checkpoint.position import UNREADABLE, InputPosition
from ctl_core.checkpoint.record import (
    Damaged,
    Record,
    find_user_part,
    keep_best,
    read_record,
    remove_leftovers,
    saved_steps,
)
from ctl_core.checkpoint.sources import Source
from ctl_core.checkpoint.vocabularies import Vocabularies
from ctl_core.checkpoint.writer import Writer, all_write
from ctl_core.compat import graphs_called, max_to_keep, written_resources
from ctl_core.hooks.recording import list_freezable, read_flags, set_flags
from ctl_core.model.state import Progress, State, check_hook_state
from ctl_core.numerics.replicas import MovingStatistics, ReplicaCopies
from ctl_core.numerics.variables import is_summed, plain_variable
from ctl_core.run.console import Console
from ctl_core.run.errors import RunError, SetupError, brief
from ctl_core.run.files import from_here

_WRITING_TABLES = ("LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2")
# The hooks whose variables a resumed run cannot do without; others may change between two starts.
_NEEDED = ("create_model/", "create_loss/", "create_opt/", "create_eval_model/")


class CheckpointFacade:
    """The ``ckpt`` of hooks: what ``create_ckpt`` returned, but restoring it leaves step and data.

    Attributes:
        go_back: is called with the original's function that restores, and its arguments
    """

    def __init__(self, original: tf.train.Checkpoint, go_back: Callable[..., Any]) -> None:
        self._original, self._go_back = original, go_back

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._original, name)
        return functools.partial(self._go_back, found) if name in ("restore", "read") else found


class ManagerFacade:
    """The ``manager`` of hooks: ``save`` saves once the hooks of the step have run.

    A checkpoint taken between two hooks of a step would miss what the second one changes.
    """

    def __init__(
        self,
        original: tf.train.CheckpointManager,
        ckpt: CheckpointFacade,
        request: Callable[[], str],
    ) -> None:
        self._original, self._ckpt, self._request = original, ckpt, request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @property
    def max_to_keep(self) -> int | None:
        """How many are kept; None: all."""
        return max_to_keep(self._original)

    def restore(self, path: str | None = None) -> Any:
        """Restores a checkpoint, by default the newest, as ``ckpt.restore`` does."""
        return self._ckpt.restore(path or self.latest_checkpoint)

    def save(self, *_: Any, **__: Any) -> str:
        """Asks for a checkpoint of this step; returns its path."""
        return self._request()


class Checkpoints:
    """Saves and restores a run.

    Attributes:
        ckpt, manager: as hooks are given them
        statistics: what each replica has for itself
        saved_step: the step of the last checkpoint, or -1
        save_requested: whether a hook has called ``manager.save``
    """

    def __init__(self, state: State, console: Console) -> None:
        self.ckpt = CheckpointFacade(state.ckpt, self._go_back)
        self.manager = ManagerFacade(state.manager, self.ckpt, self._request)
        self.saved_step, self.save_requested, self._is_writing = -1, False, False
        self._state, self._console, self._cluster = state, console, state.cluster
        self._folder = Path(state.manager.directory)
        recording, variables = state.recording, state.recording.variables
        held = map(plain_variable, tf.train.TrackableView(state.ckpt).descendants())
        self._held = [part for part in held if isinstance(part, tf.Variable)]
        # What an evaluation sums up begins anew each time.
        passing = state.evaluation.passing_variables() if state.evaluation is not None else []
        left_out = {id(variable) for variable in (*self._held, *passing)}
        self._created = {n: v for n, v in variables.items() if id(v) not in left_out}
        self._vocabularies = Vocabularies(recording.layers, state.hooks)
        self._engine_part = tf.train.Checkpoint(
            created=self._created, learnt=self._vocabularies.text
        )
        own = [v for name, v in variables.items() if "/StateVar" in name]
        sums = filter(is_summed, (*self._created.values(), *self._held))
        self.statistics = MovingStatistics(
            recording.layers, state.strategy, [*recording.generators, *own, *sums]
        )
        self._divergence = Divergence(state.strategy, state.cluster, variables.values())
        self._position = InputPosition(state, console)
        self._writer = Writer(state, self._engine_part)

    def check_written(self, graph: Any) -> None:
        """Refuses a step that writes what no checkpoint holds, or what replicas share.

        Raises:
            SetupError: it does.
        """
        local, iterator = self._state.strategy.experimental_local_results, self._state.data.iterator

        def find_handles(variables: Iterable[Any]) -> set[int]:
            parts = [part for variable in variables for part in local(variable)]
            return {id(part.handle) for part in parts if hasattr(part, "handle")}

        recorded = self._state.recording.variables
        of_units = getattr(iterator, "variables", ())
        handles = find_handles([*recorded.values(), *self._held, *of_units])
        if self._state.strategy.num_replicas_in_sync > 1:
            shared = [v for name, v in recorded.items() if name.startswith("elsewhere")]
            handles -= find_handles(shared)
        written = set(map(id, written_resources(graph)))
        for variable in graph.variables:
            if id(variable.handle) in written - handles:
                raise SetupError(
                    f"the step writes {variable.name.split(':')[0]}, which was made outside of the "
                    "hooks, so that no checkpoint would hold it, or replicas share it; make it in "
                    "create_model."
                )
        named = tf.train.TrackableView(self._state.ckpt).descendants()
        tables = {id(getattr(part, "resource_handle", None)) for part in named}
        if any(id(table) not in tables for table in find_written_tables(graph)):
            raise SetupError(
                "the step writes a lookup table, which no checkpoint would hold; return it from "
                "create_ckpt."
            )

    def _request(self) -> str:
        self.save_requested = True
        return str(self._folder / f"ckpt-{self._state.step}")

    def _go_back(self, restore: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        """Restores what a hook asks for: weights and optimizer go back, step and data do not.

        Of a run's checkpoint, also what the user's part leaves out is restored; each replica then
        goes on with its random numbers.
        """
        self._writer.background.wait()
        state = self._state
        kept = [state.parts.step_variable, *state.recording.generators]
        with ReplicaCopies(state.strategy, kept).put_back_after():
            status = restore(path, *args, **options)
            if number := re.search(r"-(\d+)$", str(path)):
                part = Path(path).parent / "engine" / f"ckpt-{number[1]}"
                if part.with_suffix(".index").exists():
                    self._engine_part.read(str(part)).expect_partial()
        return status

    # ---- Saving ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Saves after the current step, unless that is done and no hook has requested it since.

        Raises:
            RunError: the files cannot be written, or the replicas have diverged; earlier
                checkpoints stay good.
            PeerLost: another process is gone.
        """
        step = self._state.step
        requested, self.save_requested = self.save_requested, False
        if self.saved_step == step and not requested:
            return
        check_hook_state(self._state.hook_state, "a host hook")
        if late := self._state.recording.find_late():
            raise RunError(
                f"{late} while training, which no checkpoint would bring back; make it in "
                "create_model, or keep numbers in state."
            )
        scale = self._state.parts.loss_scale
        if scale is not None and (complaint := scale.complaint()):
            self._console.warn(complaint)
        self.wait()
        with self.statistics.averaged():
            self._divergence.check(step)
            self._save(step)
        self.saved_step, self._is_writing = step, True

    def _save(self, step: int) -> None:
        state, engine, chief = self._state, self._folder / "engine", self._cluster.task.chief
        with all_write(state, step):
            engine.mkdir(parents=True, exist_ok=True)
            if chief:  # while its parts are replaced, it must not count
                (engine / f"ckpt-{step}.json").unlink(missing_ok=True)
        with all_write(state, step):
            # All processes read the same global batches, so that one position is that of all.
            input_saved = not chief or self._position.save(engine / f"input-{step}")
            if own := self.statistics.own:
                own.write(str(self._own_part(step)))
        record = Record(
            step=step,
            input=self._position.describe(),
            input_saved=self._cluster.all(input_saved),
            replicas=state.parts.shape.replicas,
            learning_rate=state.config.learning_rate,
            frozen=read_flags(state.recording),
            created=list(self._created),
            progress=dataclasses.asdict(state.progress),  # copies: hooks go on meanwhile
        )
        self._vocabularies.fill()
        with all_write(state, step):
            self._writer.write(record)

    def _own_part(self, step: int) -> Path:
        """Returns the prefix of the part that each process writes for itself."""
        return self._folder / "engine" / f"statistics-{step}-{self._cluster.task.index}"

    def wait(self) -> None:
        """Waits until what is written in the background is on the disk.

        Raises:
            RunError: it could not be written; earlier checkpoints stay good.
            PeerLost: another process is gone.
        """
        if self._is_writing:
            self._is_writing = False
            with all_write(self._state, self.saved_step):
                self._writer.background.wait()

    def close(self) -> None:
        """Lets what is written in the background come to its end, well or not."""
        with contextlib.suppress(Exception):  # the run has its own failure to tell
            self._writer.background.wait()

    # ---- Restoring -------------------------------------------------------------------------------

    def restore(
        self, step: int | Literal["best"] | None = None, with_input: bool = True
    ) -> Record | None:
        """Restores the newest whole checkpoint, or that of ``step``.

        Args:
            step: the checkpoint to take, or the one that ``keep_best`` keeps; default: the newest
            with_input: whether training goes on from here, so that the data must, too; otherwise
                the weights are averaged with ``ema``

        Returns:
            Its record; None if there is no checkpoint at all.

        Raises:
            SetupError: there are checkpoints but none is whole, the one asked for is not there,
                or it does not fit the model any more.
        """
        folder, shown, chief = self._folder, from_here(self._folder), self._cluster.task.chief
        if with_input and chief:
            remove_leftovers(folder)  # not while another process may be training
        steps = saved_steps(folder)
        if not self._cluster.has_same(repr(steps).encode()):
            raise SetupError(
                f"runs_dir: {shown} has other checkpoints on another process of the cluster; all "
                "of them need one folder, on a file system that they share."
            )
        if step is not None:
            source = Source("checkpoint", folder.parent, step)
            folder, steps = source.folder, [source.find_step()]
        for number in steps:
            record = self._restore_one(folder, number, with_input)
            if record is not None:
                if with_input and chief:
                    keep_best(folder, record)  # a process was killed before it could
                return record
        if steps:
            raise SetupError(
                f"{shown}: there are checkpoints, but none of them is whole; to start over, "
                "choose another run_name or remove the folder."
            )
        return None

    def _restore_one(self, folder: Path, step: int, with_input: bool) -> Record | None:
        """Restores one checkpoint; if it is damaged, warns and returns None."""
        record, why, state = None, "another process cannot read it", self._state
        try:
            record = self._read(folder, step)
        except Damaged as error:
            why = str(error)
        except UNREADABLE as error:
            why = brief(error, 160)
        if not self._cluster.all(record is not None) or record is None:
            self._console.warn(
                f"the checkpoint of step {step} is damaged ({why}); using the one before."
            )
            return None
        state.progress = Progress.from_json(record.progress)
        if with_input:
            self._position.restore(record, folder / "engine" / f"input-{step}")
        if (average := state.average) is not None:
            if not any(name.startswith("ema/") for name in record.created):
                average.begin()
            if not with_input:
                average.swap()
        if not set_flags(list_freezable(state.recording), record.frozen):
            self._console.warn(
                "what was frozen in the checkpoint is of other layers than the model has now; "
                "what is frozen is as create_model left it."
            )
        self.saved_step = step
        return record

    def _read(self, folder: Path, step: int) -> Record:
        """Reads the record and all variables.

        Raises:
            Damaged: a file is gone, or of another step; or what TensorFlow raises, UNREADABLE.
            SetupError: the checkpoint does not fit the model.
        """
        record, user_part = read_record(folder, step), find_user_part(folder, step)
        needed = [name for name in self._created if name.startswith(_NEEDED)]
        try:
            if new := [name for name in needed if name not in record.created]:
                raise ValueError(f"{', '.join(new[:5])} is new.")
            self._state.ckpt.restore(str(user_part)).expect_partial().assert_consumed()
            self._engine_part.read(str(folder / "engine" / f"ckpt-{step}")).expect_partial()
        except (ValueError, AssertionError) as error:
            raise SetupError(
                f"the checkpoint {from_here(user_part)} does not fit the model any more: "
                f"{brief(error)} Undo the change, or choose another run_name."
            ) from error
        if self._state.step != step:
            raise Damaged(f"its files are of step {self._state.step}")
        self._vocabularies.put_back(self._console)
        for layer in self._state.recording.layers:
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # it computes with constants made of its variables
        return record

    def restore_own(self, record: Record) -> None:
        """Gives the replicas their own values again; others than before go on with the mean."""
        own = self.statistics.own
        same = record.replicas == self._state.parts.shape.replicas
        if own and same and record.created == list(self._created):
            # Without them, the mean differs by the order of sums only.
            with contextlib.suppress(*UNREADABLE):
                own.read(str(self._own_part(record.step)))
                self.statistics.put_back()


def find_written_tables(graph: Any) -> list[Any]:
    """Returns the handles of the lookup tables outside of a graph that it writes."""

    def find(graph: Any) -> set[str]:
        written = set()
        for op in graph.get_operations():
            if op.type in _WRITING_TABLES:
                written.add(op.inputs[0].name)
            for called in graphs_called(op):
                inside, inputs = find(called), op.inputs[len(op.inputs) - len(called.inputs) :]
                pairs = zip(inputs, called.inputs, strict=True)
                written |= {outer.name for outer, inner in pairs if inner.name in inside}
        return written

    written = find(graph)
    return [outer for outer, inner in graph.captures if inner.name in written]
