"""The GPUs of this machine, shared out among the processes of a cluster on it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from ctl_core.errors import SetupError


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Names the GPUs as ``CUDA_VISIBLE_DEVICES`` does, or, without it, as nvidia-smi lists them."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        gpus: list[str] = []
        for gpu in named.split(","):
            if not re.match(r"\d|GPU-|MIG-", gpu.strip()):
                break  # CUDA ignores what comes after one that there is not, such as -1
            gpus.append(gpu.strip())
        return gpus
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE) if not listed.returncode else []


def share_gpus(gpus: Sequence[str], workers: int) -> list[str]:
    """Returns a value of ``CUDA_VISIBLE_DEVICES`` for each worker.

    Raises:
        SetupError: the GPUs cannot be shared out evenly.
    """
    each, left = divmod(len(gpus), workers)
    if left:
        raise SetupError(
            f"workers: {workers} workers cannot share {len(gpus)} GPU{'s' * (len(gpus) > 1)} "
            "evenly; take a number that divides it, or choose GPUs with CUDA_VISIBLE_DEVICES "
            "(empty: train on the CPU)."
        )
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(workers)]
