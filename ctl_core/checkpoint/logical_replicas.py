"""Reads the settings that determine a run's bits from its record, before TensorFlow starts.

The order in which a CPU kernel adds numbers depends on the number of threads. A run with logical
replicas therefore uses the number of threads of its first start on every machine.
"""

import dataclasses

from ctl_core.checkpoint.record import Record, read_complete_records
from ctl_core.checkpoint.source import Source
from ctl_core.cluster.task import count_cores
from ctl_core.run.errors import SetupError
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config


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
    return dataclasses.replace(
        config,
        logical_replicas=record.logical_replicas,
        intra_op_threads=record.intra_op_threads,
    )
