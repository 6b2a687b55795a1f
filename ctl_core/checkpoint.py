"""Checkpoints: the user's part, the engine's part beside it, and a record that makes it count.

A checkpoint of step 300 is, in runs/NAME/ckpt:

    ckpt-300.index, .data-*             what ``create_ckpt`` names
    engine/ckpt-300.index, .data-*      every other variable that the hooks have created
    engine/input-300.index, .data-*     the position in the training data
    engine/statistics-300-0.index, ...  what each of its replicas has for itself: random generators,
                                        and batch normalisations before their mean
    engine/vocabularies-<hash>.json     what preprocessing layers have learnt, if there are any
    engine/ckpt-300.json                the record, written last: without it, nothing counts
    best/                               the same files of the checkpoint that ``keep_best`` keeps

so that a process killed at any moment leaves either a whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from ctl_core.cluster.divergence import Divergence
from ctl_core.compat import graphs_called, holding, max_to_keep, written_resources
from ctl_core.console import Console
from ctl_core.errors import RunError, SetupError, brief, reason
from ctl_core.files import from_here
from ctl_core.model.freezing import read_flags, set_flags
from ctl_core.model.variables import plain_variable
from ctl_core.numerics.batch_norm import MovingStatistics
from ctl_core.numerics.staging import Background, StagingCopy, entries
from ctl_core.position import InputPosition
from ctl_core.run_state.fitting import UNREADABLE, differing_variables, unfitting
from ctl_core.run_state.folder import clean, keep_best, keep_best_again, remove_orphans
from ctl_core.run_state.record import (
    NUMBER,
    Damaged,
    Record,
    check_format,
    read_record,
    regular,
    saved_steps,
    sync_files,
    write_record,
)
from ctl_core.run_state.vocabularies import ADAPTED, Vocabularies
from ctl_core.selection import best_step
from ctl_core.sources import NOT_BEGUN
from ctl_core.state import Progress, State, check_hook_state

_WRITING_TABLES = ("LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2")
# The hooks whose variables a resumed run cannot do without; others may change between two starts.
_NEEDED = ("create_model/", "create_loss/", "create_opt/", "create_eval_model/")


class CheckpointFacade:
    """The ``ckpt`` of hooks: what ``create_ckpt`` returned; restored by hooks, the step stays.

    Attributes:
        original: what ``create_ckpt`` returned
        restore_as: is given the original's function and its arguments; set by ``Checkpoints``
    """

    def __init__(self, original: tf.train.Checkpoint) -> None:
        self.original = original
        self.restore_as: Callable[..., Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def restore(self, path: str, *args: Any, **options: Any) -> Any:
        """Restores weights and optimizer; the step and the position in the data stay."""
        assert self.restore_as is not None
        return self.restore_as(self.original.restore, path, *args, **options)

    def read(self, path: str, *args: Any, **options: Any) -> Any:
        """Does the same for what ``write`` has written."""
        assert self.restore_as is not None
        return self.restore_as(self.original.read, path, *args, **options)


class ManagerFacade:
    """The ``manager`` of hooks: ``save`` saves once the hooks of the step have run.

    A checkpoint taken between two hooks of a step would miss what the second one changes.

    Attributes:
        original: what ``create_ckpt`` returned
        request: returns the path that the checkpoint will have; set by ``Checkpoints``
    """

    def __init__(self, original: tf.train.CheckpointManager, ckpt: CheckpointFacade) -> None:
        self.original = original
        self.request: Callable[[], str] | None = None
        self._ckpt = ckpt

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return self.original.directory  # type: ignore[no-any-return]

    @property
    def checkpoints(self) -> list[str]:
        """The paths of those that are kept, oldest first."""
        return self.original.checkpoints  # type: ignore[no-any-return]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest; None if there is none."""
        return self.original.latest_checkpoint  # type: ignore[no-any-return]

    @property
    def max_to_keep(self) -> int | None:
        """How many are kept; None: all."""
        return max_to_keep(self.original)

    def restore(self, path: str | None = None) -> Any:
        """Restores a checkpoint, by default the newest, as ``ckpt.restore`` does."""
        return self._ckpt.restore(path or self.latest_checkpoint or "")

    def save(self, *_: Any, **__: Any) -> str:
        """Asks for a checkpoint of this step; returns its path."""
        assert self.request is not None
        return self.request()


def read_first_batch_size(folder: Path) -> int | None:
    """Returns the ``per_replica_batch_size`` of a run's first start; None if there is none."""
    for step in saved_steps(folder / "engine"):
        with contextlib.suppress(Damaged):
            size = read_record(folder / "engine", step).input.get("per_replica_batch_size")
            return size if isinstance(size, int) else None
    return None


class Checkpoints:
    """Saves and restores a run.

    Attributes:
        saved_step: the step of the last checkpoint, or -1
        save_requested: whether a hook has called ``manager.save``
    """

    def __init__(self, state: State, console: Console) -> None:
        self.saved_step = -1
        self.save_requested = False
        self._state = state
        self._console = console
        self._cluster = state.cluster
        self._ckpt: tf.train.Checkpoint = state.ckpt.original
        self._folder = Path(state.manager.directory)
        self._engine = self._folder / "engine"
        recording = state.recording
        layers = recording.layers
        adapted = [layer for layer in layers if isinstance(layer, ADAPTED)]
        learnt = {f"{number}/{layer.name}": layer for number, layer in enumerate(adapted)}
        self._vocabularies = Vocabularies(learnt, state.hooks)
        own = [v for name, v in recording.variables.items() if "/StateVar" in name]
        self.statistics = MovingStatistics(layers, state.strategy, [*recording.generators, *own])
        variables = recording.variables
        self._divergence = Divergence(state.strategy, state.cluster, variables.values())
        held = map(plain_variable, tf.train.TrackableView(self._ckpt).descendants())
        self._held = [part for part in held if isinstance(part, tf.Variable)]
        named = set(map(id, self._held))
        self._created = {n: v for n, v in variables.items() if id(v) not in named}
        if state.evaluation is not None:  # begins anew each time
            passing = set(map(id, state.evaluation.passing_variables()))
            self._created = {n: v for n, v in self._created.items() if id(v) not in passing}
        self._sums = ReplicaSums(state, self._created)
        self._engine_part = tf.train.Checkpoint(created={**self._created, **self._sums.totals})
        self._position = InputPosition(state, console)
        self._writer = _Writer(state, self._engine_part)
        self._starting: int | None = None
        state.manager.request = self._request
        state.ckpt.restore_as = self._rewind

    def check_written(self, graph: Any) -> None:
        """Refuses a step that writes what no checkpoint holds.

        Raises:
            SetupError: it writes a variable that was created elsewhere, or a table; or one that
                several replicas share.
        """
        local = self._state.strategy.experimental_local_results
        iterator = self._state.data.iterator
        known = [*self._state.recording.variables.values(), *self._held]
        known += getattr(iterator, "variables", ())  # of units
        handles = {id(part.handle) for v in known for part in local(v) if hasattr(part, "handle")}
        names = {
            id(v.handle): v.name.split(":")[0] for v in graph.variables if hasattr(v, "handle")
        }
        shared = {
            id(variable.handle): variable.name.split(":")[0]
            for name, variable in self._state.recording.variables.items()
            if name.startswith("elsewhere") and self._state.strategy.num_replicas_in_sync > 1
        }
        for handle in written_resources(graph):
            if name := shared.get(id(handle)):
                raise SetupError(
                    f"the step writes {name}, which was made outside of the hooks, so that the "
                    "replicas share it and each would write to it; make it in create_model."
                )
            if id(handle) in handles or handle is getattr(iterator, "_iterator_resource", None):
                continue
            if (what := names.get(id(handle))) is None:
                continue
            raise SetupError(
                f"the step writes {what}, which no hook has created, so that no checkpoint would "
                "hold it; make it in create_model, or return it from create_ckpt."
            )
        named = tf.train.TrackableView(self._ckpt).descendants()
        tables = {id(getattr(part, "resource_handle", None)) for part in named}
        if any(id(table) not in tables for table in find_written_tables(graph)):
            raise SetupError(
                "the step writes a lookup table, which no checkpoint would hold; return it from "
                "create_ckpt."
            )

    def _request(self) -> str:
        self.save_requested = True
        return str(self._folder / f"ckpt-{self._state.step}")

    def _rewind(self, restore: Any, path: str, *args: Any, **options: Any) -> Any:
        """``ckpt.restore`` as hooks call it: weights and optimizer go back, step and data do not.

        Of one of this run's checkpoints, also what the user's part leaves out is restored; each
        replica then draws numbers of its own again.
        """
        step, generators = self._state.step, self._state.recording.generators
        local = self._state.strategy.experimental_local_results
        drawn = [[part.read_value() for part in local(one)] for one in generators]
        self._writer.background.wait()
        status = restore(path, *args, **options)
        match = NUMBER.search(Path(path).name) if path else None
        folder = Path(path or ".").parent.resolve()
        if match and folder in (self._folder.resolve(), (self._folder / "best").resolve()):
            part = folder / "engine" / f"ckpt-{match[1]}"
            if part.with_name(f"{part.name}.index").exists():
                self._engine_part.read(str(part)).expect_partial()
                self._sums.put_back()
        self._state.parts.step_variable.assign(step)
        for one, values in zip(generators, drawn, strict=True):
            for replica, value in zip(local(one), values, strict=True):
                replica.assign(value)
        return status

    # ---- Saving ----------------------------------------------------------------------------------

    def save_if_due(self, due: bool) -> None:
        """Saves after the current step, if that is due or a hook has requested it.

        Raises:
            RunError: the files cannot be written, or the replicas have diverged; earlier
                checkpoints stay good.
            PeerLost: another process is gone.
        """
        step = self._state.step
        requested, self.save_requested = self.save_requested, False
        if not requested and (not due or self.saved_step == step):
            return
        check_hook_state(self._state.hook_state, "a host hook")
        if late := self._state.recording.find_late():
            raise RunError(
                f"{late} while training, which no checkpoint would bring back; make it in "
                "create_model, or keep numbers in state."
            )
        scale = self._state.parts.loss_scale
        if scale is not None and (complaint := scale.complaint()):
            self._console.warn_once(complaint)
        self.wait()
        with self._cluster.peers(), self.statistics.averaged():
            self._divergence.check(step)
            self._sums.take()
            self._save(step)
        self.saved_step, self._starting = step, step

    def _save(self, step: int) -> None:
        chief = self._cluster.task.chief
        with all_write(self._state, step):
            self._engine.mkdir(parents=True, exist_ok=True)
            if chief:  # while its parts are replaced, it must not count
                (self._engine / f"ckpt-{step}.json").unlink(missing_ok=True)
        with all_write(self._state, step):
            # All processes read the same global batches, so that one position is that of all.
            input_saved = not chief or self._position.save(self._engine / f"input-{step}")
            if own := self.statistics.own:
                own.write(str(self._own_part("statistics", step)))
        record = self._make_record(step, self._cluster.all(input_saved))
        with all_write(self._state, step):
            if chief:
                record.vocabularies = self._vocabularies.save(self._engine)
                self._writer.write(record)
            else:
                self._writer.take_part()

    def _own_part(self, name: str, step: int) -> Path:
        """Returns the prefix of a part that each process writes for itself."""
        return self._engine / f"{name}-{step}-{self._cluster.task.index}"

    def _make_record(self, step: int, input_saved: bool) -> Record:
        state = self._state
        return Record(
            step=step,
            path=f"ckpt-{step}",
            input=self._position.describe(),
            input_saved=input_saved,
            replicas=state.parts.shape.replicas,
            learning_rate=state.config.learning_rate,
            frozen=read_flags(state.recording),
            created={name: v.shape.as_list() for name, v in self._created.items()},
            vocabularies=None,
            progress=state.progress.to_json(),
        )

    def wait(self) -> None:
        """Waits until what is written in the background is on the disk.

        Raises:
            RunError: it could not be written; earlier checkpoints stay good.
            PeerLost: another process is gone.
        """
        if self._starting is None:
            return
        step, self._starting = self._starting, None
        with self._cluster.peers(), all_write(self._state, step):
            self._writer.background.wait()

    def raise_if_failed(self) -> None:
        """Looks whether writing in the background has failed; costs nothing.

        Raises:
            RunError: it has.
        """
        failure = self._writer.background.failure
        if isinstance(failure, OSError | tf.errors.OpError):
            raise describe_failure(self._state, self._starting, failure) from failure

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
            with_input: whether training goes on from here, so that the data must, too

        Returns:
            Its record; None if there is no checkpoint at all.

        Raises:
            SetupError: there are checkpoints but none is whole, the one asked for is not there,
                or it does not fit the model any more.
        """
        if with_input and self._cluster.task.chief:
            clean(self._folder, self._console)  # not while another process may be training
        folder, shown = self._folder, from_here(self._folder)
        steps = saved_steps(self._engine)
        if not self._cluster.has_same(repr(steps).encode()):
            raise SetupError(
                f"runs_dir: {shown} has other checkpoints on another process of the cluster; all "
                "of them need one folder, on a file system that they share."
            )
        if step == "best":
            folder, steps = folder / "best", saved_steps(folder / "best" / "engine")
            if not steps:
                raise SetupError(
                    f"checkpoint: {shown} has no best one; train with keep_best, such as "
                    "--keep-best loss."
                )
        elif step is not None:
            if step not in steps:
                there = ", ".join(map(str, steps[:10])) or "none"
                raise SetupError(f"checkpoint: {shown} has none of step {step} (there: {there}).")
            steps = [step]
        for number in steps:
            record = self._restore_one(folder, number, with_input)
            if record is not None:
                if with_input and self._cluster.task.chief:
                    keep_best_again(self._folder, record)
                return record
        # A single user's part beside a folder of the engine's without any record is what is left of
        # a first checkpoint that was never finished: the run begins anew.
        parts = list(self._folder.glob("*.index"))
        if steps or len(parts) > 1 or (parts and not self._engine.exists()):
            raise SetupError(
                f"{shown}: there are checkpoints, but none of them is whole; to start over, "
                "choose another run_name or remove the folder."
            )
        return None

    def _restore_one(self, folder: Path, step: int, with_input: bool) -> Record | None:
        """Restores one checkpoint; if it is damaged, warns and returns None."""
        record, why = None, "another process cannot read it"
        try:
            record = self._read(folder, step)
        except Damaged as error:
            why = str(error)
        if not self._cluster.all(record is not None) or record is None:
            self._console.warn(
                f"the checkpoint of step {step} is damaged ({why}); using the one before."
            )
            return None
        state = self._state
        state.progress = Progress.from_json(record.progress)
        if with_input:
            self._position.restore(record, self._engine / f"input-{step}")
            self._restore_statistics(record)
        if not set_flags(state.recording, record.frozen):
            self._console.warn(
                "what was frozen in the checkpoint is of other layers than the model has now; "
                "what is frozen is as create_model left it."
            )
        self.saved_step = record.step
        return record

    def _read(self, folder: Path, step: int) -> Record:
        """Reads the record and all variables.

        Raises:
            Damaged: a file is cut short, altered or gone.
            SetupError: the checkpoint does not fit the model.
        """
        state = self._state
        fork = state.config.fork if (folder / NOT_BEGUN).exists() else None
        engine = folder / "engine"
        record = read_record(engine, step)
        check_format(record, folder)
        user_part = regular(str(folder / record.path))
        engine_part = regular(str(engine / f"ckpt-{step}"))
        changed: list[str] = []
        if record.vocabularies is not None:
            file = engine / record.vocabularies
            try:
                changed = self._vocabularies.put_back(file, self._console)
            except (OSError, ValueError) as error:
                raise Damaged(f"{file.name} cannot be read") from error
        try:
            if differences := self._compare(record):
                raise unfitting(engine_part, [*differences, *changed], fork)
            self._restore_user_part(user_part, changed, fork)
            self._engine_part.read(engine_part).expect_partial()
            self._sums.put_back()
        except UNREADABLE as error:
            raise Damaged(brief(error, 160)) from error
        if state.step != step:
            raise Damaged(f"its files are of step {state.step}")
        for layer in state.recording.layers:
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # it computes with constants made of its variables
        return record

    def _compare(self, record: Record) -> list[str]:
        """Returns what of the engine's part does not fit; warns of what hooks have changed."""
        differences: list[str] = []
        changes: list[str] = []
        for name in sorted({*record.created, *self._created}):
            needed = name.startswith(_NEEDED)
            where = differences if needed else changes
            if name not in self._created:
                where.append(f"{name} is gone")
            elif name not in record.created:
                where.append(f"{name} is new")
            elif (shape := self._created[name].shape.as_list()) != record.created[name]:
                differences.append(
                    f"{name} has shape {shape}, in the checkpoint {record.created[name]}"
                )
        if changes and not differences:
            self._console.warn(
                "of what hooks have created, compared with the checkpoint: "
                f"{', '.join(changes[:5])}{' …' * (len(changes) > 5)}."
            )
        return differences

    def _restore_user_part(self, path: str, changed: list[str], fork: str | None) -> None:
        status = None
        try:
            status = self._ckpt.restore(path)
            status.assert_consumed()
        except (ValueError, AssertionError) as error:
            if status is not None:
                status.expect_partial()
            differences = differing_variables(self._ckpt, path)
            if not differences:  # unequal in a way that no variable shows
                differences = [brief(error, 200)]
            raise unfitting(path, [*differences, *changed], fork) from error

    def _restore_statistics(self, record: Record) -> None:
        """Gives the replicas their own values again; others than before go on with the first's."""
        own = self.statistics.own
        if own and record.replicas == self._state.parts.shape.replicas:
            # Without them, the mean differs by the order of sums only.
            with contextlib.suppress(*UNREADABLE, Damaged):
                own.read(regular(str(self._own_part("statistics", record.step))))
                self.statistics.put_back()


class ReplicaSums:
    """Variables that each replica keeps for itself and that are summed up when they are read.

    Reading one takes all processes, so their sums are taken by all, and written by one.

    Attributes:
        totals: a variable for the sum of each, by name
    """

    def __init__(self, state: State, variables: dict[str, tf.Variable]) -> None:
        self._state = state
        self._variables = {name: v for name, v in variables.items() if is_summed(v)}
        self.totals = {
            name: tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for name, v in self._variables.items()
        }
        self._take: Any = None

    def take(self) -> None:
        """Sums up; every process of a cluster must call it."""
        if not self.totals:
            return
        if self._take is None:

            @tf.function(autograph=False)
            def take() -> None:
                for name, total in self.totals.items():
                    total.assign(self._variables[name].read_value())

            self._take = take
        self._take()

    def put_back(self) -> None:
        """Gives the first of all replicas what was summed up, and the others zero."""
        for name, variable in self._variables.items():
            total, of_sum = self.totals[name], variable.aggregation == tf.VariableAggregation.SUM
            parts = self._state.strategy.experimental_local_results(variable)
            for index, part in enumerate(parts):
                first = index == 0 and self._state.cluster.task.chief
                part.assign(total if first or not of_sum else tf.zeros_like(total))


def is_summed(variable: Any) -> bool:
    """Returns whether each replica keeps a variable for itself, as metrics do."""
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
    )


def find_written_tables(graph: Any) -> list[Any]:
    """Returns the handles of the lookup tables, made outside of a graph, that it writes."""

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


class _Writer:
    """Writes the user's part, the engine's part and the record, in this order.

    The first two checkpoints of a process are written at once; the second shows that a copy of the
    variables holds the same. After them the copies are written, while training goes on.
    """

    def __init__(self, state: State, engine_part: tf.train.Checkpoint) -> None:
        self.background = Background()
        self._state = state
        self._parts = [state.ckpt.original, engine_part]
        self._manager: tf.train.CheckpointManager = state.manager.original
        self._folder = Path(self._manager.directory)
        usual = (tf.train.Checkpoint, tf.train.CheckpointManager)
        self._copying = (type(self._parts[0]), type(self._manager)) == usual
        if state.cluster.task.processes > 1:
            found = map(plain_variable, tf.train.TrackableView(self._parts[0]).descendants())
            self._copying &= not any(map(is_summed, found))
        self._copies: list[StagingCopy] = []
        self._entries: list[Any] | None = None  # what copies must hold, until they have shown it

    def write(self, record: Record) -> None:
        """Writes a checkpoint, or begins to: what was begun before must have been waited for."""
        if not all(copy.fits() for copy in self._copies):
            self._copies = []
        if not self._copies:
            self._write(record, self._parts)
            if self._copying:
                self._copies = [StagingCopy(part) for part in self._parts]
                engine = str(self._folder / "engine" / f"ckpt-{record.step}")
                self._entries = [entries(self._manager.latest_checkpoint), entries(engine)]
            return
        copies = [copy.checkpoint for copy in self._copies]
        for copy in self._copies:
            copy.take()
        counter = self._parts[0].save_counter
        copies[0].save_counter.assign(counter)
        counter.assign_add(1)
        expected, self._entries = self._entries, None
        if expected is None:
            self.background.start(lambda: self._write(record, copies))
        elif not self._write(record, copies, expected):
            self._write(record, self._parts)
            self._copies, self._copying = [], False

    def take_part(self) -> None:
        """Writes the user's part where nobody looks, if reading its variables takes all processes.

        Those that each replica keeps for itself are summed up over the cluster to be saved.
        """
        if self._state.cluster.task.processes == 1:
            return
        found = map(plain_variable, tf.train.TrackableView(self._parts[0]).descendants())
        if any(map(is_summed, found)):
            with tempfile.TemporaryDirectory() as folder:
                self._parts[0].write(str(Path(folder) / "part"))

    def _write(
        self, record: Record, parts: list[tf.train.Checkpoint], expected: list[Any] | None = None
    ) -> bool:
        """Writes the files; the record last, unless other entries were expected."""
        user_part, engine_part = parts
        with holding(self._manager, user_part):
            saved = self._manager.save(checkpoint_number=record.step)
        if saved is None:
            raise RunError("create_ckpt's manager did not save; leave out its step_counter.")
        engine = self._folder / "engine"
        engine_part.write(engine_path := str(engine / f"ckpt-{record.step}"))
        if expected is not None and [entries(saved), entries(engine_path)] != expected:
            return False
        names = (f"*-{record.step}.*", f"*-{record.step}-*.*")
        files = [p for n in names for p in engine.glob(n)]
        files += self._folder.glob(f"{Path(saved).name}.*")
        sync_files(*(file for file in files if file.is_file()), engine, self._folder)
        write_record(engine, dataclasses.replace(record, path=Path(saved).name))
        sync_files(engine / f"ckpt-{record.step}.json", engine)
        if best_step(record.best) == record.step:
            keep_best(self._folder, record)
        remove_orphans(self._folder)
        self._state.whole.append((record.step, Path(saved)))
        return True


@contextlib.contextmanager
def all_write(state: State, step: int | None) -> Iterator[None]:
    """Around one part of the writing: all processes go on when all are done, or none does.

    Raises:
        RunError: a file cannot be written, here or by another process.
    """
    failure: Exception | None = None
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        if isinstance(error, tf.errors.OpError) and state.cluster.lost(error):
            raise
        failure = error
    well = state.cluster.all(failure is None)
    if failure is not None:
        raise describe_failure(state, step, failure) from failure
    if not well:
        raise describe_failure(state, step, None)


def describe_failure(state: State, step: int | None, failure: Exception | None) -> RunError:
    """Returns the error for a checkpoint that cannot be written; None: by another process."""
    why = " by another process" if failure is None else f": {reason(failure)}"
    return RunError(
        f"the checkpoint of step {step} cannot be written to {from_here(state.manager.directory)}"
        f"{why}; earlier checkpoints are kept."
    )
