"""What every example of the template goes through, in a project that was generated with it.

All in this process, but for a training that kills itself and a program without our code that loads
the export.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from ctl_core.callbacks_file import find_callbacks, load_callbacks
from ctl_core.run_state.tracking import find, plain_variable
from tests.helpers.rendering import Render
from tests.helpers.resume import values

# It ends by SIGKILL after a step that no checkpoint has.
KILLED = """
from callbacks import *


def kill(step):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


at_step = {{**globals().get("at_step", {{}}), {step}: kill}}
"""
# Run without the engine and the hooks: what the newest export returns.
LOAD = """
import numpy as np
import tensorflow as tf

serve = tf.saved_model.load("runs/parts/export/1").signatures["serving_default"]
with np.load("inputs.npz") as file:
    arrays = {name: tf.constant(file[name]) for name in file}
names = list(serve.structured_input_signature[1])
if list(arrays) == ["only"]:
    arrays = {names[0]: arrays["only"]}
np.savez("found.npz", **{name: value.numpy() for name, value in serve(**arrays).items()})
"""


def weights(state: ctl_core.State) -> dict[str, np.ndarray]:
    """The floating-point variables of the model, as the first replica has them."""
    plain = {
        path: plain_variable(variable)
        for path, variable in find({"train_model": state.train_model}).variables.items()
    }
    read = state.strategy.experimental_local_results
    return {
        path: read(variable)[0].numpy()
        for path, variable in plain.items()
        if isinstance(variable, tf.Variable) and variable.dtype.is_floating
    }


class Example:
    """A generated project whose training is tried on small data.

    Attributes:
        project: its folder, which is the current one
    """

    def __init__(
        self,
        name: str,
        render: Render,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        **settings: Any,
    ) -> None:
        """Generates the project of an example.

        Args:
            name: of the example
            render: makes projects
            folder: where to
            monkeypatch: of the test
            settings: of every run, such as a small width: ``hparams={"width": 4}``
        """
        self.project = render(folder, example=name)
        self._settings: dict[str, Any] = {"batch_size": 8, "eval_every": 0, **settings}
        monkeypatch.chdir(self.project)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.setattr(tf.get_logger(), "level", 40)

    def hooks(self) -> types.ModuleType:
        """Imports callbacks.py anew, as a process of its own would."""
        sys.modules.pop("callbacks", None)
        return load_callbacks(find_callbacks("callbacks.py", None, "callbacks.py", True))

    def train(self, run_name: str, **settings: Any) -> ctl_core.State:
        """Trains a run, or goes on with it."""
        hparams = {**self._settings.get("hparams", {}), **settings.pop("hparams", {})}
        own = {**self._settings, "run_name": run_name, **settings}
        config = ctl_core.load_config("config.yaml")
        own["hparams"] = {**config.hparams, **hparams}
        return ctl_core.train(self.hooks(), ctl_core.load_config("config.yaml", **own))

    def command(self, *words: str) -> None:
        """Runs ``python -m ctl_core`` with these words, in this process."""
        sys.modules.pop("callbacks", None)
        assert main(list(words)) == 0, words

    def assert_same_on_two_devices(
        self, steps: int = 4, rtol: float = 1e-4, atol: float = 1e-5, **settings: Any
    ) -> None:
        """Compares the trained weights of one device and of two."""
        one, two = (
            weights(self.train(f"on-{n}", steps=steps, virtual_devices=n, **settings))
            for n in (1, 2)
        )
        assert one and one.keys() == two.keys()
        for path, value in one.items():
            np.testing.assert_allclose(two[path], value, rtol, atol, err_msg=path)

    def assert_resumes(self, steps: int = 12, ckpt_every: int = 4) -> None:
        """Compares a whole run with one that was killed in the middle, bit for bit.

        The latter is the run ``parts``.
        """
        whole = values(self.train("whole", steps=steps, ckpt_every=ckpt_every))
        (self.project / "experiments").mkdir(exist_ok=True)
        killed = self.project / "experiments" / "killed.py"
        killed.write_text(KILLED.format(step=ckpt_every * 2 - 1))
        flags = ["--steps", str(steps), "--ckpt-every", str(ckpt_every), "--run-name", "parts"]
        for name, value in self._settings.items():
            inner = value if isinstance(value, dict) else {"": value}
            for key, one in inner.items():
                flags += [f"--{name}{'.' * bool(key)}{key}".replace("_", "-"), str(one)]
        done = self.process("-m", "ctl_core", "train", "--callbacks", str(killed), *flags)
        assert done.returncode == -9, done.stdout + done.stderr
        parts = values(self.train("parts", steps=steps, ckpt_every=ckpt_every))
        assert whole.keys() == parts.keys()
        for path, value in whole.items():
            np.testing.assert_array_equal(parts[path], value, err_msg=path)

    def assert_is_used(self, inputs: Any, atol: float = 1e-5) -> Any:
        """Evaluates, predicts and exports ``parts``; loads the export where our code is not.

        Args:
            inputs: what clients send: an array, or arrays by name
            atol: by how much what the export returns may differ from ``ctl_core.load``

        Returns:
            What ``ctl_core.load`` returns for the inputs.
        """
        for command in ("evaluate", "predict", "export"):
            self.command(command, "--run-name", "parts")
        sys.modules.pop("callbacks", None)
        expected = ctl_core.load("runs/parts")(inputs)
        arrays = inputs if isinstance(inputs, dict) else {"only": inputs}
        np.savez("inputs.npz", **arrays)
        done = self.process("-I", "-c", LOAD)
        assert done.returncode == 0, done.stderr
        with np.load("found.npz") as file:
            found = [file[name] for name in sorted(file)]
        flat = expected if isinstance(expected, dict) else {"output": expected}
        for mine, name in zip(found, sorted(flat), strict=True):
            np.testing.assert_allclose(mine, np.asarray(flat[name]), 1e-4, atol, err_msg=name)
        return expected

    def process(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs Python in the project, with its own copy of the engine."""
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(self.project)}
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=300, check=False
        )
