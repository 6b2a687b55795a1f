"""Checkpoints: the user's part, the engine's part beside it, and a record that makes it count.

A checkpoint of step 300 is, in runs/NAME/ckpt:

    ckpt-300.index, .data-*             what ``create_ckpt`` names
    engine/ckpt-300.index, .data-*      every other variable that the hooks have created
    engine/input-300.index, .data-*     the position in the training data
    engine/statistics-300-0.index, ...  what each of its replicas has for itself: random generators,
                                        sums, and batch normalisations before their mean
    engine/ckpt-300.json                the record: progress, what layers have learnt, ...; written
                                        last: without it, nothing counts
    best/                               the same files of the checkpoint that ``keep_best`` keeps

so that a process killed at any moment leaves either a whole checkpoint or none.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checkpoint.position import UNREADABLE, InputPosition
from ctl_core.checkpoint.record import Damaged, Record, find_user_part, keep_best, read_record
from ctl_core.checkpoint.source import Source
from ctl_core.checkpoint.vocabularies import Vocabularies
from ctl_core.checkpoint.writer import Divergence, Writer, write_together
from ctl_core.compat import add_called_ops, find_written_resources, read_max_to_keep
from ctl_core.hooks.recording import find_tables, list_freezable, read_flags, set_flags
from ctl_core.model.state import Progress, State
from ctl_core.numerics.randomness import fold_in_replica_id
from ctl_core.numerics.replicas import MovingStatistics, ReplicaCopies
from ctl_core.numerics.variables import is_summed, unwrap
from ctl_core.run.console import Console
from ctl_core.run.errors import RunError, SetupError, format_error
from ctl_core.run.files import relative_path

_WRITING_TABLES = {"LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2"}
# The hooks whose variables a resumed run cannot do without; others may change between two starts.
_NEEDED = ("create_model/", "create_loss/", "create_opt/", "create_eval_model/")


class Facade:
    """What hooks get of what ``create_ckpt`` returned: it, with some attributes that are others."""

    def __init__(self, original: Any, **others: Any) -> None:
        self._original = original
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Checkpoints:
    """Saves and restores a run.

    Attributes:
        ckpt, manager: as hooks are given them: to restore leaves step and data, and ``save`` saves
            once the hooks of the step have run, the last of which may change something
        statistics: what each replica has for itself
        saved_step: the step of the last checkpoint, or -1
        save_requested: whether a hook has called ``manager.save``
    """

    def __init__(self, state: State, console: Console) -> None:
        ckpt, manager, recording = state.ckpt, state.manager, state.recording
        self.ckpt = Facade(
            ckpt,
            restore=functools.partial(self._go_back, ckpt.restore),
            read=functools.partial(self._go_back, ckpt.read),
        )
        self.manager = Facade(
            manager,
            save=self._request,
            restore=lambda path=None: self.ckpt.restore(path or manager.latest_checkpoint),
            max_to_keep=read_max_to_keep(manager),
        )
        self.saved_step, self.save_requested = -1, False
        self._state, self._console, self._cluster = state, console, state.cluster
        self._folder = state.run_dir / "ckpt"
        if Path(manager.directory) != self._folder:
            raise state.hooks.create_ckpt.reject("returned a manager that does not use ckpt_path.")
        variables = recording.variables
        held = map(unwrap, tf.train.TrackableView(ckpt).descendants())
        self._held = [part for part in held if isinstance(part, tf.Variable)]
        # What an evaluation sums up begins anew each time.
        passing = state.evaluation.list_passing_variables() if state.evaluation is not None else []
        left_out = {id(variable) for variable in (*self._held, *passing)}
        self._created = {n: v for n, v in variables.items() if id(v) not in left_out}
        self._engine_part = tf.train.Checkpoint(created=self._created)
        of_tensorflow = [v for name, v in variables.items() if "/StateVar" in name]
        self._generators = generators = [*recording.generators, *of_tensorflow]
        sums = filter(is_summed, (*self._created.values(), *self._held))
        self.statistics = MovingStatistics(recording.layers, state.strategy, [*generators, *sums])
        drawn = set(map(id, generators))
        alike = [v for v in variables.values() if not (id(v) in drawn or is_summed(v))]
        self._divergence = Divergence(state, alike)
        self._vocabularies = Vocabularies(state)
        self._position = InputPosition(state, console)
        self._writer = Writer(state, self._engine_part)

    def check_written(self, graph: Any) -> None:
        """Refuses a step that writes what no checkpoint holds, or what replicas share."""
        strategy, recorded = self._state.strategy, self._state.recording.variables
        several, local = strategy.num_replicas_in_sync > 1, strategy.experimental_local_results
        shared = {id(v) for n, v in recorded.items() if several and n.startswith("elsewhere")}
        held = (*self._held, *self._state.data.held)
        own = [v for v in (*recorded.values(), *held) if id(v) not in shared]
        handles = {id(part.handle) for variable in own for part in local(variable)}
        written = set(map(id, find_written_resources(graph))) - handles
        unsaved = [v.name.split(":")[0] for v in graph.variables if id(v.handle) in written]
        if any(op.type in _WRITING_TABLES for op in add_called_ops(graph.get_operations())):
            named = set(map(id, tf.train.TrackableView(self._state.ckpt).descendants()))
            tables = [table for table in find_tables(graph) if hasattr(table, "insert")]
            unsaved += ["a lookup table" for table in tables if id(table) not in named]
        if unsaved:
            raise SetupError(
                f"the step writes {unsaved[0]}, which was made outside of the hooks, and is in no "
                "checkpoint; make variables in create_model, return lookup tables from create_ckpt."
            )

    def _request(self, *_: Any, **__: Any) -> str:
        self.save_requested = True
        return str(self._folder / f"ckpt-{self._state.step}")

    def _go_back(self, restore: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        """Restores what a hook asks for: weights and optimizer go back, step and data do not.

        Also what the user's part leaves out goes back, but for each replica's random numbers.
        """
        self._writer.wait()
        state = self._state
        kept = [state.components.step_variable, *self._generators]
        with ReplicaCopies(state.strategy, kept).put_back_after():
            status = restore(path, *args, **options)
            folder, _, number = str(path).rpartition("-")
            part = Path(folder).parent / "engine" / f"ckpt-{number}"
            if part.with_suffix(".index").exists():
                self._engine_part.read(str(part)).expect_partial()
        return status

    def save(self) -> None:
        """Saves after the current step, unless that is done and no hook has requested it since.

        Raises:
            RunError: the files cannot be written, or the replicas have diverged.
        """
        step = self._state.step
        requested, self.save_requested = self.save_requested, False
        if self.saved_step == step and not requested:
            return
        if late := self._state.recording.find_late():
            raise RunError(
                f"{late} while training, which no checkpoint would bring back; make it in "
                "create_model, or keep numbers in state."
            )
        scale = self._state.components.loss_scale
        if scale is not None and (complaint := scale.describe_trouble()):
            self._console.warn(complaint)
        self.wait()
        with self.statistics.hold_averages():
            self._divergence.check(step)
            self._save(step)
        self.saved_step = step

    def _save(self, step: int) -> None:
        state, engine = self._state, self._folder / "engine"
        record = Record(
            step=step,
            input=self._position.describe(),
            input_saved=False,
            replicas=state.components.shape.replicas,
            learning_rate=state.config.learning_rate,
            frozen=read_flags(state.recording),
            created=list(self._created),
            progress=dataclasses.asdict(state.progress),  # copies: hooks go on meanwhile
            learnt=self._vocabularies.learnt,
        )
        taken = self._position.take(record) if self._cluster.task.chief else []  # all read alike
        with write_together(state, step):
            engine.mkdir(parents=True, exist_ok=True)
            # While its parts are replaced, it must not count.
            (engine / f"ckpt-{step}.json").unlink(missing_ok=True)
            if own := self.statistics.own:
                own.write(str(self._own_part(self._folder, step)))
        with write_together(state, step):
            self._writer.write(
                record, lambda: self._position.write(taken, record, engine / f"input-{step}")
            )

    def _own_part(self, folder: Path, step: int) -> Path:
        """Returns the prefix of the part that each process writes for itself."""
        return folder / "engine" / f"statistics-{step}-{self._cluster.task.index}"

    def wait(self) -> None:
        """Waits until what is written is on the disk; raises a RunError if it cannot be."""
        with write_together(self._state, self.saved_step):
            self._writer.wait()

    def close(self) -> None:
        """Lets what is written in the background come to its end, well or not."""
        self._writer.pool.shutdown()  # in a notebook, no thread is left after a run
        self.tell_saved()

    def tell_saved(self) -> None:
        """Tells the listeners of checkpoints that have become whole."""
        while self._writer.written and self._console.listeners is not None:
            self._console.listeners.tell("saved", *self._writer.written.pop(0))

    def restore(self, source: Source | None, with_input: bool = True) -> Record | None:
        """Restores a checkpoint: of several that will do the newest that is whole.

        Without ``with_input``, training does not go on from here: the data stay where they are, and
        the weights are averaged with ``ema``.

        Returns:
            Its record; None without a source.

        Raises:
            SetupError: none is there, or whole; or it does not fit the model any more.
        """
        folder = source.folder if source else self._folder
        steps = source.find_steps() if source else []
        if not self._cluster.has_same(repr(steps).encode()):
            raise SetupError(
                f"runs_dir: {relative_path(self._folder)} has other checkpoints on another process "
                "of the cluster; all of them need one folder, on a file system that they share."
            )
        tried = (self._restore_one(folder, step, with_input) for step in steps)
        record = next(filter(None, tried), None)
        has_lost = any(folder.glob("*.index")) and not (folder / "engine").is_dir()
        if record is None and (steps or has_lost):
            raise SetupError(
                f"{relative_path(folder)}: there are checkpoints, but none of them is whole; to "
                "start over, choose another run_name or remove the folder."
            )
        if with_input:
            generators, task = self._state.recording.generators, self._cluster.task
            fold_in_replica_id(generators, self._state.strategy, task)
        if with_input and record is not None:
            self._restore_own(folder, record)
            if folder != self._folder:
                self._console.say(
                    f"fork: goes on from {relative_path(folder)}, step {record.step}."
                )
            if task.chief:  # a process was killed before it could
                keep_best(self._folder, record, folder)
        return record

    def _restore_one(self, folder: Path, step: int, with_input: bool) -> Record | None:
        """Restores one checkpoint; if it is damaged, warns and returns None."""
        record, why, state = None, "another process cannot read it", self._state
        try:
            record = self._read(folder, step)
        except UNREADABLE as error:
            why = format_error(error, 160).removeprefix("Damaged: ")
        if not self._cluster.agree(record is not None) or record is None:
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
        self.saved_step = step if folder == self._folder else -1
        return record

    def _read(self, folder: Path, step: int) -> Record:
        """Reads the record and all variables; raises UNREADABLE, or a SetupError if it is unfit."""
        record, user_part = read_record(folder, step), find_user_part(folder, step)
        needed = [name for name in self._created if name.startswith(_NEEDED)]
        try:
            if new := [name for name in needed if name not in record.created]:
                raise ValueError(f"{', '.join(new[:5])} is new.")
            self._state.ckpt.restore(str(user_part)).expect_partial().assert_consumed()
            self._engine_part.read(str(folder / "engine" / f"ckpt-{step}")).expect_partial()
        except (ValueError, AssertionError) as error:
            raise SetupError(
                f"the checkpoint {relative_path(user_part)} does not fit the model any more: "
                f"{format_error(error)} Undo the change, or choose another run_name."
            ) from error
        if self._state.step != step:
            raise Damaged(f"its files are of step {self._state.step}")
        self._vocabularies.put_back(record.learnt, self._console)
        for layer in self._state.recording.layers:
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # it computes with constants made of its variables
        return record

    def _restore_own(self, folder: Path, record: Record) -> None:
        """Gives the replicas their own values again; others than before go on with the mean."""
        own = self.statistics.own
        same = record.replicas == self._state.components.shape.replicas
        if own and same and record.created == list(self._created):
            # Without them, the mean differs by the order of sums only.
            with contextlib.suppress(*UNREADABLE):
                own.read(str(self._own_part(folder, record.step)))
                self.statistics.copies.put_back()
