"""The commands, and what each takes beside the settings of a run."""

from __future__ import annotations

import functools
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, create_model

from ctl_core.settings import STRICT, Folder, check_path, declare

COMMANDS = {
    "train": "train, or resume a run",
    "evaluate": "evaluate a run's checkpoint",
    "predict": "write a run's predictions to a file",
    "export": "write a run's model for TensorFlow Serving",
    "hooks": "print the table of hooks",
}

_File = Annotated[
    str | None,
    AfterValidator(lambda path: path if path is None else os.path.abspath(check_path(path))),
    Field(title="the name of a file or folder"),
]
_Files = Annotated[list[Folder] | None, Field(title="the name of a file")]


def _check_step(step: Any) -> Any:
    if isinstance(step, int) and not 0 <= step < 2**63:
        raise ValueError
    return step


_Checkpoint = Annotated[int | Literal["best"] | None, AfterValidator(_check_step)]
# Options that belong to one command and are no settings of a run: name -> (type, default and help).
_CHECKPOINT: dict[str, Any] = {
    "checkpoint": (
        _Checkpoint,
        declare(
            None,
            "step of the checkpoint to take, or best for the one of keep_best; default: the newest",
            title="a step, a whole number from 0 up, or best",
        ),
    )
}
_CONTINUE = declare(False, "train on in a run that a hook has ended (StopTraining)")
_CHECK = declare(
    False,
    "try everything once, in a temporary folder: two steps, every host hook, an evaluation of one "
    "batch, a checkpoint; hooks that write files or call services do so; a run that is there is "
    "not touched",
)
_NOTE = declare(
    None,
    "what you expect of the run: an entry in training_log.md, to which its end adds the result",
    title="a text",
)
_INPUT = declare(
    None,
    "a .npy file with what clients send, or a .npz file with one array per named input; default: "
    "the data of create_eval_dataset",
)
_OUTPUT = declare(
    None,
    "the .npz file to write; default: predictions.npz in the run folder, of an --input "
    "x.npy predictions-x.npz there",
)
_EXPORT = declare(
    None,
    "the folder that versions 1, 2, ... are written into; default: export in the run folder",
)
_DATASET = declare(
    None, "which set to take, if create_eval_dataset returns several by name", title="a text"
)
_WATCH = declare(
    False,
    "follow a run that another process trains: evaluate each checkpoint as it comes, and write the "
    "values to watch.jsonl and tb/watch in the run folder, until the run has ended",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "train": {
        "continue": (bool, _CONTINUE),
        "check": (bool, _CHECK),
        "note": (str | None, _NOTE),
    },
    "evaluate": {**_CHECKPOINT, "watch": (bool, _WATCH)},
    "predict": {
        **_CHECKPOINT,
        "input": (_File, _INPUT),
        "dataset": (str | None, _DATASET),
        "output": (_File, _OUTPUT),
    },
    "export": {**_CHECKPOINT, "output": (_File, _EXPORT)},
}
_CONFIG = declare(
    None,
    "settings file, before the run's own; may be repeated: a later one goes before; default: "
    "config.yaml",
)


def default_options(command: str) -> dict[str, Any]:
    """Returns the options of a command as they are where no flag says otherwise."""
    values = options_of(command)().model_dump()
    return {name: value for name, value in values.items() if name != "config"}


@functools.cache
def options_of(command: str) -> type[BaseModel]:
    """Builds what checks a command's own options, and ``--config``."""
    fields: dict[str, Any] = {"config": (_Files, _CONFIG), **OPTIONS[command]}
    return create_model(command, __config__=STRICT, **fields)
