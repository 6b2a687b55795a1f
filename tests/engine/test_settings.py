"""Settings: where they come from, which goes before which, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ctl_core
from ctl_core.__main__ import main
from ctl_core.cli import COMMANDS, OPTIONS, Command, find_run, parse_command
from ctl_core.cluster import supervisor
from ctl_core.errors import SetupError
from ctl_core.layers import load_config, write_config
from ctl_core.settings import SETTINGS, Config, nearest

FIELDS = list(SETTINGS)

# For each setting a value for the file, one for the environment and one for a flag, as written
# there, and what each is in Python. All differ from the default.
VALUES: dict[str, list[tuple[str, Any]]] = {
    "steps": [("30", 30), ("40", 40), ("50", 50)],
    "epochs": [("3", 3), ("4", 4), ("5", 5)],
    "batch_size": [("8", 8), ("16", 16), ("0x20", 32)],
    "accumulate_steps": [("2", 2), ("3", 3), ("4", 4)],
    "precision": [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16")],
    "jit_compile": [("true", True), ("1", True), ("", True)],
    "on_nan": [("stop", "stop"), ("ignore", "ignore"), ("stop", "stop")],
    "learning_rate": [("1e-1", 0.1), ("2", 2.0), (".25", 0.25)],
    "lr_schedule": [("cosine", "cosine"), ("linear", "linear"), ("step", "step")],
    "warmup": [("5", 5), ("6", 6), ("7", 7)],
    "ema": [("0.9", 0.9), ("0.99", 0.99), ("0.5", 0.5)],
    "seed": [("7", 7), ("8", 8), ("4294967295", 2**32 - 1)],
    "run_name": [("'3'", "3"), ("4", "4"), ("2024-01-05", "2024-01-05")],
    "ckpt_every": [("0", 0), ("5", 5), ("6", 6)],
    "eval_every": [("0", 0), ("5", 5), ("6", 6)],
    "max_time": [("7h30m", "7h30m"), ("45min", "45min"), ("90s", "90s")],
    "log_every": [("5", 5), ("6", 6), ("7", 7)],
    "keep_best": [("loss", "loss"), ("loss:min", "loss:min"), ("a:max", "a:max")],
    "early_stop": [("loss:3", "loss:3"), ("a:max:1", "a:max:1"), ("b:min:20", "b:min:20")],
    "strategy": [("mirrored", "mirrored"), ("one_device", "one_device"), ("mirrored", "mirrored")],
    "virtual_devices": [("2", 2), ("3", 3), ("4", 4)],
    "workers": [("2", 2), ("3", 3), ("4", 4)],
    "max_restarts": [("0", 0), ("1", 1), ("2", 2)],
    "steps_per_call": [("10", 10), ("20", 20), ("30", 30)],
    "deterministic": [("true", True), ("1", True), ("", True)],
    "profile": [("'5:6'", "5:6"), ("50:60", "50:60"), ("7:8", "7:8")],
    "runs_dir": [("some/where", "some/where"), ("else where", "else where"), ("x=y", "x=y")],
    "callbacks": [("experiments/gan.py", "experiments/gan.py"), ("b c.py", "b c.py"), ("d", "d")],
    "debug": [("yes", True), ("true", True), ("", True)],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CTL_")]:
        monkeypatch.delenv(name)
    return tmp_path


def resolve(
    *flags: str, config: str | None = None, environ: dict[str, str] | None = None
) -> Config:
    """Returns the settings of ``train`` with these flags, config.yaml and environment."""
    if config is not None:
        Path("config.yaml").write_text(config)
    return parse_command(["train", *flags], environ or {}).config


def flag_of(name: str, text: str) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [f"{flag}={text}"] if text else [flag]


def test_the_table_above_knows_every_setting() -> None:
    assert [*VALUES, "hparams"] == FIELDS


def test_without_anything_the_defaults_hold() -> None:
    assert resolve() == Config()


@pytest.mark.parametrize("name", VALUES)
def test_defaults_give_way_to_the_file_the_environment_and_flags(name: str) -> None:
    (file, in_file), (variable, in_environment), (flag, in_flag) = VALUES[name]
    config, environ = f"{name}: {file}\n", {f"CTL_{name.upper()}": variable}
    flags = flag_of(name, flag)
    for settings, expected in (
        (resolve(config=config), in_file),
        (resolve(config=config, environ=environ), in_environment),
        (resolve(*flags, config=config, environ=environ), in_flag),
        (resolve(config="", environ=environ), in_environment),
        (resolve(*flags, config="", environ=environ), in_flag),
        (resolve(*flags, config=config), in_flag),
        (resolve(*flags, config=""), in_flag),
    ):
        value = getattr(settings, name)
        assert (value, type(value)) == (expected, type(expected))
        assert dataclasses.replace(settings, **{name: getattr(Config(), name)}) == Config()


def test_switches_can_be_switched_off_again() -> None:
    for name in ("deterministic", "debug"):
        assert getattr(resolve(f"--no-{name}", config=f"{name}: true"), name) is False
        off = {f"CTL_{name.upper()}": "0"}
        assert getattr(resolve(config=f"{name}: true", environ=off), name) is False
        assert getattr(resolve(f"--{name}", config="", environ=off), name) is True


def test_what_is_empty_says_nothing() -> None:
    assert resolve(config="seed:\nhparams:\n# nothing else\n", environ={"CTL_SEED": ""}) == Config()
    assert resolve(config="") == Config()
    assert resolve(environ={"ctl_seed": "3", "CTLSEED": "3", "PATH": "x"}) == Config()


def test_the_last_of_a_repeated_flag_holds() -> None:
    assert resolve("--seed", "1", "--seed", "2").seed == 2


def test_another_config_file() -> None:
    Path("config.yaml").write_text("seed: 1\n")
    Path("two.yaml").write_text("seed: 2\n")
    Path("three.yaml").write_bytes(b"\xef\xbb\xbfseed: 3\r\nsteps: 4\r\n")
    assert resolve("--config", "two.yaml") == Config(seed=2)
    assert resolve(environ={"CTL_CONFIG": "two.yaml"}) == Config(seed=2)
    both = resolve("--config", "three.yaml", environ={"CTL_CONFIG": "two.yaml"})
    assert both == Config(seed=3, steps=4)
    with pytest.raises(SetupError, match=r"four.yaml: there is no such settings file"):
        resolve("--config", "four.yaml")


def test_epochs_of_a_higher_layer_replace_steps_of_a_lower_one() -> None:
    assert resolve("--epochs", "3", config="steps: 600") == Config(epochs=3)
    assert resolve("--steps", "3", config="epochs: 600") == Config(steps=3)
    assert resolve(config="steps: 600", environ={"CTL_EPOCHS": "2"}) == Config(epochs=2)
    assert resolve("--steps", "5", environ={"CTL_EPOCHS": "2"}) == Config(steps=5)
    with pytest.raises(SetupError, match="steps=600 and epochs=3"):
        resolve(config="steps: 600\nepochs: 3")
    with pytest.raises(SetupError, match="steps=5 and epochs=2"):
        resolve("--steps", "5", "--epochs", "2")


HPARAMS = "hparams: {width: 32, name: base, layers: {first: 1, second: 2}, rates: [1, 2]}"


def test_hparams_are_merged_name_by_name() -> None:
    environ = {"CTL_HPARAMS": "{width: 64, layers: {second: 3}}"}
    flags = ("--hparams.name", "wide", "--hparams.layers.first=5", "--hparams.rates", "[3]")
    assert resolve(config=HPARAMS).hparams == {
        "width": 32,
        "name": "base",
        "layers": {"first": 1, "second": 2},
        "rates": [1, 2],
    }
    assert resolve(*flags, environ=environ).hparams == {
        "width": 64,
        "name": "wide",
        "layers": {"first": 5, "second": 3},
        "rates": [3],
    }


def test_a_dict_of_hparams_as_a_flag() -> None:
    flags = ("--hparams", "{a: {b: 1}, c: 2}", "--hparams.a.d", "x", "--steps", "3")
    assert resolve(*flags) == Config(steps=3, hparams={"a": {"b": 1, "d": "x"}, "c": 2})
    assert resolve("--hparams.a", "1", "--hparams.a.b", "2").hparams == {"a": {"b": 2}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-1", -1),
        ("1e-3", 0.001),
        ("-2.5E+2", -250.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("true", True),
        ("null", None),
        ("", ""),
        ("relu", "relu"),
        ("'64'", "64"),
        ("'1e-3'", "1e-3"),
        ("1e-3x", "1e-3x"),
        ("[1, 1e2, a]", [1, 100.0, "a"]),
        ("{a: {b: 2}}", {"a": {"b": 2}}),
        ("[not yaml", "[not yaml"),
        ("a: b: c", "a: b: c"),
        ("ümlaut …", "ümlaut …"),
    ],
)
def test_hparams_have_the_same_types_everywhere_and_come_back(text: str, value: Any) -> None:
    found = resolve("--hparams.x", text).hparams["x"]
    assert (found, type(found)) == (value, type(value))
    assert resolve(f"--hparams.x={text}").hparams == {"x": value}
    plain = Config(hparams={"x": value})
    write_config(plain, Path("config.yaml"))
    assert resolve() == plain and load_config("config.yaml") == plain
    if text and not text.startswith("[not") and ": b:" not in text:
        assert resolve(config=f"hparams:\n  x: {text}\n") == plain
        assert resolve(config="", environ={"CTL_HPARAMS": f"{{x: {text}}}"}) == plain


def test_the_resolved_config_comes_back_equal(folder: Path) -> None:
    every = Config(
        steps=30,
        batch_size=12,
        accumulate_steps=3,
        precision="bfloat16",
        learning_rate=1e-5,
        seed=2**32 - 1,
        run_name="007",
        ckpt_every=0,
        eval_every=7,
        strategy="mirrored",
        virtual_devices=2,
        steps_per_call=3,
        deterministic=True,
        runs_dir="some where: else",
        debug=True,
        hparams={"a": {"b": [1, "2", 1e-5, None, True]}, "yes": "no", "1": "null"},
    )
    for config in (Config(), every, Config(epochs=3)):
        write_config(config, folder / "resolved.yaml")
        assert load_config(folder / "resolved.yaml") == config
        assert resolve("--config", "resolved.yaml") == config
        assert list(yaml.safe_load((folder / "resolved.yaml").read_text())) == FIELDS
    assert os.listdir(folder) == ["resolved.yaml"]


PLAIN = {int, float, str, bool, dict, type(None)}


def test_numbers_of_numpy_and_paths_become_plain(folder: Path) -> None:
    config = Config(
        steps=np.int64(3),  # type: ignore[arg-type]
        learning_rate=np.float32(0.5),  # type: ignore[arg-type]
        runs_dir=folder / "x",  # type: ignore[arg-type]
        strategy=np.str_("mirrored"),  # type: ignore[arg-type]
    )
    assert config == Config(3, learning_rate=0.5, runs_dir=str(folder / "x"), strategy="mirrored")
    assert {type(value) for value in dataclasses.asdict(config).values()} <= PLAIN
    write_config(config, folder / "resolved.yaml")
    assert load_config(folder / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 3.0}, "steps: expected a whole number from 0 up, got 3.0"),
        ({"steps": True}, "steps: expected a whole number from 0 up, got True"),
        ({"batch_size": None}, "batch_size: expected a whole number from 1 up, got None"),
        ({"learning_rate": Fraction(10**400)}, "learning_rate: expected a number above 0, got"),
        ({"seed": 10**5000}, "seed: expected a whole number from 0 up and below 2**32, got a very"),
        ({"step": 3}, "unknown setting 'step'; did you mean 'steps'?"),
        ({"profile": "60:50"}, "profile: expected START:STOP, two step numbers"),
        ({"profile": "5"}, "profile: expected START:STOP, two step numbers"),
        ({"hparams": {"d": np.inf, "s": {3}}}, "hparams: 's' has the value {3}"),
        ({"accumulate_steps": 0}, "accumulate_steps: expected a whole number from 1 up, got 0"),
        ({"steps_per_call": 0}, "steps_per_call: expected a whole number from 1 up, got 0"),
        ({"steps": 2**63}, "below 2**63"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number above 0, got 'fast'"),
        ({"learning_rate": float("inf")}, "learning_rate: expected a number above 0, got inf"),
        (
            {"run_name": 3},
            "run_name: expected a folder name of letters",
        ),
        ({"run_name": "a" * 201}, "at most 200 of them, got 'aaa"),
        ({"run_name": ".hidden"}, "run_name: expected a folder name"),
        ({"runs_dir": 3}, "folder, in quotes if it looks like a number, got 3"),
        ({"runs_dir": "a\0b"}, "runs_dir: expected the name of a folder, got 'a\\x00b'"),
        ({"runs_dir": "x" * 300}, "runs_dir: expected the name of a folder, got 'xxx"),
        ({"runs_dir": " "}, "runs_dir: expected the name of a folder, got ' '"),
        ({"deterministic": "no"}, "deterministic: expected true or false, got 'no'"),
        ({"debug": 1}, "debug: expected true or false, got 1"),
        (
            {"strategy": "tpu"},
            "strategy: expected one of auto, one_device, mirrored, multi_worker, got 'tpu'",
        ),
        ({"on_nan": "halt"}, "on_nan: expected one of stop, warn, ignore, got 'halt'"),
        (
            {"precision": "half"},
            "expected one of float32, bfloat16, float16, got 'half'",
        ),
        ({"strategy": "one_device", "virtual_devices": 2}, "virtual_devices is 2"),
        ({"strategy": "one_device", "workers": 2}, "one_device trains in one process, but workers"),
        ({"strategy": "mirrored", "workers": 3}, "trains in one process, but workers is 3"),
        ({"workers": 0}, "workers: expected a whole number from 1 up, got 0"),
        ({"workers": 2000}, "workers: expected a whole number from 1 up and below 2**10, got 2000"),
        ({"max_restarts": -1}, "max_restarts: expected a whole number from 0 up, got -1"),
        ({"steps": 1, "epochs": 1}, "steps and epochs: give one of the two"),
        ({"hparams": None}, "hparams: expected names with values, got None"),
        ({"hparams": {"f": print}}, "hparams: 'f' has the value <built-in function print>"),
        ({"hparams": {"n": np.float32(1)}}, "hparams: 'n' has the value"),
        ({"hparams": {3: "x"}}, "hparams: 3 has the value 'x'"),
    ],
)
def test_from_python_the_same_checks_hold(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=re.escape(message)):
        Config(**values)
    with pytest.raises(SetupError, match=re.escape(message)):
        dataclasses.replace(Config(), **values)
    if "hparams" not in values:
        Path("config.yaml").write_text("")
        with pytest.raises(SetupError, match=re.escape(message)):
            load_config("config.yaml", **values)


URLS = ["gs://bucket/x", "s3://bucket/x", "hdfs://name:9000/x", "file:///x", "abfss://a@b.c/x"]


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_no_folder(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused in one line wherever it is said, before anything is made."""
    words = f"runs_dir: expected a path in the file system, got the URL '{url}'; "
    for make in (lambda: Config(runs_dir=url), lambda: resolve("--runs-dir", url)):
        with pytest.raises(SetupError, match=f"^{re.escape(words)}.*copy.*mount"):
            make()
    # pathlib has made one slash of the two.
    with pytest.raises(SetupError, match=r"runs_dir: .*the URL"):
        Config(runs_dir=Path(url))  # type: ignore[arg-type]
    (folder / "callbacks.py").touch()
    (folder / "other.yaml").write_text(f"runs_dir: {url}\n")
    for argv, environ in (
        (["--runs-dir", url], {}),
        (["--runs-dir", url, "--workers", "2"], {}),
        (["--config", "other.yaml"], {}),
        ([], {"CTL_RUNS_DIR": url}),
    ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        for command in COMMANDS:
            if command != "hooks":
                assert main([command, *argv]) == 2
                error = capsys.readouterr().err
                assert words.partition(": ")[2] in error and error.count("\n") == 1
                assert re.match("error: (other.yaml: )?(runs_dir|CTL_RUNS_DIR): ", error)
    assert sorted(path.name for path in folder.iterdir()) == ["callbacks.py", "other.yaml"]


def test_a_url_is_no_file_either(folder: Path) -> None:
    make_run("a", 10)
    for key in ("input", "output", "config"):
        with pytest.raises(SetupError, match=f"^{key}: .* got the URL 'gs://bucket/x.npz'"):
            parse_command(["predict", f"--{key}", "gs://bucket/x.npz"], {})


@pytest.mark.parametrize("path", ["C:/runs", "C:\\\\runs", "/mnt/gs:/x", "a:b", "x/http://y"])
def test_a_path_with_a_colon_is_a_path(path: str) -> None:
    assert Config(runs_dir=path).runs_dir == path


def test_load_config_takes_settings_on_top(folder: Path) -> None:
    (folder / "my.yaml").write_text(HPARAMS + "\nsteps: 3\n")
    config = load_config("my.yaml", epochs=2, hparams={"layers": {"first": 9}})
    assert (config.steps, config.epochs) == (None, 2)
    assert config.hparams["layers"] == {"first": 9, "second": 2}
    assert ctl_core.load_config(folder / "my.yaml", steps=None) == dataclasses.replace(
        load_config("my.yaml"), steps=None
    )
    with pytest.raises(SetupError, match=r"unknown setting 'step'; did you mean 'steps'\?"):
        load_config("my.yaml", step=2)
    with pytest.raises(SetupError, match=r"nowhere.yaml: there is no such settings file"):
        load_config("nowhere.yaml")


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", OPTIONS)
def test_help_shows_every_setting_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    sections = re.split(r" (?=--[a-z-]+(?: [A-Z{]|, --no-))", text.split(" options: ")[1])
    by_flag = {section.split()[0].rstrip(","): section for section in sections}
    for name, setting in SETTINGS.items():
        section = by_flag["--" + name.replace("_", "-")]
        default = yaml.safe_load(section.split("(default: ")[-1].removesuffix(")"))
        assert default == getattr(Config(), name), section
        assert str(setting.description) in section and len(section) > 50, "says what it is for"
    for option in OPTIONS[command]:
        assert f"--{option}" in by_flag
    assert "CTL_BATCH_SIZE" in text


def test_help_needs_no_docstrings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -OO`` has none, and Python 3.13 changes their indentation."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["predict", "--help"]) == 0
    shown = capsys.readouterr().out
    environ = {**os.environ, "PYTHONPATH": str(Path(ctl_core.__file__).parents[1])}
    process = [sys.executable, "-OO", "-m", "ctl_core", "predict", "--help"]
    done = subprocess.run(process, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


def test_help_and_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main(["-h"]) == 0
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command, text in COMMANDS.items():
        assert len(re.findall(rf"^  {command} +{re.escape(text)}$", shown, re.MULTILINE)) == 3
    assert main(["hooks", "--help"]) == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["xyz"], "expected one of train, evaluate, predict, export, hooks"),
        (["--steps", "3"], "unknown command '--steps'"),
        (["hooks", "all"], "unexpected word 'all'"),
    ],
)
def test_unknown_commands(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


def test_every_setting_is_used_somewhere() -> None:
    """Somewhere else in the engine than where settings are read."""
    engine = Path(ctl_core.__file__).parent
    sources = [p.read_text() for p in engine.rglob("*.py") if p.stem not in ("settings", "cli")]
    for name in FIELDS:
        assert any(re.search(rf"\bconfig\.{name}(_steps)?\b", text) for text in sources), name


def make_run(name: str, age: int, text: str = "") -> Path:
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(text)
    os.utime(run / "config.yaml", (10**9 - age, 10**9 - age))
    return run


def test_find_run() -> None:
    runs = Path("runs")
    with pytest.raises(SetupError, match="runs: no run there yet; train one first"):
        find_run(runs, None)
    make_run("old", 20)
    make_run("new", 10)
    (runs / "newest-but-nothing-in-it").mkdir()
    assert find_run(runs, None) == runs / "new"
    assert find_run(runs, "old") == runs / "old"
    with pytest.raises(SetupError, match=r"run_name: no run 'odl' in runs; did you mean 'old'\?"):
        find_run(runs, "odl")
    with pytest.raises(SetupError, match=r"there: new, old"):
        find_run(runs, "newest-but-nothing-in-it")


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
    alone = used("--run-name", "old", "--workers", "2", "--strategy", "one_device", CTL_WORKERS="2")
    assert alone.config.workers == 1
    options = used("--run-name", "old", "--checkpoint", "3").options
    assert options == {**dict.fromkeys(OPTIONS[command]), "checkpoint": 3}
    Path("mine.yaml").write_text("batch_size: 11\nrun_name: old\nhparams: {width: x}\n")
    other = dataclasses.replace(expected, batch_size=11, hparams={"width": "x"})
    assert used("--config", "mine.yaml").config == other
    Path("config.yaml").write_text("run_name: old\n")
    assert used().config == expected
    with pytest.raises(SetupError, match="no run 'none' in runs"):
        used("--run-name", "none")
    with pytest.raises(SetupError, match="elsewhere: no run there yet"):
        used("--runs-dir", "elsewhere")
    with pytest.raises(SetupError, match=r"unknown setting --chekpoint; did you mean '--checkpo"):
        used("--chekpoint", "3")
    with pytest.raises(SetupError, match=r"checkpoint: expected a step, a whole.* got 'last'"):
        used("--checkpoint", "last")


def first_run(text: str, *flags: str) -> Config:
    """Writes config.yaml and resolves the settings of run a, which is then there."""
    Path("config.yaml").write_text(text)
    config = resolve("--run-name", "a", *flags)
    write_config(config, make_run("a", 10) / "config.yaml")
    return config


def test_a_run_is_trained_on_with_its_own_settings() -> None:
    flags = ("--batch-size", "8", "--steps", "300", "--workers", "2", "--hparams.width", "5")
    first = first_run("steps: 600\nhparams: {width: 3}\n", *flags, "--debug")
    first = dataclasses.replace(first, debug=False)
    assert first.hparams == {"width": 5}
    assert resolve("--run-name", "a") == first
    assert resolve("--run-name", "a", "--steps", "600") == dataclasses.replace(first, steps=600)
    assert resolve("--run-name", "a", environ={"CTL_SEED": "4"}).seed == 4
    assert resolve("--run-name", "a", "--epochs", "2").steps is None
    assert resolve(environ={"CTL_RUN_NAME": "a"}) == first
    assert resolve(config="run_name: a\nsteps: 5\n") == first
    assert resolve("--run-name", "a", "--hparams.width", "6").hparams == {"width": 6}
    # How it is watched is the project's to say, and the others are new runs.
    assert resolve("--run-name", "a", config="debug: true\nsteps: 7") == dataclasses.replace(
        first, debug=True
    )
    assert resolve("--run-name", "b") == Config(steps=7, debug=True, run_name="b")
    assert resolve("--run-name", "a", "--runs-dir", "else").batch_size == 64
    # A cluster of several machines says by itself how many processes there are.
    assert resolve("--run-name", "a", environ={"TF_CONFIG": "{}"}).workers == 1
    assert resolve("--run-name", "a", "--workers", "2", environ={"TF_CONFIG": "{}"}).workers == 2


def test_a_config_file_that_is_named_goes_before_the_runs_own() -> None:
    first = first_run("steps: 600\n", "--batch-size", "8", "--seed", "3")
    Path("mine.yaml").write_text("seed: 4\nepochs: 2\n")
    expected = dataclasses.replace(first, steps=None, epochs=2, seed=4)
    for named in (("--config", "mine.yaml"), ()):
        environ = {} if named else {"CTL_CONFIG": "mine.yaml"}
        command = parse_command(["train", "--run-name", "a", *named], environ)
        assert command.config == expected and not command.notes
    assert resolve("--run-name", "a", "--config", "mine.yaml", "--seed", "5").seed == 5


def test_a_folder_without_settings_is_a_new_run() -> None:
    """As each process of a cluster finds it, whose supervisor has made it for their logs."""
    (Path("runs") / "a").mkdir(parents=True)
    flags = ("--run-name", "a", "--hparams.w", "2", "--epochs", "3")
    before = resolve(*flags, config="seed: 3\nsteps: 9\nhparams: {w: 1.5}\n")
    assert before == Config(epochs=3, seed=3, run_name="a", hparams={"w": 2.0})
    write_config(before, Path("runs/a/config.yaml"))  # and as it is when they start again
    assert resolve(*flags) == before


def test_what_config_yaml_says_otherwise_than_the_run_is_told() -> None:
    def notes(*flags: str, config: str, command: str = "train") -> str:
        Path("config.yaml").write_text(config)
        found = parse_command([command, "--run-name", "a", *flags], {}).notes
        assert len(found) <= 1
        return found[0] if found else ""

    same = "steps: 600\nlearning_rate: 1\nhparams: {width: 3, deep: {x: [1]}}\n"
    first_run(same)
    assert notes(config=same) == notes(config="") == notes(config=same + "runs_dir: runs") == ""
    changed = "steps: 300\nseed: 7\nhparams: {width: 4, deep: {x: [1, 2]}, new: a}\n"
    told = notes(config=changed)
    assert told.startswith("runs/a: ") and told.count("->") == 3
    for words in ("steps: 600 -> 300, seed: 0 -> 7, hparams.width: 3 -> 4 and 2 more",):
        assert words in told
    told = notes("--steps", "900", "--hparams.width", "9", config=changed)
    assert "steps" not in told and "width" not in told
    assert "seed: 0 -> 7, hparams.deep.x: [1] -> [1, 2], hparams.new: None -> 'a';" in told
    assert notes(config=changed, command="evaluate") == ""
    assert notes("--config", "config.yaml", config=changed) == ""


def test_what_an_earlier_engine_did_not_write_is_the_default() -> None:
    (make_run("a", 10) / "config.yaml").write_text("steps: 6\n")
    same = "steps: 6\ncallbacks: ./callbacks.py\non_nan: warn\nseed: 0\n"
    Path("config.yaml").write_text(same)
    assert parse_command(["train", "--run-name", "a"], {}).notes == []
    Path("config.yaml").write_text(same + "steps_per_call: 5\n")
    (told,) = parse_command(["train", "--run-name", "a"], {}).notes
    assert "differs: steps_per_call: 1000 -> 5;" in told


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("./gan.py", "gan.py"),
        ("a/../b/x.py", "b/x.py"),
        ("..x/y.py", "..x/y.py"),
        ("{here}/b/x.py", "b/x.py"),
        ("../x.py", "{above}/x.py"),
        ("/x.py", "/x.py"),
    ],
)
def test_callbacks_inside_of_the_project_are_kept_relative_to_it(
    folder: Path, given: str, kept: str
) -> None:
    places = {"here": folder, "above": folder.parent}
    config = resolve("--callbacks", given.format(**places))
    assert config.callbacks == kept.format(**places)


def test_several_config_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("base", "steps: 3\nseed: 1\n" + HPARAMS), ("big", "epochs: 2\nseed: 2\n")):
        Path(f"{name}.yaml").write_text(text)
    Path("more.yaml").write_text("hparams: {width: wide, layers: {second: 9}}")
    hparams = yaml.safe_load(HPARAMS)["hparams"]
    expected = Config(epochs=2, seed=2, hparams=hparams)
    files = ["base.yaml", "big.yaml"]
    assert resolve("--config", files[0], "--config", files[1]) == expected
    assert resolve(environ={"CTL_CONFIG": os.pathsep.join(files)}) == expected
    assert resolve("--config", files[1], "--config=base.yaml").steps == 3
    changed = resolve("--config", files[0], "--config", "more.yaml").hparams
    assert changed == {**hparams, "width": "wide", "layers": {"first": 1, "second": 9}}
    with pytest.raises(SetupError, match=r"^none.yaml: there is no such settings file"):
        resolve("--config", files[0], "--config", "none.yaml")


TYPED = "hparams: {n: 3, x: 1.5, sure: true, t: base, l: [1], d: {n: 1}, nothing: null}"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("n", "4", 4),
        ("n", "1e3", 1000),
        ("x", "2", 2.0),
        ("x", "null", None),
        ("sure", "no", False),
        ("t", "7", "7"),
        ("t", "007", "007"),
        ("t", "'8'", "8"),
        ("t", "null", None),
        ("l", "[a]", ["a"]),
        ("d", "{n: 5, m: x}", {"n": 5, "m": "x"}),
        ("d.n", "5.0", 5),
        ("nothing", "a", "a"),
        ("new", "1.0", 1.0),
    ],
)
def test_hparams_keep_the_type_that_config_yaml_gives_them(
    name: str, text: str, value: Any
) -> None:
    found: Any = resolve(f"--hparams.{name}", text, config=TYPED).hparams
    for each in name.split("."):
        found = found[each]
    assert (found, type(found)) == (value, type(value))
    if name in ("n", "x"):
        environ = {"CTL_HPARAMS": f"{{{name}: {text}}}"}
        assert resolve(config=TYPED, environ=environ).hparams[name] == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("n", "many", "a whole number, as the settings file has it (3), got 'many'"),
        ("n", "1.5", "a whole number, as the settings file has it (3), got 1.5"),
        ("n", "true", "a whole number, as the settings file has it (3), got True"),
        ("x", "fast", "a number, as the settings file has it (1.5), got 'fast'"),
        ("sure", "1", "true or false, as the settings file has it (True), got 1"),
        ("l", "3", "a list, as the settings file has it ([1]), got 3"),
        ("d", "3", "names with values, as the settings file has it ({'n': 1}), got 3"),
        ("d.n", "a", "a whole number, as the settings file has it (1), got 'a'"),
    ],
)
def test_an_hparam_of_another_type_is_refused(name: str, text: str, expected: str) -> None:
    with pytest.raises(SetupError) as caught:
        resolve(f"--hparams.{name}", text, config=TYPED)
    assert str(caught.value) == f"--hparams.{name}: expected {expected}."
    inner, _, last = name.rpartition(".")
    hparams = {inner: {last: yaml.safe_load(text)}} if inner else {last: yaml.safe_load(text)}
    with pytest.raises(SetupError, match=re.escape(f"hparams.{name}: expected {expected}")):
        load_config("config.yaml", hparams=hparams)
    with pytest.raises(SetupError, match=re.escape(f"CTL_HPARAMS.{name}: expected {expected}")):
        resolve(environ={"CTL_HPARAMS": yaml.dump(hparams)})


def test_a_slip_in_the_name_of_an_hparam_gives_a_warning() -> None:
    Path("config.yaml").write_text("hparams: {width: 3, optimizer: {momentum: 0.9}, rate: 1}\n")

    def notes(*flags: str) -> list[str]:
        return list(parse_command(["train", *flags], {}).notes)

    assert notes("--hparams.widht", "3") == [
        "warning: --hparams.widht is in no settings file; did you mean 'width'?"
    ]
    assert notes("--hparams.optimizer.momentun", "3")[0].endswith("did you mean 'momentum'?")
    assert notes("--hparams.depth", "3", "--hparams.width", "4") == []
    assert notes("--hparams.rates", "3", "--hparams.rate", "4") == []
    assert resolve("--hparams.widht", "3").hparams["widht"] == 3


def test_notes_are_on_the_console_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("config.yaml").write_text("steps: 1\nhparams: {width: 3}\n")
    for supervised in (False, True):
        if supervised:
            monkeypatch.setenv(supervisor.PIPE, "0")
        assert main(["train", "--hparams.widht", "3"]) == 2  # there is no callbacks.py
        assert capsys.readouterr().out.count("did you mean 'width'?") == (not supervised)


SHORT = (
    "2001-99-99¦0x_¦0b_¦!!int x¦!!bool x¦!!float x¦!!timestamp x¦!!binary ß¦!!set {a}¦{<<: 3}¦"
    "\0¦\a¦\x1b[31m¦\ud800¦\u2028¦a\nb¦a\r\nb¦*a¦&a [*a]¦&a {b: *a, c: *a}¦? ¦---¦...¦%YAML 9¦"
    "@¦|¦> ¦'¦\"¦1:30¦1e999¦.nan¦-.inf¦~¦null¦yes¦!x¦{1: 2}¦{[1]: 2}¦!!python/name:os.system¦[1, 2¦"
    "a: b: c¦\t¦#¦ ¦-¦--¦--x¦=3¦1_0¦٣¦gs://x¦../x¦/¦."
)
LONG = ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "[" * 400, "[" * 400 + "]" * 400]
ODD = [*SHORT.split("¦"), *LONG, "", "{a: " * 400, "- " * 400, "x" * 300, "a/" * 3000, "é" * 100]


def names_the_cause(error: SetupError, *names: str) -> bool:
    text = str(error)
    return len(text) <= 300 and text.isprintable() and any(name in text for name in names)


def test_whatever_is_given_there_is_a_config_or_one_line_that_names_the_cause() -> None:
    """3,000 values, damaged at random, through file, variables and flags."""
    chance = random.Random(0)
    fine = ["3", "0.1", "true", "float32", "stop", "50:60", "runs", "a", "{width: 3}", "[1]"]
    signs = "\0\1\n\r\t:{}[]&*!|>'\"%@`#-=,.~\x85\ufeff\x7f"
    seen = {Config: 0, SetupError: 0}
    for number in range(3000):
        text, name = chance.choice([*fine, *ODD]), chance.choice(FIELDS)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(min(len(text), 100) + 1)
            change = chance.choice([chance.choice(signs), "", chance.choice(ODD)[:100]])
            text = text[:at] + change + text[at + (change == "") :]
        flag, variable, flags, environ = (
            f"--{name.replace('_', '-')}",
            f"CTL_{name.upper()}",
            [],
            {},
        )
        Path("config.yaml").write_bytes(b"")
        if number % 3 == 0:
            Path("config.yaml").write_bytes(f"{name}: {text}".encode("utf-8", "surrogatepass"))
        elif number % 3 == 1:
            environ[variable] = text
        else:
            flag += chance.choice(["", ".x", ".y.z"]) * (name == "hparams")
            flags = chance.choice([[f"{flag}={text}"], [flag, text]])
        try:
            config = parse_command(["train", *flags], environ).config
        except SetupError as error:
            seen[SetupError] += 1
            switch = ("unexpected word", "unknown setting") if len(flags) == 2 else ()
            assert names_the_cause(error, name, variable, "config.yaml:", flag, *switch), text
        else:
            seen[Config] += 1
            write_config(config, Path("again.yaml"))
            again = load_config("again.yaml")
            assert again == config or "nan" in text.lower()
    assert min(seen.values()) > 200


@pytest.mark.parametrize("how", ["file", "variable", "flag"])
@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("seed", "2001-99-99", "'2001-99-99'"),
        ("workers", "0x_", "'0x_'"),
        ("steps", "!!int x", "'"),
        ("batch_size", "9" * 5000, "'999"),
        ("steps_per_call", "[" * 40 + "]" * 40, "[[[[[["),
        ("runs_dir", "x" * 300, "'xxxx"),
        ("run_name", "x" * 3_000_000, "'xxxx"),
        ("seed", "'a\n\n  b'", "'a\\n"),
    ],
)
def test_a_wrong_value_is_shown_in_one_line(how: str, name: str, text: str, shown: str) -> None:
    where = f"config.yaml: {name}"
    flags: list[str] = []
    environ: dict[str, str] = {}
    if how == "file":
        Path("config.yaml").write_text(f"{name}: {text}\n")
    elif how == "variable":
        where = f"CTL_{name.upper()}"
        environ[where] = text
    else:
        where, flags = name, [f"--{name.replace('_', '-')}", text]
    with pytest.raises(SetupError) as caught:
        resolve(*flags, environ=environ)
    assert str(caught.value).startswith(f"{where}: expected ") and names_the_cause(caught.value, "")
    got = str(caught.value).rpartition(", got ")[2]
    assert got.startswith(shown) and len(got) <= 81


@pytest.mark.parametrize("text", ["[" * 100_000, "hparams: " + "{a: " * 400 + "}" * 400])
def test_a_file_nested_without_end_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=r"^config.yaml: no valid YAML: nested too deeply.$"):
        resolve(config=text)


def test_nearest() -> None:
    assert nearest("bach", ["batch", "lr"]) == "; did you mean 'batch'?"
    assert nearest("seeed", ["seed"], "--") == "; did you mean '--seed'?"
    assert nearest("zzz", ["batch", "lr"]) == ""


@pytest.mark.parametrize("way", ["file", "variable", "flag", "flag="])
def test_a_setting_that_has_a_new_name_works_by_its_old_one(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("max_chunk: 5\n" if way == "file" else "steps: 3\n")
    environ = {"CTL_MAX_CHUNK": "5"} if way == "variable" else {}
    flags = {"flag": ["--max-chunk", "5"], "flag=": ["--max-chunk=5"]}.get(way, [])
    command = parse_command(["train", *flags], environ)
    assert command.config.steps_per_call == 5
    old = {"file": "config.yaml: max_chunk", "variable": "CTL_MAX_CHUNK"}.get(way, "--max-chunk")
    assert list(command.notes) == [f"{old} is called steps_per_call now."]
    assert list(parse_command(["train", "--steps-per-call", "5"], {}).notes)[1:] == []
    with pytest.raises(SetupError, match="it is called steps_per_call now"):
        load_config("config.yaml", max_chunk=5)
