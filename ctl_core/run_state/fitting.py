"""Whether a checkpoint fits the model that there is now, and in what it does not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tensorflow as tf

from ctl_core.compat import checkpointed_names
from ctl_core.errors import SetupError
from ctl_core.files import from_here

# What reading a file that is cut short, altered or gone raises.
UNREADABLE = (tf.errors.OpError, RuntimeError, IndexError)
KEY_END = "/.ATTRIBUTES/"


def unfitting(path: str, differences: list[str], fork: str | None = None) -> SetupError:
    """Returns the error for a checkpoint of which these parts differ.

    Args:
        path: of the checkpoint
        differences: in words
        fork: where it was copied from, if the run has not begun with it yet
    """
    more = f", and {len(differences) - 5} more" if len(differences) > 5 else ""
    found = f"{'; '.join(differences[:5])}{more}"
    if fork is not None:
        return SetupError(
            f"fork: the checkpoint of {fork} does not fit the model: {found}. Fork it with the "
            "model that it has."
        )
    return SetupError(
        f"the checkpoint {from_here(path)} does not fit the model any more: {found}. Undo the "
        "change, or choose another run_name."
    )


def differing_variables(ckpt: tf.train.Checkpoint, path: str) -> list[str]:
    """Lists the variables that differ, by writing the present state down and comparing."""
    saved = _variables_in(path)
    with tempfile.TemporaryDirectory() as folder:
        present = _variables_in(ckpt.write(str(Path(folder) / "present")))
    differences = []
    for key in sorted({*saved, *present}):
        if key.startswith("save_counter"):
            continue
        if key not in saved:
            differences.append(f"{present[key][0]} is new")
        elif key not in present:
            differences.append(f"{saved[key][0]} is gone")
        elif saved[key][1] != present[key][1]:
            differences.append(
                f"{present[key][0]} has shape {present[key][1]}, in the checkpoint {saved[key][1]}"
            )
    return differences


def _variables_in(path: str) -> dict[str, tuple[str, list[int]]]:
    """Reads a checkpoint's variables: key -> (name for people, shape)."""
    reader = tf.train.load_checkpoint(path)
    names = checkpointed_names(reader)
    return {
        key.split(KEY_END)[0]: (names.get(key) or key.split(KEY_END)[0], list(shape))
        for key, shape in reader.get_variable_to_shape_map().items()
        if KEY_END in key
    }
