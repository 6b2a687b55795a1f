"""A start that a setting refuses leaves nothing; one that a hook fails leaves its log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ctl_core
from ctl_core import run_process
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import FLAGS, PIECES, Cli, files, source_of

EVALUATED = source_of(
    create_eval_dataset="""\
def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""
)
ENDLESS = source_of(
    create_dataset="""\
def create_dataset(per_replica_batch_size):
    return data.repeat().batch(per_replica_batch_size, drop_remainder=True)
"""
)
# What refuses it is known only with the hooks, the data or the devices.
REFUSED = {
    "a metric": (EVALUATED, ("--keep-best", "foo"), "keep_best: no metric is called 'foo'"),
    "a metric to follow": (EVALUATED, ("--early-stop", "foo:2"), "early_stop: no metric"),
    "no evaluation": (source_of(), ("--keep-best", "loss"), "keep_best: needs an evaluation"),
    "a global batch": (
        source_of(),
        ("--batch-size", "9", "--virtual-devices", "2"),
        "batch_size: 9 cannot be shared out evenly over 2",
    ),
    "a batch of evaluation": (
        EVALUATED,
        ("--eval-batch-size", "9", "--virtual-devices", "2"),
        "eval_batch_size: 9 cannot",
    ),
    "too few examples": (source_of(), ("--batch-size", "64"), "lower batch_size"),
    "epochs": (ENDLESS, ("--steps", "null", "--epochs", "1"), "epochs: create_dataset"),
    "a period": (ENDLESS, ("--ckpt-every", "1epoch"), "ckpt_every: create_dataset"),
    "weights": (source_of(), ("--init-from", "other.weights.h5"), "init_from: other.weights.h5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_be_leaves_no_run(case: str, cli: Cli) -> None:
    import keras

    source, flags, words = REFUSED[case]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.save_weights("other.weights.h5")
    refused = cli(source, *flags, "--note", "it learns")
    assert refused.code == 2 and words in refused.err
    assert not refused.written and not Path("runs", "a").exists()


def test_its_name_is_free_and_nothing_of_the_settings_is_kept(cli: Cli) -> None:
    assert cli(EVALUATED, "--keep-best", "foo", "--seed", "5").code == 2
    right = cli(None)
    assert right.code == 0 and "its last start" not in right.out
    assert "seed: 0" in Path("runs/a/config.yaml").read_text()


def test_a_run_that_is_there_stays_as_it_was(cli: Cli) -> None:
    assert cli(EVALUATED, "--note", "it learns").code == 0
    folder = Path("runs", "a")
    before = {name: Path(name).read_bytes() for name in ("runs/a/process.json", "training_log.md")}
    again = ("--keep-best", "foo", "--steps", "20", "--note", "it learns")
    assert cli(None, *again).code == 2
    assert {name: Path(name).read_bytes() for name in before} == before
    process = run_process.read_process(folder)
    assert process is not None and (process.how, process.step) == ("done", 10)
    assert "no metric is called 'foo'" in (folder / "train.log").read_text(), "its log says so"
    assert cli(None, "--steps", "12").code == 0


def test_a_fork_that_does_not_fit_leaves_nothing_and_says_what_does(cli: Cli) -> None:
    assert cli(source_of()).code == 0
    wider = source_of(create_model=PIECES["create_model"].replace("Dense(1", "Dense(2"))
    flags = ("--run-name", "b", "--fork", "a", "--steps", "20")
    refused = cli(wider, *flags)
    assert refused.code == 2 and not Path("runs", "b").exists()
    assert "error: fork: the checkpoint of a does not fit the model: " in refused.err
    assert "has shape [2, 2], in the checkpoint [2, 1]" in refused.err
    assert cli(source_of(), *flags).code == 0


def test_a_failing_hook_leaves_its_traceback_and_its_flags(cli: Cli) -> None:
    wrong = source_of(create_model="def create_model():\n    return 1 / 0\n")
    assert cli(wrong, "--seed", "5").code == 2
    folder = Path("runs", "a")
    assert "ZeroDivisionError" in (folder / "train.log").read_text()
    assert cli(EVALUATED, "--keep-best", "foo", "--seed", "6").code == 2
    process = run_process.read_process(folder)
    assert process is not None and process.flags[-2:] == ["--seed", "5"]


def test_a_run_in_the_background_stays_to_say_why(cli: Cli) -> None:
    """Its terminal has shown nothing."""
    folder = Path("runs", "a")
    folder.mkdir(parents=True)
    run_process.begin(folder, os.getpid(), background=True)
    assert cli(EVALUATED, "--keep-best", "foo").code == 2
    listed = cli(None, command=("runs",))
    assert "failed" in listed.out and "no metric is called 'foo'" in listed.out


@pytest.mark.cluster
def test_workers_leave_nothing_either(tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    command = [sys.executable, "-m", "ctl_core", "train", *FLAGS, "--workers", "2"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "-1"}
    before = files(tmp_path)
    refused = subprocess.run(
        [*command, "--keep-best", "foo"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "no metric is called 'foo'" in refused.stderr
    left = {name for name in files(tmp_path) - before if "__pycache__" not in name}
    assert not left and not (tmp_path / "runs" / "a").exists()


def test_a_program_is_refused_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ctl_core.SetupError, match="keep_best: needs an evaluation"):
        ctl_core.train(_hooks(), _config(tmp_path))
    assert not list(tmp_path.iterdir())


def _config(folder: Path) -> ctl_core.Config:
    return ctl_core.Config(steps=1, batch_size=8, keep_best="loss", runs_dir=str(folder))


def _hooks() -> dict[str, object]:
    hooks: dict[str, object] = {}
    exec(source_of(), hooks)
    return hooks
