"""Explains why no GPU is used: ``python -m ctl_core doctor``. TensorFlow is not imported here."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ctl_core.machine.checks import describe_health, diagnose
from ctl_core.machine.facts import HIDING_VARIABLE, Facts, collect_facts
from ctl_core.run.errors import make_line

# A GPU for which TensorFlow has no machine code needs minutes to compile its kernels.
_PATIENCE = 600.0
# Matches a warning or an error of TensorFlow's C++ code, in both of its formats.
_WARNING = re.compile(r"(?:[WEF]\d{4} |\S+ \S+: [WEF] ).*?\] (.+)")


def examine(is_deep: bool) -> int:
    """Prints what prevents TensorFlow from using the GPUs of this machine.

    Args:
        is_deep: whether to train on each GPU as well

    Returns:
        The exit code: 1 if something prevents TensorFlow from using a GPU, otherwise 0.
    """
    facts = collect_facts()
    findings = diagnose(facts)
    for finding in findings:
        kind = "error" if finding.is_blocking else "warning"
        print(f"{kind}: {finding.text}", flush=True)
    can_train = not is_deep or _try_gpus(facts)
    if not findings and can_train:
        print(describe_health(facts), flush=True)
    return int(not can_train or any(finding.is_blocking for finding in findings))


def _try_gpus(facts: Facts) -> bool:
    """Trains on each visible GPU, prints the results, and returns False if one has failed."""
    if facts.visible_gpus == 0:
        print("--deep: there is no GPU to try.")
    succeeded = True
    for number in _list_visible(facts):
        is_good, result = _try_gpu(number)
        succeeded &= is_good
        print(f"{'GPU' if is_good else 'error: GPU'} {number}: {result}", flush=True)
    return succeeded


def _list_visible(facts: Facts) -> Iterator[str]:
    """Yields the value of ``CUDA_VISIBLE_DEVICES`` that shows each visible GPU alone."""
    value = facts.variables.get(HIDING_VARIABLE)
    names = [str(index) for index in range(len(facts.driver.gpus))]
    if value is not None:
        names = [name.strip() for name in value.split(",")]
    yield from names[: facts.visible_gpus]


def _try_gpu(number: str) -> tuple[bool, str]:
    """Trains on one GPU in a child process.

    Args:
        number: the value of ``CUDA_VISIBLE_DEVICES`` that shows this GPU alone

    Returns:
        Whether it has worked, and one line with the result.
    """
    command = [sys.executable, "-m", "ctl_core.commands.gpu_trial"]
    environment = {**os.environ, HIDING_VARIABLE: number, "TF_CPP_MIN_LOG_LEVEL": "0"}
    environment.pop("TF_CONFIG", None)
    engine = str(Path(__file__).parents[2])
    paths = [engine, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no result within {_PATIENCE:.0f} s"
    if done.returncode == 0:
        return True, done.stdout.strip().rpartition("\n")[2]
    end = f"exit code {done.returncode}"
    if done.returncode < 0:
        end = f"ended by signal {-done.returncode}"
    return False, f"{end}: {_find_reason(done.stderr)}"


def _find_reason(output: str) -> str:
    """Returns the last line of a failed process and TensorFlow's warnings before it."""
    lines = output.strip().splitlines() or ["no message"]
    matches = map(_WARNING.match, lines[:-1])
    warnings = [match[1] for match in matches if match is not None]
    return make_line("; ".join([*warnings[-2:], lines[-1]]), 600)
