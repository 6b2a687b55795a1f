"""evaluate, predict and export on a trained run, through the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from tests.helpers.cases import regression_data, small_model
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import EVALUATED


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    (tmp_path / "config.yaml").write_text("steps: 6\nbatch_size: 16\nckpt_every: 3\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run-name", "first"]) == 0
    return tmp_path


def weights_at(project: Path, step: int, run: str = "first") -> list[np.ndarray]:
    model = small_model()
    ckpt = tf.train.Checkpoint(train_model=model)
    ckpt.read(str(project / f"runs/{run}/ckpt/ckpt-{step}")).expect_partial()
    return model.get_weights()  # type: ignore[no-any-return]


def test_evaluate_the_newest_and_an_earlier_checkpoint(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, target = (part[:37] for part in regression_data())
    for flags, step in (([], 6), (["--checkpoint", "3"], 3)):
        capsys.readouterr()
        assert main(["evaluate", *flags]) == 0
        output = capsys.readouterr().out
        model = small_model()
        model.set_weights(weights_at(project, step))
        error = abs(model(inputs).numpy() - target).mean()
        assert f"step {step}" in output and f"error {error:.4g}" in output
    assert main(["evaluate", "--checkpoint", "4"]) == 2
    assert "there: 6, 3" in capsys.readouterr().err


def test_predict_from_the_evaluation_data_and_from_a_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = regression_data()[0]
    model = small_model()
    model.set_weights(weights_at(project, 6))
    assert main(["predict"]) == 0
    with np.load(project / "runs/first/predictions.npz") as file:
        np.testing.assert_allclose(file["output"], model(inputs[:37]), rtol=1e-5, atol=1e-6)
    np.save("new.npy", inputs[50:71])
    assert main(["predict", "--input", "new.npy", "--output", "out.npz"]) == 0
    with np.load("out.npz") as file:
        np.testing.assert_allclose(file["output"], model(inputs[50:71]), rtol=1e-5, atol=1e-6)
    np.save("wrong.npy", inputs[:, :3])
    capsys.readouterr()
    for flags, words in (
        (["--input", "wrong.npy"], "the model takes float32 [None, 5], got float32 [100, 3]"),
        (["--input", "nowhere.npy"], "nowhere.npy cannot be read"),
        (["--output", "x.csv"], "expected the name of a .npz file"),
    ):
        assert main(["predict", *flags]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_export_serves_without_the_engine(project: Path) -> None:
    for _ in range(2):
        assert main(["export"]) == 0
    export = project / "runs/first/export"
    assert sorted(os.listdir(export)) == ["1", "2"]
    served = tf.saved_model.load(str(export / "2"))
    inputs = regression_data()[0]
    model = small_model()
    model.set_weights(weights_at(project, 6))
    for count in (1, 7):
        np.testing.assert_allclose(
            served.serve(inputs[:count]), model(inputs[:count]), rtol=1e-5, atol=1e-6
        )


def test_the_runs_own_settings_are_used_and_left_as_they_are(project: Path) -> None:
    config = (project / "runs/first/config.yaml").read_text()
    metrics = (project / "runs/first/metrics.jsonl").read_text()
    (project / "config.yaml").write_text("steps: 6\nbatch_size: 7\n")
    assert main(["evaluate", "--run-name", "first"]) == 0
    assert (project / "runs/first/config.yaml").read_text() == config
    assert (project / "runs/first/metrics.jsonl").read_text() == metrics
    assert json.loads(metrics.splitlines()[-1])["split"] == "eval"


def test_a_run_is_resumed_with_the_flags_that_it_was_started_with(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch-size", "8", "--learning-rate", "0.02"]
    assert main(["train", "--run-name", "whole", "--steps", "9", *flags]) == 0
    assert main(["train", "--run-name", "parts", "--steps", "4", *flags]) == 0
    capsys.readouterr()
    assert main(["train", "--run-name", "parts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "config.yaml" in line] == [
        "runs/parts: has its own settings: steps 4 (config.yaml: 6), batch_size 8 (config.yaml: "
        "16); --config config.yaml takes those of the file."
    ]
    assert any("at step 4 of 4 already" in line for line in lines)
    assert main(["train", "--run-name", "parts", "--steps", "9"]) == 0
    for whole, parts in zip(
        weights_at(project, 9, "whole"), weights_at(project, 9, "parts"), strict=True
    ):
        np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize(
    "change",
    [
        "os.chdir('elsewhere')",
        "def leave():\n    os.chdir(home / 'elsewhere')\n\nevery_steps = {2: leave}",
    ],
)
def test_a_hook_that_changes_the_folder_leaves_the_run_where_it_is(
    project: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "elsewhere").mkdir()
    start = f"import os\nfrom pathlib import Path\n\nhome = Path({str(project)!r})\n"
    (project / "callbacks.py").write_text(start + EVALUATED + change)
    assert main(["train", "--run-name", "second"]) == 0
    monkeypatch.chdir(project)
    assert main(["predict", "--run-name", "second", "--output", "here.npz"]) == 0
    assert not list((project / "elsewhere").iterdir()) and (project / "here.npz").exists()
    assert (project / "runs/second/ckpt/ckpt-6.index").exists()
    assert (project / "runs/second/tb").exists()


def test_messages_name_a_run_from_where_the_user_is(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative below the current folder; absolute elsewhere."""
    commands = (["train", "--steps", "9"], ["train"], ["evaluate"], ["predict"], ["export"])
    for runs, shown in (("runs", "runs"), (str(project / "runs"), "runs")):
        capsys.readouterr()
        for command in commands:
            assert main([*command, "--run-name", "first", "--runs-dir", runs]) == 0
        out = capsys.readouterr().out
        assert f"\n{shown}/first: " in f"\n{out}" and str(project) not in out
        for words in (
            "is in {}/first\n",
            "to {}/first/predictions.npz\n",
            "to {}/first/export/",
        ):
            assert words.format(shown) in out
    (project / "below").mkdir()
    shutil.copy(project / "callbacks.py", project / "below")
    monkeypatch.chdir(project / "below")
    capsys.readouterr()
    assert main(["evaluate", "--runs-dir", "../runs"]) == 0
    assert f"{project}/runs/first: checkpoint of step 9." in capsys.readouterr().out


@pytest.mark.slow
def test_without_docstrings_and_assertions(project: Path) -> None:
    """Every command does under ``python -OO`` what it does otherwise."""
    commands = [["train", "--run-name", "again"], ["evaluate"], ["predict"], ["export"], ["hooks"]]
    program = (
        "import sys\n"
        "from ctl_core.__main__ import main\n"
        "assert False, 'is left out'\n"
        f"for command in {commands}:\n"
        "    code = main(command)\n"
        "    if code:\n"
        "        sys.exit(f'{command}: {code}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-OO", "-c", program],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("ckpt/ckpt-6.index", "predictions.npz", "export/1/saved_model.pb"):
        assert (project / "runs/again" / name).exists(), name
    metrics = [project / f"runs/{run}/metrics.jsonl" for run in ("first", "again")]
    assert metrics[0].read_text() == metrics[1].read_text()


def test_asking_for_a_run_that_is_not_there(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("evaluate", "predict", "export"):
        assert main([command, "--run-name", "frist"]) == 2
        assert "did you mean 'first'?" in capsys.readouterr().err
    assert not (project / "runs/frist").exists()


def test_a_package_that_is_not_installed_is_one_line(project: Path) -> None:
    command = [sys.executable, "-S", "-m", "ctl_core", "train"]  # -S: no installed packages
    environ = {**os.environ, "PYTHONPATH": str(Path(ctl_core.__file__).parents[1])}
    environ.pop("VIRTUAL_ENV", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: \w+ is not installed in \S+; in the project's folder: \S+ -m pip install "
        r"--editable \.\n",
        done.stderr,
    )
