"""Tests that no thread runs the user's input functions while Python shuts down.

The thread would never get on, and TensorFlow would wait for it, so the process would hang.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A Python function reads the dataset. While training ends, its current call takes three seconds.
# ``report_reading`` is the last function that runs before Python shuts down, because it is
# registered before the engine reads anything.
CALLBACKS = """
import atexit
import time

import tensorflow as tf

from tests.golden import small
from tests.golden.small import create_loss, create_model

every_steps = {}
seconds_per_call = 0.05
calls_begun = calls_ended = 0


@atexit.register
def report_reading():
    print("still reading" if calls_begun > calls_ended else "reading has ended")


def slow_down(step):
    global seconds_per_call
    seconds_per_call = 3
    time.sleep(0.2)


at_step = {5: slow_down}


def create_dataset(global_batch_size):
    def wait(target):
        global calls_begun, calls_ended
        calls_begun += 1
        time.sleep(seconds_per_call)
        calls_ended += 1
        return target

    def wait_in_graph(inputs, target):
        return inputs, tf.ensure_shape(tf.numpy_function(wait, [target], tf.float32), target.shape)

    return small.create_dataset(global_batch_size).map(wait_in_graph)
"""

SCRIPT = """
import callbacks
import ctl_core

settings = ctl_core.Config(steps=6, batch_size=16, run_name="a")
"""

FLAGS = "train --steps=6 --batch-size=16 --run-name=a"
# How training ends: the flags of a command, or a script.
ENDINGS = {
    "command": FLAGS,
    "command on two devices": f"{FLAGS} --virtual-devices=2",
    "script that keeps the state": SCRIPT + "state = ctl_core.train(callbacks, settings)",
    "script with an error": SCRIPT
    + """
def fail(step):
    raise ValueError("a hook failed")


callbacks.at_step = {6: fail}
ctl_core.train(callbacks, settings)
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_reading_has_ended_before_python_shuts_down(ending: str, tmp_path: Path) -> None:
    """It has ended after a command and after a script, even if an error ended the script."""
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    words = ["script.py"]
    if ending.startswith("command"):
        words = ["-m", "ctl_core", *ENDINGS[ending].split()]
    else:
        (tmp_path / "script.py").write_text(ENDINGS[ending])
    process = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.stdout.splitlines()[-1] == "reading has ended", process.stderr
    assert ("a hook failed" in process.stderr) == (ending == "script with an error")
