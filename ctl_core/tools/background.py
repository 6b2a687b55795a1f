"""``train --background``: the same command in a process of its own, which no terminal ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ctl_core import run_process, training_log
from ctl_core.cluster.place import find_place
from ctl_core.cluster.supervisor import check_workers
from ctl_core.errors import SetupError, reason
from ctl_core.files import from_here, refuse_links
from ctl_core.settings import Config


def detach(
    argv: Sequence[str], config: Config, note: str | None = None, flags: Sequence[str] = ()
) -> int:
    """Starts the training and leaves it; says where it prints.

    Args:
        argv: the command line
        config: the settings that it means, with the run's name
        note: what is expected of the run; its entry is there when this returns
        flags: those of the command line for settings

    Raises:
        SetupError: the run is being trained, its folder cannot be written, its workers cannot be
            started here, or another program starts the processes of this cluster.
    """
    if sys.platform == "win32":
        raise SetupError("background: needs Linux or macOS.")
    if (place := find_place(config)).in_cluster:
        raise SetupError(
            f"background: {place.name} in the environment says that another program starts and "
            "ends this process; leave background out, or join no cluster with --cluster none."
        )
    if config.workers > 1:
        check_workers(config)
    name = config.run_name
    assert name is not None
    folder = Path(config.runs_dir).absolute() / name
    output = folder / run_process.OUTPUT
    run_process.refuse_taken(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder, [output, folder / run_process.FILE])
        with output.open("ab", buffering=0) as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "ctl_core", *argv, "--no-background", "--run-name", name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # neither Ctrl-C nor the end of the terminal reaches it
            )
        run_process.begin(folder, child.pid, background=True, flags=flags)
        if note is not None:
            training_log.begin(folder, note, config)
    except OSError as error:
        raise SetupError(
            f"{from_here(folder)}: the run cannot be started in the background: {reason(error)}"
            + ("; choose another runs_dir or run_name." if error.filename else ".")
        ) from error
    print(f"{from_here(folder)}: started in the background, process {child.pid}.")
    print(f"It prints into {from_here(output)}: python -m ctl_core logs {name} -f")
    print(f"To stop and save it: python -m ctl_core stop {name}")
    return 0
