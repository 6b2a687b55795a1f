"""Settings: each is a field of ``Config``, which says its type, range, default and help.

Checks, messages and flags follow from that. Where settings come from is the part of layers.py.
Neither imports TensorFlow: a misspelt flag is answered at once.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import numbers
import operator
import os
import re
import reprlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from ctl_core.errors import SetupError, one_line


def check_path(text: str) -> str:
    """Refuses a URL, where there are no locks and no renames, and what cannot be a path."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):  # of one slash, as pathlib writes it
        raise ValueError(
            f"expected a path in the file system, got the URL {shown(text)}; take a local path and "
            "copy the files, or mount what the URL names (gcsfuse does so for gs://) and give the "
            "path."
        )
    longest = max(len(part.encode()) for part in text.split("/"))
    unprinted = re.search("[\0-\x1f\x7f-\x9f\u2028\u2029]", text)
    if not text.strip() or unprinted or longest > 255 or len(text) > 2000:
        raise ValueError
    return text


def _check_source(text: str | None) -> str | None:
    return None if text is None else check_path(text)


def _check_profile(text: str | None) -> str | None:
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text or "0:1")
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError
    return text


def _check_hparams(hparams: Any) -> Any:
    for name, value in hparams.items() if isinstance(hparams, dict) else ():
        if not isinstance(name, str) or not _is_plain(value):
            raise ValueError(
                f"{shown(name)} has the value {shown(value)}; expected a name with numbers, texts, "
                "true, false, null, or lists and dicts of these, at most 50 deep."
            )
    return hparams


def _is_plain(value: Any) -> bool:
    """Whether a file can hold a value; a list may hold itself, or another one very often."""
    level = [value]
    for _ in range(51):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += [*each, *each.values()]
            elif isinstance(each, list | tuple):
                below += each
            elif type(each) not in (int, float, str, bool, type(None)):
                return False
            if len(below) > 10**6 or (type(each) is int and each.bit_length() > 1024):
                return False
        level = below
    return not level


EPOCHS = r"([1-9][0-9]{0,8}) ?epochs?"
_TIME = r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})(?:m|min))?(?:([0-9]{1,8})s)?"


def seconds_in(text: int | str | None) -> float | None:
    """Returns the seconds of a text such as 7h30m, 10min or 90s; None for anything else."""
    found = re.fullmatch(_TIME, text) if isinstance(text, str) and text else None
    if found is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(3600 * hours + 60 * minutes + seconds) or None


def _check_period(value: Any, clock: bool = True) -> Any:
    if isinstance(value, str):
        known = re.fullmatch(EPOCHS, value) or (clock and seconds_in(value))
    else:
        known = 0 <= value < 2**63
    if not known:
        raise ValueError
    return value


def _check_eval_period(value: Any) -> Any:
    return _check_period(value, clock=False)


def _check_time(text: Any) -> Any:
    if text is not None and not seconds_in(text):
        raise ValueError
    return text


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Number = Annotated[int, Field(ge=1, lt=2**63)]
Length = Annotated[int | None, Field(ge=0, lt=2**63)]
Folder = Annotated[str, AfterValidator(check_path)]
_Name = Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
_Source = Annotated[str | None, AfterValidator(_check_source)]
_Profile = Annotated[str | None, AfterValidator(_check_profile)]
_KeepBest = Annotated[str | None, Field(pattern=r"^[^:]+(:(max|min))?$")]
_EarlyStop = Annotated[str | None, Field(pattern=r"^[^:]+(:(max|min))?:[1-9][0-9]{0,8}$")]
_Listener = Annotated[str | None, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*$")]
_Hparams = Annotated[dict[str, Any], BeforeValidator(_check_hparams)]
STRICT = ConfigDict(strict=True, extra="forbid")


def declare(default: Any, text: str, **more: Any) -> Any:
    """Declares a setting; its help is no docstring, of which -OO leaves nothing.

    ``title`` says what is expected where the type does not; ``examples`` has what the help shows.
    """
    return Field(default, description=text, **more)


@dataclass(frozen=True, config=STRICT)
class Config:
    """Settings of a run; numbers of NumPy become Python's, and paths become texts.

    Raises:
        SetupError: a value, or a combination, is impossible; the message names setting and value.
    """

    steps: Length = declare(
        None, "train until this step, counted from the start of the run, not of the process"
    )
    epochs: Length = declare(
        None, "the same in passes over the training data (give steps or epochs)"
    )
    overfit_batches: _Count = declare(
        0,
        "train on the first so many global batches only, over and over, to see whether the model "
        "can learn at all; they are an epoch (0: train on all)",
    )
    batch_size: _Number = declare(64, "global batch size, shared out evenly over the replicas")
    accumulate_steps: _Number = declare(
        1, "micro-batches that an update is made of, to save memory, not time"
    )
    last_batch: Literal["drop", "keep"] = declare(
        "drop",
        "what happens to the examples at the end of a pass that fill no global batch; keep: they "
        "are a smaller one, so that each example counts once an epoch",
    )
    precision: Literal["float32", "bfloat16", "float16"] = declare(
        "float32", "what Keras layers compute in; weights and updates stay float32"
    )
    jit_compile: bool = declare(
        False,
        "compile with XLA: on one replica, stretches of many steps as one executable; on several, "
        "each one's forward and backward pass",
    )
    on_nan: Literal["stop", "warn", "ignore"] = declare(
        "warn",
        "at a NaN or infinite loss; warn: exit code 1 if the last one is; stop: at the first, with "
        "exit code 1",
    )
    detect_anomaly: bool = declare(
        False,
        "end training at the first NaN or infinity that an op of a step gives, and say at which of "
        "your lines the op was made; slower",
    )
    learning_rate: Annotated[float, Field(gt=0, lt=1e30, allow_inf_nan=False)] = declare(
        0.001, "initial value of lr; on resume, a changed value replaces the current one"
    )
    lr_schedule: Literal["constant", "cosine", "linear", "step", "exponential"] = declare(
        "constant",
        "how lr falls from learning_rate until the last step: cosine and linear to 0, exponential "
        "to a hundredth, step to a tenth at half and a hundredth at three quarters",
    )
    warmup: _Count = declare(0, "steps in which lr first rises to learning_rate")
    ema: Annotated[float | None, Field(gt=0, lt=1)] = declare(
        None,
        "keep a moving average of the weights that forgets at this rate, such as 0.999; what is "
        "evaluated, predicted and exported is the average",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = declare(
        0, "seeds Python, NumPy, TensorFlow and Keras"
    )
    run_name: _Name = declare(
        None,
        "folder of the run inside runs_dir; an existing one resumes, with the settings in its own "
        "config.yaml; default: the time",
        title="a folder name of letters, digits, '.', '_' and '-' that starts with a letter or "
        "digit, at most 200 of them",
    )
    fork: _Source = declare(
        None,
        "begin a new run as another goes on: its settings, weights, optimizer, position in the "
        "data and random state; a, a@300 or a@best",
        title="a run, as RUN, RUN@STEP or RUN@best",
        examples=["RUN[@STEP]"],
    )
    init_from: _Source = declare(
        None,
        "begin a new run with the weights of another, of a .keras or .weights.h5 file, or of a "
        "SavedModel",
        title="a run, as RUN, RUN@STEP or RUN@best, or a file",
        examples=["RUN|FILE"],
    )
    ckpt_every: Annotated[int | str, AfterValidator(_check_period)] = declare(
        1000,
        "save a checkpoint every so many steps (0: only at the end), every 1epoch, or every 10min",
        title="a number of steps, a number of epochs such as 1epoch, or a time such as 10min",
    )
    eval_every: Annotated[int | str, AfterValidator(_check_eval_period)] = declare(
        1000,
        "evaluate every so many steps (0: only at the end), or every 1epoch",
        title="a number of steps, or a number of epochs such as 1epoch",
    )
    eval_batch_size: Annotated[int | None, Field(ge=1, lt=2**63)] = declare(
        None,
        "examples that an evaluation takes at once, shared out over the replicas; default: as many "
        "as a step",
    )
    limit_eval: Annotated[int | None, Field(ge=1, lt=2**31)] = declare(
        None,
        "evaluate the first so many batches of each set only, of eval_batch_size examples on all "
        "replicas together; predict takes all; default: all",
    )
    max_time: Annotated[str | None, AfterValidator(_check_time)] = declare(
        None,
        "stop and save after this time, as at a SIGTERM; started again, the run goes on",
        title="a time such as 7h30m, 45min or 90s",
        examples=["TIME"],
    )
    log_every: _Number = declare(
        100, "write the train metrics, if there are any, every so many steps, and begin anew"
    )
    keep_best: _KeepBest = declare(
        None,
        "keep the checkpoint with the best value of a metric, apart from the newest ones",
        title="a metric of the evaluation, as METRIC, METRIC:max or METRIC:min",
        examples=["METRIC"],
    )
    early_stop: _EarlyStop = declare(
        None,
        "end training when a metric has not become better for so many evaluations",
        title="METRIC:PATIENCE, METRIC:max:PATIENCE or METRIC:min:PATIENCE, such as loss:3",
        examples=["METRIC:PATIENCE"],
    )
    strategy: Literal["auto", "one_device", "mirrored", "multi_worker"] = declare(
        "auto", "auto joins the cluster of TF_CONFIG; else it takes all GPUs, or the one device"
    )
    virtual_devices: _Number = declare(
        1, "split the CPU into so many devices, to try multi-GPU code on a laptop"
    )
    workers: Annotated[int, Field(ge=1, lt=2**10)] = declare(
        1, "start a cluster of so many processes on this machine"
    )
    max_restarts: _Count = declare(
        3, "how often a cluster is started again after a crash of one of its workers"
    )
    deterministic: bool = declare(
        False, "bit-identical results from run to run (op determinism), slower"
    )
    profile: _Profile = declare(
        None,
        "START:STOP profiles the steps after START up to STOP, for TensorBoard",
        title="START:STOP, two step numbers of which the first is lower, such as 50:60",
    )
    runs_dir: Folder = declare("runs", "folder that holds the runs", title="the name of a folder")
    callbacks: Folder = declare(
        "callbacks.py",
        "the Python file with the hooks, such as experiments/gan.py; each run keeps a copy",
        title="the name of a Python file",
    )
    listener: _Listener = declare(
        None,
        "a class of your own that hears what a run says, a ctl_core.Listener, such as the tracker "
        "in tracker.py",
        title="a class, as module.Class",
        examples=["CLASS"],
    )
    debug: bool = declare(False, "show tracebacks and TensorFlow's own messages on the console")
    hparams: _Hparams = Field(
        default_factory=dict,
        description="free values of your own; hooks get them as hparams; as a flag: "
        "--hparams.width 64",
    )

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise SetupError(
                f"steps and epochs: give one of the two, got steps={self.steps} and "
                f"epochs={self.epochs}."
            )
        if self.strategy == "one_device" and self.virtual_devices > 1:
            raise SetupError(
                f"strategy: one_device uses one device, but virtual_devices is "
                f"{self.virtual_devices}; leave one of them out."
            )
        if self.detect_anomaly and self.jit_compile:
            raise SetupError(
                "detect_anomaly: looks at each op, of which jit_compile makes one; leave out one "
                "of the two (--no-jit-compile)."
            )
        if self.detect_anomaly and self.precision == "float16":
            raise SetupError(
                "detect_anomaly: the loss scale of float16 makes gradients infinite now and then; "
                "take --precision bfloat16 or float32."
            )
        if self.fork is not None and self.init_from is not None:
            raise SetupError("fork and init_from: give one of the two.")
        if self.workers > 1 and self.strategy in ("one_device", "mirrored"):
            raise SetupError(
                f"strategy: {self.strategy} trains in one process, but workers is {self.workers}; "
                "leave one of them out."
            )

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return value
        with contextlib.suppress(TypeError):
            return operator.index(value)
        with contextlib.suppress(OverflowError):
            if isinstance(value, numbers.Real):
                return float(value)
        if isinstance(value, str):
            return str.__str__(value)  # of a member of an enumeration, its value
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, values: Any, validate: Any) -> Any:
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
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text (in quotes, if it looks like a number)",
    list: "a list",
    dict: "names with values",
}
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def shown(value: Any, limit: int = 80) -> str:
    """Returns a value as messages show it, in at most so many characters."""
    try:
        return one_line(_SHORT.repr(value), limit)
    except ValueError:  # Python writes no numbers of thousands of digits
        return f"a very long {type(value).__name__}"


def label(text: object) -> str:
    """Returns a path or a name as messages show it: in one line, without quotes."""
    return shown(str(text))[1:-1]


def kind_of(setting: FieldInfo) -> Any:
    """Returns the type of a setting's values, where it has one: int, str, list, Literal."""
    hint = setting.annotation
    if get_origin(hint) not in (Literal, dict):
        hint = (get_args(hint) or (hint,))[0]
    return get_origin(hint) or hint


def explain(error: ValidationError, settings: Mapping[str, FieldInfo]) -> str:
    """Says in one line which setting is wrong first, what was expected, and what it is."""
    wrong = error.errors(include_url=False)[0]
    name, setting = wrong["loc"][0], settings.get(str(wrong["loc"][0]))
    if setting is None:
        return f"unknown setting {shown(name)}{nearest(str(name), settings)}"
    if words := str(wrong.get("ctx", {}).get("error", "")):
        return f"{name}: {words}"
    kind = kind_of(setting)
    limits = {
        key: getattr(each, key)
        for each in setting.metadata
        for key in ("ge", "gt", "lt")
        if hasattr(each, key)
    }
    if kind is Literal:
        expected = f"one of {', '.join(get_args(setting.annotation))}"
    elif setting.title:
        of_no_text = wrong["type"] == "string_type"
        expected = setting.title + ", in quotes if it looks like a number" * of_no_text
    else:
        expected = WORDS[kind]
    if "ge" in limits:
        expected += f" from {limits['ge']} up"
    if "gt" in limits:
        expected += f" above {limits['gt']}"
    if wrong["type"] == "less_than":
        most = limits["lt"]
        expected += f" and below {f'2**{math.log2(most):.0f}' if kind is int else f'{most:g}'}"
    return f"{name}: expected {expected}, got {shown(wrong['input'])}."


def nearest(name: str, names: Iterable[str], mark: str = "", cutoff: float = 0.5) -> str:
    """Returns ``"; did you mean 'x'?"`` for the nearest of ``names``, or an empty string.

    ``mark`` is put before it, and is no part of what is compared.
    """
    close = difflib.get_close_matches(name[:80], list(names), n=1, cutoff=cutoff)
    return f"; did you mean '{mark}{close[0]}'?" if close else ""


def free_name(runs_dir: Path) -> str:
    """Returns the time as a name for a run; with a number behind it if that second is taken."""
    name = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while os.path.lexists(runs_dir / (name if number == 1 else f"{name}-{number}")):
        number += 1
    return name if number == 1 else f"{name}-{number}"
