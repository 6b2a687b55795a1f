"""Tests that several runs in one process, as in a notebook, train as in separate processes.

Cells are compiled as in IPython: their file names do not exist, but ``linecache`` has their source.
"""

import gc
import importlib
import linecache
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.project import line_of

HOOKS = """\
import keras
import numpy as np
import tensorflow as tf
from tests.golden.small import create_eval_dataset, create_loss, data


def create_dataset(per_replica_batch_size):
    inputs, target = data()
    inputs = inputs + np.random.normal(size=inputs.shape)
    examples = tf.data.Dataset.from_tensor_slices((inputs.astype("float32"), target)).shuffle(100)
    return examples.batch(per_replica_batch_size, drop_remainder=True)


def create_model():
    layers = [keras.layers.Dense(WIDTH, activation="tanh"), keras.layers.Dropout(0.3)]
    return keras.Sequential([*layers, keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def create_opt(lr):
    return keras.optimizers.Adam(lr)


def update_pre(gradients):
    if tf.linalg.global_norm(gradients) > 1.0:
        gradients = [gradient * 0.5 for gradient in gradients]
    return gradients, gradients


def hook(step, loss):
    BODY


at_step = {7: hook}
"""

# The runs of the notebook. In a separate process, each run must reach the same weights.
RUNS: list[dict[str, Any]] = [
    {"width": 8},
    {"width": 16},
    {"width": 8, "body": "raise ValueError('no')"},
    {"width": 8, "settings": {"deterministic": True}},
    {"width": 8, "body": "raise KeyboardInterrupt"},
    {"width": 8, "settings": {"precision": "bfloat16"}},
    {"width": 8},
]
PROGRAM = """
import sys
from tests.helpers import project
from tests.engine.test_notebook import RUNS, hooks_of, train, weights_of
import numpy as np
for index in map(int, sys.argv[2:]):
    state = train(sys.argv[1], f"alone-{index}", **RUNS[index])
    np.savez(f"{sys.argv[1]}/alone-{index}.npz", *weights_of(state))
"""


def hooks_of(cell: int, width: int, body: str = "pass") -> SimpleNamespace:
    """Runs a cell and returns the hooks that it defines."""
    name, space = f"/tmp/ipykernel_77/{cell}.py", {"__name__": "__main__"}
    source = HOOKS.replace("WIDTH", str(width)).replace("BODY", body)
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), space)
    return SimpleNamespace(**{k: v for k, v in space.items() if not k.startswith("__")})


def train(runs_dir: str, name: str, width: int, body: str = "pass", settings: Any = None) -> Any:
    defaults: dict[str, Any] = {"steps": 10, "batch_size": 20, "eval_every": 5, "ckpt_every": 5}
    config = ctl_core.Config(**defaults, runs_dir=runs_dir, run_name=name, **(settings or {}))
    return ctl_core.train(hooks_of(abs(hash(name)), width, body), config)


def weights_of(state: Any) -> list[np.ndarray]:
    names = [layer.name for layer in state.train_model.layers]
    return [*state.train_model.get_weights(), np.array(names)]


def prepare_process() -> dict[str, Any]:
    """Returns the state of the process that a run may change but has to restore."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "wakeup": signal.set_wakeup_fd(-1),
        "streams": (sys.stdout, sys.stderr),
        "logging": list(logging.getLogger("ctl_core").handlers),
        "policy": keras.config.dtype_policy().name,
        "summaries": (tf.summary.experimental.get_step(), tf.summary.should_record_summaries()),
        "strategy": tf.distribute.has_strategy(),
        "folder": os.getcwd(),
        "environ": dict(os.environ),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
def test_each_run_trains_as_in_a_process_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is not affected by earlier runs that failed or changed precision or determinism."""
    before, weights, kept = prepare_process(), {}, []
    failures = []
    for index, run in enumerate(RUNS):
        try:
            state = train(str(folder), f"run-{index}", **run)
        except ctl_core.RunError as error:
            failures.append(str(error))
            continue
        except KeyboardInterrupt:
            continue
        finally:
            sys.last_traceback = None
            assert prepare_process() == before
        weights[index] = weights_of(state)
        kept += [weakref.ref(state.train_model), weakref.ref(state.optimizer)]
        del state
    assert failures == [f"at_step[7] (cell:{line_of(HOOKS, 'BODY')}): ValueError: no"]
    assert "retracing" not in capsys.readouterr().err
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)
    root, processes = Path(ctl_core.__file__).parents[1], {}
    for number in (1, 5):
        words = [sys.executable, "-c", PROGRAM, str(folder), str(number)]
        processes[number] = subprocess.Popen(
            words, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    for number, process in processes.items():
        assert process.wait() == 0
        alone = np.load(folder / f"alone-{number}.npz")
        for ours, name in zip(weights[number], alone.files, strict=True):
            np.testing.assert_array_equal(ours, alone[name])
    for ours, again in zip(weights[0], weights[6], strict=True):
        np.testing.assert_array_equal(ours, again)


@pytest.mark.slow
def test_in_a_thread_and_after_a_cell_that_was_interrupted(folder: Path) -> None:
    """A run can train in a thread, and an interrupted cell saves its run, which can resume."""
    expected, trained = weights_of(train(str(folder), "expected", width=8)), []
    thread = threading.Thread(target=lambda: trained.append(train(str(folder), "thread", width=8)))
    thread.start()
    thread.join()
    body = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    stopped = train(str(folder), "stopped", width=8, body=body)
    assert (stopped.step, stopped.stopped_by) == (7, signal.SIGINT)
    for state in (trained[0], train(str(folder), "stopped", width=8)):
        for ours, theirs in zip(weights_of(state), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_module_that_was_edited_and_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit without a reload is refused.

    https://github.com/jupyter/notebook/issues/4156
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "notebook_hooks.py"
    source = HOOKS.replace("WIDTH", "8").replace("BODY", "pass")
    file.write_text(source)
    module = importlib.import_module("notebook_hooks")

    def train_module(name: str) -> Any:
        defaults: dict[str, Any] = {"runs_dir": str(tmp_path), "run_name": name}
        return ctl_core.train(module, ctl_core.Config(steps=2, batch_size=20, **defaults))

    train_module("a")
    file.write_text(source.replace("* 0.5", "* 0.25"))
    with pytest.raises(ctl_core.SetupError, match=r"notebook_hooks.py was edited after it was imp"):
        train_module("b")
    edited = "# Edited.\n" + source.replace("Dense(8", "Dense(9").replace("* 0.5", "* tf.nothing")
    file.write_text(edited)
    importlib.reload(module)
    line = line_of(edited, "tf.nothing")
    message = rf"^update_pre \(notebook_hooks.py:{line}\): AttributeError"
    with pytest.raises(ctl_core.SetupError, match=message):
        train_module("b")
    file.write_text(edited.replace("* tf.nothing", "* 0.25"))
    importlib.reload(module)
    assert train_module("b").train_model.layers[0].units == 9
    assert (tmp_path / "b/callbacks.py").read_text() == file.read_text()


def test_an_edit_while_a_run_starts_does_not_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoGraph reads the source of a hook that has already been imported.

    https://github.com/pytorch/pytorch/issues/43856
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    weights = []
    for name, condition, edited in (("a", "> 0.0", "* 0.5"), ("b", "> -1.0", "* 0.0")):
        # The conditions are always true, but differ, because AutoGraph keeps what it has converted.
        source = HOOKS.replace("WIDTH", "8").replace("BODY", "pass").replace("> 1.0", condition)
        file = tmp_path / f"hooks_{name}.py"
        file.write_text(source)
        module = importlib.import_module(file.stem)
        content = source.replace("* 0.5", edited)

        def edit_and_create(lr: Any, file: Path = file, content: str = content) -> Any:
            file.write_text(content)
            return keras.optimizers.SGD(lr)

        monkeypatch.setattr(module, "create_opt", edit_and_create)
        config = ctl_core.Config(steps=4, batch_size=20, runs_dir=str(tmp_path), run_name=name)
        weights.append(ctl_core.train(module, config).train_model.get_weights())
        assert (tmp_path / name / "callbacks.py").read_text() == source
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
