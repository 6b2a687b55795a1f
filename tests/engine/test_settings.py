"""Settings: where they come from, which goes before which, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import ctl_core
from ctl_core.cli import parse_command
from ctl_core.errors import SetupError
from ctl_core.layers import load_config, write_config
from ctl_core.settings import SETTINGS, Config
from tests.helpers.settings import TYPED, resolve

pytestmark = pytest.mark.usefixtures("folder")

FIELDS = list(SETTINGS)

# For each setting a value for the file, one for the environment and one for a flag, as written
# there, and what each is in Python. All differ from the default.
VALUES: dict[str, list[tuple[str, Any]]] = {
    "steps": [("30", 30), ("40", 40), ("50", 50)],
    "epochs": [("3", 3), ("4", 4), ("5", 5)],
    "overfit_batches": [("1", 1), ("2", 2), ("3", 3)],
    "batch_size": [("8", 8), ("16", 16), ("0x20", 32)],
    "accumulate_steps": [("2", 2), ("3", 3), ("4", 4)],
    "last_batch": [("keep", "keep"), ("drop", "drop"), ("keep", "keep")],
    "precision": [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16")],
    "jit_compile": [("true", True), ("1", True), ("", True)],
    "on_nan": [("stop", "stop"), ("ignore", "ignore"), ("stop", "stop")],
    "detect_anomaly": [("true", True), ("1", True), ("", True)],
    "learning_rate": [("1e-1", 0.1), ("2", 2.0), (".25", 0.25)],
    "lr_schedule": [("cosine", "cosine"), ("linear", "linear"), ("step", "step")],
    "warmup": [("5", 5), ("6", 6), ("7", 7)],
    "ema": [("0.9", 0.9), ("0.99", 0.99), ("0.5", 0.5)],
    "seed": [("7", 7), ("8", 8), ("4294967295", 2**32 - 1)],
    "run_name": [("'3'", "3"), ("4", "4"), ("2024-01-05", "2024-01-05")],
    "fork": [("a", "a"), ("a@3", "a@3"), ("b/c@best", "b/c@best")],
    "init_from": [("a", "a"), ("m.keras", "m.keras"), ("b/c@best", "b/c@best")],
    "ckpt_every": [("0", 0), ("5", 5), ("6", 6)],
    "eval_every": [("0", 0), ("5", 5), ("6", 6)],
    "eval_batch_size": [("32", 32), ("64", 64), ("8", 8)],
    "limit_eval": [("3", 3), ("5", 5), ("1", 1)],
    "max_time": [("7h30m", "7h30m"), ("45min", "45min"), ("90s", "90s")],
    "log_every": [("5", 5), ("6", 6), ("7", 7)],
    "keep_best": [("loss", "loss"), ("loss:min", "loss:min"), ("a:max", "a:max")],
    "early_stop": [("loss:3", "loss:3"), ("a:max:1", "a:max:1"), ("b:min:20", "b:min:20")],
    "strategy": [("mirrored", "mirrored"), ("one_device", "one_device"), ("mirrored", "mirrored")],
    "virtual_devices": [("2", 2), ("3", 3), ("4", 4)],
    "workers": [("2", 2), ("3", 3), ("4", 4)],
    "max_restarts": [("0", 0), ("1", 1), ("2", 2)],
    "deterministic": [("true", True), ("1", True), ("", True)],
    "profile": [("'5:6'", "5:6"), ("50:60", "50:60"), ("7:8", "7:8")],
    "runs_dir": [("some/where", "some/where"), ("else where", "else where"), ("x=y", "x=y")],
    "callbacks": [("experiments/gan.py", "experiments/gan.py"), ("b c.py", "b c.py"), ("d", "d")],
    "listener": [("a.B", "a.B"), ("a.b:C", "a.b:C"), ("c.D", "c.D")],
    "debug": [("yes", True), ("true", True), ("", True)],
}


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


def test_a_setting_is_taken_back_by_null() -> None:
    Path("config.yaml").write_text("early_stop: loss:3\nlimit_eval: 4\nema: 0.9\n")
    flags = ["--steps=1", "--early-stop", "null", "--ema=null"]
    config = parse_command(["train", *flags], {"CTL_LIMIT_EVAL": "null"}).config
    assert config.early_stop is config.ema is config.limit_eval is None


def test_epochs_of_a_higher_layer_replace_steps_of_a_lower_one() -> None:
    assert resolve("--epochs", "3", config="steps: 600") == Config(epochs=3)
    assert resolve("--steps", "3", config="epochs: 600") == Config(steps=3)
    assert resolve(config="steps: 600", environ={"CTL_EPOCHS": "2"}) == Config(epochs=2)
    assert resolve("--steps", "5", environ={"CTL_EPOCHS": "2"}) == Config(steps=5)


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


TEXTS: dict[str, Any] = {
    "64": 64, "-1": -1, "1e-3": 0.001, "-2.5E+2": -250.0, ".5": 0.5, "1_000": 1000, "true": True,
    "null": None, "": "", "relu": "relu", "'64'": "64", "'1e-3'": "1e-3", "1e-3x": "1e-3x",
    "[1, 1e2, a]": [1, 100.0, "a"], "{a: {b: 2}}": {"a": {"b": 2}}, "[not yaml": "[not yaml",
    "a: b: c": "a: b: c", "ümlaut …": "ümlaut …",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_hparams_have_the_same_types_everywhere_and_come_back(text: str) -> None:
    value = TEXTS[text]
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
        steps=30, batch_size=12, accumulate_steps=3, precision="bfloat16", learning_rate=1e-5,
        seed=2**32 - 1, run_name="007", ckpt_every=0, eval_every=7, strategy="mirrored",
        virtual_devices=2, deterministic=True, runs_dir="some where: else",
        debug=True, hparams={"a": {"b": [1, "2", 1e-5, None, True]}, "yes": "no", "1": "null"},
    )  # fmt: skip
    for config in (Config(), every, Config(epochs=3)):
        write_config(config, folder / "resolved.yaml")
        assert load_config(folder / "resolved.yaml") == config
        assert resolve("--config", "resolved.yaml") == config
        assert list(yaml.safe_load((folder / "resolved.yaml").read_text())) == FIELDS
    assert os.listdir(folder) == ["resolved.yaml"]


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


def test_every_setting_is_used_somewhere() -> None:
    """Somewhere else in the engine than where settings are read."""
    engine = Path(ctl_core.__file__).parent
    sources = [p.read_text() for p in engine.rglob("*.py") if p.stem not in ("settings", "cli")]
    for name in FIELDS:
        assert any(re.search(rf"\bconfig\.{name}(_steps)?\b", text) for text in sources), name


def test_other_config_files() -> None:
    for name, text in (("base", "steps: 3\nseed: 1\n" + HPARAMS), ("big", "epochs: 2\nseed: 2\n")):
        Path(f"{name}.yaml").write_text(text)
    Path("config.yaml").write_text("batch_size: 7\n")  # of which nothing is taken
    Path("bom.yaml").write_bytes(b"\xef\xbb\xbfseed: 3\r\nsteps: 4\r\n")
    Path("more.yaml").write_text("hparams: {width: wide, layers: {second: 9}}")
    hparams = yaml.safe_load(HPARAMS)["hparams"]
    expected = Config(epochs=2, seed=2, hparams=hparams)
    files = ["base.yaml", "big.yaml"]
    assert resolve("--config", files[0], "--config", files[1]) == expected
    assert resolve(environ={"CTL_CONFIG": os.pathsep.join(files)}) == expected
    assert resolve("--config", files[1], "--config=base.yaml").steps == 3
    both = resolve("--config", "bom.yaml", environ={"CTL_CONFIG": files[1]})
    assert both == Config(seed=3, steps=4)
    changed = resolve("--config", files[0], "--config", "more.yaml").hparams
    assert changed == {**hparams, "width": "wide", "layers": {"first": 1, "second": 9}}
    with pytest.raises(SetupError, match=r"^none.yaml: there is no such settings file"):
        resolve("--config", files[0], "--config", "none.yaml")


KEPT: list[tuple[str, str, Any]] = [
    ("n", "4", 4), ("n", "1e3", 1000), ("x", "2", 2.0), ("x", "null", None), ("sure", "no", False),
    ("t", "7", "7"), ("t", "007", "007"), ("t", "'8'", "8"), ("t", "null", None),
    ("l", "[a]", ["a"]), ("d", "{n: 5}", {"n": 5}), ("d.n", "5.0", 5), ("nothing", "a", "a"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), KEPT)
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


def test_an_hparam_that_no_settings_file_has_is_refused() -> None:
    """Else a slip in its name would train with the old value; a new one is written down first."""
    text = "hparams: {width: 3, optimizer: {momentum: 0.9}, rates: {}, deep: null}\n"
    Path("config.yaml").write_text(text)

    def refused(*flags: str, environ: dict[str, str] | None = None) -> str:
        with pytest.raises(SetupError) as caught:
            resolve(*flags, environ=environ)
        return str(caught.value)

    assert refused("--hparams.widht", "4") == (
        "--hparams.widht: is not among the hparams of config.yaml; did you mean 'width'? "
        "A new one is to be written there first."
    )
    said = refused("--hparams.optimizer.momentun", "3")
    assert "'momentum'" in said and said.startswith("--hparams.optimizer.momentun: is not among")
    assert "(there: width, optimizer, rates, deep). A new" in refused("--hparams.q", "4")
    assert "CTL_HPARAMS.widht: is" in refused(environ={"CTL_HPARAMS": "{widht: 4}"})
    Path("big.yaml").write_text("hparams: {height: 2}\n")
    named = ("--config", "config.yaml", "--config", "big.yaml")
    assert "of big.yaml" in refused(*named, "--hparams.widht", "4")
    with pytest.raises(SetupError, match=r"^hparams\.widht: is not among the hparams of my\.yaml"):
        load_config(shutil.copy("config.yaml", "my.yaml"), hparams={"widht": 4})

    found = resolve(*named, "--hparams.height", "4", "--hparams.rates.a", "1").hparams
    assert found["height"] == 4 and found["rates"] == {"a": 1}
    assert resolve("--hparams.deep.x", "1").hparams["deep"] == {"x": 1}
    for none in ("", "hparams: {}\n"):  # where there are none, they are free
        environ = {"CTL_HPARAMS": "{a: 1}"}
        free = resolve("--hparams.b", "2", config=none, environ=environ).hparams
        assert free == {"a": 1, "b": 2}
