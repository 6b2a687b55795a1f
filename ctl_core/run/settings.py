"""Settings: each is a field of ``Config``, which says its type, range, default and help, once.

Flags, variables and messages follow from that. Layers of settings lie over each other: defaults <
config.yaml < ``CTL_*`` environment variables < flags, which cli.py reads. TensorFlow is not
imported here: a misspelt flag is answered at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from ctl_core.run.errors import SetupError, one_line
from ctl_core.run.files import written_whole

TIME, EPOCHS = r"(?:[0-9]{1,8}(?:h|min|m|s))+", r"([1-9][0-9]{0,8}) ?epochs?"
_SECONDS = {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}


def seconds_in(text: int | str | None) -> float | None:
    """Returns the seconds of a text such as 7h30m, 10min or 90s; None for anything else."""
    if not isinstance(text, str) or not re.fullmatch(TIME, text):
        return None
    return sum(int(count) * _SECONDS[unit] for count, unit in re.findall("([0-9]+)([a-z]+)", text))


def check_path(text: str) -> str:
    """Refuses a URL, where there are no locks and no renames, and an empty text."""
    if re.match(r"\s*$|[A-Za-z][A-Za-z0-9+.-]+:/", text):  # of one slash, as pathlib writes it
        raise ValueError(f"expected a path in the file system, got {shown(text)}.")
    return text


Count = Annotated[int, Field(ge=0)]
Number = Annotated[int, Field(ge=1)]
FilePath = Annotated[str, AfterValidator(check_path)]
_Period = Count | Annotated[str, Field(pattern=f"^{EPOCHS}$")]
_PeriodOrTime = Count | Annotated[str, Field(pattern=f"^(?:{TIME}|{EPOCHS})$")]
_Time = Annotated[str, Field(pattern=f"^{TIME}$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
_Best = Annotated[str, Field(pattern="^[^:]+(:(max|min))?$")]
_Patience = Annotated[str, Field(pattern="^[^:]+(:(max|min))?:[1-9][0-9]{0,8}$")]
_Steps = Annotated[str, Field(pattern="^[0-9]{1,18}:[0-9]{1,18}$")]
_Class = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*$")]
_Precision = Literal["float32", "bfloat16", "float16"]
_Schedule = Literal["constant", "cosine", "linear", "step", "exponential"]
_Strategy = Literal["auto", "one_device", "mirrored", "multi_worker"]


def declare(default: Any, text: str, *examples: str, **limits: Any) -> Any:
    """Declares a setting: its default, a line of help, examples for messages, and its range."""
    return Field(default, description=text, examples=list(examples), **limits)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """Settings of a run; numbers of NumPy become Python's, and paths become texts.

    Raises:
        SetupError: a value, or a combination, is impossible; the message names setting and value.
    """

    steps: Count | None = declare(None, "train until this step, counted from the run's start")
    epochs: Count | None = declare(None, "the same in passes over the training data")
    overfit_batches: Count = declare(0, "train on the first N global batches alone, over and over")
    batch_size: Number = declare(64, "global batch size, shared out over the replicas")
    accumulate_steps: Number = declare(1, "micro-batches of an update, to save memory, not time")
    last_batch: Literal["drop", "keep"] = declare("drop", "keep: a pass ends in a smaller batch")
    precision: _Precision = declare("float32", "what Keras layers compute in; weights: float32")
    jit_compile: bool = declare(False, "compile the step with XLA")
    on_nan: Literal["stop", "warn", "ignore"] = declare("warn", "at a NaN or infinite loss")
    detect_anomaly: bool = declare(False, "name the first op that gives NaN or infinity; slower")
    learning_rate: float = declare(0.001, "initial value of lr", gt=0, lt=1e30)
    lr_schedule: _Schedule = declare("constant", "how lr falls until the last step")
    warmup: Count = declare(0, "steps in which lr first rises to learning_rate")
    ema: float | None = declare(None, "use averages of weights, decay such as 0.999", gt=0, lt=1)
    seed: int = declare(0, "seeds Python, NumPy, TensorFlow and Keras", ge=0, lt=2**32)
    run_name: _Name | None = declare(None, "folder in runs_dir; one that is there goes on", "wide")
    fork: FilePath | None = declare(None, "go on from a run as a new one: a, a@300 or a@best")
    init_from: FilePath | None = declare(None, "weights of a run or a Keras file")
    ckpt_every: _PeriodOrTime = declare(1000, "save every N steps, 1epoch or 10min", "10min")
    eval_every: _Period = declare(1000, "evaluate every N steps (0: at its end), 1epoch", "1epoch")
    eval_batch_size: Number | None = declare(None, "that of evaluations; null: as for training")
    limit_eval: Number | None = declare(None, "evaluate the first N batches of each set only")
    max_time: _Time | None = declare(None, "stop and save after this time", "7h30m")
    log_every: Number = declare(100, "write the train metrics every N steps, and begin anew")
    keep_best: _Best | None = declare(None, "keep the best by METRIC or METRIC:max", "loss")
    early_stop: _Patience | None = declare(
        None,
        "METRIC:N, or METRIC:max:N: end when it has not become better for N evaluations",
        "loss:3",
    )
    strategy: _Strategy = declare("auto", "auto: the cluster of TF_CONFIG, else all GPUs")
    virtual_devices: Number = declare(1, "split the CPU, to try multi-GPU code on a laptop")
    workers: Number = declare(1, "train in a cluster of N processes here", lt=2**10)
    max_restarts: Count = declare(3, "starts of that cluster after a crash of a worker")
    deterministic: bool = declare(False, "bit-identical results from run to run; slower")
    profile: _Steps | None = declare(None, "START:STOP, steps to profile for TensorBoard", "50:60")
    runs_dir: FilePath = declare("runs", "folder of the runs")
    callbacks: FilePath = declare("callbacks.py", "Python file with the hooks")
    listener: _Class | None = declare(None, "a class that hears what a run says", "tracker.Tracker")
    debug: bool = declare(False, "show tracebacks and TensorFlow's own messages")
    hparams: dict[str, Any] = Field(
        default_factory=dict, description="values of your own: --hparams.width 64"
    )

    def __post_init__(self) -> None:
        for one, other in (("steps", "epochs"), ("fork", "init_from")):
            values = getattr(self, one), getattr(self, other)
            if None not in values:
                given = f"got {values[0]} and {values[1]}"
                raise SetupError(f"{one} and {other}: give one of the two, {given}.")
        if self.detect_anomaly and (self.jit_compile or self.precision == "float16"):
            raise SetupError(
                "detect_anomaly: needs --no-jit-compile, which makes one op of all, and another "
                "precision than float16, whose loss scale makes gradients infinite now and then."
            )

    @field_validator("*", mode="before")
    @classmethod
    def _make_plain(cls, value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        return value.item() if hasattr(value, "item") else value

    @model_validator(mode="wrap")
    @classmethod
    def _explain_in_one_line(cls, values: Any, validate: Any) -> Any:
        try:
            return validate(values)
        except ValidationError as error:
            raise SetupError(explain(error, SETTINGS)) from error

    @property
    def keeps_last_batch(self) -> bool:
        """Whether a smaller batch is kept; of the first batches alone, none is smaller."""
        return self.last_batch == "keep" and not self.overfit_batches

    @property
    def counts_epochs(self) -> bool:
        """Whether a setting is in epochs of which the steps have to be counted."""
        if self.keeps_last_batch and self.steps is not None:
            return True
        periods = (self.ckpt_every, self.eval_every)
        return not self.overfit_batches and (
            self.epochs is not None or any("epoch" in str(period) for period in periods)
        )

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """The steps to profile: after the first up to the second; None for none."""
        if self.profile is None:
            return None
        first, last = map(int, self.profile.split(":"))
        return first, last


SETTINGS: Mapping[str, FieldInfo] = Config.__pydantic_fields__  # type: ignore[attr-defined]
ENV_PREFIX = "CTL_"
# What is expected where pydantic finds an error whose name begins like this.
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "greater_than_equal": "a number from {ge} up",
    "greater_than": "a number above {gt}",
    "string": "a text (in quotes, if it looks like a number)",
}


def explain(error: ValidationError, settings: Mapping[str, FieldInfo]) -> str:
    """Says in one line which setting is wrong first, what was expected, and what it is."""
    wrong = error.errors(include_url=False)[0]
    name, details = str(wrong["loc"][0]), wrong.get("ctx", {})
    if name not in settings:
        return f"{name}: there is no setting {shown(name)}{nearest(name, settings)}"
    if "error" in details:  # raised by a validator of ours
        return f"{name}: {details['error']}"
    kinds = (words for kind, words in _EXPECTED.items() if wrong["type"].startswith(kind))
    other = wrong["msg"].replace("Input should be", "expected").removeprefix("expected ")
    expected = next(kinds, other).format(**details)
    if examples := settings[name].examples:
        expected += f", or such as {examples[0]}"
    return f"{name}: expected {expected}, got {shown(wrong['input'])}."


# ---- Where settings come from ------------------------------------------------------------------


class Layer(NamedTuple):
    """What one source says: settings by name, and what a message puts before these names."""

    values: dict[str, Any]
    place: str = ""

    def locate(self, name: str) -> str:
        """Names a setting as this source has it."""
        return self.place + (name.upper() if self.place == ENV_PREFIX else name)

    def without(self, names: Collection[str]) -> Layer:
        """Returns the others of its settings."""
        others = {name: value for name, value in self.values.items() if name not in names}
        return Layer(others, self.place)


class _Loader(yaml.SafeLoader):
    """Reads YAML in which 1e-3 is a number."""


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back as it was."""


for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+\Z"),
        list("-+.0123456789"),
    )


def read_file(path: Path, required: bool = True) -> Layer:
    """Reads one YAML file of settings; a missing file that was not asked for is an empty one.

    Raises:
        SetupError: it cannot be read.
    """
    where = label(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader) or {}
    except FileNotFoundError:
        if not required:
            return Layer({})
        raise SetupError(f"{where}: there is no such settings file.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SetupError(f"{where}: no valid YAML: {one_line(error, 200)}.") from error
    if not isinstance(content, dict):
        raise SetupError(f"{where}: expected lines of the form 'name: value'.")
    if (path.parent / "train.log").exists():  # of an earlier engine, as its checkpoints will tell
        content = {name: value for name, value in content.items() if name in SETTINGS}
    return Layer({str(name): value for name, value in content.items()}, f"{where}: ")


class EnvironmentSource(EnvSettingsSource):
    """Reads ``CTL_*`` variables; ``CTL_HPARAMS`` is YAML, ``CTL_HPARAMS__WIDTH`` one of them.

    One that is empty says nothing.
    """

    def __init__(self, model: type[BaseSettings]) -> None:
        super().__init__(
            model,
            env_prefix=ENV_PREFIX,
            env_nested_delimiter="__",
            env_ignore_empty=True,
            env_parse_none_str="null",
        )

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Reads YAML, of which JSON is a part."""
        return _read_value(value)


def find_unknown_variables() -> list[str]:
    """Returns a warning for each ``CTL_*`` variable that is no setting."""
    known = [f"{ENV_PREFIX}{name.upper()}" for name in (*SETTINGS, "config")]
    return [
        f"warning: the environment has {label(name)}, which is no setting{nearest(name, known)}"
        for name in os.environ
        if name.startswith(ENV_PREFIX) and name.split("__")[0] not in known
    ]


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Reads a config file, with keyword arguments on top: the settings for ``ctl_core.train``.

    Raises:
        SetupError: the file is missing or wrong, or a setting is.
    """
    return resolve([read_file(Path(path))], [Layer(overrides)])


def resolve(files: Sequence[Layer], above: Sequence[Layer] = ()) -> Config:
    """Lays later values over earlier ones; a complaint says where the wrong one comes from.

    ``--epochs 3`` over ``steps: 600`` in a file means three epochs, not a conflict. hparams are
    merged name by name, at any depth. What is above the files keeps the type that an hparam has in
    these, and has no names that no file has, unless no file has any: a slip would train with the
    old value.

    Args:
        files: what settings files say
        above: what variables and flags say; texts are numbers where the files have these

    Raises:
        SetupError: a value is wrong, or an hparam unknown.
    """
    merged: dict[str, Any] = {}
    hparams: dict[str, Any] = {}
    known: dict[str, Any] | None = None
    layers = [*files, *above]
    for number, layer in enumerate(layers):
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if layer.values.get(one) is not None:
                merged.pop(other, None)
        merged |= layer.values
        if number == len(files):
            known = hparams
        over = layer.values.get("hparams") or {}
        hparams = merge_hparams(hparams, over, layer.locate("hparams"), known)
    try:
        return Config(**{**merged, "hparams": hparams})
    except SetupError as error:
        name, colon, words = str(error).partition(": ")
        places = (layer.locate(name) for layer in reversed(layers) if name in layer.values)
        raise SetupError(f"{next(places, name)}{colon}{words}") from error.__cause__


def merge_hparams(
    below: Mapping[str, Any],
    over: Any,
    where: str = "hparams",
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Lays hparams over others, name by name, also in the dicts within.

    Args:
        below: what is there
        over: what is laid over it
        where: what to call ``over`` in a message
        known: names that there may be, all if it is empty; values keep the type of what is there.
            None: whatever is said is taken

    Raises:
        SetupError: a name is unknown, or a value has another type.
    """
    if not isinstance(over, dict):
        raise SetupError(f"{where}: expected names with values, got {shown(over)}.")
    merged = dict(below)
    for name, value in over.items():
        inner, old, inside = f"{where}.{name}", below.get(name), None
        if known and name not in known:
            there = f"; a settings file has {one_line(', '.join(map(str, known)), 100)}"
            near = nearest(str(name), map(str, known)) or there
            raise SetupError(f"{label(inner)}: no settings file has it{near}")
        if known is not None:
            value, inside = _convert(value, old, inner), known.get(name)
            inside = inside if isinstance(inside, dict) else {}
        if isinstance(value, dict):
            value = merge_hparams(old if isinstance(old, dict) else {}, value, inner, inside)
        merged[name] = value
    return merged


def _convert(value: Any, old: Any, where: str) -> Any:
    """Returns a value with the type of the one that it replaces; null has none.

    Raises:
        SetupError: it has another.
    """
    if isinstance(value, str):
        read = _read_value(value)
        value = value if isinstance(old, str) and not isinstance(read, str | None) else read
    if old is None or value is None:
        return value
    try:
        return TypeAdapter(type(old)).validate_python(value)
    except ValidationError:
        expected = f"expected a value such as {shown(old, 40)}, which a settings file has"
        raise SetupError(f"{label(where)}: {expected}, got {shown(value)}.") from None


def _read_value(text: str) -> Any:
    """Reads the text of a flag or variable as YAML; what is none is a text."""
    with contextlib.suppress(yaml.YAMLError, ValueError):
        return yaml.load(text, Loader=_Loader)
    return text


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns values by name, those of hparams by names like hparams.width."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flatten(value, f"{above}{name}.") if isinstance(value, dict) else {}
        found |= inner or {f"{above}{name}": value}
    return found


def write_config(config: Config, path: Path) -> None:
    """Writes the settings as resolved, whole or not at all."""
    text = yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")


# ---- Words of messages -------------------------------------------------------------------------


def shown(value: Any, limit: int = 80) -> str:
    """Returns a value as messages show it, in one line of at most so many characters."""
    return one_line(repr(value), limit)


def label(text: object) -> str:
    """Returns a path or a name as messages show it: in one line, without quotes."""
    return shown(str(text))[1:-1]


def nearest(name: str, names: Iterable[str], mark: str = "", cutoff: float = 0.5) -> str:
    """Returns ``"; did you mean 'x'?"`` for the nearest of ``names``, or an empty string.

    ``mark`` is put before it, and is no part of what is compared.
    """
    close = difflib.get_close_matches(name[:80], list(names), n=1, cutoff=cutoff)
    return f"; did you mean '{mark}{close[0]}'?" if close else ""


def free_name(runs_dir: Path) -> str:
    """Returns the time as a name for a run; with a number behind it if that second is taken."""
    now = time.strftime("%Y%m%d-%H%M%S")
    names = (now if number == 1 else f"{now}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(runs_dir / name))
