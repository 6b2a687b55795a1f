"""Tests of a run's output to listeners, training_log.md, TensorBoard, console and stderr."""

import contextlib
import io
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console as Terminal
from tensorboard.plugins.hparams import plugin_data_pb2

import ctl_core
from ctl_core.evaluation import summaries
from ctl_core.run.console import Console, activate
from ctl_core.run.progress import ProgressLine
from ctl_core.session.messages import describe_end, describe_start
from ctl_core.trainer import CHECK_ADVICE
from tests.golden import small
from tests.helpers import lean
from tests.helpers.cases import assert_weights, make_hooks
from tests.helpers.project import EVALUATED, Cli, Train, refused


class Heard(ctl_core.Listener):
    """Records its calls, and asserts that the files of a run exist when it is called."""

    instances: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.instances.append(self)
        self.calls: list[tuple[Any, ...]] = []

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        assert (folder / "config.yaml").exists()
        assert (folder / "env.json").exists()
        self.calls.append(("start", folder.name, config["batch_size"], step))

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        self.calls.append((split, step, values))

    def saved(self, step: int, path: Path) -> None:
        assert (path.parent / "engine" / f"ckpt-{step}.json").exists()
        assert tf.train.load_checkpoint(str(path)).get_variable_to_shape_map()
        self.calls.append(("saved", step))

    def end(self, step: int, how: str) -> None:
        self.calls.append(("end", step, how))

    def short(self) -> list[tuple[Any, ...]]:
        """Returns the recorded calls without the values."""
        return [call[:2] if call[0] in ("train", "eval") else call for call in self.calls]


def hooks_that_report(**more: Any) -> SimpleNamespace:
    return make_hooks(every_steps={2: lambda step, loss: ctl_core.report(step, loss=loss)}, **more)


def listening(hooks: Any, folder: Path, *listeners: ctl_core.Listener, **settings: Any) -> Any:
    settings = {"steps": 6, "batch_size": 16, "run_name": "run", "ckpt_every": 4, **settings}
    config = ctl_core.Config(runs_dir=str(folder / "runs"), **settings)
    return ctl_core.train(hooks, config, listeners=listeners)


def test_listener_hears_a_run_from_start_to_end(tmp_path: Path) -> None:
    first, second = Heard(), Heard()
    listening(hooks_that_report(), tmp_path, first)
    assert [call for call in first.short() if call[0] != "saved"] == [
        ("start", "run", 16, 0),
        *[("train", 2), ("train", 4), ("train", 6)],
        ("end", 6, "done"),
    ]
    assert [call for call in first.calls if call[0] == "saved"] == [("saved", 4), ("saved", 6)]
    assert first.short().index(("saved", 4)) > first.short().index(("train", 4))
    listening(hooks_that_report(), tmp_path, second)
    assert second.calls == [], "there is nothing left to train"
    listening(hooks_that_report(), tmp_path, second, steps=8)
    expected = [("train", 8), ("saved", 8), ("end", 8, "done")]
    assert second.short() == [("start", "run", 16, 6), *expected]


def test_listener_hears_how_a_run_ends(tmp_path: Path) -> None:
    """A listener and the hook ``at_end`` receive the reason why a run ends."""

    def fail(step: int) -> None:  # noqa: ARG001  (hooks take values by name)
        raise ValueError("a hook fails")

    def stop(step: int) -> None:  # noqa: ARG001  (hooks take values by name)
        raise ctl_core.StopTraining

    def kill(step: int) -> None:  # noqa: ARG001  (hooks take values by name)
        signal.raise_signal(signal.SIGTERM)

    ends: list[tuple[str, int]] = []
    for hook, how in ((fail, "failed"), (stop, "ended"), (kill, "stopped")):
        heard = Heard()
        hooks = make_hooks(
            at_step={3: hook}, at_end=lambda reason, step: ends.append((reason, step))
        )
        with contextlib.suppress(ctl_core.RunError):
            listening(hooks, tmp_path, heard, run_name=how)
        assert heard.calls[-1] == ("end", 3, how)
    assert ends == [("failed", 3), ("ended", 3), ("stopped", 3)]


def test_listener_that_raises_is_dropped_with_one_warning(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raised: list[str] = []

    def raising(method: str) -> ctl_core.Listener:
        def fail(*_values: Any) -> None:
            raised.append(method)
            raise SystemExit(3) if method == "values" else ValueError("no such run")

        listener = ctl_core.Listener()
        setattr(listener, method, fail)
        return listener

    methods, heard = ["start", "values", "saved", "end"], Heard()
    state = listening(hooks_that_report(), tmp_path, *map(raising, methods), heard)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    for line in warnings:
        assert line.startswith("warning: listener: ctl_core.run.listeners.Listener: ")
        assert line.endswith("; training continues without it.")
    assert len(warnings) >= 2
    assert sorted(raised) == sorted(methods)
    assert heard.calls[-1] == ("end", 6, "done")
    alone = train(hooks_that_report(), steps=6, learning_rate=state.config.learning_rate)
    assert_weights(state, alone, rtol=0)
    assert "Traceback" in (tmp_path / "runs" / "run" / "train.log").read_text()


def test_listener_of_the_settings_hears_the_lines_of_metrics_jsonl(cli: Cli) -> None:
    source = EVALUATED.replace("{}", "{5: lambda step, loss: ctl_core.report(step, loss=loss)}")
    Path("config.yaml").write_text(f"listener: {__name__}.Heard\n")
    assert cli(source, "--eval-every", "5").code == 0
    start, *values, end = (call for call in Heard.instances[-1].calls if call[0] != "saved")
    assert start == ("start", "a", 8, 0)
    assert end == ("end", 10, "done")
    assert len(values) == 4
    lines = map(json.loads, Path("runs/a/metrics.jsonl").read_text().splitlines())
    assert values == [(line.pop("split"), line.pop("step"), line) for line in lines]
    assert cli(None, "--steps", "12").code == 0, "the run's own settings have it"
    assert Heard.instances[-1].calls[0] == ("start", "a", 8, 10)


@pytest.mark.parametrize("name", [f"{__name__}.Hears", f"{__name__}.Path", "a_lacking_service.Any"])
def test_listener_that_cannot_be_used_is_refused_before_the_run(name: str, cli: Cli) -> None:
    refused(cli(small.CALLBACKS, "--listener", name), f"error: listener: {name}")
    assert not Path("runs").exists()


def test_listener_whose_package_is_missing_names_the_command(cli: Cli) -> None:
    Path("tracking.py").write_text("import a_lacking_package\n")
    message = (
        "error: listener: tracking.Any needs the package a_lacking_package: pip install "
        "a_lacking_package"
    )
    refused(cli(small.CALLBACKS, "--listener", "tracking.Any"), message)


# ---- training_log.md -----------------------------------------------------------------------------

LOG = Path("training_log.md")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"
STOPPED = """
import signal

every_steps = {6: lambda step: signal.raise_signal(signal.SIGINT)}
create_eval_dataset = create_dataset
"""


def test_training_log_has_an_entry_at_the_start_and_a_line_at_each_end(cli: Cli) -> None:
    """Text that the user adds is kept, and a repeated note does not start a new entry."""
    assert cli(small.CALLBACKS + STOPPED, "--eval-every", "4", "--note", "wider\nhelps").code == 130
    text = LOG.read_text()
    expected = (
        "# Training log\n\n## runs/a\n\n- Expected: wider helps\n"
        r"- Settings: steps 10, batch_size 8, eval_every 4\n"
        rf"- {TIME}: started without a git commit\n"
        rf"- {TIME}: runs/a stopped at step 6; evaluation of step 4: loss \S+\n"
    )
    assert re.fullmatch(expected, text), text
    LOG.write_text(f"{text}\nMy own words.\n")
    assert cli(None, "--note", "wider helps", "--steps", "8").code == 0
    again = LOG.read_text().removeprefix(f"{text}\nMy own words.\n")
    expected = rf"- {TIME}: runs/a done at step 8; evaluation: loss \S+\n"
    assert re.fullmatch(expected, again), again
    assert cli(None, "--steps", "9", "--note", "longer, too").code == 0
    assert LOG.read_text().count("\n## runs/a\n") == 2


def test_training_log_has_no_entry_without_a_note(cli: Cli) -> None:
    assert cli(small.CALLBACKS, "--run-name", "b").code == 0
    assert not LOG.exists()
    failing = "def fail(step):\n    raise ValueError('enough')\n\n\nevery_steps = {5: fail}\n"
    assert cli(small.CALLBACKS + failing, "--note", "x").code == 1
    assert LOG.read_text().endswith("runs/a failed at step 5\n")


# ---- TensorBoard: summaries, progress, profiles and the HParams page -----------------------------


def read_scalars(state: ctl_core.State) -> list[tuple[int, str, float]]:
    """Returns (step, name, value) of each scalar summary of training, sorted."""
    return sorted(
        (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
        for file in (state.run_dir / "tb/train").glob("events.out.tfevents.*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    )


# ---- tf.summary in graph hooks: one summary per step on any number of devices --------------------


def summarizing_hooks(**hooks: Any) -> SimpleNamespace:
    """Returns hooks, two of which write a summary."""

    def input_pre(batch: Any) -> Any:
        tf.summary.scalar("input", tf.cast(tf.summary.experimental.get_step(), tf.float32))
        return batch[0]

    def update_pre(gradients: Any) -> Any:
        """Writes a summary of scaled gradients.

        If only one replica used the value, rounding could differ between the replicas.
        """
        third = [gradient * 0.3 for gradient in gradients]
        tf.summary.scalar("third", tf.linalg.global_norm(third))
        return [gradient * 0.7 for gradient in third], gradients

    return make_hooks(**{"input_pre": input_pre, "update_pre": update_pre, **hooks})


def test_summaries_of_micro_batches_leave_replicas_equal(train: Train) -> None:
    state = train(summarizing_hooks(), steps=30, accumulate_steps=2, virtual_devices=2)
    scalars = read_scalars(state)
    inputs = [(step, value) for step, name, value in scalars if name == "input"]
    assert inputs == [(step, step) for step in range(1, 31) for _ in range(2)]
    assert [step for step, name, _ in scalars if name == "third"] == [*range(1, 31)]
    for weight in state.train_model.weights:
        first_replica, second_replica = state.strategy.experimental_local_results(weight.value)
        np.testing.assert_array_equal(first_replica.numpy(), second_replica.numpy())


def test_summaries_in_a_compiled_step_are_refused(train: Train) -> None:
    """On several devices, ``update_pre`` may write summaries, because XLA does not compile it."""
    message = r" \(\w+.py:\d+\): jit_compile cannot compile tf.summary or "
    with pytest.raises(ctl_core.SetupError, match=f"^input_pre{message}"):
        train(summarizing_hooks(), steps=1, jit_compile=True)
    hooks = make_hooks(update_pre=summarizing_hooks().update_pre)
    with pytest.raises(ctl_core.SetupError, match=f"^update_pre{message}"):
        train(hooks, steps=2, jit_compile=True)
    state = train(hooks, steps=2, jit_compile=True, virtual_devices=2, run_name="update")
    assert [step for step, name, _ in read_scalars(state) if name == "third"] == [1, 2]


# ---- Summaries that the engine writes ------------------------------------------------------------


def test_summaries_have_the_learning_rate_and_the_speed(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed is not in metrics.jsonl, because tests compare the lines of two runs."""
    monkeypatch.setattr(summaries, "PAUSE", 0.0)  # Without a pause, even fast steps are reported.
    # Only a GPU has a peak memory, so the value is faked.
    monkeypatch.setattr(summaries, "read_peak_memory", lambda devices: 3 * 2**20)
    report = {2: lambda step, loss: ctl_core.report(step, loss=loss)}
    hooks = small.hooks(every_steps=report)
    settings = {"lr_schedule": "cosine", "learning_rate": 0.2, "batch_size": 16}
    for steps in (8, 16):
        state = train(hooks, steps=steps, **settings)
    scalars = {(step, name): value for step, name, value in read_scalars(state)}
    rates = {
        step: value for (step, name), value in scalars.items() if name.endswith("learning_rate")
    }
    assert [*rates] == [2, 4, 6, 8, 10, 12, 14, 16]
    for step in range(10, 17, 2):  # The reported rate is the rate of the step's own update.
        assert rates[step] == pytest.approx(0.1 * (1 + np.cos(np.pi * (step - 1) / 16)), rel=1e-4)
    for (step, name), value in scalars.items():
        if name == "progress/examples_per_second":
            expected = 16 * scalars[step, "progress/steps_per_second"]
            assert value == pytest.approx(expected, rel=1e-4)
    assert scalars[16, "progress/peak_gpu_memory_mib"] == 3.0
    lines = map(json.loads, Path(state.run_dir, "metrics.jsonl").read_text().splitlines())
    assert {name for line in lines for name in line} == {
        "step", "split", "loss", "learning_rate",
    }  # fmt: skip


def test_a_profile_changes_no_bit_and_ends_with_a_failing_hook(train: Train) -> None:
    plain = train(make_hooks(), steps=8, run_name="plain")

    def fail(step: int) -> None:  # noqa: ARG001  (hooks take values by name)
        raise ValueError("mine")

    with pytest.raises(ctl_core.RunError, match="mine"):
        train(make_hooks(at_step={4: fail}), steps=8, profile="2:6", run_name="failing")
    profiled = train(make_hooks(), steps=8, profile="3:5", run_name="profiled")
    assert_weights(profiled, plain, rtol=0)
    assert list(profiled.run_dir.glob("tb/train/plugins/profile/*/*.xplane.pb"))


def test_the_hparams_page_has_the_last_settings_of_a_run(train: Train) -> None:
    """The page shows the settings that differ from the defaults."""
    settings = {"run_name": "a", "hparams": {"width": 8, "of": {"kinds": ["a"]}}}
    train(make_hooks(), steps=2, **settings)
    run = train(make_hooks(), steps=4, ema=0.9, **settings).run_dir
    (file,) = (run / "tb").glob("*.hparams")
    (start,) = (
        plugin_data_pb2.HParamsPluginData.FromString(
            value.metadata.plugin_data.content
        ).session_start_info
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    )
    values = start.hparams
    assert start.group_name == "a"
    assert {"steps", "ema", "hparams.width", "hparams.of.kinds"} <= {*values}
    assert not {"seed", "run_name"} & {*values}
    assert values["steps"].number_value == 4
    assert values["hparams.width"].number_value == 8
    assert values["hparams.of.kinds"].string_value == '["a"]'


# ---- The console, on a terminal and in a pipe ----------------------------------------------------

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = "a name [red]of some length[/] :smile:"


def terminal(width: int) -> tuple[Console, io.StringIO]:
    """Returns a console on a simulated terminal, and the buffer that receives its output."""
    written, environ = io.StringIO(), {"TERM": "xterm-256color"}
    pretended = Terminal(force_terminal=True, width=width, file=written, _environ=environ)
    return Console(pretended), written


def screen(text: str) -> list[str]:
    """Splits a terminal's output into lines without escape codes."""
    return [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", text)) if line.strip()]


@pytest.mark.parametrize("width", [10, 40, 200])
def test_the_progress_line_stays_within_the_terminal(width: int) -> None:
    console, written = terminal(width)
    console.start(0, 1000)
    for step in range(1, 1001):
        if step % 100 == 0:
            console.values(step, "train", {"loss": 1.0 / step, LONG: 12345.678})
        console.advance(step)
    console.stop()
    lines = screen(written.getvalue())
    assert lines
    assert max(map(len, lines)) <= width
    if width >= 40:
        assert lines[-1].startswith("step 1000/1000")
        assert "loss 0.001" in lines[-1]
    if width >= 200:
        assert f"loss 0.001  {LONG} 1.235e+04" in lines[-1], "no markup, no emoji"


def test_a_narrow_terminal_has_no_bar_and_then_fewer_words() -> None:
    line = ProgressLine(
        step="step 300/600",
        epoch="epoch 3/6",
        values="loss 0.2247",
        speed="145 steps/s",
        elapsed="0:12",
        remaining="0:24 left",
        share=0.5,
    )
    text = "step 300/600  epoch 3/6  loss 0.2247  145 steps/s  0:12  0:24 left"
    assert str(line) == text
    full = line.fit(140)
    assert "━" * 20 + "─" * 20 in full
    assert full.replace("━" * 20 + "─" * 20 + "  ", "") == text
    assert line.fit(len(text) + 12).count("━") == line.fit(len(text) + 12).count("─") == 5
    assert line.fit(len(text)) == text
    assert line.fit(len(text) - 1) == text.replace("  0:12", "")
    assert line.fit(50) == "step 300/600  epoch 3/6  loss 0.2247  0:24 left"
    assert line.fit(25) == "step 300/600  loss 0.2247"
    assert line.fit(20) == "step 300/600  loss …"


def test_messages_appear_above_the_progress_line_as_they_are() -> None:
    console, written = terminal(40)
    console.start(0, 10)
    for _ in range(2):  # A repeated warning is shown only once.
        console.warn(f"{LONG} and then some more words than the terminal has columns")
    console.values(5, "eval", {"accuracy": 0.5}, remark="in 0.1 s")
    console.advance(10)
    console.stop()
    console.say("done")
    lines = screen(written.getvalue())
    warning = f"warning: {LONG} and then some more words than the terminal has columns"
    assert lines.count(warning) == 1
    assert "step 5/10  eval: accuracy 0.5  in 0.1 s" in lines
    assert lines[-1] == "done"
    assert lines[-2].startswith("step 10/10")


def test_show_step_prints_what_the_engine_does_not_show(capfd: pytest.CaptureFixture[str]) -> None:
    """A step is printed, except in a deferred hook or if a terminal shows a progress line."""
    console, written = terminal(80)
    console.start(0, 10)
    console.step(5)
    console.stop()
    assert "\nstep 5" not in "\n".join(screen(written.getvalue())[1:])
    plain = Console()
    plain.start(0, 10)
    plain._printed_at = -math.inf  # Pretends that the last line was printed long ago.
    with plain.defer():
        plain.step(4)
    plain.step(5)
    plain.step(6)
    assert capfd.readouterr().out.splitlines()[0].startswith("step 5/10")


def test_many_values_can_be_kept_from_the_console() -> None:
    console, written = terminal(140)
    heard: list[Any] = []
    console.listeners = SimpleNamespace(tell=lambda *values: heard.append(values))
    console.start(0, 10)
    before = activate(console)
    for name in "abcdef":
        ctl_core.report(5, console=True, **{name: 1.0})
    ctl_core.report(5, loss=2.0, console=True)
    ctl_core.report(5, hidden=3.0, console=False)
    activate(before)
    console.advance(5)
    console.stop()
    last = screen(written.getvalue())[-1]
    assert "loss 2  c 1  d 1  e 1  f 1" in last
    assert "hidden" not in last
    assert heard[-1] == ("values", 5, "train", {"hidden": 3.0})


def test_console_prints_few_lines_into_a_pipe(
    train: Train, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default hooks, a line is printed every few seconds and another one at the end."""
    every_steps = ctl_core.hooks.defaults.every_steps
    state = train(make_hooks(every_steps=every_steps), steps=40)
    out, err = capfd.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert "\r" not in out
    first, parameters, *others = out.splitlines()
    assert "training, to step 40, batch size 16, 1 replica on CPU" in first
    assert "parameters to train" in parameters
    last, done, where, next_command = others
    assert re.fullmatch(r"step 40/40  loss [0-9.e+-]+(  [0-9.]+ steps/s)?  0:\d\d", last)
    assert done.startswith("done: step 40")
    assert where == f"Everything is in {state.run_dir}. Next, for example:"
    assert next_command.startswith("  tensorboard --logdir ")

    train(make_hooks(every_steps=every_steps), steps=80, run_name="often", log_seconds=1e-3)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("  loss")[0] for line in lines[-3:]] == [
        f"step {n}/80" for n in (60, 70, 80)
    ]
    kind = type(state.strategy.extended)  # The next line pretends that the replica is on a GPU.
    monkeypatch.setattr(kind, "worker_devices", ("/replica:0/task:0/device:GPU:0",))
    reason = "1 replica on GPU, not compiled: training runs on a CPU."  # The run was on a CPU.
    assert describe_start(state, 0, 41).endswith(reason)
    peaks = {"current": 2**20, "peak": 3 * 2**20}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", {"GPU:0": peaks}.get)
    assert "; peak GPU memory 3 MiB" in describe_end(state, 0, 0)[0]


def test_a_start_that_fails_leaves_no_dated_folder(tmp_path: Path) -> None:
    """If a start fails, only the folder of a run with a name is kept. It contains the log."""

    def fail() -> None:
        raise ValueError("mine")

    for name, left in ((None, []), ("named", ["named"])):
        config = ctl_core.Config(steps=1, batch_size=16, runs_dir=str(tmp_path), run_name=name)
        with pytest.raises(ctl_core.SetupError, match="mine"):
            ctl_core.train(small.hooks(create_model=fail), config)
        assert [path.name for path in tmp_path.iterdir()] == left


# ---- Standard error ------------------------------------------------------------------------------

NOTES = """
import ctl_core


class Notes(ctl_core.Listener):
    def start(self, folder, config, step):
        self.file = (folder / "notes").open("a")
        print("start", step, file=self.file)

    def end(self, step, how):
        print(how, step, file=self.file, flush=True)
"""


@pytest.mark.cluster
def test_commands_that_succeed_write_nothing_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a missing list of checkpoints causes no message on stderr.

    The listener of a cluster is called by the chief only.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", lean.PYTHONPATH)
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # The engine sets the log level.
    Path("callbacks.py").write_text(EVALUATED)
    Path("own.py").write_text(NOTES)
    ctl = [sys.executable, "-W", "default::DeprecationWarning:__main__", "-m", "ctl_core"]
    train = ("train", "--batch-size=16", "--run-name=a")
    for words in (
        (*train, "--steps=2", "--virtual-devices=2"),
        (*train, "--steps=4", "--virtual-devices=1", "--workers=2", "--listener=own.Notes"),
        *(("evaluate",), ("predict",), ("export",)),
    ):
        done = subprocess.run([*ctl, *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), words
        Path("runs/a/ckpt/checkpoint").unlink(missing_ok=True)
    assert Path("runs/a/notes").read_text() == "start 2\ndone 4\n"
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    done = subprocess.run([*ctl, "evaluate", "--debug"], capture_output=True, text=True, check=True)
    assert "oneDNN" in done.stderr


@pytest.mark.slow
def test_a_new_run_on_several_devices_recommends_a_check(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_hooks(), steps=1, run_name="one")
    assert "--check" not in capsys.readouterr().out
    train(make_hooks(), steps=1, run_name="two", virtual_devices=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "--check" in line]
    assert lines == [CHECK_ADVICE]
    train(make_hooks(), steps=2, run_name="two", virtual_devices=2)
    assert "--check" not in capsys.readouterr().out
