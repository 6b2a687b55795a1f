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
    best/                               the same files of the checkpoint that ``keep_best`` keeps

so that a process killed at any moment leaves either a whole checkpoint or none. In a cluster, the
folder has to be one that all processes share. How the chief writes while training goes on is in
run_state/writing.py.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from ctl_core.cluster.divergence import Divergence
from ctl_core.console import Console
from ctl_core.errors import SetupError
from ctl_core.files import from_here
from ctl_core.numerics.randomness import generator_states
from ctl_core.run_state.fitting import UNREADABLE
from ctl_core.run_state.folder import clean, keep_best_again
from ctl_core.run_state.hook_state import check_state
from ctl_core.run_state.input_position import InputPosition
from ctl_core.run_state.reading import CheckpointReader
from ctl_core.run_state.record import (
    NUMBER,
    Damaged,
    Record,
    read_record,
    regular,
    saved_steps,
)
from ctl_core.run_state.remainder import Remainder
from ctl_core.run_state.vocabularies import Vocabularies
from ctl_core.run_state.writing import CheckpointWriter, all_write, unwritten
from ctl_core.state import Progress, State


class Checkpoints:
    """Saves and restores a run.

    Attributes:
        remainder: the variables of the run that are not in the user's part
        reader: reads a checkpoint into the variables
        saved_step: the step of the last checkpoint, or -1
        save_requested: whether a hook has called ``manager.save``
    """

    def __init__(self, state: State, console: Console) -> None:
        """Takes over ``manager.save``: called in a hook, it saves when the step's hooks are done.

        A checkpoint taken between two hooks of a step would miss what the second one changes.
        """
        self.remainder = Remainder(state)
        self.saved_step = -1
        self.save_requested = False
        self._state = state
        self._console = console
        self._cluster = state.cluster
        self._folder = Path(state.manager.directory)
        self._engine = self._folder / "engine"
        self._best = self._folder / "best"
        self._vocabularies = Vocabularies(state.found, state.hooks)
        self._divergence = Divergence(state.strategy, state.cluster, state.found.variables.values())
        self._position = InputPosition(state, console)
        self.reader = CheckpointReader(
            state, console, self.remainder, self._vocabularies, self._engine_part
        )
        self._writer = CheckpointWriter(state, lambda: self._engine_part(self.remainder.names))
        self._begun: int | None = None
        state.manager.save = self._request  # type: ignore[method-assign]
        for name in ("restore", "read"):
            rewind = functools.partial(self._rewind, getattr(state.ckpt, name))
            setattr(state.ckpt, name, rewind)

    @property
    def _shown(self) -> str:
        """The folder, as messages name it."""
        return from_here(self._folder)

    def _request(self, *_: Any, **__: Any) -> str:
        self.save_requested = True
        return str(self._folder / f"ckpt-{self._state.step}")

    def _rewind(self, restore: Any, path: str, *args: Any, **options: Any) -> Any:
        """``ckpt.restore`` as hooks call it: weights and optimizer go back, step and data do not.

        Of one of this run's checkpoints, also what the user's part leaves out is restored.
        """
        step = self._state.step
        self._writer.background.wait()
        status = restore(path, *args, **options)
        self._state.step_variable.assign(step)
        match = NUMBER.search(Path(path).name) if path else None
        folder = Path(path or ".").parent.resolve()
        if match and folder in (self._folder.resolve(), self._best.resolve()):
            with contextlib.suppress(Damaged):  # no checkpoint of a run: what the hook wrote there
                names = read_record(folder / "engine", int(match[1])).remainder or []
                part = tf.train.Checkpoint(remainder=self.remainder.saved(names))
                part.read(str(folder / "engine" / f"ckpt-{match[1]}")).expect_partial()
                self.remainder.put_back(names)
        return status

    def _engine_part(self, remainder: list[str]) -> tf.train.Checkpoint:
        part = tf.train.Checkpoint(
            step=self._state.step_variable,
            lr=self._state.lr,
            seeds=generator_states(self._state.train_model),
            remainder=self.remainder.saved(remainder),
        )
        if self._state.context.loss_scale is not None:
            part.loss_scale = self._state.context.loss_scale
        return part

    def save_if_due(self, due: bool) -> None:
        """Saves after the current step, if that is due or a hook has requested it.

        Every process of a cluster takes part, also those that write next to nothing.

        Raises:
            RunError: the files cannot be written, or the replicas have diverged; earlier
                checkpoints stay good.
            PeerLost: another process is gone.
        """
        step = self._state.step
        requested, self.save_requested = self.save_requested, False
        if not requested and (not due or self.saved_step == step):
            return
        check_state(self._state.hook_state, "a host hook")
        loss_scale = self._state.context.loss_scale
        if loss_scale is not None and (complaint := loss_scale.complaint()):
            self._console.warn_once(complaint)
        self.wait()
        hooks_ran = self.remainder.check_nothing_new(step)
        with self._cluster.peers(), self._state.statistics.averaged():
            self._divergence.check(step)
            self.remainder.take()
            self._save(step, hooks_ran)
        self.saved_step, self._begun = step, step

    def _save(self, step: int, hooks_ran: bool) -> None:
        chief = self._cluster.task.chief
        with all_write(self._state, step):
            self._engine.mkdir(parents=True, exist_ok=True)
            if chief:  # while its parts are replaced, it must not count
                (self._engine / f"ckpt-{step}.json").unlink(missing_ok=True)
        with all_write(self._state, step):
            input_saved = self._position.save(self._own_part("input", step))
            if own := self._state.statistics.own:
                own.write(str(self._own_part("statistics", step)))
        record = self._record(step, self._cluster.all(input_saved))
        with all_write(self._state, step):
            if chief:
                record.vocabularies = self._vocabularies.save(self._engine)
                self._writer.write(record, hooks_ran)
            else:
                self._writer.take_part()

    def _own_part(self, name: str, step: int) -> Path:
        """Returns the prefix of a part that each process writes for itself."""
        return self._engine / f"{name}-{step}-{self._cluster.task.index}"

    def _record(self, step: int, input_saved: bool) -> Record:
        context = self._state.context
        return Record(
            step=step,
            path=f"ckpt-{step}",
            processes=self._cluster.task.processes,
            replicas=context.replicas,
            batch_size=context.batch_size,
            accumulate_steps=context.accumulate_steps,
            overfit_batches=self._state.config.overfit_batches,
            last_batch=self._state.config.last_batch,
            unit=self._state.data.unit,
            input_saved=input_saved,
            learning_rate=self._state.config.learning_rate,
            frozen=self._state.freezing.flags(),
            remainder=self.remainder.names,
            **self._state.progress.fields_of_record(),
        )

    def wait(self) -> None:
        """Waits until what is written in the background is on the disk.

        Every process of a cluster takes part.

        Raises:
            RunError: it could not be written; earlier checkpoints stay good.
            PeerLost: another process is gone.
        """
        if self._begun is None:
            return
        step, self._begun = self._begun, None
        with self._cluster.peers(), all_write(self._state, step):
            self._writer.background.wait()

    def raise_if_failed(self) -> None:
        """Looks whether writing in the background has failed; costs nothing.

        Raises:
            RunError: it has.
        """
        failure = self._writer.background.failure
        if isinstance(failure, OSError | tf.errors.OpError):
            raise unwritten(self._state, self._begun, failure) from failure

    def close(self) -> None:
        """Lets what is written, and read, in the background come to its end, well or not."""
        with contextlib.suppress(Exception):  # the run has its own failure to tell
            self._writer.background.wait()
        self._position.close()

    def settle(self, seconds: float) -> None:
        """Gives what is written in the background so long; it counts only if it is all there."""
        self._writer.background.settle(seconds)

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
        steps, folder = self._synced_steps(), self._folder
        if step == "best":
            folder, steps = self._best, saved_steps(self._best / "engine")
            if not steps:
                raise SetupError(
                    f"checkpoint: {self._shown} has no best one; train with keep_best, such as "
                    "--keep-best loss."
                )
        elif step is not None:
            if step not in steps:
                there = ", ".join(map(str, steps[:10])) or "none"
                raise SetupError(
                    f"checkpoint: {self._shown} has none of step {step} (there: {there})."
                )
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
                f"{self._shown}: there are checkpoints, but none of them is whole; to start over, "
                "choose another run_name or remove the folder."
            )
        return None

    def _synced_steps(self) -> list[int]:
        """Returns the steps of the checkpoints there are, newest first, as the chief sees them.

        Raises:
            SetupError: another process of the cluster sees others.
        """
        self._cluster.gather([0])  # the chief has tidied up
        steps = saved_steps(self._engine)
        newest = steps[0] if steps else -1
        table = self._cluster.gather([len(steps), newest])
        if (table != table[0]).any():
            seen = ", ".join(f"process {i}: {n or 'none'}" for i, n in enumerate(table[:, 0]))
            raise SetupError(
                f"runs_dir: the processes of the cluster do not see the same checkpoints in "
                f"{self._shown} ({seen}); it must be on a file system that all of them share."
            )
        return steps

    def _restore_one(self, folder: Path, step: int, with_input: bool) -> Record | None:
        """Restores one checkpoint; if it is damaged, warns and returns None."""
        record, why = None, "another process cannot read it"
        try:
            record = self.reader.read(folder, step)
        except Damaged as error:
            why = str(error)
        if not self._cluster.all(record is not None) or record is None:
            self._console.warn(
                f"the checkpoint of step {step} is damaged ({why}); using the one before."
            )
            return None
        if with_input:
            self._position.restore(record, self._own_part("input", step))
            self._restore_statistics(record)
        if not self._state.freezing.put_back(record.frozen):
            self._console.warn(
                "what was frozen in the checkpoint is of other layers than the model has now; "
                "what is frozen is as create_model left it."
            )
        self._state.progress = Progress.of_record(record)
        self.saved_step = record.step
        return record

    def _restore_statistics(self, record: Record) -> None:
        """Gives the replicas their own statistics again; others than before go on with the mean."""
        own, task = self._state.statistics.own, self._cluster.task
        same = (record.processes, record.replicas) == (task.processes, self._state.context.replicas)
        if own and same:
            # Without them, the mean differs by the order of sums only.
            with contextlib.suppress(*UNREADABLE, Damaged):
                own.read(regular(str(self._own_part("statistics", record.step))))
                self._state.statistics.put_back()
