"""The small project that the kill test trains, and what its processes and run folders say."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Each process says in a file of its own what it is doing.
CALLBACKS = """
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

from ctl_core import data, report

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(203, 6, 6, 1)).astype("float32")
LABELS = RANDOM.integers(0, 3, 203)

PLACE = json.loads(os.environ.get("TF_CONFIG") or '{"task": {"index": 0}}')
PHASE = os.open(f"phase-{PLACE['task']['index']}", os.O_WRONLY | os.O_CREAT, 0o666)


def mark(phase):
    os.pwrite(PHASE, f"{phase:40}".encode(), 0)


mark("building")


def create_dataset(per_replica_batch_size, config):
    examples = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(50, seed=config.seed)

    def augment(example, seed):
        image, label = example
        noise = tf.random.stateless_normal(image.shape, seed)
        return image + 0.1 * noise, label

    augmented = data.with_seeds(examples, config.seed).map(augment, num_parallel_calls=2)
    return augmented.batch(per_replica_batch_size)


def create_eval_dataset(per_replica_batch_size, hparams):
    def slow(image, label):
        def wait(label):
            mark("evaluating")
            time.sleep(hparams.get("pause", 0.0))
            return label

        return image, tf.ensure_shape(tf.py_function(wait, [label], label.dtype), label.shape)

    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(
        per_replica_batch_size).map(slow)


def create_model():
    return keras.Sequential([
        keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)])


def create_loss():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda loss_input: loss(loss_input[1], loss_input[0])


def input_pre(batch):
    mark("tracing")
    return batch[0]


def halve(lr):
    lr.assign(lr * 0.5)


def slow(step, loss, hparams):
    mark(f"after step {step}")
    report(step, loss=loss)
    time.sleep(hparams.get("pause", 0.0))


every_steps = {1: slow}
at_step = {30: halve, 60: halve}
"""


class Failed(Exception):
    """A run ended by itself with an error, got stuck, or is not the same."""


@dataclasses.dataclass(frozen=True)
class Project:
    """The project's folder, and how it is trained."""

    folder: Path
    steps: int = 300
    workers: int = 1

    def make(self) -> Project:
        """Writes the hooks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "callbacks.py").write_text(CALLBACKS)
        return self

    def start(
        self, run: str, *flags: str, before: Sequence[str] = (), **how: Any
    ) -> subprocess.Popen[bytes]:
        """Starts training, in the run's folder if it is there already.

        Args:
            run: its name
            flags: further settings
            before: a command that runs the command, such as ``nice``
            how: see ``subprocess.Popen``
        """
        for path in self.folder.glob("phase-*"):
            path.unlink()
        settings = "--batch-size=16 --ckpt-every=7 --eval-every=20 --deterministic"
        command = [*before, sys.executable, "-m", "ctl_core", "train", *settings.split()]
        command += [f"--steps={self.steps}", f"--run-name={run}", *flags]
        if self.workers > 1:
            command += [f"--workers={self.workers}", "--max-restarts=1000000"]
        with (self.folder / f"{run}.log").open("ab") as log:
            how = {"stdout": log, "stderr": log, "env": os.environ, **how}
            paths = [how["env"].get("PYTHONPATH", ""), str(ROOT)]
            how["env"] = {**how["env"], "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            how["env"].pop("TF_CPP_MIN_LOG_LEVEL", None)  # the engine's own choice is to be seen
            return subprocess.Popen(command, cwd=self.folder, **how)

    def expect_done(self, run: str, code: int) -> None:
        """Complains of another exit code than 0."""
        if code:
            text = (self.folder / f"{run}.log").read_text(errors="replace")
            raise Failed(f"{run} ended with exit code {code}:\n{text[-3000:]}")

    def lines(self, run: str) -> list[dict[str, Any]]:
        """Reads metrics.jsonl."""
        path = self.folder / "runs" / run / "metrics.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

    def tensors(self, run: str) -> dict[str, bytes]:
        """Reads the last checkpoint, all but the data pipeline's own serialized form."""
        import numpy as np
        import tensorflow as tf

        found = {}
        for part in ("", "engine/"):
            path = self.folder / "runs" / run / "ckpt" / f"{part}ckpt-{self.steps}"
            reader = tf.train.load_checkpoint(str(path))
            for key in reader.get_variable_to_shape_map():
                if not any(word in key for word in ("OBJECT_GRAPH", "ITERATOR", "save_counter")):
                    found[part + key] = np.asarray(reader.get_tensor(key)).tobytes()
        return found

    def compare(self, run: str, whole: str) -> str:
        """Compares two runs: weights, optimizer, step, lr, seeds, and each line of the metrics.

        Returns:
            What was compared.

        Raises:
            Failed: they are not the same bit for bit; the message says where.
        """
        expected, found = self.tensors(whole), self.tensors(run)
        if differ := sorted(k for k in {*expected, *found} if expected.get(k) != found.get(k)):
            raise Failed(f"{run}: {len(differ)} tensors differ from {whole}: {differ[:5]}")
        lines, expected_lines = self.lines(run), self.lines(whole)
        trained = [line["step"] for line in lines if line["split"] == "train"]
        if trained != list(range(1, self.steps + 1)):
            raise Failed(f"{run}: metrics.jsonl has not each step once: {trained}")
        for line, other in zip(lines, expected_lines, strict=True):
            if line != other:
                raise Failed(f"{run}: metrics.jsonl has {line}, in {whole} {other}")
        return f"{len(found)} tensors and {len(lines)} lines of metrics"

    def processes(self) -> list[int]:
        """What still runs in the project's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == self.folder.resolve():
                    found.append(int(path.parent.name))
        return found

    def phase(self) -> str:
        """What the chief was doing last."""
        try:
            return (self.folder / "phase-0").read_text().strip() or "importing"
        except FileNotFoundError:
            return "importing"

    def files(self, run: str) -> set[str]:
        """The files of all checkpoints."""
        found: set[str] = set()
        for folder in ("ckpt", "ckpt/engine"):
            with contextlib.suppress(FileNotFoundError):
                found.update(os.listdir(self.folder / "runs" / run / folder))
        return found

    def half_saved(self, run: str, since: float) -> int | None:
        """The step of the checkpoint that was being written, if one was, after a kill."""
        folder = self.folder / "runs" / run / "ckpt"
        for path in [*folder.glob("ckpt-*"), *folder.glob("engine/*-*")]:
            step = path.name.replace(".", "-").split("-")[1].split("_")[0]
            with contextlib.suppress(FileNotFoundError):
                if (
                    step.isdigit()
                    and path.stat().st_mtime >= since
                    and not (folder / "engine" / f"ckpt-{step}.json").exists()
                ):
                    return int(step)
        return None
