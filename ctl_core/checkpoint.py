"""Checkpoints: the user's part, the engine's part beside it, and a record that makes it count.

A checkpoint of step 300 is, in runs/NAME/ckpt:

    ckpt-300.index, .data-*             what ``create_ckpt`` names
    engine/ckpt-300.index, .data-*      random state, step, lr, loss scale, and what belongs to the
                                        run but not to the user's part
    engine/input-300-0.index, .data-*   process 0's position in the training data, if it can be
                                        saved; in a cluster, each process writes its own
    engine/statistics-300-0.index, ...  what its replicas have of batch normalisations before
                                        their mean, which is in the user's part
    engine/vocabularies-<hash>.json     what preprocessing layers have learnt, if there are any
    engine/ckpt-300.json                the record, written last: without it, nothing counts

so that a process killed at any moment leaves either a whole checkpoint or none. In a cluster, the
folder has to be one that all processes share.

The chief copies the variables and writes the copies in the background, while training goes on; it
waits for that before the next checkpoint and at the end of the run. The first two checkpoints of a
process, of which the second shows that a copy holds the same, and input positions are written at
once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.build import State
from ctl_core.checks.position import holds_shuffles
from ctl_core.cluster.divergence import Drift
from ctl_core.console import Console
from ctl_core.errors import RunError, SetupError, op_message, reason
from ctl_core.numerics.not_finite import Noted
from ctl_core.numerics.randomness import generator_states
from ctl_core.numerics.staging import Background, Snapshot, Traced, entries
from ctl_core.run_state.hook_state import check_state
from ctl_core.run_state.record import (
    NAME,
    NUMBER,
    PART,
    Damaged,
    Record,
    read_record,
    regular,
    saved_steps,
    write_record,
)
from ctl_core.run_state.remainder import Remainder, is_summed
from ctl_core.run_state.vocabularies import Vocabularies

# What reading a file that is cut short, altered or gone raises.
_UNREADABLE = (tf.errors.OpError, RuntimeError, IndexError)
_LARGE_INPUT = 64 * 2**20
_KEY_END = "/.ATTRIBUTES/"


class Checkpoints:
    """Saves and restores a run.

    Attributes:
        examples: training examples used so far, over all processes
        done: the keys of ``at_step`` that have run
        evaluated: the step of the last evaluation, or -1
        ended: the step to which the run was to go when a hook ended it, or None
        saved_step: the step of the last checkpoint, or -1
        asked: whether a hook has called ``manager.save``
    """

    def __init__(self, state: State, console: Console) -> None:
        """Takes over ``manager.save``: called in a hook, it saves when the step's hooks are done.

        A checkpoint taken between two hooks of a step would miss what the second one changes.
        """
        self.state = state
        self.console = console
        self.examples = 0
        self.done: set[int] = set()
        self.evaluated = -1
        self.ended: int | None = None
        self.saved_step = -1
        self.asked = False
        self._cluster = state.cluster
        self.remainder = Remainder(state)
        self._vocabularies = Vocabularies(state.found, state.hooks)
        self._drift = Drift(state.strategy, state.cluster, state.found.variables.values())
        self._folder = Path(state.manager.directory)
        self._warned: set[str] = set()
        self._summed_up: bool | None = None
        self._relearnt: list[str] = []  # what the last restore has put back into layers
        self._input: Any = None
        self._background = Background()
        self._begun: int | None = None
        self._copied = True
        self._snapshots: list[Snapshot] = []
        self._entries: list[Any] | None = None  # what copies must hold, until they have shown it
        self._save_user_part = state.manager.save
        state.manager.save = self._ask  # type: ignore[method-assign]
        self._restore, self._read = state.ckpt.restore, state.ckpt.read
        state.ckpt.restore = functools.partial(self._rewind, self._restore)
        state.ckpt.read = functools.partial(self._rewind, self._read)

    @property
    def _engine_folder(self) -> Path:
        return self._folder / "engine"

    def _ask(self, *_: Any, **__: Any) -> str:
        self.asked = True
        return str(self._folder / f"ckpt-{self.state.step}")

    def _rewind(self, restore: Any, path: str, *args: Any, **options: Any) -> Any:
        """``ckpt.restore`` as hooks call it: weights and optimizer go back, step and data do not.

        Of one of this run's checkpoints, also what the user's part leaves out is restored.
        """
        step = self.state.step
        self._background.wait()
        status = restore(path, *args, **options)
        self.state.step_variable.assign(step)
        match = NUMBER.search(Path(path).name) if path else None
        if match and Path(path).parent.resolve() == self._folder.resolve():
            with contextlib.suppress(Damaged):  # no checkpoint of a run: what the hook wrote there
                names = read_record(self._engine_folder, int(match[1])).remainder or []
                part = tf.train.Checkpoint(remainder=self.remainder.saved(names))
                part.read(str(self._engine_folder / f"ckpt-{match[1]}")).expect_partial()
                self.remainder.put_back(names)
        return status

    def _engine_part(self, remainder: list[str]) -> tf.train.Checkpoint:
        part = tf.train.Checkpoint(
            step=self.state.step_variable,
            lr=self.state.lr,
            seeds=generator_states(self.state.train_model),
            remainder=self.remainder.saved(remainder),
        )
        if self.state.parts.loss_scale is not None:
            part.loss_scale = self.state.parts.loss_scale
        return part

    def _input_part(self) -> tf.train.Checkpoint:
        iterator = self.state.data.iterator
        if self._input is None or self._input.input is not iterator:
            self._input = Traced(input=iterator)
        return self._input

    def save(self, due: bool) -> None:
        """Saves after the current step, if that is due or a hook asked for it.

        Every process of a cluster takes part, also those that write next to nothing.

        Raises:
            RunError: the files cannot be written, or the replicas have drifted apart; earlier
                checkpoints stay good.
            PeerLost: another process is gone.
        """
        step = self.state.step
        asked, self.asked = self.asked, False
        if not asked and (not due or self.saved_step == step):
            return
        check_state(self.state.hook_state, "a host hook")
        loss_scale = self.state.parts.loss_scale
        if loss_scale is not None and (complaint := loss_scale.complaint()):
            self._warn_once(complaint)
        self.finish()
        self.remainder.check_nothing_new(step)
        with self._cluster.peers(), self.state.statistics.averaged():
            self._drift.check(step)
            self.remainder.take()
            self._save(step)
        self.saved_step = step

    def _save(self, step: int) -> None:
        chief, index = self._cluster.task.chief, self._cluster.task.index
        record = self._engine_folder / f"ckpt-{step}.json"
        with self._writing(step):
            self._engine_folder.mkdir(parents=True, exist_ok=True)
            if chief:
                record.unlink(missing_ok=True)  # while its parts are replaced, it must not count
        with self._writing(step):
            input_saved = self._save_input(str(self._engine_folder / f"input-{step}-{index}"))
            if own := self.state.statistics.own:
                own.write(self._own_statistics(step))
        made = self._record(step, self._cluster.all(input_saved))
        with self._writing(step):
            if chief:
                made.vocabularies = self._vocabularies.save(self._engine_folder)
            if not chief:
                self._take_part()
            elif copies := self._take_copies():
                if self._entries is None:
                    self._background.start(lambda: self._write(made, copies))
                elif not self._write(made, copies, expected=self._entries):
                    self._write(made, self._originals())
                    self._snapshots, self._copied = [], False
                self._entries = None
            else:
                self._write(made, self._originals())
                self._make_snapshots(step)
        self._begun = step

    def finish(self) -> None:
        """Waits until what is written in the background is on the disk.

        Every process of a cluster takes part.

        Raises:
            RunError: it could not be written; earlier checkpoints stay good.
            PeerLost: another process is gone.
        """
        if self._begun is None:
            return
        step, self._begun = self._begun, None
        with self._cluster.peers(), self._writing(step):
            self._background.wait()

    def poll(self) -> None:
        """Looks whether writing in the background has failed; costs nothing.

        Raises:
            RunError: it has.
        """
        if isinstance(failure := self._background.failure, OSError | tf.errors.OpError):
            raise self._unwritten(self._begun, failure) from failure

    def abandon(self) -> None:
        """Lets what is written in the background come to its end, in a run that has failed."""
        with contextlib.suppress(Exception):  # the run has its own failure to tell
            self._background.wait()

    def settle(self, seconds: float) -> None:
        """Gives what is written in the background so long; it counts only if it is all there."""
        self._background.settle(seconds)

    def _write(
        self,
        record: Record,
        parts: list[tf.train.Checkpoint],
        expected: list[Any] | None = None,
    ) -> bool:
        """Writes the chief's files; the record last, unless other entries were expected."""
        user_part, engine_part = parts
        with _holding(self.state.manager, user_part):
            saved = self._save_user_part(checkpoint_number=record.step)
        if saved is None:
            raise RunError("create_ckpt's manager did not save; leave out its step_counter.")
        engine_part.write(engine_path := str(self._engine_folder / f"ckpt-{record.step}"))
        if expected is not None and [entries(saved), entries(engine_path)] != expected:
            return False
        write_record(self._engine_folder, dataclasses.replace(record, path=Path(saved).name))
        self._remove_orphans()
        return True

    def _originals(self) -> list[tf.train.Checkpoint]:
        """What the chief writes: the user's part and the engine's."""
        return [self.state.ckpt, self._engine_part(self.remainder.names)]

    def _make_snapshots(self, step: int) -> None:
        """Makes what later checkpoints are copied to, if a copy may hold the same."""
        ckpt, manager = self.state.ckpt, self.state.manager
        usual = (tf.train.Checkpoint, tf.train.CheckpointManager)
        if self._copied and (type(ckpt), type(manager)) == usual and not self._sums_up():
            self._snapshots = [Snapshot(part) for part in self._originals()]
            paths = manager.latest_checkpoint, str(self._engine_folder / f"ckpt-{step}")
            self._entries = [entries(path) for path in paths]

    def _take_copies(self) -> list[tf.train.Checkpoint]:
        """Copies the variables; returns what is to be written instead of the originals, if any."""
        if not all(one.fits() for one in self._snapshots):
            self._snapshots = []
        for one in self._snapshots:
            one.take()
        copies = [one.checkpoint for one in self._snapshots]
        if copies:
            copies[0].save_counter.assign(self.state.ckpt.save_counter)
            self.state.ckpt.save_counter.assign_add(1)
        return copies

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Around one part of the writing: all go on when all are done, or none does.

        Raises:
            RunError: a file cannot be written, here or by another process.
        """
        failure: Exception | None = None
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            if isinstance(error, tf.errors.OpError) and self._cluster.lost(error):
                raise
            failure = error
        well = self._cluster.all(failure is None)
        if failure is not None:
            raise self._unwritten(step, failure) from failure
        if not well:
            raise self._unwritten(step, None)

    def _unwritten(self, step: int | None, failure: Exception | None) -> RunError:
        why = " by another process" if failure is None else f": {reason(failure)}"
        return RunError(
            f"the checkpoint of step {step} cannot be written to {self._folder}{why}; earlier "
            "checkpoints are kept."
        )

    def _take_part(self) -> None:
        """Writes the user's part where nobody looks, if reading its variables takes all processes.

        Those that each replica keeps for itself are summed up over the cluster to be saved.
        """
        if self._sums_up():
            with tempfile.TemporaryDirectory() as folder:
                self.state.ckpt.write(str(Path(folder) / "part"))

    def _sums_up(self) -> bool:
        """Whether reading what the user's part holds takes all processes of a cluster."""
        if self._cluster.task.processes == 1:
            return False
        if self._summed_up is None:
            found = tf.train.TrackableView(self.state.ckpt).descendants()
            self._summed_up = any(is_summed(item) for item in found)
        return self._summed_up

    def _record(self, step: int, input_saved: bool) -> Record:
        return Record(
            step=step,
            path=f"ckpt-{step}",
            examples=self.examples,
            processes=self._cluster.task.processes,
            replicas=self.state.parts.replicas,
            batch_size=self.state.parts.batch_size,
            input_saved=input_saved,
            learning_rate=self.state.config.learning_rate,
            done=sorted(self.done),
            frozen=self.state.freezing.flags(),
            evaluated=self.evaluated,
            metrics=dict(self.state.metrics),
            accumulate_steps=self.state.parts.accumulate_steps,
            remainder=self.remainder.names,
            ended=self.ended,
            noted=dataclasses.asdict(self.state.noted),
            state=copy.deepcopy(self.state.hook_state),  # hooks go on while it is written
        )

    def _own_statistics(self, step: int) -> str:
        return str(self._engine_folder / f"statistics-{step}-{self._cluster.task.index}")

    def _restore_statistics(self, record: Record) -> None:
        """Gives the replicas their own statistics again; others than before go on with the mean."""
        own, task = self.state.statistics.own, self._cluster.task
        same = (record.processes, record.replicas) == (task.processes, self.state.parts.replicas)
        if own and same:
            # Without them, the mean differs by the order of sums only.
            with contextlib.suppress(*_UNREADABLE, Damaged):
                own.read(regular(self._own_statistics(record.step)))
                self.state.statistics.put_back()

    def _save_input(self, prefix: str) -> bool:
        """Writes the position in the training data; returns whether that is possible."""
        why = self.state.data.unsavable
        try:
            if why is None:
                self._input_part().write(prefix)
        except tf.errors.FailedPreconditionError as error:
            why = op_message(error, 120)
        if why is not None:
            self._warn_once(
                f"the position in the training data cannot be saved exactly ({why}); a resumed "
                "run will read and drop what was used. For random changes to examples, see "
                "ctl_core.data.with_seeds."
            )
            return False
        self._warn_if_large(prefix)
        return holds_shuffles(Path(prefix), self.state.data.pipeline.dataset)

    def _remove_orphans(self) -> None:
        """Removes engine parts whose user part the manager has deleted, or that do not count."""
        named = set()
        for step in saved_steps(self._engine_folder):
            path = self._engine_folder / f"ckpt-{step}.json"
            with contextlib.suppress(Damaged):  # restore says so
                record = read_record(self._engine_folder, step)
                named.add(record.vocabularies)
                if not (self._folder / f"{record.path}.index").exists():
                    path.unlink()
        for path in self._engine_folder.glob("vocabularies-*.json"):
            if path.name not in named:
                path.unlink()
        for path in self._engine_folder.glob("*.index"):
            match = PART.fullmatch(path.stem)
            if match and not (self._engine_folder / f"ckpt-{match[1]}.json").exists():
                for part in self._engine_folder.glob(f"{path.stem}.*"):
                    part.unlink()

    def _warn_if_large(self, prefix: str) -> None:
        size = sum(
            path.stat().st_size for path in Path(prefix).parent.glob(Path(prefix).name + ".data*")
        )
        if size > _LARGE_INPUT:
            self._warn_once(
                f"the position in the training data takes {size / 2**20:.0f} MB in every "
                "checkpoint, most of it a shuffle buffer; for data in memory, "
                "ctl_core.data.index_shuffle shuffles as well and takes next to nothing."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.console.warn(text)

    def restore(self, step: int | None = None, with_input: bool = True) -> Record | None:
        """Restores the newest whole checkpoint, or that of ``step``.

        Args:
            step: the checkpoint to take; default: the newest
            with_input: whether training goes on from here, so that the data must, too

        Returns:
            Its record; None if there is no checkpoint at all.

        Raises:
            SetupError: there are checkpoints but none is whole, the one asked for is not there,
                or it does not fit the model any more.
        """
        if with_input and self._cluster.task.chief:
            self._clean()  # while only reading, another process may be training and saving
        steps = self._agreed_steps()
        if step is not None:
            if step not in steps:
                there = ", ".join(map(str, steps[:10])) or "none"
                raise SetupError(
                    f"checkpoint: {self._folder} has none of step {step} (there: {there})."
                )
            steps = [step]
        for number in steps:
            record = self._restore_one(number, with_input)
            if record is not None:
                return record
        # A single user's part beside a folder of the engine's without any record is what is left of
        # a first checkpoint that was never finished: the run begins anew.
        parts = list(self._folder.glob("*.index"))
        if steps or len(parts) > 1 or (parts and not self._engine_folder.exists()):
            raise SetupError(
                f"{self._folder}: there are checkpoints, but none of them is whole; to start over, "
                "choose another run_name or remove the folder."
            )
        return None

    def _clean(self) -> None:
        """Removes what a process that was killed while saving left half-written.

        What is no file and has a file's name, such as a named pipe, is moved out of the way.
        """
        for folder in (self._folder, self._engine_folder):
            for path in folder.glob("*-*.*"):
                if NAME.fullmatch(path.name) and not path.is_file():
                    aside = path.rename(path.with_name(f"{path.name}.aside"))
                    self.console.warn(f"{path} is no file; it is called {aside.name} now.")
            for path in folder.glob("*_temp"):
                shutil.rmtree(path, ignore_errors=True)
            for path in folder.glob("*.tmp"):
                if not path.is_dir():
                    path.unlink()

    def _agreed_steps(self) -> list[int]:
        """Returns the steps of the checkpoints there are, newest first, as the chief sees them.

        Raises:
            SetupError: another process of the cluster sees others.
        """
        self._cluster.exchange([0])  # the chief has tidied up
        steps = saved_steps(self._engine_folder)
        newest = steps[0] if steps else -1
        table = self._cluster.exchange([len(steps), newest])
        if (table != table[0]).any():
            seen = ", ".join(f"process {i}: {n or 'none'}" for i, n in enumerate(table[:, 0]))
            raise SetupError(
                f"runs_dir: the processes of the cluster do not see the same checkpoints in "
                f"{self._folder} ({seen}); it must be on a file system that all of them share."
            )
        return steps

    def _restore_one(self, step: int, with_input: bool) -> Record | None:
        """Restores one checkpoint; if it is damaged, warns and returns None."""
        record, why = None, ""
        try:
            record = self._read_parts(step)
        except Damaged as error:
            why = str(error)
        if not self._cluster.all(record is not None) or record is None:
            self._warn_damaged(step, why or "another process cannot read it")
            return None
        if with_input:
            self._restore_input(record)
            self._restore_statistics(record)
        if not self.state.freezing.put_back(record.frozen):
            self.console.warn(
                "what was frozen in the checkpoint is of other layers than the model has now; "
                "what is frozen is as create_model left it."
            )
        self.examples = record.examples
        self.done = set(record.done)
        self.evaluated = record.evaluated
        self.ended = record.ended
        self.saved_step = record.step
        self.state.metrics = record.metrics
        self.state.noted = Noted(**record.noted)
        self.state.hook_state.clear()
        self.state.hook_state.update(record.state)
        return record

    def _read_parts(self, step: int) -> Record:
        """Reads the record and all variables.

        Raises:
            Damaged: a file is cut short, altered or gone.
            SetupError: the checkpoint does not fit the model.
        """
        record = read_record(self._engine_folder, step)
        user_part = regular(str(self._folder / record.path))
        engine_part = regular(str(self._engine_folder / f"ckpt-{step}"))
        self._put_back_vocabularies(record)
        try:
            remainder = self._check_remainder(record.remainder, engine_part)
            self._restore_user_part(user_part)
            self._engine_part(remainder).read(engine_part).expect_partial()
            self.remainder.put_back(remainder)
        except _UNREADABLE as error:
            raise Damaged(op_message(error, 160)) from error
        if self.state.step != step:
            raise Damaged(f"its files are of step {self.state.step}")
        for layer in self.state.found.adapted.values():
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # it computes with constants made of its variables
        return record

    def _put_back_vocabularies(self, record: Record) -> None:
        self._relearnt = []
        if record.vocabularies is not None:
            file = self._engine_folder / record.vocabularies
            try:
                self._relearnt = self._vocabularies.put_back(file, self.console)
            except (OSError, ValueError) as error:
                raise Damaged(f"{file.name} cannot be read") from error

    def _check_remainder(self, names: list[str] | None, engine_part: str) -> list[str]:
        """Compares what the engine's part holds for the user's with what there is.

        Returns:
            The paths to be read.

        Raises:
            SetupError: it does not fit the model any more.
        """
        shapes = tf.train.load_checkpoint(engine_part).get_variable_to_shape_map()
        keys = [f"remainder/{i}{_KEY_END}VARIABLE_VALUE" for i in range(len(names or ()))]
        if names is None:
            names = []
            if self.remainder.names:
                self.console.warn(
                    f"the checkpoint is of an earlier engine, which did not keep "
                    f"{', '.join(self.remainder.names[:5])}: as created."
                )
            return names
        differences, changes = self.remainder.compare(names, [shapes.get(key) for key in keys])
        if differences:
            raise _unfitting(engine_part, [*differences, *self._relearnt])
        if changes:
            self.console.warn(f"of what hooks hold, compared with the checkpoint: {changes}.")
        return names

    def _warn_damaged(self, step: int, why: str) -> None:
        self.console.warn(
            f"the checkpoint of step {step} is damaged ({why}); using the one before."
        )

    def _restore_input(self, record: Record) -> None:
        """Goes to the position in the training data, by reading and dropping if need be."""
        parts, task = self.state.parts, self._cluster.task
        if not record.input_saved:
            why = "it could not be saved"
        elif (record.processes, record.replicas, record.batch_size, record.accumulate_steps) != (
            task.processes,
            parts.replicas,
            parts.batch_size,
            parts.accumulate_steps,
        ):
            why = f"it was saved with {_count(record.replicas, 'replica')}"
            if record.processes != task.processes:
                why += f" in {_count(record.processes, 'process')}"
            why += f", batch_size {record.batch_size}"
            if record.accumulate_steps > 1 or parts.accumulate_steps > 1:
                why += f", accumulate_steps {record.accumulate_steps}"
        else:
            why = ""
            try:
                prefix = self._engine_folder / f"input-{record.step}-{task.index}"
                self._input_part().read(regular(str(prefix)))
            except (*_UNREADABLE, Damaged):
                why = "the saved position does not fit the data any more, or its file is damaged"
            # All processes or none: those that skip and those that do not could not be told apart.
            if self._cluster.all(not why):
                return
            why = why or "another process cannot read the position that it saved"
            self.state.renew_input()
        self.console.warn(
            f"the position in the training data is reached by reading and dropping "
            f"{record.examples} examples, since {why}."
        )
        elements = record.examples // parts.micro_batch_size
        self.state.data.skip(elements // task.processes)

    def _restore_user_part(self, path: str) -> None:
        status = None
        try:
            status = self._restore(path)
            status.assert_consumed()
        except (ValueError, AssertionError) as error:
            if status is not None:
                status.expect_partial()
            differences = self._differences(path)
            if not differences:  # unequal in a way that no variable shows
                differences = [op_message(error, 200)]
            raise _unfitting(path, [*differences, *self._relearnt]) from error

    def _differences(self, path: str) -> list[str]:
        """Lists the variables that differ, by writing the present state down and comparing."""
        saved = _variables_in(path)
        with tempfile.TemporaryDirectory() as folder:
            present = _variables_in(self.state.ckpt.write(str(Path(folder) / "present")))
        differences = []
        for key in sorted({*saved, *present}):
            if key.startswith("save_counter"):
                continue
            if key not in saved:
                differences.append(f"{present[key][0]} is new")
            elif key not in present:
                differences.append(f"{saved[key][0]} is gone")
            elif saved[key][1] != present[key][1]:
                differences.append(
                    f"{present[key][0]} has shape {present[key][1]}, in the checkpoint "
                    f"{saved[key][1]}"
                )
        return differences


def _unfitting(path: str, differences: list[str]) -> SetupError:
    more = f", and {len(differences) - 5} more" if len(differences) > 5 else ""
    return SetupError(
        f"the checkpoint {path} does not fit the model any more: "
        f"{'; '.join(differences[:5])}{more}. Undo the change, or choose another run_name."
    )


def _count(number: int, what: str) -> str:
    many = what + ("es" if what.endswith("s") else "s")
    return f"{number} {what if number == 1 else many}"


@contextlib.contextmanager
def _holding(
    manager: tf.train.CheckpointManager, checkpoint: tf.train.Checkpoint
) -> Iterator[None]:
    """Lets a manager save another checkpoint than its own.

    It has no argument for that: its private ``_checkpoint`` is exchanged for a while.
    tests/engine/test_snapshot.py fails if TensorFlow changes this.
    """
    own = manager.checkpoint
    manager._checkpoint = checkpoint
    try:
        yield
    finally:
        manager._checkpoint = own


def _variables_in(path: str) -> dict[str, tuple[str, list[int]]]:
    """Reads a checkpoint's variables: key -> (name for people, shape)."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2  # not part of tf's public names

    reader = tf.train.load_checkpoint(path)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    names = {
        attribute.checkpoint_key: attribute.full_name.split(":")[0]
        for node in graph.nodes
        for attribute in node.attributes
    }
    return {
        key.split(_KEY_END)[0]: (names.get(key) or key.split(_KEY_END)[0], list(shape))
        for key, shape in reader.get_variable_to_shape_map().items()
        if _KEY_END in key
    }
