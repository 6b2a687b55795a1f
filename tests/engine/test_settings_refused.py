"""Settings that are wrong: one line that says where, what was found and what was expected.

Each layer says it through the parser; that a command ends with that line and code 2, and has
written nothing, is tried once a layer.
"""

from __future__ import annotations

import dataclasses
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ctl_core.__main__ import main
from ctl_core.cli import parse_command
from ctl_core.errors import SetupError
from ctl_core.layers import load_config, write_config
from ctl_core.options import OPTIONS
from ctl_core.settings import SETTINGS, Config
from tests.helpers.project import Cli, refused, source_of
from tests.helpers.settings import TYPED, resolve

pytestmark = pytest.mark.usefixtures("folder")

FIELDS = list(SETTINGS)


def said(*flags: str, config: str | bytes = "", environ: dict[str, str] | None = None) -> str:
    """What ``train`` with these flags, config.yaml and environment is refused with."""
    Path("config.yaml").write_bytes(config if isinstance(config, bytes) else config.encode())
    with pytest.raises(SetupError) as caught:
        parse_command(["train", *flags], environ or {})
    return str(caught.value)


def in_layer(how: str, name: str, text: str) -> tuple[str, str]:
    """What is said of a value in one of the layers, and how that has to begin."""
    if how == "file":
        return said(config=f"{name}: {text}\n"), f"config.yaml: {name}: "
    if how == "variable":
        variable = f"CTL_{name.upper()}"
        return said(environ={variable: text}), f"{variable}: "
    return said(f"--{name.replace('_', '-')}", text), f"{name}: "


LAYERS = ("file", "variable", "flag")
FOLDER_NAME = "a folder name of letters"
# A setting, a value as all three layers have it, what is expected of it, and how it is shown.
VALUES: list[tuple[str, str, str, str]] = [
    ("seed", "many", "a whole number from 0 up", "'many'"),
    ("seed", "3.5", "a whole number from 0 up", "3.5"),
    ("seed", "true", "a whole number from 0 up", "True"),
    ("seed", "[1]", "a whole number from 0 up", "[1]"),
    ("seed", "-1", "a whole number from 0 up", "-1"),
    ("seed", "4294967296", "a whole number from 0 up and below 2**32", "4294967296"),
    ("seed", "2001-99-99", "a whole number from 0 up", "'2001-99-99'"),
    ("seed", "'a\n\n  b'", "a whole number from 0 up", "'a\\n"),
    ("steps", "99999999999999999999", "a whole number from 0 up and below 2**63", "99999"),
    ("steps", "!!int x", "a whole number from 0 up", "'"),
    ("batch_size", "0", "a whole number from 1 up", "0"),
    ("batch_size", "9" * 5000, "a whole number from 1 up", "'999"),
    ("workers", "0x_", "a whole number from 1 up", "'0x_'"),
    ("workers", "2000", "a whole number from 1 up and below 2**10", "2000"),
    ("steps_per_call", "[" * 40 + "]" * 40, "a whole number from 1 up", "[[[[[["),
    ("learning_rate", "fast", "a number above 0", "'fast'"),
    ("learning_rate", "0", "a number above 0", "0"),
    ("learning_rate", ".nan", "a number above 0", "nan"),
    ("deterministic", "maybe", "true or false", "'maybe'"),
    ("strategy", "tpu", "one of auto, one_device, mirrored, multi_worker", "'tpu'"),
    ("on_nan", "halt", "one of stop, warn, ignore", "'halt'"),
    ("precision", "half", "one of float32, bfloat16, float16", "'half'"),
    ("profile", "half", "START:STOP, two step numbers", "'half'"),
    ("run_name", "../a", FOLDER_NAME, "'../a'"),
    ("run_name", ".hidden", FOLDER_NAME, "'.hidden'"),
    ("run_name", "a" * 201, "at most 200 of them", "'aaa"),
    ("run_name", "x" * 3_000_000, FOLDER_NAME, "'xxxx"),
    ("runs_dir", "x" * 300, "the name of a folder", "'xxxx"),
    ("hparams", "3", "names with values", "3"),
    ("hparams", "a", "names with values", "'a'"),
]


@pytest.mark.parametrize("how", LAYERS)
@pytest.mark.parametrize("case", VALUES, ids=lambda case: f"{case[0]}={case[1][:20]}")
def test_a_wrong_value(how: str, case: tuple[str, str, str, str]) -> None:
    name, text, expected, shown = case
    if how == "flag" and name == "deterministic":
        return  # a switch takes no value, see FLAGS
    message, where = in_layer(how, name, text)
    if how == "flag" and name == "hparams":
        where = "--hparams: "
    before, _, got = message.rpartition(", got ")
    assert before.startswith(f"{where}expected ") and expected in before
    assert got.startswith(shown) and len(got) <= 81
    assert len(message) <= 300 and message.isprintable()


URLS = ["gs://bucket/x", "s3://bucket/x", "hdfs://name:9000/x", "file:///x", "abfss://a@b.c/x"]
FILES: list[tuple[str | bytes, str]] = [
    ("bacth_size: 8", r"config.yaml.*unknown setting 'bacth_size'.*'batch_size'"),
    ("batch-size: 8", r"config.yaml.*unknown setting 'batch-size'.*'batch_size'"),
    ("3: 8", r"config.yaml.*unknown setting 3"),
    ("runs_dir: ''", r"runs_dir: expected the name of a folder, got ''"),
    ("runs_dir: 2024", r"config.yaml: runs_dir: expected .* folder, in quotes if.*got 2024"),
    ("strategy: one_device\nvirtual_devices: 2", r"strategy: one_device.*virtual_devices is 2"),
    ("steps: 600\nepochs: 3", r"steps and epochs: give one of the two, got steps=600 and epochs=3"),
    ("hparams: {1: 2}", r"hparams: 1 has the value 2.*expected a name"),
    ("steps: [", r"config.yaml: line 1, column 9: no valid YAML"),
    ("steps: 3: 4", r"config.yaml: line 1, column 9: no valid YAML"),
    ("\tsteps: 3", r"config.yaml: line 1, column 1: no valid YAML.*'\\t'"),
    ("steps: 3\nseed: 1\nsteps: 4", r"config.yaml: line 3, column 1: no valid YAML: steps stands"),
    ("hparams: {a: 1, a: 2}", r"config.yaml: line 1, column 17: no valid YAML: a stands there"),
    ("steps: !!python/name:os.system", r"config.yaml: line 1, column 8: no valid YAML"),
    ("steps: \x01", r"config.yaml: no valid YAML.*#x0001"),
    ("[" * 100_000, r"config.yaml: no valid YAML: nested too deeply.$"),
    ("hparams: " + "{a: " * 400 + "}" * 400, r"config.yaml: no valid YAML: nested too deeply.$"),
    ("just words", r"config.yaml: expected lines of the form 'name: value', got 'just words'"),
    ("- steps", r"config.yaml: expected lines of the form 'name: value', got \['steps'\]"),
    (b"run_name: \xe4\n", r"config.yaml: cannot be read.*utf-8"),
]
FLAGS: list[tuple[tuple[str, ...], str]] = [
    (("--bacth-size", "8"), r"unknown setting --bacth-size; did you mean '--batch-size'\?"),
    (("--batch_size", "8"), r"unknown setting --batch_size; did you mean '--batch-size'\?"),
    (("--batch-size",), r"--batch-size: expected a value"),
    (("--batch-size", ""), r"batch_size: expected a whole number from 1 up, got ''"),
    (("--deterministic=yes",), r"--deterministic takes no value.*--no-deterministic"),
    (("--deterministic", "yes"), r"unexpected word 'yes'"),
    (("--steps", "5", "--epochs", "2"), r"steps and epochs: .* got steps=5 and epochs=2"),
    (("--run-name", " "), r"run_name: expected a folder name.* got ' '"),
    (("--run-name", ""), r"run_name: expected a folder name.* got ''"),
    (("--config", "missing.yaml"), r"missing.yaml: there is no such settings file"),
    (("--config", "."), r"\.: cannot be read as a settings file.*Is a directory"),
    (("--hparams.width",), r"--hparams.width: expected a name and a value"),
    (("--hparams..width", "3"), r"--hparams..width: expected a name and a value"),
    (("--checkpoint", "3"), r"unknown setting --checkpoint"),
    (("words",), r"unexpected word 'words'.*--name value"),
]
VARIABLES: list[tuple[str, str, str]] = [
    ("CTL_BACTH_SIZE", "8", r"CTL_BACTH_SIZE.*did you mean 'CTL_BATCH_SIZE'\?"),
    ("CTL_", "8", r"unknown setting CTL_ in the environment"),
    ("CTL_DEBUG", "banana", r"CTL_DEBUG: expected true or false, got 'banana'"),
    ("CTL_CONFIG", "missing.yaml", r"missing.yaml: there is no such settings file"),
]


def test_files() -> None:
    for config, message in FILES:
        assert re.search(message, said(config=config)), config[:30]


def test_flags() -> None:
    for flags, message in FLAGS:
        assert re.search(message, said(*flags)), flags


def test_variables() -> None:
    for name, value, message in VARIABLES:
        assert re.search(message, said(environ={name: value})), name


@pytest.mark.parametrize("how", LAYERS)
def test_a_command_that_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    words = "expected a whole number from 0 up, got 'many'"
    if how == "variable":
        monkeypatch.setenv("CTL_SEED", "many")
    flags = ("--seed", "many") if how == "flag" else ()
    outcome = cli(source_of(), *flags, config="seed: many" if how == "file" else "")
    refused(outcome, words)
    assert not outcome.written


# From Python, values of any type.
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 3.0}, "steps: expected a whole number from 0 up, got 3.0"),
    ({"steps": True}, "steps: expected a whole number from 0 up, got True"),
    ({"batch_size": None}, "batch_size: expected a whole number from 1 up, got None"),
    ({"learning_rate": Fraction(10**400)}, "learning_rate: expected a number above 0, got"),
    ({"learning_rate": float("inf")}, "learning_rate: expected a number above 0, got inf"),
    ({"seed": 10**5000}, "seed: expected a whole number from 0 up and below 2**32, got a very"),
    ({"step": 3}, "unknown setting 'step'; did you mean 'steps'?"),
    ({"profile": "60:50"}, "profile: expected START:STOP, two step numbers"),
    ({"profile": "5"}, "profile: expected START:STOP, two step numbers"),
    ({"accumulate_steps": 0}, "accumulate_steps: expected a whole number from 1 up, got 0"),
    ({"max_restarts": -1}, "max_restarts: expected a whole number from 0 up, got -1"),
    ({"run_name": 3}, "run_name: expected a folder name of letters"),
    ({"runs_dir": 3}, "folder, in quotes if it looks like a number, got 3"),
    ({"runs_dir": "a\0b"}, "runs_dir: expected the name of a folder, got 'a\\x00b'"),
    ({"runs_dir": " "}, "runs_dir: expected the name of a folder, got ' '"),
    ({"deterministic": "no"}, "deterministic: expected true or false, got 'no'"),
    ({"debug": 1}, "debug: expected true or false, got 1"),
    ({"strategy": "one_device", "virtual_devices": 2}, "virtual_devices is 2"),
    ({"strategy": "one_device", "workers": 2}, "one_device trains in one process, but workers"),
    ({"strategy": "mirrored", "workers": 3}, "trains in one process, but workers is 3"),
    ({"steps": 1, "epochs": 1}, "steps and epochs: give one of the two"),
    ({"hparams": None}, "hparams: expected names with values, got None"),
    ({"hparams": {"d": np.inf, "s": {3}}}, "hparams: 's' has the value {3}"),
    ({"hparams": {"f": print}}, "hparams: 'f' has the value <built-in function print>"),
    ({"hparams": {"n": np.float32(1)}}, "hparams: 'n' has the value"),
    ({"hparams": {3: "x"}}, "hparams: 3 has the value 'x'"),
]


def test_from_python_the_same_checks_hold() -> None:
    Path("config.yaml").write_text("")
    for values, message in CONFIGS:
        with pytest.raises(SetupError, match=re.escape(message)):
            Config(**values)
        with pytest.raises(SetupError, match=re.escape(message)):
            dataclasses.replace(Config(), **values)
        if "hparams" not in values:
            with pytest.raises(SetupError, match=re.escape(message)):
                load_config("config.yaml", **values)


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
        for command in OPTIONS:
            assert main([command, *argv]) == 2
            error = capsys.readouterr().err
            assert words.partition(": ")[2] in error and error.count("\n") == 1
            assert re.match("error: (other.yaml: )?(runs_dir|CTL_RUNS_DIR): ", error)
    assert sorted(path.name for path in folder.iterdir()) == ["callbacks.py", "other.yaml"]


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
