"""Saves and restores checkpoints, each with a user's part, an engine's part and a record.

A checkpoint of step 300 consists of these files in runs/NAME/ckpt:

    ckpt-300.index, .data-*             the user's part: the objects of ``create_ckpt``
    engine/ckpt-300.index, .data-*      the engine's part: all other variables of the hooks
    engine/input-300.index, .data-*     the position in the training data
    engine/statistics-300-0.index, ...  the values that differ between the replicas of process 0:
                                        their parts of the sums of training metrics
    engine/ckpt-300.json                the record: progress, vocabularies, ...; written last
    best/                               the same files of the checkpoint that ``keep_best`` keeps

A checkpoint without a record is ignored. If a process is killed while it saves, it therefore leaves
either a complete checkpoint or none.

When the manager of ``create_ckpt`` saves a checkpoint, it deletes the user's part of the oldest
ones. After that, retention.py removes the remaining files of each checkpoint whose user's part is
gone. The user's part may have a prefix other than ``ckpt``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.checkpoint.finite import FiniteVariables
from ctl_core.checkpoint.logical_replicas import read_kernel_variables
from ctl_core.checkpoint.position import UNREADABLE, InputPosition, SavedPosition
from ctl_core.checkpoint.record import Damaged, Record, find_user_part, list_files, read_record
from ctl_core.checkpoint.retention import keep_and_remove, sweep
from ctl_core.checkpoint.source import Source
from ctl_core.checkpoint.stateful_ops import find_keeping_op, find_unknown_ops
from ctl_core.checkpoint.vocabularies import Vocabularies
from ctl_core.checkpoint.writer import Divergence, Writer, write_together
from ctl_core.compat import (
    FunctionGraph,
    find_captured_iterators,
    find_written_resources,
    read_max_to_keep,
)
from ctl_core.hooks.callbacks_file import COPY
from ctl_core.hooks.recording import find_tables, list_freezable, read_flags, set_flags
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.failures import find_line
from ctl_core.model.generator_states import has_states_after
from ctl_core.model.state import Progress, State
from ctl_core.numerics.variables import is_summed, unwrap
from ctl_core.run.console import Console
from ctl_core.run.errors import RunError, SetupError, format_error
from ctl_core.run.files import relative_path
from ctl_core.run.hash_seed import fingerprint_order
from ctl_core.run.layers import format_config

# The type of the object that ``tf.train.Checkpoint.restore`` and ``read`` return.
RestoreStatus: TypeAlias = Any

# The functions that create the ops of Python code.
_PYTHON_FUNCTIONS = {"EagerPyFunc": "tf.py_function", "PyFunc": "tf.numpy_function"}
_WRITING_TABLES = {"LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2"}
# A resumed run needs all variables of these hooks. The variables of other hooks may have changed
# since the checkpoint was saved.
_NEEDED = ("create_model/", "create_loss/", "create_opt/", "create_eval_model/")


class Facade:
    """Wraps an object that is passed to hooks, and replaces some of its attributes."""

    def __init__(
        self, original: tf.train.Checkpoint | tf.train.CheckpointManager, **replaced: Any
    ) -> None:
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Checkpoints:
    """Saves and restores a run.

    Attributes:
        ckpt: the checkpoint that is passed to hooks. If a hook restores it, the step and the
            position in the data do not change.
        manager: the manager that is passed to hooks. If a hook calls ``save``, the checkpoint is
            saved after all hooks of the step, because a later hook may still change a variable.
        parts: copies of the values that differ between replicas: their parts of the sums of
            training metrics
        position: the position in the training data
        saved_step: the step of the last checkpoint that was saved or resumed from, or -1
        is_save_wanted: whether to save a checkpoint of the current step even if none is due, or if
            the step was already saved. The reason is a hook that has called ``manager.save``, an
            evaluation that is the best so far, or the timer of ``ckpt_every``. One process with
            such a reason is enough, see ``LoopStatus.save``
    """

    def __init__(self, state: State, console: Console) -> None:
        self.ckpt = Facade(
            state.ckpt,
            restore=functools.partial(self._restore_in_hook, state.ckpt.restore),
            read=functools.partial(self._restore_in_hook, state.ckpt.read),
        )
        self.manager = Facade(
            state.manager,
            save=self._request,
            restore=self._restore_from_manager,
            max_to_keep=read_max_to_keep(state.manager),
        )
        self.saved_step = -1
        self.is_save_wanted = False
        self._state = state
        self._console = console
        self._cluster = state.cluster
        self._folder = state.run_dir / "ckpt"
        if Path(state.manager.directory) != self._folder:
            raise state.hooks.create_ckpt.reject("returned a manager that does not use ckpt_path.")
        self._named = _list_variables(state.ckpt)
        self._created = self._find_created()
        self._engine_part = tf.train.Checkpoint(created=self._created)
        variables = state.recording.variables
        self._generators = [*state.recording.generators, *state.recording.tf_generators]
        saved_variables = [*self._created.values(), *self._named]
        sums = [variable for variable in saved_variables if is_summed(variable)]
        self.parts = ReplicaCopies(state.strategy, sums)
        differing = set(map(id, self._generators))
        differing.update(map(id, filter(is_summed, variables.values())))
        self._divergence = Divergence(
            state, [variable for variable in variables.values() if id(variable) not in differing]
        )
        self._finite_variables = FiniteVariables(state)
        # Whether the weights were finite when they were last checked; None if they were not.
        self._is_finite: bool | None = None
        # Whether the run has a checkpoint of weights that are not finite, from which it did not
        # resume.
        self._has_nonfinite = False
        self._vocabularies = Vocabularies(state)
        self.position = InputPosition(state, console)
        self._writer = Writer(state, self._engine_part)
        self._settings = format_config(state.config)
        self._kernel_variables: dict[str, str] | None = None
        if state.config.logical_replicas is not None:
            self._kernel_variables = read_kernel_variables()
        self._run_id = uuid.uuid4().hex  # replaced if the run is resumed

    def _find_created(self) -> dict[str, tf.Variable]:
        """Returns the variables of the engine's part by name.

        These are the variables that hooks have created and that the user's part does not contain.
        The variables of evaluation metrics are left out, because every evaluation resets them.
        """
        state = self._state
        left_out = set(map(id, self._named))
        if state.evaluation is not None:
            left_out.update(map(id, state.evaluation.list_passing_variables()))
        return {
            name: variable
            for name, variable in state.recording.variables.items()
            if id(variable) not in left_out
        }

    def _request(self, *_: Any, **__: Any) -> str:
        """Requests a checkpoint and returns its path; hooks call this as ``manager.save``."""
        self.is_save_wanted = True
        return str(self._folder / f"ckpt-{self._state.step}")

    def _restore_from_manager(self, path: str | None = None) -> RestoreStatus:
        return self.ckpt.restore(path or self._state.manager.latest_checkpoint)

    def _restore_in_hook(
        self,
        restore: Callable[..., RestoreStatus],
        path: str | os.PathLike[str],
        *args: Any,
        **options: Any,
    ) -> RestoreStatus:
        """Restores the variables of a checkpoint for a hook.

        The step, the position in the data and the random generators do not change. The variables of
        the engine's part are restored, too.
        """
        self._writer.wait()
        kept = [self._state.components.step_variable, *self._generators]
        with ReplicaCopies(self._state.strategy, kept).put_back_after():
            status = restore(path, *args, **options)
            folder, _, number = str(path).rpartition("-")
            engine_part = Path(folder).parent / "engine" / f"ckpt-{number}"
            if engine_part.with_suffix(".index").exists():
                self._engine_part.read(str(engine_part)).expect_partial()
        return status

    def save(self) -> bool:
        """Saves a checkpoint after the current step.

        Does nothing if this step was already saved and ``is_save_wanted`` is False, or if
        ``on_nan`` does not allow the current weights to be saved.

        Returns:
            True if a checkpoint was saved.

        Raises:
            RunError: the files cannot be written, or the replicas have diverged.
        """
        step = self._state.step
        is_wanted = self.is_save_wanted
        self.is_save_wanted = False
        if self.saved_step == step and not is_wanted:
            return False
        late_variable = self._state.recording.find_late()
        if late_variable is not None:
            raise RunError(
                f"{late_variable} during training, so no checkpoint would restore it; create "
                "it in create_model, or keep numbers in state."
            )
        self._warn_of_loss_scale()
        self.wait()
        # Listeners are notified before the next checkpoint is written, because the manager may then
        # delete the last one.
        self.tell_saved()
        self._divergence.check(step)
        if not self._accepts_weights(step):
            return False
        self._save(step)
        self.saved_step = step
        return True

    def _accepts_weights(self, step: int) -> bool:
        """Returns True if the setting ``on_nan`` allows the current weights to be saved.

        With ``on_nan: warn``, only the first checkpoint with weights that are not finite is saved,
        and no older checkpoint is deleted for it. Further checkpoints of this kind would soon
        replace all usable ones.

        Weights are all variables that an evaluation uses, see ``FiniteVariables``.

        Raises:
            RunError: ``on_nan`` is stop, and a weight is not finite.
        """
        state = self._state
        if state.config.on_nan == "ignore":
            self._check_for_mirror(step)
            return True
        was_finite = self._is_finite is not False
        name = self._finite_variables.find_nonfinite()
        self._is_finite = name is None
        state.has_finite_weights = name is None
        if name is None:
            return True
        if state.config.on_nan == "stop":
            raise RunError(
                f"after step {step}, {name} is not finite (on_nan: stop); no checkpoint is "
                "written for this step."
            )
        if was_finite:
            self._console.warn(
                f"after step {step}, {name} is not finite. No further checkpoints are written "
                "until all weights are finite again; --detect-anomaly finds where the NaN "
                "comes from."
            )
        return was_finite and not self._has_nonfinite

    def _check_for_mirror(self, step: int) -> None:
        """Checks the weights if the run has a mirror, which keeps only finite checkpoints."""
        if self._state.config.mirror is None:
            return
        was_finite = self._is_finite is not False
        name = self._finite_variables.find_nonfinite()
        self._is_finite = name is None
        if was_finite and name is not None:
            self._console.warn(
                f"after step {step}, {name} is not finite. No further checkpoints are copied to "
                "the mirror until all weights are finite again."
            )

    def _warn_of_loss_scale(self) -> None:
        loss_scale = self._state.components.loss_scale
        if loss_scale is None:
            return
        trouble = loss_scale.describe_trouble()
        if trouble:
            self._console.warn(trouble)

    def _save(self, step: int) -> None:
        state = self._state
        engine = self._folder / "engine"
        record = Record(
            step=step,
            input=self.position.describe(),
            input_saved=False,
            replicas=state.components.shape.replicas,
            leaves=state.components.shape.leaves,
            learning_rate=state.config.learning_rate,
            frozen=read_flags(state.recording),
            created=list(self._created),
            # The progress is copied, because hooks may change it while the record is written.
            progress=dataclasses.asdict(state.progress),
            compiled=state.compilation.is_compiled,
            learnt=self._vocabularies.learnt,
            settings=self._settings,
            logical_replicas=state.config.logical_replicas,
            intra_op_threads=state.config.intra_op_threads,
            set_order=fingerprint_order(),
            generators=[state.tolist() for state in state.components.generators.initial_states],
            run_id=self._run_id,
            is_finite=self._is_finite,
            kernel_variables=self._kernel_variables,
        )
        position = SavedPosition()
        # All processes read the same data, so it is enough to save the position of the chief.
        if self._cluster.task.chief:
            position = self.position.read()
        with write_together(state, step):
            # If the folder of the run was removed, it is not created again, because its other
            # files would be missing.
            self._folder.mkdir(exist_ok=True)
            engine.mkdir(exist_ok=True)
            self._remove_files(step)
            if self.parts.values:
                self.parts.take()
                prefix = self._name_statistics(self._folder, step)
                _make_parts_checkpoint(self.parts).write(str(prefix))
        write_position = functools.partial(
            self.position.write, position, record, engine / f"input-{step}"
        )
        with write_together(state, step):
            self._writer.write(record, write_position)

    def _remove_files(self, step: int) -> None:
        """Removes the files that this process wrote for an earlier checkpoint of the same step.

        The record is removed first, so that a partly replaced checkpoint is ignored. TensorFlow
        would write into some of the existing files, and thereby damage the copy of the best
        checkpoint, which may consist of hard links to them.
        """
        statistics = self._name_statistics(self._folder, step).name
        for path in reversed(list_files(self._folder, step)):
            is_written_here = self._cluster.task.chief
            if path.name.startswith("statistics-"):
                is_written_here = path.name.startswith(f"{statistics}.")
            if is_written_here:
                path.unlink(missing_ok=True)

    def _name_statistics(self, folder: Path, step: int) -> Path:
        """Returns the prefix of the files that this process writes for its replicas."""
        return folder / "engine" / f"statistics-{step}-{self._cluster.task.index}"

    def wait(self) -> None:
        """Waits until the last checkpoint is on the disk.

        Raises:
            RunError: the checkpoint cannot be written.
        """
        with write_together(self._state, self.saved_step):
            self._writer.wait()

    def close(self) -> None:
        """Waits until writing in the background has ended, successfully or not."""
        self._writer.pool.shutdown()  # a run in a notebook must not leave a thread behind
        self.tell_saved()

    def tell_saved(self) -> None:
        """Notifies the listeners of each checkpoint that has been completed since the last call."""
        while self._writer.written and self._console.listeners is not None:
            self._console.listeners.tell("saved", *self._writer.written.pop(0))

    def restore(
        self, source: Source | None, with_input: bool = True, reads_data: bool = True
    ) -> Record | None:
        """Restores the newest complete checkpoint of a source.

        Args:
            source: the checkpoints that may be used; None if the run starts from scratch
            with_input: whether training resumes from the checkpoint. If False, the data start from
                the beginning, and the weights are replaced by their averages if the run computes
                averages (``ema``).
            reads_data: whether the data of the hooks are used. In this case, a line is printed if
                sets have another order than in the process that trained.

        Returns:
            The record of the checkpoint; None without a source.

        Raises:
            SetupError: no checkpoint is complete, the checkpoint does not fit the model, or the
                processes of a cluster find different checkpoints.
        """
        folder = self._folder
        steps: list[int] = []
        if source is not None:
            folder = source.folder
            steps = source.find_steps()
            if with_input and source.wanted is None:
                steps = self._put_nonfinite_last(folder, steps)
        if not self._cluster.has_same(repr(steps).encode()):
            raise SetupError(
                f"runs_dir: {relative_path(self._folder)} contains different checkpoints on "
                "another process of the cluster; all processes need the same folder, on a "
                "shared file system."
            )
        record = None
        for step in steps:
            record = self._restore_step(folder, step, with_input)
            if record is not None:
                break
        has_lost_records = any(folder.glob("*.index")) and not (folder / "engine").is_dir()
        if record is None and (steps or has_lost_records):
            raise SetupError(_explain_none_whole(folder, source))
        self._compare_set_order(record, reads_data)
        if with_input and self._cluster.task.chief:
            sweep(self._folder)
        self._set_initial_generators(record)
        if record is not None:
            self._finish_restoring(folder, record, with_input)
        return record

    def _set_initial_generators(self, record: Record | None) -> None:
        """Sets the initial states of random generators to those with which the run began.

        Usually, these are the states that the generators have had when they were created. If they
        do not fit the states in the checkpoint either, a warning is printed.
        """
        generators = self._state.components.generators
        if record is None or not record.generators:
            generators.initial_states = [state.numpy() for state in generators.variables]
            return
        created = generators.initial_states
        generators.initial_states = [np.array(state) for state in record.generators]
        is_known = all(map(np.array_equal, created, generators.initial_states))
        if is_known or record.logical_replicas is None:
            return
        if not has_states_after(self._state.components, record.step, record.logical_replicas):
            self._console.warn(
                f"the checkpoint of step {record.step}: the random generators in its record do not "
                "fit those in its variables, so training may continue with other random numbers; "
                "either a hook has used a generator between two steps, or the file was changed."
            )

    def _compare_set_order(self, record: Record | None, reads_data: bool) -> None:
        """Prints a line if sets have another order than in the process that trained the run."""
        if record is None or not reads_data or record.set_order in (None, fingerprint_order()):
            return
        self._console.say(
            "PYTHONHASHSEED: sets have another order in this process than in the one that "
            "trained the checkpoint. If hooks number classes in the order of a set, sort the "
            "set; train.sh and python -m ctl_core fix the order."
        )

    def _put_nonfinite_last(self, folder: Path, steps: list[int]) -> list[int]:
        """Moves the newest checkpoints to the end of a list if their weights are not finite.

        A run could not become finite again from these checkpoints. It resumes from the newest
        checkpoint before them, if there is one.

        Args:
            folder: the folder with the checkpoints
            steps: the steps of the checkpoints, newest first
        """
        if self._state.config.on_nan == "ignore":
            return steps
        finite = steps
        while finite and _is_known_nonfinite(folder, finite[0]):
            finite = finite[1:]
        nonfinite = steps[: len(steps) - len(finite)]
        if finite and nonfinite:
            self._has_nonfinite = True
            self._console.warn(
                f"the weights of the newest checkpoint, step {steps[0]}, are not finite, so "
                f"training resumes from step {finite[0]}; --fork {relative_path(folder.parent)}"
                f"@{steps[0]} starts a new run from step {steps[0]}."
            )
        return finite + nonfinite

    def _check_restored(self, record: Record, with_input: bool) -> None:
        """Checks whether restored weights are finite.

        If training resumes, this decides whether a further checkpoint may be written. Otherwise, a
        warning is printed.

        Args:
            record: the record of the checkpoint
            with_input: whether training resumes from the checkpoint
        """
        if self._state.config.on_nan == "ignore" or record.is_finite:
            return
        name = self._finite_variables.find_nonfinite()
        if name is None:
            return
        if with_input:
            self._is_finite = False
            self._state.has_finite_weights = False
        self._console.warn(
            f"the checkpoint of step {record.step} is not finite: {name} contains NaN or infinity."
        )

    def _finish_restoring(self, folder: Path, record: Record, with_input: bool) -> None:
        """Checks the restored weights; if training resumes, prepares the folder for it.

        Restores the parts of the replicas, and removes files left by a kill.
        """
        self._check_restored(record, with_input)
        if not with_input:
            return
        self._restore_parts(folder, record)
        if folder != self._folder:
            self._console.say(f"fork: continues from {relative_path(folder)}, step {record.step}.")
        if self._cluster.task.chief:
            keep_and_remove(self._state, record, folder)

    def _restore_step(self, folder: Path, step: int, with_input: bool) -> Record | None:
        """Restores the checkpoint of a step; if it is damaged, warns and returns None."""
        record = None
        damage = "another process cannot read it"
        try:
            record = self._read(folder, step)
        except UNREADABLE as error:
            damage = format_error(error, 160).removeprefix("Damaged: ")
        if not self._cluster.agree(record is not None) or record is None:
            self._console.warn(
                f"the checkpoint of step {step} is damaged ({damage}); using the previous one."
            )
            return None
        if with_input:
            self.position.restore(record, folder / "engine" / f"input-{step}")
        self._settle_averages(record, with_input)
        if not set_flags(list_freezable(self._state.recording), record.frozen):
            self._console.warn(
                "the model has other layers than the checkpoint, so their frozen state cannot "
                "be restored; it stays as create_model set it."
            )
        self.saved_step = -1
        if folder == self._folder:
            self.saved_step = step
            self._run_id = record.run_id
        return record

    def _settle_averages(self, record: Record, with_input: bool) -> None:
        """Starts the averages of the weights if the checkpoint does not contain them.

        If training does not resume, the averages also replace the weights.
        """
        average = self._state.average
        if average is None:
            return
        if not any(name.startswith("ema/") for name in record.created):
            average.begin()
        if not with_input:
            average.swap()

    def _read(self, folder: Path, step: int) -> Record:
        """Reads the record and all variables of a checkpoint.

        Raises:
            UNREADABLE: a file is damaged.
            SetupError: the checkpoint does not fit the model.
        """
        record = read_record(folder, step)
        try:
            progress = Progress.from_json(record.progress)
        except (TypeError, ValueError) as error:
            raise Damaged("its record cannot be read") from error
        user_part = find_user_part(folder, step)
        needed = [name for name in self._created if name.startswith(_NEEDED)]
        missing = [name for name in needed if name not in record.created]
        try:
            if missing:
                raise ValueError(f"{', '.join(missing[:5])} is new.")
            self._state.ckpt.restore(str(user_part)).expect_partial().assert_consumed()
            self._engine_part.read(str(folder / "engine" / f"ckpt-{step}")).expect_partial()
        except (ValueError, AssertionError) as error:
            raise SetupError(
                f"the checkpoint {relative_path(user_part)} no longer fits the model: "
                f"{format_error(error)} Undo the change, or choose another run_name."
                f"{self._explain_saved_hooks()}"
            ) from error
        self._check_generators(record)
        if self._state.step != step:
            raise Damaged(f"its files are of step {self._state.step}")
        self._vocabularies.put_back(record.learnt, self._console)
        for layer in self._state.recording.layers:
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # recomputes constants that depend on the layer's variables
        self._state.progress = progress
        return record

    def _explain_saved_hooks(self) -> str:
        """Returns how to read the run with the hooks that it was trained with, for a message."""
        copy = self._state.run_dir / COPY
        if not copy.is_file():
            return ""
        return (
            f" To read the run with the hooks that it was trained with: {relative_path(copy)}, see "
            '--callbacks, or ctl.load(run, callbacks="saved") in Python.'
        )

    def _check_generators(self, record: Record) -> None:
        """Checks that a record has the states of all generators.

        Records of engine 2.0 or older have none, unless the run had logical replicas.

        Raises:
            Damaged: the number of states, or their shapes, differ.
        """
        if record.logical_replicas is None and not record.generators:
            return
        generators = self._state.components.generators.variables
        shapes = [tuple(generator.shape) for generator in generators]
        if [np.shape(state) for state in record.generators] != shapes:
            raise Damaged("the states of its random generators are not those of the model")

    def _restore_parts(self, folder: Path, record: Record) -> None:
        """Restores the parts of the sums of training metrics that each replica had.

        If the number of replicas has changed, or if the file cannot be read, each replica continues
        with an equal part. The printed metrics may then differ by rounding.
        """
        is_same_number = record.replicas == self._state.components.shape.replicas
        has_same_variables = record.created == list(self._created)
        is_readable = record.leaves is not None  # engine 2.0 wrote other values
        if not (self.parts.values and is_same_number and has_same_variables and is_readable):
            return
        prefix = self._name_statistics(folder, record.step)
        try:
            _make_parts_checkpoint(self.parts).read(str(prefix))
            self.parts.put_back()
        except UNREADABLE:
            self._console.warn(
                f"{relative_path(prefix)} cannot be read: the training metrics of the current "
                "period may differ by rounding."
            )


def _make_parts_checkpoint(copies: ReplicaCopies) -> tf.train.Checkpoint:
    """Returns a checkpoint of the values copied on this process."""
    return tf.train.Checkpoint(own=copies.values)


def _is_known_nonfinite(folder: Path, step: int) -> bool:
    """Returns True if a record says that the weights of a checkpoint are not finite."""
    try:
        return read_record(folder, step).is_finite is False
    except Damaged:
        return False


def _explain_none_whole(folder: Path, source: Source | None) -> str:
    """Returns the error message for a folder in which every checkpoint is damaged."""
    if source is not None and source.wanted == "best":
        return (
            f"{relative_path(folder)}: the copy of the best checkpoint is damaged; leave out "
            '"best" to use the newest checkpoint, or resume training, which copies the best '
            "one again if its original still exists."
        )
    if source is not None and source.wanted is not None:
        return (
            f"{relative_path(folder)}: the checkpoint of step {source.wanted} is damaged; use "
            "another one."
        )
    return (
        f"{relative_path(folder)}: there are checkpoints, but all of them are damaged; to "
        "start over, choose another run_name."
    )


def _list_variables(ckpt: tf.train.Checkpoint) -> list[tf.Variable]:
    """Returns the variables that a checkpoint contains."""
    descendants = map(unwrap, tf.train.TrackableView(ckpt).descendants())
    return [item for item in descendants if isinstance(item, tf.Variable)]


def check_written(state: State, graph: FunctionGraph, stateful_ops: Sequence[tf.Operation]) -> None:
    """Raises an error if a step keeps values for later steps that no checkpoint contains.

    These are the values of variables and lookup tables, and the contents of queues. If there are
    several replicas, a variable that was created outside of the hooks is an error, too, because the
    replicas would share it.

    Args:
        state: the state of the run
        graph: the graph of the step
        stateful_ops: the result of ``list_stateful_ops`` for the graph

    Raises:
        SetupError: the graph writes such a variable or lookup table, or uses a queue.
    """
    op = find_keeping_op(stateful_ops)
    if op is not None:
        raise SetupError(
            f"{find_line(op, state.hooks) or 'a step'}: {op.type} keeps values for later steps, "
            "and no checkpoint contains them; keep the values in a tf.Variable of shape "
            "[capacity, ...], and the position of the next one in an integer tf.Variable."
        )
    unsaved = _find_unsaved_variables(state, graph)
    if any(op.type in _WRITING_TABLES for op in stateful_ops):
        unsaved += _find_unsaved_tables(state, graph)
    if unsaved:
        raise reject_unsaved(unsaved[0])


def describe_unknown_state(
    state: State, graph: FunctionGraph, stateful_ops: Sequence[tf.Operation]
) -> str | None:
    """Describes the ops of a step whose state, if they have one, is in no checkpoint.

    Args:
        state: the state of the run
        graph: the graph of the step
        stateful_ops: the result of ``list_stateful_ops`` for the graph

    Returns:
        The description; None if there are no such ops.
    """
    names = []
    for op in find_unknown_ops(stateful_ops):
        name = _PYTHON_FUNCTIONS.get(op.type, op.type)
        line = find_line(op, state.hooks)
        if line is not None:
            name += f" in {line}"
        names.append(name)
    iterators = find_captured_iterators(graph, state.data.stream)
    saved: set[int] = set()
    if iterators:
        saved = set(map(id, tf.train.TrackableView(state.ckpt).descendants()))
    if any(id(iterator) not in saved for iterator in iterators):
        names.append("an iterator that a hook reads (return it from create_ckpt)")
    if not names:
        return None
    return (
        f"checkpoints do not contain the state of {', '.join(names)}. If such a state affects "
        "training, a resumed run trains other weights; keep it in a tf.Variable."
    )


def reject_unsaved(name: str) -> SetupError:
    """Returns the error for a variable or table that a step writes and no checkpoint contains."""
    return SetupError(
        f"a training step assigns {name}, which was created outside the hooks, so no "
        "checkpoint contains it; create variables in create_model, and return lookup tables "
        "from create_ckpt."
    )


def _find_unsaved_variables(state: State, graph: FunctionGraph) -> list[str]:
    """Returns the names of the variables that a graph writes and that no checkpoint contains."""
    strategy = state.strategy
    recorded = state.recording.variables
    shared = set()
    if strategy.num_replicas_in_sync > 1:
        # A variable that was created outside of the hooks exists only once, so all replicas would
        # share it.
        shared = {
            id(variable) for name, variable in recorded.items() if name.startswith("elsewhere")
        }
    saved_handles = {
        id(component.handle)
        for variable in (*recorded.values(), *_list_variables(state.ckpt), *state.data.held)
        if id(variable) not in shared
        for component in strategy.experimental_local_results(variable)
    }
    unsaved_handles = set(map(id, find_written_resources(graph))) - saved_handles
    return [
        variable.name.split(":")[0]
        for variable in graph.variables
        if id(variable.handle) in unsaved_handles
    ]


def _find_unsaved_tables(state: State, graph: FunctionGraph) -> list[str]:
    """Returns a name for each lookup table of a graph that can be written and is not saved."""
    named = set(map(id, tf.train.TrackableView(state.ckpt).descendants()))
    tables = [table for table in find_tables(graph) if hasattr(table, "insert")]
    return ["a lookup table" for table in tables if id(table) not in named]
