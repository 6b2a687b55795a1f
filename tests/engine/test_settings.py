"""Tests of settings: their sources and precedence, the settings of runs, and ``--help``."""

import dataclasses
import enum
import os
import re
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml

import ctl_core
from ctl_core.__main__ import main
from ctl_core.commands.cli import COMMANDS, Command, parse_command
from ctl_core.commands.help import GROUPS
from ctl_core.run.errors import SetupError
from ctl_core.run.layers import describe_variables, load_config, write_config
from ctl_core.run.settings import PERIODS, SETTINGS, Config

# For each setting, a value that differs from the default. A tuple contains the text in a file and
# the value in Python, if the two differ.
VALUES: dict[str, Any] = {
    "steps": 30, "epochs": 3, "overfit_batches": 1, "batch_size": 8, "accumulate_steps": 2,
    "logical_replicas": 4, "shard_optimizer": True, "intra_op_threads": 2,
    "last_batch": "keep", "precision": "bfloat16", "jit_compile": True, "on_nan": "stop",
    "detect_anomaly": True, "learning_rate": ("1e-1", 0.1), "lr_schedule": "cosine", "warmup": 5,
    "ema": (".9", 0.9), "seed": 2**32 - 1, "run_name": "2024-01-05b", "fork": "b/c@best",
    "init_from": "m.keras", "init_skip": ("head/*", ["head/*"]), "ckpt_every": "10min",
    "eval_every": "2epochs", "eval_batch_size": 32, "limit_eval": 3, "max_time": "7h30m",
    "log_every": 5, "log_seconds": 5.0, "keep": 3, "keep_best": "a:max", "early_stop": "a:max:1",
    "strategy": "mirrored", "virtual_devices": 2, "workers": 2, "max_restarts": 0,
    "stall_seconds": 60, "deterministic": True, "profile": ("50:61", "50:61"),
    "runs_dir": "else where", "mirror": "else/where", "mirror_keep": 5,
    "callbacks": "b, c.py", "listener": "a.b:C", "debug": True,
}  # fmt: skip

# Further settings that some settings require.
NEEDED = {"init_skip": {"init_from": "m.keras"}, "mirror": {"run_name": "a"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty project folder and removes all settings from the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CTL_")]:
        monkeypatch.delenv(name)
    return tmp_path


def parse(*words: str, config: str | None = None, **environ: str) -> Command:
    """Parses a command line with the given config.yaml and environment variables."""
    if config is not None:
        Path("config.yaml").write_text(config)
    with mock.patch.dict(os.environ, environ):
        return parse_command(words)


def make_run(name: str, text: str = "seed: 0\n", age: int = 0) -> Path:
    """Writes the config.yaml of a run. A run with a larger ``age`` (in seconds) is older."""
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(text)
    os.utime(run / "config.yaml", (10**9 - age, 10**9 - age))
    return run


def resolve(*flags: str, config: str | None = None, **environ: str) -> Config:
    return parse("train", *flags, config=config, **environ).config


def refuse(*flags: str, config: str | None = None, **environ: str) -> str:
    with pytest.raises(SetupError) as caught:
        resolve(*flags, config=config, **environ)
    return str(caught.value)


# ---- Precedence --------------------------------------------------------------------------------


def test_the_table_of_sources_has_every_setting() -> None:
    assert [*VALUES, "hparams"] == [*SETTINGS]
    assert resolve() == Config()


@pytest.mark.parametrize("name", VALUES)
def test_file_environment_and_flags_read_a_setting_alike(name: str) -> None:
    needed: dict[str, Any] = NEEDED.get(name, {})
    rest = "".join(f"{other}: {words}\n" for other, words in needed.items())
    text, value = VALUES[name] if isinstance(VALUES[name], tuple) else 2 * (VALUES[name],)
    flag = "--" + name.replace("_", "-") + (f"={text}" if value is not True else "")
    for resolved in (
        resolve(config=f"{rest}{name}: {text}\n"),
        resolve(config=rest, **{f"CTL_{name.upper()}": str(text)}),
        resolve(flag),
    ):
        assert resolved == Config(**needed, **{name: value})
        assert type(getattr(resolved, name)) is type(value)


def test_flags_override_the_environment_which_overrides_the_file() -> None:
    """A higher layer can also reset a value to null or switch off an option of a lower layer."""
    assert resolve(config="batch_size: 8", CTL_BATCH_SIZE="16").batch_size == 16
    assert resolve("--batch-size=32", CTL_BATCH_SIZE="16").batch_size == 32
    assert resolve(CTL_BATCH_SIZE="").batch_size == 8
    assert resolve("--no-debug", config="debug: true").debug is False
    assert resolve(config="debug: true", CTL_DEBUG="0").debug is False
    assert resolve("--debug", config="", CTL_DEBUG="0").debug is True
    config = "early_stop: loss:3\nlimit_eval: 4\nema: 0.9\n"
    resolved = resolve("--early-stop", "null", "--ema=null", config=config, CTL_LIMIT_EVAL="null")
    assert resolved == Config()


def test_epochs_of_a_higher_layer_replace_steps_of_a_lower_one() -> None:
    assert resolve("--epochs", "3", config="steps: 600") == Config(epochs=3)
    assert resolve(config="steps: 600", CTL_EPOCHS="2") == Config(epochs=2)
    assert resolve("--steps", "5", CTL_EPOCHS="2") == Config(steps=5)


def test_the_last_of_two_settings_files_wins() -> None:
    """Settings files that are passed explicitly replace config.yaml."""
    Path("base.yaml").write_text("steps: 3\nseed: 1\nhparams: {width: 32, deep: {a: 1, b: 2}}\n")
    Path("big.yaml").write_bytes(
        b"\xef\xbb\xbfepochs: 2\r\nseed: 2\r\nhparams: {width: wide, deep: {b: 9}}\r\n"
    )
    expected = Config(epochs=2, seed=2, hparams={"width": "wide", "deep": {"a": 1, "b": 9}})
    files = ("--config", "base.yaml", "--config", "big.yaml")
    assert resolve(*files, config="batch_size: 7\n") == expected
    assert resolve(CTL_CONFIG=os.pathsep.join(files[1::2])) == expected
    both = resolve("--config=big.yaml", CTL_CONFIG="base.yaml")
    assert both == dataclasses.replace(expected, hparams={"width": "wide", "deep": {"b": 9}})
    assert refuse(*files, "--config=none.yaml") == "none.yaml: there is no such settings file."


def test_a_number_outside_of_its_limits_is_refused_with_the_limit() -> None:
    for flag, expected in {
        "--keep=1": "keep: expected a number of at least 2, got '1'.",
        "--ema=1": "ema: expected a number below 1.0, got '1'.",
        "--workers=1024": "workers: expected a number below 1024, got '1024'.",
        "--virtual-devices=1024": "virtual_devices: expected a number below 1024, got '1024'.",
        "--intra-op-threads=8192": "intra_op_threads: expected a number below 8192, got '8192'.",
        "--seed=-1": "seed: expected a number of at least 0, got '-1'.",
        "--learning-rate=0": "learning_rate: expected a number above 0.0, got '0'.",
    }.items():
        assert refuse(flag) == expected
    assert resolve("--keep=2").keep == 2


# ---- hparams -----------------------------------------------------------------------------------

TYPED = (
    "hparams: {n: 3, x: 1.5, sure: true, t: base, l: [1], d: {n: 1, In: 1}, Up: 1, nothing: null}"
)
KEPT: dict[tuple[str, str], Any] = {
    ("n", "4"): 4, ("x", "2"): 2.0, ("x", "null"): None, ("sure", "no"): False, ("t", "007"): "007",
    ("n", "0.5"): 0.5, ("l", "[a]"): ["a"], ("Up", "5"): 5, ("d.In", "6"): 6,
    ("d.n", "5"): 5, ("nothing", "a"): "a",
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), KEPT)
def test_hparams_keep_the_type_that_a_file_gives_them(name: str, text: str) -> None:
    variable, value = "CTL_HPARAMS__" + name.replace(".", "__").upper(), KEPT[name, text]
    for flags in (f"--hparams.{name}", text), (f"--hparams.{name}={text}",), ():
        environ = {} if flags else {variable: text}
        resolved: Any = resolve(*flags, config=TYPED, **environ).hparams
        for each in name.split("."):
            resolved = resolved[each]
        assert (resolved, type(resolved)) == (value, type(value))


TEXTS: dict[str, Any] = {
    "64": 64, "1e-3": 0.001, "-2.5E+2": -250.0, "true": True, "null": None, "relu": "relu",
    "'1e-3'": "1e-3", "[1, 1e2, a]": [1, 100.0, "a"], "{a: {b: 2}}": {"a": {"b": 2}},
    "[not yaml": "[not yaml", "ümlaut …": "ümlaut …",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_hparams_are_read_alike_everywhere_and_read_back_equal(text: str) -> None:
    plain = Config(hparams={"x": TEXTS[text]})
    resolved = resolve("--hparams.x", text, config="")
    assert resolved == plain
    assert type(resolved.hparams["x"]) is type(TEXTS[text])
    write_config(plain, Path("config.yaml"))
    assert resolve() == load_config("config.yaml") == plain
    if text != "[not yaml":
        assert resolve(config=f"hparams:\n  x: {text}\n") == plain


def test_an_hparam_is_switched_off_and_a_list_is_written_in_brackets() -> None:
    resolved = resolve(
        "--no-hparams.sure", "--no-hparams.d.b", config="hparams: {sure: true, d: {b: true}}"
    )
    assert resolved.hparams == {"sure": False, "d": {"b": False}}
    config = "hparams: {sizes: [64, 32], d: {n: 1}}\n"
    assert resolve("--hparams.sizes", "[16, 8]", config=config).hparams["sizes"] == [16, 8]
    for flags in (("--hparams.sizes", "16,8"), ("--hparams.sizes.0", "16"), ("--hparams.sizes=8",)):
        message = refuse(*flags)
        assert message.startswith("hparams.sizes: expected a list such as '[64, 32]', the value in")
    assert "expected names with values such as '{n: 1}', the value" in refuse("--hparams.d=3")


def test_an_hparam_that_no_settings_file_has_is_refused() -> None:
    """Unknown hyperparameters are refused, because a misspelled name would have no effect.

    A new hyperparameter must first be added to a settings file.
    """
    config = "hparams: {width: 3, optimizer: {momentum: 0.9}, rates: {}, deep: null}\n"
    message = refuse("--hparams.widht", "4", config=config)
    assert (
        message == "hparams.widht: no settings file has this hyperparameter; did you mean 'width'?"
    )
    assert "'momentum'" in refuse("--hparams.optimizer.momentun", "3")
    assert "CTL_HPARAMS.widht: no" in refuse(CTL_HPARAMS="{widht: 4}")
    assert "'width'" in refuse(CTL_HPARAMS__WIDHT="4")
    assert "expected a value of the same kind as 3" in refuse("--hparams.width", "wide")
    with pytest.raises(
        SetupError, match=r"^hparams\.widht: no settings file has this hyperparameter"
    ):
        load_config("config.yaml", hparams={"widht": 4})
    assert resolve("--hparams.rates.a", "1").hparams["rates"] == {"a": 1}
    assert resolve("--hparams.deep.x", "1").hparams["deep"] == {"x": 1}
    free = resolve("--hparams.b", "2", config="", CTL_HPARAMS="{a: 1}").hparams
    assert free == {"a": 1, "b": 2}, "where there are none"


# ---- Mistakes ----------------------------------------------------------------------------------


def test_wrong_flags_are_refused() -> None:
    assert "such as loss:3, got 'loss'." in refuse("--early-stop=loss")
    message = "runs_dir: expected a path in the file system, got 'gs:"
    assert message in refuse("--runs-dir=gs://bucket/x")
    for mirror in ("s3:/bucket/x", "gs:/b", "s3:b/x", "simplecache::s3://b/x", "S3:/b"):
        assert f"://bucket/x, or a path, got '{mirror}'" in refuse("--mirror", mirror)
    for mirror in ("file:/x", "file://localhost/x", "FILE:///x"):
        assert "expected file:///PATH or a path" in refuse("--mirror", mirror)
    for name in ("mirror", "runs_dir", "fork", "init_from", "callbacks"):
        expected = f"{name}: only a shell expands '~' at the beginning of '~/x'; write /"
        assert expected in refuse(config=f"{name}: ~/x\n")
    Path("config.yaml").unlink()
    assert "expected a path in the file system" in refuse("--runs-dir=simplecache::s3://b/x")
    for mirror in ("file:///x", "s3://b/x", "my:folder", "/a/b:c", "x~/y", "../~z", "C:/x"):
        assert Config(mirror=mirror, run_name="a").mirror == mirror
    for flag in ("--steps", "--batch-size", "--limit-eval", "--ckpt-every"):
        assert "at most 9223372036854775807" in refuse(flag, str(2**63))
    assert "detect_anomaly: needs --no-jit" in refuse("--detect-anomaly", "--jit-compile")


def test_jit_compile_is_true_false_or_auto_wherever_it_is_set() -> None:
    """All sources accept the three values, and a flag without a value means true."""
    flags = {
        (): "auto",
        ("--jit-compile",): True,
        ("--jit-compile", "--steps=3"): True,
        ("--jit-compile=auto",): "auto",
        ("--jit-compile", "auto"): "auto",
        ("--jit-compile", "false"): False,
        ("--no-jit-compile",): False,
    }
    for words, value in flags.items():
        assert resolve(*words).jit_compile == value
    for text, value in {"true": True, "false": False, "auto": "auto"}.items():
        below = f"jit_compile: {text}\n"
        assert resolve(CTL_JIT_COMPILE=text, config="").jit_compile == value
        config = resolve(config=below)
        assert config.jit_compile == value
        write_config(config, Path("written.yaml"))
        assert load_config("written.yaml") == config
        assert resolve("--jit-compile=auto", config=below).jit_compile == "auto"
    message = "jit_compile: expected true or false, or such as auto, got 'fast'."
    assert refuse("--jit-compile", "fast", config="") == message
    assert "CTL_JIT_COMPILE: expected true" in refuse(CTL_JIT_COMPILE="fast")


def test_lists_of_patterns_are_read_and_written(folder: Path) -> None:
    """Flags replace a list of a lower layer, written lists read back equal, and null means None."""
    below = "init_from: a\ninit_skip: ['*/bias', head/*]\n"
    config = resolve(config=below)
    assert config.init_skip == ["*/bias", "head/*"]
    write_config(config, folder / "written.yaml")
    assert load_config(folder / "written.yaml") == config
    assert resolve("--init-skip", "a/*", "--init-skip=*b", config=below).init_skip == ["a/*", "*b"]
    assert resolve(config=below, CTL_INIT_SKIP="*/kernel").init_skip == ["*/kernel"]
    assert resolve(config=below, CTL_INIT_SKIP="[a/*, '*b']").init_skip == ["a/*", "*b"]
    assert resolve("--init-skip=null", config=below).init_skip is None
    alone = refuse("--init-skip=head/*", config="")
    assert alone.startswith("init_skip: ")
    assert "init_from" in alone
    assert "\n" not in alone


def test_settings_from_python_are_converted_and_checked() -> None:
    resolved = Config(steps=np.int64(3), learning_rate=np.float32(0.5), runs_dir=Path("x"))  # type: ignore[arg-type]
    assert resolved == Config(steps=3, learning_rate=0.5, runs_dir="x")
    assert type(resolved.steps) is int
    assert type(resolved.runs_dir) is str
    with pytest.raises(
        SetupError, match=r"^fork and init_from: set only one of the two, got a and b."
    ):
        Config(fork="a", init_from="b")
    Path("my.yaml").write_text("steps: 3\nhparams: {layers: {first: 1, second: 2}}\n")
    changed = ctl_core.load_config("my.yaml", hparams={"layers": {"first": np.int64(9)}})
    assert type(changed.hparams["layers"]["first"]) is int
    config = ctl_core.load_config("my.yaml", epochs=2, hparams={"layers": {"first": 9}})
    assert config == Config(epochs=2, hparams={"layers": {"first": 9, "second": 2}})
    with pytest.raises(SetupError, match=r"no setting 'step'; did you mean 'steps'\?"):
        load_config("my.yaml", step=2)


class Activation(enum.StrEnum):
    RELU = "relu"


def test_hparams_from_python_are_those_that_a_resumed_run_reads(folder: Path) -> None:
    """Tools that search for hyperparameters pass NumPy numbers and tuples.

    https://github.com/ray-project/ray/issues/4528
    """
    config = Config(
        hparams={
            "width": np.int64(64),
            "rate": np.float32(0.5),
            "layers": (32, np.int32(16)),
            "head": types.MappingProxyType({"bias": np.array([0.5, 1.0]), "on": np.bool_(True)}),
            "activation": Activation.RELU,
            "kind": np.str_("wide"),
            "data": Path("x"),
        }
    )
    head = {"bias": [0.5, 1.0], "on": True}
    plain = {"width": 64, "rate": 0.5, "layers": [32, 16], "head": head}
    plain |= {"activation": "relu", "kind": "wide", "data": "x"}
    assert repr(config.hparams) == repr(plain)
    write_config(config, folder / "written.yaml")
    assert repr(load_config(folder / "written.yaml").hparams) == repr(plain)
    with pytest.raises(SetupError, match=r"^hparams: head.act is <built-in function len>, which"):
        Config(hparams={"head": {"act": [1, len]}})


def test_variables_of_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that was set for another project would change a setting silently.

    https://github.com/langfuse/claude-observability-plugin/issues/30
    """
    assert describe_variables() == []
    variables = {"CTL_STEPS": "3", "CTL_HPARAMS__WIDTH": "8", "CTL_STEP": "3", "CTL_SEED": ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    unknown, used = describe_variables()
    assert unknown.startswith("warning: the environment variable CTL_STEP is not a setting; did")
    assert used == "settings from the environment: CTL_HPARAMS__WIDTH, CTL_STEPS"


# ---- Runs --------------------------------------------------------------------------------------


def test_commands_use_a_run_with_its_saved_settings() -> None:
    saved = Config(
        steps=9, batch_size=3, run_name="old", workers=3, debug=True, hparams={"width": 7}
    )
    for name, age in (("old", 20), ("new", 10)):
        write_config(dataclasses.replace(saved, run_name=name), Path("own.yaml"))
        make_run(name, Path("own.yaml").read_text(), age)
    Path("config.yaml").write_text("steps: 1\nbatch_size: 64\nema: 0.9\nhparams: {width: 1}\n")

    def use(*words: str, **environ: str) -> Any:
        return parse("evaluate", *words, **environ)

    # A command that uses a run ignores its settings debug and workers, which concern only training.
    expected = dataclasses.replace(saved, debug=False, workers=1)
    for words in (["old"], ["--run-name", "old"]):
        command = use(*words, "--checkpoint", "3")
        assert command.config == expected
        assert command.run == Path("runs/old")
        assert command.options["checkpoint"] == 3
    assert use().config == dataclasses.replace(expected, run_name="new")
    assert use(CTL_RUN_NAME="old").config == expected
    assert use("old", "--batch-size", "5", CTL_BATCH_SIZE="6").config.batch_size == 5
    Path("mine.yaml").write_text("batch_size: 11\nrun_name: old\nhparams: {width: x}\n")
    other = dataclasses.replace(expected, batch_size=11, hparams={"width": "x"})
    assert use("--config", "mine.yaml").config == other
    for words, message in (
        (["--runs-dir", "elsewhere"], "elsewhere: there is no run yet"),
        (["--checkpoint", "first"], "checkpoint: expected a whole number, got 'first'."),
        (["--workers", "2"], "there is no setting '--workers'"),
    ):
        with pytest.raises(SetupError, match=f"^{re.escape(message)}"):
            use(*words)


def test_a_resumed_run_keeps_its_saved_settings() -> None:
    """Only flags and explicitly passed files override the saved settings.

    A hyperparameter that the run does not have is read from the project's config.yaml.
    """
    project = "steps: 600\nearly_stop: loss:3\nhparams: {old: 1}\n"
    first = resolve("--run-name=a", "--batch-size=8", "--early-stop=null", config=project)
    write_config(first, Path("own.yaml"))
    make_run("a", Path("own.yaml").read_text())
    Path("config.yaml").write_text(project.replace("old: 1", "old: 2, new: 2") + "seed: 4\n")
    command = parse("train", "--run-name=a", "--hparams.new=3")
    assert command.config == dataclasses.replace(first, hparams={"old": 1, "new": 3})
    message = (
        "runs/a keeps its own settings; config.yaml differs in early_stop, hparams.old, seed: "
    )
    assert message in command.notes[0]
    os.utime("runs/a/config.yaml", (2**33, 2**33))  # The run was started again in the meantime.
    assert not parse("train", "--run-name=a").notes
    Path("mine.yaml").write_text("seed: 5\nepochs: 2\n")
    command = parse("train", "--run-name=a", "--config=mine.yaml")
    assert not command.notes
    assert (command.config.seed, command.config.epochs, command.config.batch_size) == (5, 2, 8)


def test_a_fork_and_a_run_of_an_earlier_engine_inherit_known_settings() -> None:
    """Settings that only an earlier engine had are ignored.

    A run folder without settings is treated as new, because a supervisor creates it for its logs.
    """
    run = make_run("a", "steps: 5\nseed: 3\nworkers: 2\nrun_name: a\nfork: b\n")
    (run / "ckpt/engine").mkdir(parents=True)
    (run / "ckpt/engine/ckpt-3.json").touch()
    resolved = resolve("--fork=a", "--run-name=c", config="seed: 4\n")
    assert resolved == Config(steps=5, seed=3, run_name="c", fork="a")
    Path("runs/none").mkdir()
    assert resolve("--run-name=none", config="seed: 3\n") == Config(seed=3, run_name="none")
    (make_run("old", "steps: 9\ncurves: true\n") / "train.log").touch()
    assert resolve("--run-name=old", config="") == Config(steps=9, run_name="old")


def test_saved_settings_read_back_equal(folder: Path) -> None:
    every = Config(
        steps=30, accumulate_steps=3, learning_rate=1e-5, run_name="007", ckpt_every="1epoch",
        runs_dir="some where: else", hparams={"a": {"b": [1, "2", 1e-5, None, True]}, "1": "null"},
    )  # fmt: skip
    for config in (Config(), every, Config(epochs=3)):
        write_config(config, folder / "resolved.yaml")
        assert resolve("--config", "resolved.yaml") == config
        assert list(yaml.safe_load((folder / "resolved.yaml").read_text())) == [*SETTINGS]
    assert os.listdir(folder) == ["resolved.yaml"]


# ---- Help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_flags_of_a_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help lists all flags of the command in fewer than 100 lines."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert ("CTL_BATCH_SIZE" in shown) == bool(COMMANDS[command].settings)
    assert "default: null" not in shown
    assert len(shown.splitlines()) < 100
    names = {*COMMANDS[command][1], *COMMANDS[command][2]} - {"hparams"}
    flags = {*re.findall(r"^  --([a-z-]+)", shown, re.MULTILINE)}
    assert flags == {name.replace("_", "-") for name in names}
    assert command == "hooks" or "examples:\n  python -m ctl_core " in shown
    assert max(map(len, shown.partition("examples:")[2].splitlines()), default=0) < 80


def test_the_help_has_a_group_for_each_setting() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted([*grouped, "hparams"]) == sorted(SETTINGS)


def test_every_setting_is_used_somewhere() -> None:
    """Each setting is used outside of the modules that parse settings.

    Periods are not searched for, because the schedule reads them with ``getattr``.
    """
    engine = Path(ctl_core.__file__).parent
    sources = [p.read_text() for p in engine.rglob("*.py") if p.stem not in ("settings", "cli")]
    for name in SETTINGS.keys() - set(PERIODS):
        assert any(re.search(rf"\b_?config\.{name}\b", text) for text in sources), name


def test_unknown_settings_of_a_run_are_refused_except_those_of_earlier_engines() -> None:
    """Unknown settings of a run are refused, because a misspelled name would have no effect."""
    make_run("a", "steps: 3\ninit_partial: false\nwait_for_workers: 600\n")
    Path("runs/a/train.log").touch()
    assert resolve("--run-name", "a").steps == 3
    (Path("runs/a") / "config.yaml").write_text("steps: 3\nbatchsize: 8\n")
    with pytest.raises(SetupError, match=r"config.yaml: batchsize: .*mean 'batch_size'"):
        resolve("--run-name", "a")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a/b", "'a/b' contains '/'"),
        ("a b", "'a b' contains ' '"),
        (".a", "'.a' does not begin with a letter or a digit"),
        ("a" * 201, "is longer than 200 characters"),
    ],
)
def test_a_name_that_is_no_folder_is_refused_with_the_reason(name: str, problem: str) -> None:
    message = refuse(f"--run-name={name}")
    assert message.startswith("run_name: ")
    assert problem in message
    assert "the name becomes a folder in runs_dir" in message
