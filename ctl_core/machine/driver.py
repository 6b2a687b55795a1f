"""Runs ``driver_query.py`` in a child process, and reads its answer."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ctl_core.run.errors import make_line

_QUERY = Path(__file__).with_name("driver_query.py")
# On a machine with many GPUs, a driver that has been idle takes some seconds to start.
_PATIENCE = 30.0


class Gpu(NamedTuple):
    """A GPU: its name, and its compute capability such as ``(8, 0)``."""

    name: str
    capability: tuple[int, int]


class DriverAnswer(NamedTuple):
    """What the NVIDIA driver has answered.

    Attributes:
        library: the path of the loaded ``libcuda.so.1``, without links; "" if it was not loaded
        problem: why there are no answers, for example because the library was not found
        error: the error code of ``cuInit``; 0 if it has succeeded
        cuda: the newest version of CUDA that the driver supports, such as ``(12, 4)``
        gpus: the GPUs
    """

    library: str = ""
    problem: str = ""
    error: int = 0
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()


def ask_driver(variables: Mapping[str, str]) -> DriverAnswer:
    """Returns the answers of the driver to a process with the given environment variables."""
    command = [sys.executable, "-I", "-S", str(_QUERY)]
    try:
        done = subprocess.run(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return DriverAnswer(problem=f"no answer within {_PATIENCE:.0f} s")
    if done.returncode:
        reason = make_line(done.stderr.strip().rpartition("\n")[2], 120)
        return DriverAnswer(problem=f"ended with exit code {done.returncode} {reason}".rstrip())
    answer = json.loads(done.stdout)
    return DriverAnswer(
        library=answer.get("library", ""),
        problem=answer.get("problem", ""),
        error=answer.get("error", 0),
        cuda=_read_pair(answer.get("cuda")),
        gpus=tuple(Gpu(name, tuple(capability)) for name, capability in answer.get("gpus", ())),
    )


def _read_pair(numbers: list[int] | None) -> tuple[int, int] | None:
    if numbers is None:
        return None
    major, minor = numbers
    return major, minor
