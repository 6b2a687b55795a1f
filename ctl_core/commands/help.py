"""Formats the text of ``--help``, with settings in groups and with examples."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable

# The groups in which the help shows the settings. A test checks that no setting is missing.
GROUPS: dict[str, tuple[str, ...]] = {
    "run": (
        "steps", "epochs", "max_time", "run_name", "runs_dir", "fork", "init_from", "init_skip",
        "seed", "ckpt_every", "keep", "mirror", "mirror_keep", "callbacks",
    ),
    "data": ("batch_size", "last_batch", "overfit_batches"),
    "optimization": ("learning_rate", "lr_schedule", "warmup", "ema", "accumulate_steps"),
    "devices": (
        "strategy", "virtual_devices", "workers", "max_restarts", "logical_replicas",
        "shard_optimizer", "intra_op_threads", "deterministic", "precision", "jit_compile",
    ),
    "evaluation": (
        "eval_every", "eval_batch_size", "limit_eval", "log_every", "keep_best", "early_stop",
    ),
    "output and debugging": (
        "log_seconds", "listener", "on_nan", "detect_anomaly", "stall_seconds", "profile", "debug",
    ),
}  # fmt: skip
# Examples for each command: arguments with a description.
EXAMPLES = {
    "train": {
        "--check": "try every hook once",
        "--steps 600 --run-name a": "train, or resume, runs/a",
        "--run-name a --background": "leave the terminal",
    },
    "evaluate": {
        "a": "the best, or the last one",
        "a --checkpoint 300": "that of step 300",
        "a --watch": "each new one, while a trains",
    },
    "predict": {"a --input images.npy": "predictions of runs/a"},
    "export": {"a --output models/a": "for TensorFlow Serving"},
    "hooks": {
        "grad_pre": "everything about one hook",
        "--stub": "all hooks as code, with their defaults",
    },
    "doctor": {"--deep": "train on each GPU, too"},
}
_WIDTH = 78


class GroupedFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows first the flags that belong to no group, then the flags of each group of ``GROUPS``."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """Adds the flags of an argparse group, which contains all flags.

        Defaults that mean "not set" are left out of their help.
        """
        actions = list(actions)
        for action in actions:
            for unset in (" (default: null)", " (default: False)"):
                action.help = (action.help or "").removesuffix(unset)
        flags = {action.dest.replace("-", "_"): action for action in actions}
        grouped = {name for names in GROUPS.values() for name in names}
        super().add_arguments([action for name, action in flags.items() if name not in grouped])
        for title, names in GROUPS.items():
            group = [flags[name] for name in names if name in flags]
            if group:
                self.end_section()
                self.start_section(title)
                super().add_arguments(group)


def capitalize(text: str) -> str:
    """Returns the text with a capital letter at its beginning; names in it stay as they are."""
    return text[:1].upper() + text[1:]


def describe_command(text: str, prefix: str, has_settings: bool) -> str:
    """Returns the description that the help of a command shows before the flags.

    Args:
        text: a short description of the command
        prefix: the prefix of environment variables
        has_settings: whether the command takes settings of a run
    """
    description = f"{capitalize(text)}."
    if has_settings:
        description += (
            " Settings are read from config.yaml, the saved settings of an existing run, the "
            f"environment ({prefix}BATCH_SIZE=32) and these flags; later ones override earlier "
            "ones. --hparams.NAME VALUE sets a hyperparameter."
        )
    return textwrap.fill(description, _WIDTH)


def list_examples(command: str) -> str:
    """Returns the examples at the end of the help of a command; "" if there are none."""
    examples = EXAMPLES.get(command, {})
    if not examples:
        return ""
    longest = max(map(len, examples))
    lines = [
        f"  python -m ctl_core {command} {words:{longest}}  {text}"
        for words, text in examples.items()
    ]
    return "\n".join(["examples:", *lines])
