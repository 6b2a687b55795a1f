"""How a run begins: as another goes on, whose checkpoint ``fork`` copies; whole, or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from ctl_core.console import Console
from ctl_core.errors import SetupError, reason
from ctl_core.files import from_here
from ctl_core.run.folder import Run
from ctl_core.run_state.folder import copy_checkpoint
from ctl_core.run_state.record import Damaged, read_record, saved_steps
from ctl_core.selection import best_step
from ctl_core.settings import Config
from ctl_core.sources import read_source, record_of


@contextlib.contextmanager
def begun(config: Config, run: Run, console: Console) -> Iterator[None]:
    """Holds a run while it is trained, and forks it if that is asked for.

    A run that fails before its first step leaves nothing but its log: the command, put right, then
    begins it. What a process that was killed has forked, and not begun, is taken away first.

    Args:
        config: of the run
        run: whose ``steps_taken`` tells whether it was trained
        console: where to say what is forked

    Raises:
        SetupError: another process trains the run, or it cannot be forked.
    """
    if not run.task.chief:
        yield
        return
    run.lock()
    if run.not_begun.exists():
        shutil.rmtree(run.ckpt)
    new = [path for path in run.written if not path.exists()]
    try:
        _fork(config, run, console)
        yield
    except BaseException:
        if run.steps_taken() == 0:
            for path in new:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    path.unlink()
        raise


def _fork(config: Config, run: Run, console: Console) -> None:
    """Gives a run that has no checkpoint that of another, if ``fork`` says so.

    It then resumes as from its own: weights, optimizer, position in the data, random state. A run
    that has checkpoints goes on with them, so that a command may be given again.

    Args:
        config: with the name of the other run
        run: which is held by this process
        console: where to say so

    Raises:
        SetupError: there is no such checkpoint, or it cannot be copied.
    """
    if config.fork is None or saved_steps(run.ckpt / "engine"):
        return
    source = read_source("fork", config.fork, config.runs_dir)
    record = record_of("fork", source)
    where = f"{from_here(source.run)}, step {record.step}"
    try:
        run.ckpt.mkdir(exist_ok=True)
        run.not_begun.touch()
        best = source.run / "ckpt" / "best"
        if best_step(record.best) in saved_steps(best / "engine"):
            copy_checkpoint(
                best, read_record(best / "engine", best_step(record.best)), run.ckpt / "best"
            )
        copy_checkpoint(source.folder, record, run.ckpt)
    except (OSError, Damaged) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise SetupError(f"fork: {where}: the checkpoint cannot be copied: {why}.") from error
    console.say(f"{run.shown} goes on from {where}.")
