"""Declares the settings: each is a field of ``Config``, with its type, range, default and help.

Flags, variables and messages are derived from these fields. TensorFlow is not imported here, so
that a misspelt flag is reported at once.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
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
_SECONDS = {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}


def parse_seconds(text: int | str | None) -> float | None:
    """Returns the seconds of a text such as 7h30m, 10min or 90s; None for anything else."""
    if not isinstance(text, str) or not re.fullmatch(TIME, text):
        return None
    return sum(int(count) * _SECONDS[unit] for count, unit in re.findall("([0-9]+)([a-z]+)", text))


def check_path(text: str) -> str:
    """Refuses a URL, where there are no locks and no renames, and an empty text."""
    if re.match(r"\s*$|[A-Za-z][A-Za-z0-9+.-]+:/", text):  # of one slash, as pathlib writes it
        raise ValueError(f"expected a path in the file system, got {quote(text)}.")
    return text


def check_mirror(text: str) -> str:
    """Refuses an empty text; any other text is a URL or a path."""
    if not text.strip():
        raise ValueError(f"expected a URL or a path, got {quote(text)}.")
    return text


# A value as a source gives it: a number, a text, or lists and dicts of such values.
SettingValue: TypeAlias = Any

Count = Annotated[int, Field(ge=0)]
Number = Annotated[int, Field(ge=1)]
FilePath = Annotated[str, AfterValidator(check_path)]
_Place = Annotated[str, AfterValidator(check_mirror)]
_Period = Count | Annotated[str, Field(pattern=f"^{EPOCHS}$")]
_PeriodOrTime = Count | Annotated[str, Field(pattern=f"^(?:{TIME}|{EPOCHS})$")]
_Time = Annotated[str, Field(pattern=f"^{TIME}$")]


def _check_name(name: str) -> str:
    """Refuses a name that cannot be that of a folder directly in ``runs_dir``."""
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
        f"{problem}; a run is a folder in runs_dir, so use letters, digits, '.', '_' and '-'."
    )


_Name = Annotated[str, AfterValidator(_check_name)]
_Best = Annotated[str, Field(pattern="^[^:]+(:(max|min))?$")]
_Patience = Annotated[str, Field(pattern="^[^:]+(:(max|min))?:[1-9][0-9]{0,8}$")]
_Steps = Annotated[str, Field(pattern="^[0-9]{1,18}:[0-9]{1,18}$")]
_Class = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*$")]
_Precision = Literal["float32", "bfloat16", "float16"]
_Schedule = Literal["constant", "cosine", "linear", "step", "exponential"]
_Strategy = Literal["auto", "one_device", "mirrored", "multi_worker"]

# The settings that are a period: a number of steps (0: never) or of epochs, ``ckpt_every`` also a
# time. The graph is left after each period. A run that is only evaluated has none.
PERIODS = ("ckpt_every", "eval_every")


def declare(default: SettingValue, text: str, *examples: str, **limits: Any) -> Any:
    """Declares a setting.

    Args:
        default: the default
        text: a line of help
        examples: values that messages show as examples
        limits: the range, by the names that pydantic has for its ends, such as ``ge``

    Returns:
        A pydantic field, typed as Any because it stands for a value of the setting.
    """
    return Field(default, description=text, examples=list(examples), **limits)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """Settings of a run; numbers of NumPy become Python's, and paths become texts.

    Raises:
        SetupError: a value, or a combination, is impossible; the message names setting and value.
    """

    steps: Count | None = declare(None, "train until this step, counted from the run's start")
    epochs: Count | None = declare(None, "train for this many passes over the training data")
    overfit_batches: Count = declare(0, "train on the first N global batches alone, over and over")
    batch_size: Number = declare(64, "global batch size, divided among the replicas")
    accumulate_steps: Number = declare(1, "micro-batches per update; saves memory, not time")
    logical_replicas: Number | None = declare(
        None, "shares of a batch: the same bits on any number of devices or processes; slower"
    )
    intra_op_threads: Number | None = declare(
        None, "threads of an op; null: all cores, or TensorFlow's choice"
    )
    last_batch: Literal["drop", "keep"] = declare("drop", "keep: a pass ends in a smaller batch")
    precision: _Precision = declare("float32", "what Keras layers compute in; weights: float32")
    jit_compile: bool | Literal["auto"] = declare(
        "auto", "compile steps with XLA; auto: on a single GPU, if it can", "auto"
    )
    on_nan: Literal["stop", "warn", "ignore"] = declare(
        "warn", "what to do at a NaN or infinite loss"
    )
    detect_anomaly: bool = declare(False, "name the first op that gives NaN or infinity; slower")
    learning_rate: float = declare(0.001, "initial value of lr", gt=0, lt=1e30)
    lr_schedule: _Schedule = declare("constant", "how lr falls until the last step")
    warmup: Count = declare(0, "steps in which lr first rises to learning_rate")
    ema: float | None = declare(None, "use averages of weights, decay such as 0.999", gt=0, lt=1)
    seed: int = declare(0, "seeds Python, NumPy, TensorFlow and Keras", ge=0, lt=2**32)
    run_name: _Name | None = declare(None, "name of the run; an existing one resumes", "wide")
    fork: FilePath | None = declare(None, "continue a run as a new one: a, a@300 or a@best")
    init_from: FilePath | None = declare(None, "weights of a run, Keras file or SavedModel")
    init_skip: list[str] | None = declare(
        None, "paths of variables that init_from leaves out; again for more", "head/*"
    )
    ckpt_every: _PeriodOrTime = declare(1000, "save every N steps, 1epoch or 10min", "10min")
    eval_every: _Period = declare(1000, "evaluate every N steps or 1epoch; 0: at the end", "1epoch")
    eval_batch_size: Number | None = declare(None, "batch size of evaluations; null: batch_size")
    limit_eval: Number | None = declare(None, "evaluate the first N batches of each set only")
    max_time: _Time | None = declare(None, "stop and save after this time", "7h30m")
    log_every: Number = declare(100, "write and reset the training metrics every N steps")
    log_seconds: float = declare(
        10.0, "seconds between lines of progress in a log or a pipe", gt=0, lt=1e6
    )
    keep: Number = declare(50, "number of the newest checkpoints that are kept")
    keep_best: _Best | None = declare(
        None, "keep the best checkpoint, by METRIC or METRIC:max", "loss"
    )
    early_stop: _Patience | None = declare(
        None,
        "METRIC:N, or METRIC:max:N: end when it has not become better for N evaluations",
        "loss:3",
    )
    strategy: _Strategy = declare("auto", "auto: the cluster of TF_CONFIG, else all GPUs")
    virtual_devices: Number = declare(1, "split the CPU, to try multi-GPU code on a laptop")
    workers: Number = declare(1, "train in a cluster of N processes here", lt=2**10)
    max_restarts: Count = declare(3, "restarts of that cluster after a worker has crashed")
    stall_seconds: Count = declare(
        120, "say where training hangs if nothing ends for N seconds; 0: never"
    )
    deterministic: bool = declare(False, "bit-identical results from run to run; slower")
    profile: _Steps | None = declare(None, "START:STOP, steps to profile for TensorBoard", "50:60")
    runs_dir: FilePath = declare("runs", "folder of the runs")
    mirror: _Place | None = declare(
        None, "URL or path where checkpoints are copied, to outlive this machine", "s3://bucket/x"
    )
    mirror_keep: Number = declare(3, "newest checkpoints kept there, besides the best")
    callbacks: FilePath = declare("callbacks.py", "Python file with the hooks")
    listener: _Class | None = declare(
        None, "class that is told about each event of a run", "tracker.Tracker"
    )
    debug: bool = declare(False, "show tracebacks and TensorFlow's own messages")
    hparams: dict[str, Any] = Field(
        default_factory=dict, description="values of your own: --hparams.width 64"
    )

    def __post_init__(self) -> None:
        for first, second in (("steps", "epochs"), ("fork", "init_from")):
            values = (getattr(self, first), getattr(self, second))
            if None not in values:
                raise SetupError(
                    f"{first} and {second}: give one of the two, got {values[0]} and {values[1]}."
                )
        if self.init_skip and self.init_from is None:
            raise SetupError(
                f"init_skip: {self.init_skip} leaves out variables of init_from, which is not set; "
                "set it, too."
            )
        if self.detect_anomaly and (self.jit_compile is True or self.precision == "float16"):
            raise SetupError(
                "detect_anomaly: needs --no-jit-compile, which makes one op of all, and another "
                "precision than float16, whose loss scale makes gradients infinite now and then."
            )

        if self.logical_replicas is not None:
            problem = self._find_problem_of_logical_replicas()
            if problem is not None:
                raise SetupError(f"logical_replicas: {problem}")

    def _find_problem_of_logical_replicas(self) -> str | None:
        """Returns which setting cannot be combined with ``logical_replicas``, and what to do."""
        if self.logical_replicas is not None and self.logical_replicas > self.batch_size:
            return (
                f"{self.logical_replicas} logical replicas cannot share a batch of "
                f"{self.batch_size}; take at most batch_size of them."
            )
        if self.accumulate_steps > 1:
            return (
                f"leave out accumulate_steps, which is {self.accumulate_steps}: a device already "
                "computes its logical replicas one after another."
            )
        return None

    @field_validator("*", mode="before")
    @classmethod
    def _make_plain(cls, value: SettingValue) -> SettingValue:
        """Turns paths into texts, and numbers of NumPy into Python's."""
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if hasattr(value, "item"):
            return value.item()
        return value

    @field_validator("init_skip", mode="before")
    @classmethod
    def _make_list(cls, value: SettingValue) -> SettingValue:
        """Takes a single pattern, too, as in ``CTL_INIT_SKIP='head/*'``."""
        if isinstance(value, str):
            return [value]
        if value == [None]:  # from --init-skip null
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
        """Whether a smaller batch is kept; of the first batches alone, none is smaller."""
        return self.last_batch == "keep" and not self.overfit_batches

    @property
    def counts_epochs(self) -> bool:
        """Whether training needs the number of steps in an epoch, which takes a pass to count."""
        if self.keeps_last_batch and self.steps is not None:
            return True
        periods = (getattr(self, name) for name in PERIODS)
        return not self.overfit_batches and (
            self.epochs is not None or any("epoch" in str(period) for period in periods)
        )

    def remove_periods(self) -> Self:
        """Returns settings without an end and without periods, for which no epoch is counted."""
        no_periods: dict[str, Any] = dict.fromkeys(PERIODS, 0)
        return dataclasses.replace(self, steps=None, epochs=None, max_time=None, **no_periods)


SETTINGS: Mapping[str, FieldInfo] = Config.__pydantic_fields__  # type: ignore[attr-defined]
# Settings of engines before 1.0. They are ignored in the config.yaml of a run of such an engine.
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
# The expected value, by the beginning of the name of pydantic's error.
_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "greater_than_equal": "a number from {ge} up",
    "greater_than": "a number above {gt}",
    "string": "a text (in quotes, if it looks like a number)",
}


def explain(error: ValidationError, settings: Mapping[str, FieldInfo]) -> str:
    """Returns one line on the first wrong setting: its name, the expected value, and its value."""
    wrong = error.errors(include_url=False)[0]
    name = str(wrong["loc"][0])
    details = wrong.get("ctx", {})
    if name not in settings:
        return f"{name}: there is no setting {quote(name)}{suggest(name, settings)}"
    if "error" in details:  # raised by a validator of ours
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
