"""Runs resume by name, keep their settings, and survive signals, full disks and a second start."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.engine import Command

ROOT = Path(__file__).parents[2]

FLAGS = ("--batch-size=16", "--learning-rate=0.05", "--run-name=a")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Returns the folder of a project, in which commands find its callbacks.py."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    return tmp_path


def read_settings(run: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((run / "config.yaml").read_text()))


# ---- Names and settings ------------------------------------------------------------------------


def test_a_run_goes_on_by_its_name_with_its_own_settings(project: Path, command: Command) -> None:
    """A resumed run uses flags first, then its saved settings. A new run uses the project's."""
    (project / "config.yaml").write_text("seed: 5\nhparams: {width: 4}\n")
    assert command("train", *FLAGS, "--steps=4", "--ckpt-every=2").code == 0
    run = project / "runs" / "a"
    settings = read_settings(run)
    assert (settings["seed"], settings["hparams"]) == (5, {"width": 4})

    (project / "config.yaml").write_text("seed: 6\nlearning_rate: 1.0\nhparams: {width: 8}\n")
    outcome = command("train", "--run-name=a", "--steps=7")
    assert outcome.code == 0
    assert "step 4" in outcome.out
    again = read_settings(run)
    assert again == settings | {"steps": 7}
    outputs, expected = (model(small.data()[0]) for model in (ctl_core.load(run), small.plain(7)))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)

    assert command("train", "--run-name=b", "--steps=1").code == 0
    assert read_settings(project / "runs" / "b")["seed"] == 6


def test_python_resumes_a_run_with_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order is: arguments of load_config, saved settings of the run, config.yaml."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("batch_size: 16\nlearning_rate: 0.5\nhparams: {rate: 3.0}\n")

    def resume(steps: int, name: str = "a", **arguments: Any) -> Any:
        config = ctl_core.load_config(file, steps=steps, run_name=name, **arguments)
        return ctl_core.train(small.hooks(create_opt=scaled_sgd), config)

    def scaled_sgd(lr: Any, hparams: dict[str, float]) -> Any:
        assert hparams == {"rate": 1.0}
        return small.create_opt(lr)

    resume(4, learning_rate=0.05, ema=0.9, keep=7, hparams={"rate": 1.0})
    capsys.readouterr()
    first = read_settings(tmp_path / "runs/a")
    state = resume(7)
    compare.assert_close(state.train_model.weights, small.plain(7).weights)
    assert read_settings(tmp_path / "runs/a") == first | {"steps": 7}
    assert "now" not in capsys.readouterr().out

    forked = resume(9, "b", fork="a@4", seed=3)
    compare.assert_close(forked.train_model.weights, small.plain(9).weights)
    changes = {"steps": 9, "run_name": "b", "fork": "a@4", "seed": 3}
    assert read_settings(tmp_path / "runs/b") == first | changes

    # The file was edited after the last start; an argument takes precedence over the run.
    file.write_text("batch_size: 16\nlearning_rate: 0.5\nseed: 9\nhparams: {rate: 2.0}\n")
    os.utime(file, (time.time() + 5, time.time() + 5))
    state = resume(9, learning_rate=0.1)
    plain = small.plain(9, lambda step: 0.05 if step <= 7 else 0.1)
    compare.assert_close(state.train_model.weights, plain.weights)
    out = capsys.readouterr().out
    assert "runs/a keeps its own settings; config.yaml differs in hparams.rate, seed: to " in out


def test_a_config_made_in_python_is_used_as_it_is(
    train: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line tells of each setting that a resumed run had with another value before."""
    train(small.hooks(), **small.settings(4, ema=0.9, hparams={"width": 8}))
    capsys.readouterr()
    state = train(small.hooks(), **small.settings(6, learning_rate=0.1) | {"seed": 2})
    plain = small.plain(6, lambda step: 0.05 if step <= 4 else 0.1)
    compare.assert_close(state.train_model.weights, plain.weights)
    out = capsys.readouterr().out
    run = state.run_dir
    for name, new, old in (
        ("ema", None, 0.9),
        ("hparams.width", None, 8),
        ("learning_rate", 0.1, 0.05),
        ("seed", 2, 0),
    ):
        line = f"{name}: {new} from now on; until now, {run} has trained with {old}.\n"
        assert line in out, out
    assert out.count("from now on; until now") == 4


COPIED = """
from pathlib import Path


def read(path):
    row = tf.strings.to_number(tf.strings.split(tf.io.read_file(path)))
    return row[:5], tf.ensure_shape(row[5:], [1])


def create_dataset():
    paths = sorted(map(str, Path(__file__).resolve().with_name("rows").iterdir()))
    return tf.data.Dataset.from_tensor_slices(paths).shuffle(100, seed=4).map(read).batch(16)
"""


@pytest.mark.slow
def test_a_copied_project_reads_its_own_files(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved position of a shuffle is not used, because it names files of the original project.

    These files are changed, so that using them would show.
    """
    original, copy = tmp_path / "one", tmp_path / "two"
    (original / "rows").mkdir(parents=True)
    (original / "callbacks.py").write_text(small.CALLBACKS + COPIED)
    for number, row in enumerate(np.hstack(small.data())):
        (original / "rows" / f"{number:03}").write_text(" ".join(map(str, row)))
    monkeypatch.chdir(original)
    assert command("train", *FLAGS, "--steps=3").code == 0
    shutil.copytree(original, copy)
    for path in (original / "rows").iterdir():
        path.write_text("1 1 1 1 1 1")
    monkeypatch.chdir(copy)
    (warning, *_) = command("train", *FLAGS, "--steps=9").out.splitlines()
    assert "dropping 48 examples, because it may contain paths of files in " in warning
    assert str(original) in warning
    assert command("train", *FLAGS[:2], "--run-name=whole", "--steps=9").code == 0
    compare.assert_same_checkpoint(copy / "runs/a", copy / "runs/whole", 9)


@pytest.mark.slow
def test_without_a_name_a_run_is_named_by_the_time(project: Path, command: Command) -> None:
    for _ in range(2):
        assert command("train", "--steps=1", "--batch-size=16").code == 0
    names = [path.name for path in (project / "runs").iterdir()]
    assert len(names) == 2
    assert all(name[:8].isdigit() for name in names)


@pytest.mark.slow
def test_variables_are_typed_and_give_way_to_flags(project: Path, command: Command) -> None:
    environ = {"CTL_STEPS": "3", "CTL_SEED": "7", "CTL_DETERMINISTIC": "true",
               "CTL_HPARAMS": "{width: 3}", "CTL_LEARNING_RATE": "0.5"}  # fmt: skip
    assert command("train", *FLAGS, **environ).code == 0
    settings = read_settings(project / "runs" / "a")
    expected = {"steps": 3, "seed": 7, "deterministic": True, "learning_rate": 0.05}
    assert {name: settings[name] for name in expected} == expected
    assert settings["hparams"] == {"width": 3}


def test_a_run_that_is_done_trains_nothing_more(project: Path, command: Command) -> None:
    assert command("train", *FLAGS, "--steps=3").code == 0
    before = small.read_files(project / "runs" / "a" / "ckpt")
    assert command("train", *FLAGS, "--steps=3").code == 0
    assert small.read_files(project / "runs" / "a" / "ckpt") == before


@pytest.mark.slow
@pytest.mark.usefixtures("command")
def test_second_training_of_a_run_is_refused(project: Path) -> None:
    """The second process is refused, and the first one is not disturbed."""
    second = """
import subprocess, sys

def start_another(step):
    words = [sys.executable, "-m", "ctl_core", "train", "--run-name=a", "--steps=9"]
    done = subprocess.run(words, capture_output=True, text=True)
    with open("second", "w") as file:
        print(done.returncode, done.stderr, file=file)

at_step = {2: start_another}
"""
    (project / "callbacks.py").write_text(small.CALLBACKS + second)
    done = engine.command(project, "train", *FLAGS, "--steps=4")
    assert (done.returncode, done.stderr) == (0, "")
    code, message = (project / "second").read_text().split(" ", 1)
    assert code == "2"
    assert message.count("error: ") == 1
    assert "runs/a" in message


def test_epochs_are_passes_that_were_made(
    train: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another batch size, or more data, does not change the number of further passes."""
    batches = [*small.create_dataset(16)] * 2 + [*small.create_dataset(32)]

    def check(examples: int, expected: int, **settings: Any) -> str:
        hooks = small.hooks()
        hooks.create_dataset = small.slices(small.data(examples), drop_remainder=True)
        state = train(hooks, **small.settings(0) | {"steps": None} | settings)
        assert state.step == expected
        if len(batches) >= expected:
            plain = small.plain(expected, batches=batches[:expected])
            compare.assert_close(state.train_model.weights, plain.weights)
        return capsys.readouterr().out

    assert "an epoch has 6 steps" in check(100, 12, epochs=2)
    out = check(100, 15, epochs=3, batch_size=32)
    assert "a pass over the data has 3 steps now, and had 6 until now; 2 passes were made." in out
    assert "size of the dataset" not in out
    assert "nothing left to train" in check(100, 15, epochs=3, batch_size=32)
    out = check(70, 17, epochs=4, batch_size=32)  # 2 steps in a pass
    assert "create_dataset (small.py:" in out
    assert "): the size of the dataset has changed: a pass over the data has 2 steps now" in out
    assert "epoch 5/5" in check(100, 20, epochs=5, batch_size=32, log_seconds=1e-9)
    # Without epochs, too, a line tells that the size has changed.
    out = check(64, 21, epochs=None, steps=21, batch_size=32)
    assert "the size of the dataset has changed: a pass over the data has 2 steps now" in out


def test_sets_have_one_order_in_all_processes_of_the_command_line(project: Path) -> None:
    (project / "callbacks.py").write_text('raise ValueError(hash("a"))\n')
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"],
        env=engine.environment(PYTHONHASHSEED="0"), capture_output=True, text=True,
    )  # fmt: skip
    environ = engine.environment()
    environ.pop("PYTHONHASHSEED", None)
    words = engine.command_line("train", *FLAGS, "--steps=1")
    done = subprocess.run(words, cwd=project, env=environ, capture_output=True, text=True)
    assert done.stderr == f"error: callbacks.py:1: ValueError: {expected.stdout.strip()}\n"


def test_files_of_the_project_do_not_hide_modules_of_python(tmp_path: Path) -> None:
    """https://github.com/tensorflow/tensorflow/issues/6457"""
    for name in ("inspect", "numbers", "keras"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    done = engine.command(tmp_path, "hooks")
    assert (done.returncode, done.stderr) == (0, "")


# ---- Deleted checkpoints -----------------------------------------------------------------------


def test_a_run_whose_checkpoints_were_deleted_is_refused(train: engine.Train) -> None:
    """It does not begin at step 0, because it would replace its metrics and its best checkpoint."""
    hooks = small.hooks(create_eval_dataset=small.create_eval_dataset)
    settings = small.settings(6, ckpt_every=3, eval_every=3, keep_best="loss", run_name="a")
    run = train(hooks, **settings).run_dir
    for path in (run / "ckpt").iterdir():
        if path.is_file():
            path.unlink()
        elif path.name != "best":
            shutil.rmtree(path)
    files = small.read_files(run)
    with pytest.raises(ctl_core.SetupError) as raised:
        train(hooks, **settings)
    message = str(raised.value)
    assert "its checkpoints were deleted" in message
    assert "\n" not in message
    assert "--fork a@best --run-name NEW; or choose another run_name; or " in message
    assert message.endswith("--start-over.")
    assert small.read_files(run).keys() == files.keys()
    with pytest.raises(ctl_core.SetupError, match="its best checkpoint is kept as a@best"):
        train(hooks, **settings | {"run_name": "b", "init_from": "a"})
    forked = train(hooks, **settings | {"steps": 8, "run_name": "c", "fork": "a@best"})
    compare.assert_close(forked.train_model.weights, small.plain(8).weights)

    shutil.rmtree(run / "ckpt")
    with pytest.raises(ctl_core.SetupError, match="so it would begin at step 0") as raised:
        train(hooks, **settings)
    assert "--fork" not in str(raised.value)
    settings["runs_dir"] = str(run.parent)
    state = ctl_core.train(hooks, ctl_core.Config(**settings | {"steps": 2}), start_over=True)
    assert [line["step"] for line in state.history] == [2]
    compare.assert_close(state.train_model.weights, small.plain(2).weights)
    # A run that has checkpoints is resumed, also with start_over.
    state = ctl_core.train(hooks, ctl_core.Config(**settings | {"steps": 4}), start_over=True)
    compare.assert_close(state.train_model.weights, small.plain(4).weights)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(
    train: engine.Train, tmp_path: Path
) -> None:
    killed = tmp_path / "runs" / "killed"

    def kill() -> None:
        engine.leave_as_killed(tmp_path / "runs" / "whole", killed)

    settings = small.settings(3, ckpt_every=3)
    train(small.hooks(at_step={2: kill}), run_name="whole", **settings)
    assert (killed / "config.yaml").exists()
    assert not any(killed.rglob("*.index"))
    state = train(small.hooks(), run_name="killed", **settings)
    compare.assert_close(state.train_model.weights, small.plain(3).weights)


# ---- Signals -----------------------------------------------------------------------------------

SLOW = """
import os, time

def wait(step):
    open(f"step-{os.getpid()}", "w").write(str(step))
    time.sleep(0.05)

every_steps = {1: wait}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on(project: Path, number: int, code: int) -> None:
    """A run that a signal stops is saved, and resumes to the weights of an uninterrupted run."""
    (project / "callbacks.py").write_text(small.CALLBACKS + SLOW)
    words = engine.command_line("train", *FLAGS, "--steps=400", "--ckpt-every=0")
    process = subprocess.Popen(
        words, cwd=project, env=engine.environment(), stdout=subprocess.PIPE, text=True
    )
    wait_for_steps(project, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == code, out
    run = project / "runs" / "a"
    (saved,) = (run / "ckpt").glob("ckpt-*.index")
    step = int(saved.name.removeprefix("ckpt-").removesuffix(".index"))
    assert 0 < step < 400
    done = engine.command(project, "train", "--run-name=a", f"--steps={step + 6}")
    assert done.returncode == 0
    assert f"step {step}" in done.stdout
    outputs = ctl_core.load(run)(small.data()[0])
    expected = small.plain(step + 6)(small.data()[0])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def wait_for_steps(project: Path, *processes: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 120
    for process in processes:
        step = project / f"step-{process.pid}"
        while not (step.exists() and step.read_text() > "1"):
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.02)


# ---- Disks -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Returns a folder on a separate file system of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_full_disk_costs_no_earlier_checkpoint(small_disk: Path, train: engine.Train) -> None:
    """The run fails with one line, and resumes from an earlier checkpoint."""

    def fill(step: int) -> None:
        if step == 5:
            file = (small_disk / "filler").open("wb", buffering=0)
            with file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1024))

    settings = {"batch_size": 16, "learning_rate": 0.05, "runs_dir": str(small_disk)}
    with pytest.raises(ctl_core.RunError, match="No space left on device") as raised:
        train(small.hooks(every_steps={1: fill}), steps=12, ckpt_every=3, **settings)
    assert "\n" not in str(raised.value)
    (small_disk / "filler").unlink()
    state = train(small.hooks(), steps=9, ckpt_every=3, **settings)
    compare.assert_close(state.train_model.weights, small.plain(9).weights)


@pytest.mark.slow
def test_damaged_checkpoint_falls_back_to_the_one_before(train: engine.Train, capsys: Any) -> None:
    """A run whose newest checkpoint is damaged resumes from the one before, with a warning."""
    settings = {"batch_size": 16, "learning_rate": 0.05, "ckpt_every": 3}
    state = train(small.hooks(), steps=6, **settings)
    (file,) = (state.run_dir / "ckpt").glob("ckpt-6.data*")
    file.write_bytes(file.read_bytes()[:40])
    state = train(small.hooks(), steps=8, **settings)
    assert "warning" in capsys.readouterr().out
    compare.assert_close(state.train_model.weights, small.plain(8).weights)


# ---- A cluster ---------------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_process_whose_peer_dies_ends_with_75(project: Path) -> None:
    (project / "callbacks.py").write_text(small.CALLBACKS + SLOW)
    words = engine.command_line("train", *FLAGS, "--steps=4000")
    processes = engine.start_cluster(words, project, stderr=subprocess.PIPE, text=True)
    wait_for_steps(project, *processes)
    processes[1].kill()
    _, err = processes[0].communicate(timeout=120)
    processes[1].communicate()
    assert processes[0].returncode == 75, err
    assert err.count("error: ") == 1
    assert "Traceback" not in err


WORSENING = """
import keras
import numpy as np
import tensorflow as tf
from tests.golden import small
create_dataset = small.create_dataset
create_eval_dataset = small.create_eval_dataset
create_model = small.create_model
create_loss = small.create_loss
def create_opt(lr):
    return keras.optimizers.SGD(lr)
def after_eval(step, lr):
    lr.assign(100.0)  # from here on, the model becomes worse
every_steps = {}
"""


def test_commands_use_the_best_checkpoint_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = engine.commands_here(tmp_path, monkeypatch, capfd)
    (tmp_path / "callbacks.py").write_text(WORSENING)
    flags = ("--steps=6", "--batch-size=16", "--run-name=a", "--eval-every=2", "--ckpt-every=2")
    trained = command("train", *flags, "--learning-rate=0.05", "--keep-best=loss")
    assert trained.code == 0, trained.err
    assert "  best loss so far\n" in trained.out, trained.err
    assert "step 4/6  eval" in trained.out
    assert trained.out.count("best loss so far") == 1
    assert "; the best checkpoint is the one of step 2.\n" in trained.out

    best = command("evaluate", "a").out
    assert "checkpoint of step 2, the best one; use --checkpoint last for the newest.\n" in best
    assert best.splitlines()[-1] == command("evaluate", "a", "--checkpoint=2").out.splitlines()[-1]
    assert "checkpoint of step 6.\n" in command("evaluate", "a", "--checkpoint=last").out
    assert "checkpoint of step 2, the best one" in command("export", "a").out
    assert ctl_core.load(tmp_path / "runs/a").step == 2
    assert ctl_core.load(tmp_path / "runs/a", "last").step == 6


def test_keep_is_the_number_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """``keep`` is the number of checkpoints, and a ``create_ckpt`` that ignores it is refused."""
    command = engine.commands_here(tmp_path, monkeypatch, capfd)
    callbacks = tmp_path / "callbacks.py"
    callbacks.write_text(WORSENING)
    flags = ("train", "--steps=5", "--batch-size=16", "--run-name=a", "--ckpt-every=1")
    assert command(*flags, "--keep=2").code == 0
    kept = sorted(path.name for path in (tmp_path / "runs/a/ckpt/engine").glob("*.json"))
    assert kept == ["ckpt-4.json", "ckpt-5.json"]

    own = """
def create_ckpt(ckpt_path, step, train_model):
    ckpt = tf.train.Checkpoint(step=step, train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=9)
"""
    callbacks.write_text(WORSENING + own)
    outcome = command(*flags, "--keep=2")
    line = len(WORSENING.splitlines()) + 2
    assert (outcome.code, outcome.err) == (
        2,
        f"error: keep: create_ckpt (callbacks.py:{line}) does not use it; add the argument "
        "config, and pass max_to_keep=config.keep.\n",
    )


SLEEPY = """
import time
import tensorflow as tf
from tests.golden import small
from tests.golden.small import create_loss, create_model
every_steps = {}
def create_dataset(global_batch_size):
    def read(inputs, target):
        slept = tf.numpy_function(sleep, [target], tf.float32)
        return inputs, tf.ensure_shape(slept, target.shape)
    def sleep(target):
        time.sleep(0.1)
        return target
    return small.create_dataset(global_batch_size).map(read)
"""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 140])
def test_a_terminal_shows_steps_whatever_hooks_there_are(tmp_path: Path, columns: int) -> None:
    """The status line changes during ten seconds of training, although no hook reports a step."""
    (tmp_path / "callbacks.py").write_text(SLEEPY)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    words = ["train", "--steps=90", "--batch-size=16", "--run-name=a"]
    environ = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environ.pop("COLUMNS", None)  # COLUMNS would take precedence over the size of the terminal
    training = subprocess.Popen(
        [sys.executable, "-m", "ctl_core", *words],
        cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    killer = threading.Timer(120, training.kill)
    killer.start()
    shown = b""
    with contextlib.suppress(OSError):  # on Linux, reading fails when the other side is closed
        while part := os.read(ours, 65536):
            shown += part
    assert training.wait() == 0
    killer.cancel()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = [line for line in re.split(r"[\r\n]+", text) if re.match(r"step \d+/90", line)]
    assert len({line.split("/")[0] for line in lines}) >= 5
    assert max(map(len, lines)) <= columns
    assert text.startswith("a: loading TensorFlow")
    for word in ("steps/s", "left"):
        assert any(word in line for line in lines) or columns == 40
    assert any("━" in line for line in lines)
