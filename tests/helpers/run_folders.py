"""Folders of runs that were not trained, with small files instead of variables."""

import dataclasses
from pathlib import Path

from ctl_core.checkpoint.record import Record, write_record
from ctl_core.model.state import Progress
from ctl_core.run.layers import format_config
from ctl_core.run.settings import Config

SETTINGS = Config(steps=8, batch_size=8, seed=7, hparams={"width": 64, "optimizer": {"decay": 0.1}})


def write_checkpoint(folder: Path, step: int, best: int = -1, config: Config = SETTINGS) -> Record:
    """Writes files like those of a checkpoint, and returns the checkpoint's record."""
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint").write_text("")
    for name in (f"ckpt-{step}", f"engine/ckpt-{step}", f"engine/input-{step}"):
        (folder / f"{name}.index").write_bytes(b"index")
        (folder / f"{name}.data-00000-of-00001").write_bytes(b"weights")
    (folder / "engine" / f"statistics-{step}-0.index").write_bytes(b"index")
    progress = Progress(examples=8 * step, hook_state={"count": 3, "list": [1.5, None]})
    if best >= 0:
        progress.best = {"keep_best=loss:min": [0.5, best, 0]}
    record = Record(
        step=step,
        input={"batch_size": 8, "last_batch": "drop", "overfit_batches": 0},
        input_saved=True,
        replicas=1,
        learning_rate=config.learning_rate,
        frozen=[False],
        created=["create_model/w"],
        progress=dataclasses.asdict(progress),
        learnt={"model/0/StringLookup": {"vocabulary": ["[UNK]", "a"], "idf_weights": [0.5, 1.0]}},
        settings=format_config(config),
    )
    write_record(folder, record)
    return record
