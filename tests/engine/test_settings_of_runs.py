"""A run that is there has its own settings; what is said where config.yaml has others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from ctl_core.cli import Command, parse_command
from ctl_core.errors import SetupError
from ctl_core.layers import write_config
from ctl_core.options import default_options
from ctl_core.settings import Config
from tests.helpers.settings import make_run, resolve

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_trained_run_is_used_with_its_own_config(command: str) -> None:
    own = Config(steps=9, batch_size=3, run_name="old", workers=3, debug=True, hparams={"width": 7})
    for name, age in (("old", 20), ("new", 10)):
        run = make_run(name, age)
        write_config(dataclasses.replace(own, run_name=name), run / "config.yaml")
        os.utime(run / "config.yaml", (10**9 - age, 10**9 - age))
    Path("config.yaml").write_text("steps: 1\nbatch_size: 64\nhparams: {width: 1}\n")

    def used(*flags: str, **environ: str) -> Command:
        return parse_command([command, *flags], environ)

    # How a run was watched, and by how many processes trained, says nothing about how it is used.
    expected = dataclasses.replace(own, debug=False, workers=1)
    assert used("--run-name", "old").config == expected
    assert used().config == dataclasses.replace(expected, run_name="new")
    assert used(CTL_RUN_NAME="old").config == expected
    assert used("--run-name", "old", "--batch-size", "5").config.batch_size == 5
    assert used("--run-name", "old", CTL_BATCH_SIZE="6").config.batch_size == 6
    assert used("--run-name", "old", "--debug").config.debug is True
    alone = used("--run-name", "old", "--strategy", "one_device", CTL_WORKERS="2")
    assert alone.config.workers == 1
    with pytest.raises(SetupError, match=f"^workers: {command} uses a run in one process"):
        used("--run-name", "old", "--workers", "2")
    options = used("--run-name", "old", "--checkpoint", "3").options
    assert options == {**default_options(command), "checkpoint": 3}
    Path("mine.yaml").write_text("batch_size: 11\nrun_name: old\nhparams: {width: x}\n")
    other = dataclasses.replace(expected, batch_size=11, hparams={"width": "x"})
    assert used("--config", "mine.yaml").config == other
    Path("config.yaml").write_text("run_name: old\n")
    assert used().config == expected
    with pytest.raises(SetupError, match="elsewhere: no run there yet"):
        used("--runs-dir", "elsewhere")
    with pytest.raises(SetupError, match=r"checkpoint: expected a step, a whole.* got 'last'"):
        used("--checkpoint", "last")


def first_run(text: str, *flags: str) -> Config:
    """Writes config.yaml and resolves the settings of run a, which is then there."""
    Path("config.yaml").write_text(text)
    config = resolve("--run-name", "a", *flags)
    write_config(config, make_run("a", 10) / "config.yaml")
    return config


def test_a_config_file_that_is_named_goes_before_the_runs_own() -> None:
    first = first_run("steps: 600\n", "--batch-size", "8", "--seed", "3")
    Path("mine.yaml").write_text("seed: 4\nepochs: 2\n")
    expected = dataclasses.replace(first, steps=None, epochs=2, seed=4)
    for named in (("--config", "mine.yaml"), ()):
        environ = {} if named else {"CTL_CONFIG": "mine.yaml"}
        command = parse_command(["train", "--run-name", "a", *named], environ)
        assert command.config == expected and not command.notes
    assert resolve("--run-name", "a", "--config", "mine.yaml", "--seed", "5").seed == 5


def test_an_hparam_of_a_run_is_one_that_it_or_the_project_has() -> None:
    """Also of a run from before the project had it, and one from when it had none."""
    first_run("hparams: {old: 1}\n")
    Path("config.yaml").write_text("hparams: {new: 2}\n")
    for flags in (("--run-name", "a"), ("--run-name", "b", "--fork", "a")):
        (Path("runs") / "a" / "ckpt").mkdir(exist_ok=True)
        found = resolve(*flags, "--hparams.new", "3", "--hparams.old", "4").hparams
        assert found == {"old": 4, "new": 3}
        with pytest.raises(SetupError, match=r"hparams of config\.yaml; did you mean 'new'\?"):
            resolve(*flags, "--hparams.neww", "3")


def test_a_folder_without_settings_is_a_new_run() -> None:
    """As each process of a cluster finds it, whose supervisor has made it for their logs."""
    (Path("runs") / "a").mkdir(parents=True)
    flags = ("--run-name", "a", "--hparams.w", "2", "--epochs", "3")
    before = resolve(*flags, config="seed: 3\nsteps: 9\nhparams: {w: 1.5}\n")
    assert before == Config(epochs=3, seed=3, run_name="a", hparams={"w": 2.0})
    write_config(before, Path("runs/a/config.yaml"))  # and as it is when they start again
    assert resolve(*flags) == before


def test_what_an_earlier_engine_did_not_write_is_the_default() -> None:
    (make_run("a", 10) / "config.yaml").write_text("steps: 6\n")
    same = "steps: 6\ncallbacks: ./callbacks.py\non_nan: warn\nseed: 0\n"
    Path("config.yaml").write_text(same)
    assert parse_command(["train", "--run-name", "a"], {}).notes == []
    Path("config.yaml").write_text(same + "log_every: 5\n")
    (told,) = parse_command(["train", "--run-name", "a"], {}).notes
    assert "own settings: log_every 100 (config.yaml: 5);" in told
