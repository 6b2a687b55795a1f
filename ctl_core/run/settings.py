"""Declares the settings: each is a field of ``Config``, with its type, range, default and help.

Flags, environment variables and error messages are derived from these fields. TensorFlow is not
imported here, because its import takes seconds, and a misspelled flag should be reported at once.
"""

import dataclasses
import datetime
import enum
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs

from ctl_core.run.errors import SetupError, quote, suggest

TIME = r"(?:[0-9]{1,8}(?:h|min|m|s))+"
EPOCHS = r"([1-9][0-9]{0,8}) ?epochs?"
# The schemes of URLs that are often written without the two slashes.
_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "hdfs", "memory")
_SECONDS = {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}


def parse_seconds(text: int | str | None) -> float | None:
    """Converts a string such as 7h30m, 10min or 90s to seconds; returns None for anything else."""
    if not isinstance(text, str) or not re.fullmatch(TIME, text):
        return None
    return sum(int(count) * _SECONDS[unit] for count, unit in re.findall("([0-9]+)([a-z]+)", text))


def check_path(text: str) -> str:
    """Rejects an empty string, and a URL, because remote storage has no locks and no renames.

    A path that begins with ``~`` is rejected, too, because it would become a folder named ``~``.
    """
    if re.match(r"\s*$|[A-Za-z][A-Za-z0-9+.-]+:[:/]", text):  # pathlib shortens // to one slash
        raise ValueError(f"expected a path in the file system, got {quote(text)}.")
    _refuse_tilde(text)
    return text


def _refuse_tilde(text: str) -> None:
    """Rejects a path that only a shell would expand."""
    if not re.match(r"~[^/\\]*(?:[/\\]|$)", text):
        return
    full = os.path.expanduser(text)
    hint = f"write {full}" if full != text else "write the full path"
    raise ValueError(f"only a shell expands '~' at the beginning of {quote(text)}; {hint}.")


def check_mirror(text: str) -> str:
    """Rejects an empty string, and addresses that would silently become a folder here.

    A URL has the form ``s3://bucket/x``. A URL of a local folder has three slashes: ``file:///x``.
    """
    if not text.strip():
        raise ValueError(f"expected a URL or a path, got {quote(text)}.")
    _refuse_tilde(text)
    scheme, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme):
        return text
    if scheme.lower() == "file" and not text.startswith("file:///"):
        raise ValueError(f"expected file:///PATH or a path, got {quote(text)}.")
    if not rest.startswith("//") and (rest.startswith(("/", ":")) or scheme.lower() in _STORES):
        raise ValueError(
            f"expected a URL such as {scheme}://bucket/x, or a path, got {quote(text)}."
        )
    return text


# The value of a setting in a file, a variable or a flag: a number, a string, or lists and dicts of
# numbers and strings.
SettingValue: TypeAlias = Any


def make_plain(value: SettingValue) -> SettingValue:
    """Returns a value as a settings file would contain it.

    A tool that searches for hyperparameters may pass NumPy numbers, tuples, or dicts of its own. A
    run that is resumed reads them from its config.yaml as plain numbers, lists and dicts. This
    function converts them, so that the hooks get the same values each time. Paths and members of
    an enum become their strings or values.
    """
    if isinstance(value, enum.Enum):
        return make_plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return value.tolist()
    if isinstance(value, Mapping):
        return {make_plain(name): make_plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [make_plain(inner) for inner in value]
    return value


def _refuse_objects(name: str, value: SettingValue) -> None:
    """Rejects a hyperparameter that a settings file cannot contain.

    Raises:
        ValueError: the value is a function, for example, or contains one.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_objects(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_objects(name, inner)
    elif not isinstance(value, str | int | float | bytes | datetime.date | None):
        raise ValueError(
            f"{name} is {quote(value)}, which config.yaml cannot contain; use numbers, strings, "
            "lists and dicts."
        )


# TensorFlow's largest integers have 64 bits.
LARGEST = 2**63 - 1
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[int, Field(ge=1, le=LARGEST)]
FilePath = Annotated[str, AfterValidator(check_path)]
_Place = Annotated[str, AfterValidator(check_mirror)]
_Period = Count | Annotated[str, Field(pattern=f"^{EPOCHS}$")]
_PeriodOrTime = Count | Annotated[str, Field(pattern=f"^(?:{TIME}|{EPOCHS})$")]
_Time = Annotated[str, Field(pattern=f"^{TIME}$")]


def _check_name(name: str) -> str:
    """Rejects a name that is not suitable for a folder in ``runs_dir``."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
        return name
    wrong = re.search(r"[^A-Za-z0-9._-]", name)
    if wrong is not None:
        problem = f"{quote(name)} contains {quote(wrong[0])}"
    elif len(name) > 200:
        problem = f"{quote(name)} is longer than 200 characters"
    else:
        problem = f"{quote(name)} does not begin with a letter or a digit"
    raise ValueError(
        f"{problem}; the name becomes a folder in runs_dir, so use only letters, digits, '.', "
        "'_' and '-'."
    )


_Name = Annotated[str, AfterValidator(_check_name)]
_Best = Annotated[str, Field(pattern="^[^:]+(:(max|min))?$")]
_Patience = Annotated[str, Field(pattern="^[^:]+(:(max|min))?:[1-9][0-9]{0,8}$")]
_Steps = Annotated[str, Field(pattern="^[0-9]{1,18}:[0-9]{1,18}$")]
_Class = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*$")]
_Precision = Literal["float32", "bfloat16", "float16"]
_Schedule = Literal["constant", "cosine", "linear", "step", "exponential"]
_Strategy = Literal["auto", "one_device", "mirrored", "multi_worker"]

# The settings that are periods: a number of steps (0: never) or of epochs. ``ckpt_every`` can also
# be a time. Training leaves the graph after each period. A run that is only evaluated has no
# periods.
PERIODS = ("ckpt_every", "eval_every")


def declare(default: SettingValue, text: str, *examples: str, **limits: Any) -> Any:
    """Declares a setting.

    Args:
        default: the default
        text: a line of help
        examples: values that messages show as examples
        limits: the limits of the range, by the names that pydantic uses, such as ``ge``

    Returns:
        A pydantic field. The annotation is Any, because the field is assigned to attributes of all
        types.
    """
    return Field(default, description=text, examples=list(examples), **limits)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The settings of a run, as keyword arguments: ``Config(steps=300, batch_size=32)``.

    NumPy numbers are converted to Python numbers, and paths to strings.

    Raises:
        SetupError: a value, or a combination of values, is invalid. The message names the setting
            and the value.
    """

    steps: Count | None = declare(
        None, "number of steps to train in total, including those before a resume"
    )
    epochs: Count | None = declare(None, "the same as a number of passes over the training data")
    overfit_batches: Count = declare(0, "train only on the first N global batches, over and over")
    batch_size: Number = declare(64, "global batch size, split between the replicas")
    accumulate_steps: Number = declare(1, "micro-batches per update; saves memory, not time")
    logical_replicas: Number | None = declare(
        None,
        "split each batch into N parts: the same bits on any number of devices or "
        "processes; slower",
    )
    shard_optimizer: bool = declare(
        False, "keep each part of the optimizer's state on one device only; saves memory"
    )
    intra_op_threads: Number | None = declare(
        None, "threads per op; null: all cores, or TensorFlow's choice", lt=2**13
    )
    last_batch: Literal["drop", "keep"] = declare(
        "drop", "drop or keep the smaller batch at the end of a pass"
    )
    precision: _Precision = declare(
        "float32", "dtype in which Keras layers compute; weights stay float32"
    )
    jit_compile: bool | Literal["auto"] = declare(
        "auto", "compile steps with XLA; auto: on a single GPU, if possible", "auto"
    )
    on_nan: Literal["stop", "warn", "ignore"] = declare(
        "warn", "reaction to a NaN or infinite loss"
    )
    detect_anomaly: bool = declare(
        False, "report the first op that returns NaN or infinity; slower"
    )
    learning_rate: float = declare(0.001, "initial value of lr", gt=0, lt=1e30)
    lr_schedule: _Schedule = declare(
        "constant", "how the learning rate decreases until the last step"
    )
    warmup: Count = declare(0, "steps in which the learning rate first rises from 0")
    ema: float | None = declare(
        None, "average the weights with this decay, such as 0.999", gt=0, lt=1
    )
    seed: int = declare(0, "seed of Python, NumPy, TensorFlow and Keras", ge=0, lt=2**32)
    run_name: _Name | None = declare(
        None,
        "folder in runs_dir; an existing run is resumed; null: a new run, named by the time",
        "wide",
    )
    fork: FilePath | None = declare(
        None, "start a new run from the state of another: a, a@300 or a@best"
    )
    init_from: FilePath | None = declare(
        None, "start with the weights of a run, Keras file or SavedModel"
    )
    init_skip: list[str] | None = declare(
        None, "paths of variables that init_from does not load; repeatable", "head/*"
    )
    ckpt_every: _PeriodOrTime = declare(1000, "save every N steps, 1epoch or 10min", "10min")
    eval_every: _Period = declare(
        1000, "evaluate every N steps or 1epoch; 0: only at the end", "1epoch"
    )
    eval_batch_size: Number | None = declare(
        None, "batch size of evaluations; null: as in training"
    )
    limit_eval: Number | None = declare(None, "evaluate only the first N batches of each dataset")
    max_time: _Time | None = declare(None, "save and stop after this time", "7h30m")
    log_every: Number = declare(
        100, "write and reset the metrics of create_train_metrics every N steps"
    )
    log_seconds: float = declare(
        10.0, "seconds between progress lines in a log or a pipe", gt=0, lt=1e6
    )
    keep: int = declare(50, "number of newest checkpoints to keep, at least 2", ge=2, le=LARGEST)
    keep_best: _Best | None = declare(
        None,
        "also keep the checkpoint with the best METRIC, METRIC:max or METRIC:min",
        "loss",
    )
    early_stop: _Patience | None = declare(
        None,
        "METRIC:N or METRIC:max:N: stop when METRIC has not improved in N evaluations",
        "loss:3",
    )
    strategy: _Strategy = declare("auto", "auto: the cluster of TF_CONFIG, else all GPUs")
    virtual_devices: Number = declare(
        1, "split the CPU into N devices, to try multi-GPU code", lt=2**10
    )
    workers: Number = declare(1, "train in N processes on this machine", lt=2**10)
    max_restarts: Count = declare(3, "maximum number of restarts after a worker crashes")
    stall_seconds: Count = declare(
        120, "report where training hangs if nothing ends for N seconds; 0: never"
    )
    deterministic: bool = declare(False, "bit-identical results from run to run; slower")
    profile: _Steps | None = declare(None, "steps START:STOP to profile for TensorBoard", "50:60")
    runs_dir: FilePath = declare("runs", "folder of the runs")
    mirror: _Place | None = declare(
        None,
        "URL or path to which checkpoints are copied, in case this machine is lost",
        "s3://bucket/x",
    )
    mirror_keep: Number = declare(3, "number of newest checkpoints to keep there, besides the best")
    callbacks: FilePath = declare("callbacks.py", "Python file with the hooks")
    listener: _Class | None = declare(
        None, "class that is told about the events of a run", "tracker.Tracker"
    )
    debug: bool = declare(False, "show tracebacks and TensorFlow's own messages")
    hparams: dict[str, Any] = Field(
        default_factory=dict, description="your own hyperparameters: --hparams.width 64"
    )

    def __post_init__(self) -> None:
        for first, second in (("steps", "epochs"), ("fork", "init_from")):
            values = (getattr(self, first), getattr(self, second))
            if None not in values:
                raise SetupError(
                    f"{first} and {second}: set only one of the two, got {values[0]} and "
                    f"{values[1]}."
                )
        if self.init_skip and self.init_from is None:
            raise SetupError(
                f"init_skip: {self.init_skip} skips variables of init_from, which is not set; "
                "set init_from, too."
            )
        if self.detect_anomaly and (self.jit_compile is True or self.precision == "float16"):
            raise SetupError(
                "detect_anomaly: needs --no-jit-compile, because XLA fuses all ops into one, "
                "and a precision other than float16, whose loss scale makes gradients "
                "infinite now and then."
            )

        if self.logical_replicas is not None:
            problem = self._find_problem_of_logical_replicas()
            if problem is not None:
                raise SetupError(f"logical_replicas: {problem}")

    def _find_problem_of_logical_replicas(self) -> str | None:
        """Returns which setting conflicts with ``logical_replicas``, and a remedy; None if none."""
        if self.logical_replicas is not None and self.logical_replicas > self.batch_size:
            return (
                f"{self.logical_replicas} logical replicas cannot share a batch of "
                f"{self.batch_size}; use at most batch_size logical replicas."
            )
        if self.accumulate_steps > 1:
            return (
                f"cannot be combined with accumulate_steps, which is {self.accumulate_steps}; "
                "leave that out, because a device already computes its logical replicas one "
                "after another."
            )
        return None

    @field_validator("*", mode="before")
    @classmethod
    def _make_plain(cls, value: SettingValue) -> SettingValue:
        """Converts paths to strings, and NumPy numbers to Python numbers."""
        return make_plain(value)

    @field_validator("hparams")
    @classmethod
    def _check_hparams(cls, hparams: dict[str, Any]) -> dict[str, Any]:
        """Rejects hyperparameters that config.yaml cannot contain, such as functions."""
        for name, value in hparams.items():
            _refuse_objects(name, value)
        return hparams

    @field_validator("init_skip", mode="before")
    @classmethod
    def _make_list(cls, value: SettingValue) -> SettingValue:
        """Converts a single pattern, as in ``CTL_INIT_SKIP='head/*'``, to a list."""
        if isinstance(value, str):
            return [value]
        if value == [None]:  # the value of ``--init-skip null``
            return None
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _explain_in_one_line(
        cls, values: ArgsKwargs | dict[str, SettingValue], validate: ModelWrapValidatorHandler[Self]
    ) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            raise SetupError(explain(error, SETTINGS)) from error

    @property
    def keeps_last_batch(self) -> bool:
        """True if a smaller last batch is kept.

        With ``overfit_batches``, no batch is smaller, because only the first batches are used.
        """
        return self.last_batch == "keep" and not self.overfit_batches

    @property
    def counts_epochs(self) -> bool:
        """True if training needs the number of steps in an epoch.

        Counting them takes a pass over the training data.
        """
        if self.keeps_last_batch and self.steps is not None:
            return True
        periods = (getattr(self, name) for name in PERIODS)
        return not self.overfit_batches and (
            self.epochs is not None or any("epoch" in str(period) for period in periods)
        )

    def remove_periods(self) -> Self:
        """Returns a copy of the settings for a run that is not trained, only evaluated.

        In the copy, nothing says when training ends or when to save and evaluate, so
        ``counts_epochs`` is False.
        """
        no_periods: dict[str, Any] = dict.fromkeys(PERIODS, 0)
        return dataclasses.replace(self, steps=None, epochs=None, max_time=None, **no_periods)


SETTINGS: Mapping[str, FieldInfo] = Config.__pydantic_fields__  # type: ignore[attr-defined]
# The settings of engines before 1.0 that no longer exist. If such an engine began a run, they are
# ignored in the run's config.yaml.
RETIRED = frozenset(
    {
        "cluster",
        "curves",
        "gpu_memory_limit",
        "histograms_every",
        "init_partial",
        "max_chunk",
        "stats_every",
        "steps_per_call",
        "trackers",
        "wait_for_workers",
    }
)
# Descriptions of the expected value, by the beginning of the type of pydantic's error.
_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number below {lt}",
    "string": "a string (in quotes if it looks like a number)",
}


def explain(error: ValidationError, settings: Mapping[str, FieldInfo]) -> str:
    """Returns one line about the first invalid setting: its name, value and expected value."""
    wrong = error.errors(include_url=False)[0]
    name = str(wrong["loc"][0])
    details = wrong.get("ctx", {})
    if name not in settings:
        return f"{name}: there is no setting {quote(name)}{suggest(name, settings)}"
    if "error" in details:  # a validator of this module has raised the error
        return f"{name}: {details['error']}"
    kinds = (words for kind, words in _EXPECTED.items() if wrong["type"].startswith(kind))
    other = wrong["msg"].replace("Input should be", "expected").removeprefix("expected ")
    expected = next(kinds, other).format(**details)
    examples = settings[name].examples
    if examples and wrong["type"] == "string_pattern_mismatch":
        expected = f"a value such as {examples[0]}"
    elif examples:
        expected += f", or such as {examples[0]}"
    return f"{name}: expected {expected}, got {quote(wrong['input'])}."


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns the values of nested dicts by names such as ``hparams.width``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat
