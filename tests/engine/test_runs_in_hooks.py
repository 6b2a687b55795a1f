"""Tests that a hook or a thread can load another run without affecting the run that trains."""

import functools
import multiprocessing
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import compat
from ctl_core.hooks import recording
from ctl_core.serving import LoadedModel
from ctl_core.session.turns import PROCESS_TURN
from tests.golden import compare, engine, small

engine.start_devices()


@pytest.fixture
def train_small(tmp_path: Path) -> engine.Train:
    """Returns ``train_small(hooks, **settings)``, which trains six steps like ``small.plain``."""
    return functools.partial(engine.train, runs=tmp_path / "runs", **small.settings(6))


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> engine.Command:
    """Returns ``command(*words)``, which runs ``python -m ctl_core WORDS`` in the test's folder."""
    return engine.commands_here(tmp_path, monkeypatch, capfd)


OTHER = """\
import keras

import ctl_core
from tests.golden import small
from tests.golden.small import create_dataset, create_loss, create_opt, update_pre

every_steps = {}
keras.config.set_dtype_policy("mixed_bfloat16")


def create_model():
    keras.random.uniform([])
    return small.model_with(keras.layers.Dropout(0.2))
"""


@pytest.fixture
def other(tmp_path: Path, command: engine.Command) -> Path:
    """Returns a run of another project, whose callbacks.py sets the dtype policy of Keras.

    The run uses logical replicas, so it is deterministic and does not use TF32.
    """
    before = keras.config.dtype_policy()
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "callbacks.py").write_text(OTHER)
    words = ("--steps=2", "--batch-size=16", "--run-name=a", "--logical-replicas=2")
    project = ("--callbacks=other/callbacks.py", "--runs-dir=other/runs")
    outcome = command("train", *words, *project)
    keras.config.set_dtype_policy(before)
    assert outcome.code == 0, outcome.err
    return folder / "runs" / "a"


def read_process_state() -> dict[str, Any]:
    """Returns the process-wide state that a run may change, including random states."""
    numbers = random.getstate(), repr(np.random.get_state())
    layer = keras.layers.Layer()
    return {
        "policy": keras.config.dtype_policy().name,
        "random": numbers,
        "name": layer.name.rpartition("_")[0] or layer.name,
        "determinism": compat.is_op_determinism_enabled(),
        "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "generator": id(compat.get_seed_generator()),
        "step of summaries": tf.summary.experimental.get_step(),
        "modules": sys.modules.get("callbacks"),
        "path": list(sys.path),
        "imported": [id(reference) for reference in recording.IMPORTED],
        "signal": signal.getsignal(signal.SIGTERM),
    }


def test_a_run_that_a_hook_loads_leaves_no_trace(train_small: engine.Train, other: Path) -> None:
    """Weights and metrics equal those of a run without the hook, while the loaded model is kept."""
    loaded: list[ctl_core.LoadedModel] = []

    def load() -> None:
        before = read_process_state()
        loaded.append(ctl_core.load(other))
        assert read_process_state() == before

    def create_hooks(loading_hook: str) -> Any:
        hooks = small.hooks(create_eval_dataset=small.create_eval_dataset)

        def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
            if loading_hook == "create_dataset":
                load()
            return small.create_dataset(per_replica_batch_size)

        def report(step: int, loss: Any) -> None:
            ctl_core.report(step, loss=loss)
            if loading_hook == "every_steps":
                load()

        hooks.create_dataset = create_dataset
        hooks.every_steps = {1: report}
        hooks.after_eval = [load] if loading_hook == "after_eval" else []
        hooks.create_model = lambda: small.model_with(keras.layers.Dropout(0.2))
        return hooks

    settings = {"precision": "bfloat16", "eval_every": 2, "ckpt_every": 2}
    whole = train_small(create_hooks("none"), run_name="alone", **settings)
    for loading_hook in ("create_dataset", "every_steps", "after_eval"):
        loaded.clear()
        state = train_small(create_hooks(loading_hook), run_name=loading_hook, **settings)
        assert loaded, loading_hook
        assert {*loaded[0].model.layers[0].compute_dtype.split()} == {"bfloat16"}
        compare.assert_same(state.train_model.weights, whole.train_model.weights)
        assert state.history == whole.history
        trained = [line["step"] for line in state.history if line["split"] == "train"]
        assert trained == [*range(1, 7)]
        assert list(state.recording.variables) == list(whole.recording.variables)
        assert len(state.recording.layers) == len(whole.recording.layers)


def test_a_float32_run_is_loaded_in_float32(train_small: engine.Train) -> None:
    """A hook of a bfloat16 run can load a float32 run without affecting its own run."""
    runs = train_small(small.hooks(), steps=1, run_name="other").run_dir.parent
    seen: list[Any] = []

    def compare() -> None:
        before = read_process_state()
        served = ctl_core.load(runs / "other", callbacks=small.hooks())
        seen.append(served.model.layers[0].compute_dtype)
        assert read_process_state() == before

    hooks = small.hooks(every_steps={3: compare})
    state = train_small(hooks, precision="bfloat16", run_name="outer")
    assert state.train_model.layers[0].compute_dtype == "bfloat16"
    assert seen == ["float32"] * 2


def run_in_thread(function: Callable[[], Any]) -> Any:
    """Calls a function in another thread, and returns its result or its exception."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        return future.exception() or future.result()


def test_a_second_training_is_refused_at_once(train_small: engine.Train) -> None:
    """In a hook as in another thread; the first training is not affected."""
    refusals: list[Any] = []

    def train_another() -> None:
        def another() -> Any:
            return train_small(small.hooks(), run_name="second", precision="bfloat16")

        refusals.append(run_in_thread(another))
        with pytest.raises(ctl_core.SetupError) as raised:
            another()
        refusals.append(raised.value)

    state = train_small(small.hooks(at_step={2: train_another}), run_name="first")
    compare.assert_close(state.train_model.weights, small.plain(6).weights)
    assert len(refusals) == 2
    assert {type(refusal) for refusal in refusals} == {ctl_core.SetupError}
    for message in map(str, refusals):
        assert message.startswith("ctl.train: this process is training first already")
        assert "each run in a process of its own" in message
        assert "\n" not in message
    assert not (state.run_dir.parent / "second").exists()
    second = train_small(small.hooks(), run_name="second")
    compare.assert_close(second.train_model.weights, small.plain(6).weights)


def test_a_forked_process_is_refused_instead_of_hanging() -> None:
    """TensorFlow's threads do not exist in a process that is forked, as by gunicorn --preload.

    https://github.com/tensorflow/tensorflow/issues/8220
    """
    tf.constant(0)  # starts TensorFlow
    forking = multiprocessing.get_context("fork")
    receiver, sender = forking.Pipe(duplex=False)

    def send_refusals() -> None:
        calls = [PROCESS_TURN.train("a").__enter__, PROCESS_TURN.load().__enter__]
        for call in (*calls, lambda: LoadedModel.__call__(mock.Mock(), 0)):
            with pytest.raises(ctl_core.SetupError) as raised:
                call()
            sender.send(str(raised.value))

    child = forking.Process(target=send_refusals)
    child.start()
    sender.close()
    child.join(60)
    assert child.exitcode == 0
    for name in ("ctl.train", "ctl.load", "ctl.load"):
        assert receiver.recv().startswith(f"{name}: this process was forked from one that was al")


def test_runs_are_loaded_in_other_threads_while_a_run_trains(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, metrics and random numbers are those of a run that trains alone."""

    def create_hooks() -> Any:
        def draw(step: int, loss: Any) -> None:
            ctl_core.report(step, loss=loss, drawn=np.random.uniform())
            time.sleep(0.01)

        hooks = small.hooks(every_steps={1: draw})
        hooks.create_model = lambda: small.model_with(keras.layers.Dropout(0.2))
        return hooks

    settings = {"ckpt_every": 3, "precision": "bfloat16"}
    alone = train_small(create_hooks(), run_name="alone", **settings)
    started = threading.Event()

    def load_twice() -> list[Any]:
        started.wait(60)
        return [ctl_core.load(alone.run_dir, callbacks=create_hooks()).model for _ in range(2)]

    hooks = create_hooks()
    hooks.at_step = {1: started.set}
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(load_twice) for _ in range(2)]
        capsys.readouterr()
        state = train_small(hooks, run_name="watched", **settings)
        for future in futures:
            for model in future.result():
                compare.assert_same(model.weights, alone.train_model.weights)
    compare.assert_same(state.train_model.weights, alone.train_model.weights)
    assert state.history == alone.history
    out = capsys.readouterr().out
    assert "warning" not in out, out


def test_load_is_refused_in_hooks_that_cannot_load(train_small: engine.Train) -> None:
    run = train_small(small.hooks(), steps=0, run_name="other").run_dir

    def load_own(per_replica_batch_size: int) -> tf.data.Dataset:
        ctl_core.load(run, callbacks=small.hooks(create_dataset=load_own))
        return small.create_dataset(per_replica_batch_size)

    def create_model() -> keras.Model:
        return ctl_core.load(run, callbacks=small.hooks()).model

    def input_pre(batch: Any) -> Any:
        return ctl_core.load(run, callbacks=small.hooks())(batch[0])

    refusals = {
        r"^test_runs_in_hooks.py:\d+: .*other itself is being loaded": small.hooks(
            create_dataset=load_own
        ),
        r"^test_runs_in_hooks.py:\d+: .*create_model.* --init-from": small.hooks(
            create_model=create_model
        ),
        r"^input_pre \(test_runs_in_hooks.py:\d+\): .*a graph is traced": small.hooks(
            input_pre=input_pre
        ),
    }
    for words, hooks in refusals.items():
        with pytest.raises(ctl_core.SetupError, match=words):
            train_small(hooks)


TEACHER = """
import old

TEACHER = ctl_core.load("runs/a", callbacks=old)


def input_pre(batch):
    return batch[0] + 0 * TEACHER.model(batch[0])
"""


def test_a_file_that_loads_its_own_run_is_refused_in_one_line(
    tmp_path: Path, command: engine.Command
) -> None:
    words = ("train", "--batch-size=16", "--steps=1")
    file = tmp_path / "callbacks.py"
    file.write_text(small.CALLBACKS)
    assert command(*words, "--run-name=a").code == 0
    (tmp_path / "old.py").write_text(small.CALLBACKS)
    file.write_text(f'{small.CALLBACKS}\nTEACHER = ctl_core.load("runs/a")  # here\n')
    outcome = command(*words, "--run-name=b")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.count("callbacks.py:") == 1
    assert "--init-from" in outcome.err
    assert engine.locate(file.read_text())[0] in outcome.err

    file.write_text(f"{small.CALLBACKS}\n{TEACHER}")
    outcome = command(*words, "--run-name=c", "--virtual-devices=2")
    assert outcome.code == 0, outcome.err
