"""How a run begins: as another goes on (``fork``), or with weights only (``init_from``)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from ctl_core.checkpoint.folder import Run
from ctl_core.checkpoint.position import UNREADABLE
from ctl_core.checkpoint.record import (
    Damaged,
    copy_checkpoint,
    find_user_part,
    read_record,
    saved_steps,
)
from ctl_core.checkpoint.sources import find_sources, has_begun
from ctl_core.evaluation.selection import best_step
from ctl_core.model.state import State
from ctl_core.numerics.replicas import ReplicaCopies
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError, brief, reason
from ctl_core.run.files import from_here, written_whole
from ctl_core.run.settings import Config


@contextlib.contextmanager
def hold_run(config: Config, run: Run, console: Console) -> Iterator[None]:
    """Holds a run while it is trained, and forks it if that is asked for.

    A run that fails before its first step leaves nothing but its log: the command, put right, then
    begins it.

    Raises:
        SetupError: another process trains the run, or it cannot be forked.
    """
    if not run.task.chief:
        yield
        return
    run.lock()
    new = [path for path in run.written if not path.exists()]
    try:
        _fork(config, run, console)
        yield
    except BaseException:
        if run.steps_taken == 0:
            for path in new:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    path.unlink()
        raise


def _fork(config: Config, run: Run, console: Console) -> None:
    """Gives a run that has not begun the checkpoint of another, if ``fork`` says so.

    It then resumes as from its own: weights, optimizer, position in the data, random state. A run
    that has begun goes on with its own, so that a command may be given again.

    Raises:
        SetupError: there is no such checkpoint, or it cannot be copied.
    """
    if config.fork is None or has_begun(run.path):
        return
    source = find_sources(config)["fork"]
    step = source.find_step()
    where = f"{from_here(source.run)}, step {step}"
    try:
        with written_whole(run.ckpt) as beside:
            copy_checkpoint(source.folder, step, beside)
            best = source.run / "ckpt" / "best"
            kept = best_step(read_record(source.folder, step).progress["best"])
            if kept in saved_steps(best):
                copy_checkpoint(best, kept, beside / "best")
    except (OSError, Damaged) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise SetupError(f"fork: {where}: the checkpoint cannot be copied: {why}.") from error
    console.say(f"{run.shown} goes on from {where}.")


def load_initial_weights(state: State, console: Console) -> None:
    """Gives the model of a run that begins the weights of ``init_from``.

    A run is taken with its weights as they were trained, without its optimizer; ``fork`` takes all.

    Raises:
        SetupError: they cannot be read, or are not those of the model.
    """
    if state.config.init_from is None:
        return
    path = Path(state.config.init_from)
    # Random numbers are of this run's seed.
    with ReplicaCopies(state.strategy, state.recording.generators).put_back_after():
        what = _load_file(state, path) if path.is_file() else _load_run(state)
    if state.average:
        state.average.begin()
    console.say(f"init_from: the weights are those of {what}.")


def _load_file(state: State, path: Path) -> str:
    """Reads a ``.keras`` or ``.weights.h5`` file; returns what it is called."""
    model, hook, what = state.train_model, state.hooks.create_model, from_here(path)
    if not isinstance(model, keras.Model):
        raise SetupError(
            f"init_from: {what} is for a Keras model, and {hook} returns another; take a run."
        )
    # Keras' files hold a kernel with its adapter added up, and reading one makes both matrices of
    # the adapter 0, of which no gradient would ever move any.
    adapters = [
        variable.path
        for layer in state.recording.layers
        if getattr(layer, "lora_enabled", False)
        for variable in layer.weights
        if variable.name.startswith("lora_")
    ]
    if adapters:
        wanted = len(model.weights)
        raise SetupError(
            f"init_from: {what} fits {wanted - len(adapters)} of the {wanted} weights of {hook}: "
            f"{', '.join(adapters[:5])} are not there. Load what fits in create_model."
        )
    try:
        model.load_weights(path)
    except Exception as error:
        raise SetupError(f"init_from: {what} does not fit {hook}: {brief(error)}") from error
    return what


def _load_run(state: State) -> str:
    """Reads the weights of a run's checkpoint, by their place there; returns what it is called."""
    source, hook = find_sources(state.config)["init_from"], state.hooks.create_model
    step = source.find_step()
    what = f"{from_here(source.run)}, step {step}"
    children = tf.train.TrackableView.children(state.ckpt).items()
    model = {n: part for n, part in children if part is state.train_model or n == "train_model"}
    if not model:
        raise SetupError(f"init_from: {state.hooks.create_ckpt} returns no ckpt with train_model.")
    try:
        path = str(find_user_part(source.folder, step))
        tf.train.Checkpoint(**model).read(path).assert_existing_objects_matched()
    except (ValueError, AssertionError, Damaged, *UNREADABLE) as error:
        raise SetupError(
            f"init_from: {what} does not fit {hook}: {brief(error)} Load what fits in create_model."
        ) from error
    return what
