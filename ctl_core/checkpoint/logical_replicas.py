"""Reads the settings that determine a run's bits from its record, before TensorFlow starts.

The order in which a CPU kernel adds numbers depends on the number of threads. A run with logical
replicas therefore uses the number of threads of its first start on every machine. Some environment
variables choose other kernels; they must have the same values at every start.
"""

import dataclasses
import os
import platform
from collections.abc import Mapping

from ctl_core.checkpoint.record import Record, read_complete_records
from ctl_core.checkpoint.source import Source
from ctl_core.cluster.task import count_cores
from ctl_core.run.errors import SetupError, quote
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config

# The environment variables with which TensorFlow, oneDNN, XLA and CUDA choose kernels.
_KERNEL_VARIABLES = (
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
    "NVIDIA_TF32_OVERRIDE",
    "TF_CUDNN_DETERMINISTIC",
    "TF_CUDNN_USE_AUTOTUNE",
    "TF_CUDNN_USE_FRONTEND",
    "TF_USE_CUBLASLT",
)


def read_kernel_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that choose kernels, and thus affect bits.

    Variables that are empty, or that have the value that TensorFlow assumes anyway, are left out.
    """
    values = {name: environ.get(name, "").strip() for name in _KERNEL_VARIABLES}
    is_default = values["TF_ENABLE_ONEDNN_OPTS"].lower() in ("1", "true")
    if is_default and platform.machine().lower() in ("x86_64", "amd64"):
        values["TF_ENABLE_ONEDNN_OPTS"] = ""
    return {name: value for name, value in values.items() if value}


def settle_logical_replicas(config: Config, source: Source | None) -> Config:
    """Returns the settings, with the logical replicas and the threads of a resumed run.

    A new run with logical replicas uses as many threads as there are cores, unless
    ``intra_op_threads`` is set.

    Args:
        config: the settings
        source: the checkpoint that the run starts from; None if it starts from scratch

    Raises:
        SetupError: the settings differ from the logical replicas or threads that the run began
            with.
    """
    if source is not None and source.setting == "run_name":
        record = next(read_complete_records(source.folder), None)
        if record is not None:
            config = _take_from_record(config, record, relative_path(source.run))
    if config.logical_replicas is None or config.intra_op_threads is not None:
        return config
    return dataclasses.replace(config, intra_op_threads=count_cores())


def _take_from_record(config: Config, record: Record, run: str) -> Config:
    """Returns the settings of a resumed run, completed from its record.

    Raises:
        SetupError: a setting differs from its value in the record.
    """
    if config.logical_replicas not in (None, record.logical_replicas):
        began = "without"
        if record.logical_replicas is not None:
            began = f"with {record.logical_replicas}"
        raise SetupError(
            f"logical_replicas: {run} was started {began}, not with {config.logical_replicas}; "
            f"leave the setting out, or start a new run from this one: --fork {run}."
        )
    if record.logical_replicas is None:
        return config
    if config.intra_op_threads not in (None, record.intra_op_threads):
        raise SetupError(
            f"intra_op_threads: {run} was started with {record.intra_op_threads}, not with "
            f"{config.intra_op_threads}, which would change its bits; leave the setting out, "
            f"or start a new run from this one: --fork {run}."
        )
    _refuse_other_kernels(record, run)
    return dataclasses.replace(
        config,
        logical_replicas=record.logical_replicas,
        intra_op_threads=record.intra_op_threads,
    )


def _refuse_other_kernels(record: Record, run: str) -> None:
    """Refuses to resume a run if an environment variable would choose other kernels.

    Raises:
        SetupError: a variable has another value than when the checkpoint was saved.
    """
    if record.kernel_variables is None:  # engine 2.0 or older wrote the record
        return
    values = read_kernel_variables()
    for name in _KERNEL_VARIABLES:
        before = _show_value(record.kernel_variables, name)
        now = _show_value(values, name)
        if before != now:
            raise SetupError(
                f"{name}: {run} was trained with {before}, not with {now}, which would "
                "change its bits; set the variable as before, or start a new run from this "
                f"one: --fork {run}."
            )


def _show_value(variables: Mapping[str, str], name: str) -> str:
    """Returns the value of an environment variable for a message."""
    if name not in variables:
        return "no value"
    return quote(variables[name])
