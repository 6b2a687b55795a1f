"""The life of an example of the template: it is trained, killed, resumed and used.

A test provides small data and settings, and this module the rest.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden.compare import read_checkpoint
from tests.golden.engine import Outcome
from tests.helpers.project import Cli
from tests.helpers.rendering import ROOT, TEMPLATE
from tests.helpers.samples import find_stale_lines, read_samples

EXAMPLES = ROOT / "templates" / "examples"
NATIVE = re.compile(r"[IW]\d{4} ")  # lines of TensorFlow's log, which a project's console omits

# At step 5, copies the run as SIGKILL would leave it, once the checkpoint of step 3 is complete.
KILL = """

def _leave_as_killed():
    import pathlib
    import time

    from tests.golden.engine import leave_as_killed

    run = pathlib.Path("runs/whole")
    limit = time.monotonic() + 120
    while not (run / "ckpt/engine/ckpt-3.json").exists():
        assert time.monotonic() < limit, "the checkpoint of step 3 is not complete after 2 minutes"
        time.sleep(0.05)
    leave_as_killed(run, run.with_name("parts"))


at_step = {**globals().get("at_step", {}), 5: _leave_as_killed}
"""


class Example:
    """A project with the hooks and settings of an example, and with small settings of a test.

    Attributes:
        name: the name of the example
        folder: the folder of the project
    """

    def __init__(self, name: str, cli: Cli, folder: Path, *flags: str) -> None:
        """Writes callbacks.py and config.yaml, and the digits if the hooks read them.

        Args:
            name: the name of the example
            cli: the fixture ``cli``
            folder: the folder of the project, which is tmp_path because ``cli`` runs there
            flags: settings of each training, such as ``"--hparams.width", "4"``
        """
        self.name = name
        self.folder = folder
        self._cli = cli
        self._flags = flags
        source = (EXAMPLES / f"{name}.py").read_text()
        (folder / "callbacks.py").write_text(source)
        (folder / "config.yaml").write_text((EXAMPLES / f"{name}.yaml").read_text())
        if "make_records" in source:
            shutil.copy(EXAMPLES / "make_records.py", folder)
        if "digits.npz" in source:
            (folder / "data").mkdir(exist_ok=True)
            shutil.copy(TEMPLATE / "data" / "digits.npz", folder / "data")

    def arguments(self, run: str, *flags: str) -> list[str]:
        """Returns the command of a training.

        It has six steps, with a checkpoint and an evaluation after every third step.
        """
        periods = ("--steps", "6", "--ckpt-every", "3", "--eval-every", "3", "--warmup", "0")
        return ["train", "--run-name", run, *periods, *self._flags, *flags]

    def train(self, run: str, *flags: str) -> Outcome:
        """Trains or resumes a run, asserts that there is no warning, and returns the outcome."""
        return self.command(*self.arguments(run, *flags))

    def command(self, *arguments: str) -> Outcome:
        """Runs a command, asserts that there is no error or warning, and returns the outcome."""
        outcome = self._cli(None, command=arguments)
        lines = [line for line in outcome.err.splitlines() if not NATIVE.match(line)]
        assert (outcome.code, lines) == (0, []), outcome
        assert "warning" not in outcome.out, outcome.out
        return outcome

    def numbers(self, run: str, step: int = 6) -> dict[str, np.ndarray]:
        """Returns all numbers in a checkpoint by name: weights, optimizer and state of hooks."""
        numbers_by_name = {}
        for folder in ("", "engine"):
            for name, value in read_checkpoint(self.folder / "runs" / run, step, folder).items():
                if np.asarray(value).dtype.kind in "biuf":
                    numbers_by_name[f"{folder}/{name}"] = np.asarray(value)
        return numbers_by_name


def assert_lives(
    example: Example,
    inputs: Any,
    dataset: str | None = None,
    atol: float = 1e-5,
    written: Sequence[str] = (),
) -> None:
    """Asserts that an example trains, evaluates, predicts, exports, loads, and resumes when killed.

    The sample output in the example's README is compared with the output of a training.

    Args:
        example: an example whose batch size two devices can share
        inputs: the input that a client sends, or a dict of inputs by the names of the signature
        dataset: the dataset to predict, if there are several
        atol: the absolute tolerance between one device and two after three steps. After more
            steps, rounding errors would grow, because Adam and kinks (ReLU, max pooling)
            amplify them.
        written: the lines of the sample output that a long training has written
    """
    flags = ("--deterministic",)
    hooks = example.folder / "callbacks.py"
    source = hooks.read_text()
    hooks.write_text(source + KILL)
    printed = example.train("whole", *flags).out
    assert "done: step 6" in printed
    for sample in read_samples(EXAMPLES / f"{example.name}.md")[:1]:
        assert find_stale_lines(sample, printed) == list(written), printed
    hooks.write_text(source)
    example.train("two-devices", "--virtual-devices", "2", *flags)
    one_device = example.numbers("whole", 3)
    two_devices = example.numbers("two-devices", 3)
    assert one_device.keys() == two_devices.keys()
    assert len(one_device) > 3
    for name, value in one_device.items():
        np.testing.assert_allclose(value, two_devices[name], 1e-4, atol, err_msg=name)

    predict = ["predict"] if dataset is None else ["predict", "--dataset", dataset]
    for command in (["evaluate"], predict, ["export"]):
        example.command(*command, "--run-name", "whole")
    file = "predictions.npz" if dataset is None else f"predictions-{dataset}.npz"
    with np.load(example.folder / "runs/whole" / file) as predictions:
        assert predictions.files
        assert all(len(predictions[each]) for each in predictions.files)
    named = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    exported = tf.saved_model.load(str(example.folder / "runs/whole/export/1"))
    served = exported.signatures["serving_default"](**tf.nest.map_structure(tf.constant, named))
    returned = ctl_core.load(example.folder / "runs/whole")(inputs)
    expected = returned if isinstance(returned, dict) else {"output": returned}
    assert served.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(served[name], value, err_msg=name)

    assert "resuming at step 3" in example.train("parts", *flags).out
    whole = example.numbers("whole")
    resumed = example.numbers("parts")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    assert any((one_device[name] != value).any() for name, value in whole.items() if "_var" in name)
