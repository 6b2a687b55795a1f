"""Parses the command line: a command, its options, and the settings of the run that it uses.

Settings come from the defaults, then config.yaml, then ``CTL_*`` environment variables, then flags.
The config.yaml that an existing run has saved takes precedence over the project's.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationError, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from ctl_core.checkpoint.mirror import fetch_run
from ctl_core.checkpoint.run_settings import CONFIG_FILE, read_run_settings
from ctl_core.checkpoint.source import CheckpointName
from ctl_core.commands.help import GroupedFormatter, describe_command, list_examples
from ctl_core.commands.inherited import (
    Origin,
    ProjectFile,
    describe_differences,
    describe_saved,
    find_training_origin,
    list_not_inherited,
)
from ctl_core.conversion.formats import DEFAULT_OPSET, HIGHEST_OPSET, LOWEST_OPSET, Format
from ctl_core.hooks.callbacks_file import DEFAULT
from ctl_core.run.errors import SetupError, format_name, make_line, quote, suggest
from ctl_core.run.files import relative_path
from ctl_core.run.layers import (
    ENV_PREFIX,
    EnvironmentSource,
    Layer,
    describe_variables,
    merge_hparams,
    read_file,
    resolve,
)
from ctl_core.run.settings import SETTINGS, Config, FilePath, declare, explain

_File = Annotated[FilePath, AfterValidator(os.path.abspath)]
# The options of commands that are not settings of a run, by name: type and declaration.
OPTIONS: dict[str, Any] = {
    "config": (list[str] | None, declare(None, "settings file; repeat the flag for more")),
    "continue": (bool, declare(False, "resume a run that a hook ended with StopTraining")),
    "start_over": (bool, declare(False, "begin again a run whose checkpoints were deleted")),
    "check": (bool, declare(False, "try every hook once, in a temporary folder")),
    "background": (bool, declare(False, "continue in the background after the first step")),
    "note": (str | None, declare(None, "what you expect of the run, for training_log.md")),
    "checkpoint": (
        CheckpointName,
        declare(None, "a step, best or last; null: best, if kept"),
    ),
    "watch": (bool, declare(False, "evaluate each new checkpoint of a run in training")),
    "input": (_File | None, declare(None, "a .npy file, or a .npz file of named inputs")),
    "dataset": (str | None, declare(None, "which dataset, if create_eval_dataset returns several")),
    "include": (
        list[str] | None,
        declare(None, "also write this component of each batch, such as label"),
    ),
    "output": (_File | None, declare(None, "where to write; null: in the run's folder")),
    "format": (
        list[Format],
        declare(
            ["saved_model"],
            "saved_model, litert or onnx, or several of them, separated by commas",
        ),
    ),
    "quantize": (
        Literal["float16", "int8"] | None,
        declare(None, "write a smaller LiteRT file (float16, int8)"),
    ),
    "tolerance": (
        Annotated[float, Field(gt=0)] | None,
        declare(
            None,
            "the largest relative difference of outputs and metrics; null: 0.0001, or any if the "
            "file is quantized",
        ),
    ),
    "opset": (
        Annotated[int, Field(ge=LOWEST_OPSET, le=HIGHEST_OPSET)] | None,
        declare(
            None,
            f"the version of ONNX's operators, {LOWEST_OPSET} to {HIGHEST_OPSET}; "
            f"null: {DEFAULT_OPSET}",
        ),
    ),
    "hook": (str | None, declare(None, "the hook to explain; null: the list of all")),
    "stub": (bool, declare(False, "print callbacks.py with all hooks, to begin from")),
    "deep": (bool, declare(False, "also train a convolution on each GPU, compiled and not")),
}
_COMMON_SETTINGS = ("run_name", "runs_dir", "callbacks", "batch_size", "debug", "hparams")


class Flags(NamedTuple):
    """The flags of a command.

    Attributes:
        text: a short description of the command
        options: the names of the command's own options, which ``OPTIONS`` defines
        settings: the names of the settings that the command has as flags
        usage: the arguments that follow the name of the command
    """

    text: str
    options: Sequence[str]
    settings: Sequence[str] = _COMMON_SETTINGS
    usage: str = "[NAME] [--SETTING VALUE ...]"


COMMANDS = {
    "train": Flags(
        "train, or resume a run",
        ("config", "continue", "start_over", "check", "background", "note"),
        tuple(SETTINGS),
        "[--SETTING VALUE ...]",
    ),
    "evaluate": Flags(
        "evaluate a run's checkpoint",
        ("config", "checkpoint", "watch"),
        (*_COMMON_SETTINGS, "eval_batch_size", "limit_eval"),
    ),
    "predict": Flags(
        "write a run's predictions to a file",
        ("config", "checkpoint", "input", "dataset", "include", "output"),
        (*_COMMON_SETTINGS, "eval_batch_size"),
    ),
    "export": Flags(
        "export a run's model for TensorFlow Serving, LiteRT or ONNX",
        ("config", "checkpoint", "format", "quantize", "tolerance", "opset", "output"),
        (*_COMMON_SETTINGS, "eval_batch_size", "limit_eval", "precision"),
    ),
    "hooks": Flags(
        "list all hooks, explain one, or print their defaults as code",
        ("hook", "stub"),
        (),
        "[HOOK] [--stub]",
    ),
    "doctor": Flags(
        "explain why no GPU is used, and what to do",
        ("deep",),
        (),
        "[--deep]",
    ),
}


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
        name: the name of the command
        config: the settings
        options: the values of the command's own options, by name
        notes: lines that tell the user which settings were ignored
        run: the folder of the run, if it exists already
        trained_with: the setting ``callbacks`` in the saved config.yaml of the run
        names_callbacks: whether the user names the file with the hooks, see
            ``Layers.name_callbacks``; otherwise, only a config.yaml may name it
    """

    name: str
    config: Config
    options: dict[str, Any]
    notes: Sequence[str] = ()
    run: Path | None = None
    trained_with: str = DEFAULT
    names_callbacks: bool = True


class Layers(NamedTuple):
    """The layers of settings of a command, without the defaults and the saved settings of a run.

    Attributes:
        files: the settings files; later files take precedence
        above: environment variables and flags, which take precedence over the files
        is_named: whether a flag or an environment variable names the files; if not, the only file
            is config.yaml
    """

    files: list[Layer]
    above: list[Layer]
    is_named: bool

    def leave_out(self, names: Collection[str]) -> "Layers":
        """Returns the layers without the settings of the given names."""
        files = [layer.leave_out(names) for layer in self.files]
        above = [layer.leave_out(names) for layer in self.above]
        return Layers(files, above, self.is_named)

    def name_callbacks(self) -> bool:
        """Returns True if a flag, an environment variable or a named file sets ``callbacks``."""
        naming = list(self.above)
        if self.is_named:
            naming += self.files
        return any("callbacks" in layer.values for layer in naming)


class Settled(NamedTuple):
    """The settings of a command; for the attributes, see ``Command``."""

    config: Config
    notes: list[str]
    run: Path | None
    trained_with: str


def parse_command(argv: Sequence[str]) -> Command:
    """Parses ``COMMAND [--SETTING VALUE ...]``.

    If the command uses an existing run, the first word after the command may be the name of the
    run. After ``hooks``, it may be the name of the hook to explain.

    Raises:
        SetupError: the command is unknown, or a setting is unknown, of the wrong type, out of range
            or missing.
        SystemExit: ``--help`` was passed, and the help was printed.
    """
    command, *words = argv
    if command not in COMMANDS:
        hint = suggest(command, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}."
        raise SetupError(f"unknown command {quote(command)}{hint}")
    is_training = command == "train"
    takes_name = command not in ("train", "doctor")
    if takes_name and words and not words[0].startswith("-"):
        option = "hook" if command == "hooks" else "run-name"
        words[0] = f"--{option}={words[0]}"
    variables, flags, options = _read_words(command, words)
    if not COMMANDS[command].settings:
        return Command(command, Config(), options)

    notes = describe_variables()
    named_files = options.pop("config") or _list_files_of_variable()
    files = [
        read_file(Path(path), required=bool(named_files)) for path in named_files or ["config.yaml"]
    ]
    layers = Layers(files, [variables, flags], bool(named_files))
    if is_training and not options["check"]:
        # Hyperparameters are left out, because they can be checked only together with those of the
        # run, which is not fetched yet.
        fetch_run(_settle(layers.leave_out(["hparams"]), is_training).config)
    settled = _settle(layers, is_training)
    config = settled.config
    if command == "predict":
        config = dataclasses.replace(config, limit_eval=None)
    return Command(
        command,
        config,
        options,
        [*notes, *settled.notes],
        settled.run,
        settled.trained_with,
        layers.name_callbacks(),
    )


def _settle(layers: Layers, is_training: bool) -> Settled:
    """Merges the layers with the saved settings of the run that the command uses, if it exists.

    Raises:
        SetupError: a setting is wrong, or the command needs a run and there is none.
    """
    all_layers = [*layers.files, *layers.above]
    origin = _find_origin(is_training, all_layers)
    files = layers.files
    notes: list[str] = []
    trained_with = DEFAULT
    if origin is not None:
        saved = read_run_settings(origin.run)
        notes += describe_saved(origin, saved, all_layers)
        trained_with = str(saved.values.get("callbacks", DEFAULT))
        inherited = saved.leave_out(list_not_inherited(is_training, origin))
        if is_training and not layers.is_named:
            project = ProjectFile(Path(CONFIG_FILE), files[0], "add --config config.yaml")
            notes += describe_differences(origin, inherited, project, layers.above)
        files = [inherited, *files] if layers.is_named else [*files, inherited]
    config = resolve(files, layers.above)
    run = None
    if origin is not None and not origin.is_forked:
        run = origin.run
        config = dataclasses.replace(config, run_name=run.name, runs_dir=str(run.parent))
    config = dataclasses.replace(config, callbacks=relative_path(config.callbacks))
    return Settled(config, notes, run, trained_with)


def _list_files_of_variable() -> list[str]:
    """Returns the settings files that the environment variable ``CTL_CONFIG`` names."""
    variable = os.environ.get(f"{ENV_PREFIX}CONFIG", "")
    return [path for path in variable.split(os.pathsep) if path]


def _find_origin(is_training: bool, layers: Sequence[Layer]) -> Origin | None:
    """Returns the run whose saved settings the command inherits; None if there is no such run.

    Args:
        is_training: whether the command trains; all other commands need an existing run
        layers: the project's settings files, environment variables and flags

    Raises:
        SetupError: a setting is wrong, or the command needs a run and there is none.
    """
    # Hyperparameters are left out. They do not matter here, and can be checked only together with
    # those of the run.
    config = resolve([layer.leave_out(["hparams"]) for layer in layers])
    if is_training:
        return find_training_origin(config)
    return Origin(find_run(Path(config.runs_dir), config.run_name))


def _read_words(command: str, words: Sequence[str]) -> tuple[Layer, Layer, dict[str, Any]]:
    """Reads the settings and options of a command from the environment and its flags.

    Returns:
        The settings of the environment, those of the flags, and the values of the command's own
        options by name.

    Raises:
        SetupError: a flag is unknown or has a wrong value.
        SystemExit: ``--help`` was passed, and the help was printed.
    """
    words, hparams = _split_hparams(words)
    words = _spell_out_jit_compile(words)
    options = {name: OPTIONS[name] for name in COMMANDS[command].options}
    settings: dict[str, Any] = {
        name: (SETTINGS[name].annotation, SETTINGS[name]) for name in COMMANDS[command].settings
    }
    variables = EnvironmentSource(create_model("Variables", __base__=BaseSettings, **settings))()
    settings.pop("hparams", None)
    source = _create_flag_source(command, options | settings)
    try:
        flags = source(args=words)()
    except SettingsError as error:
        raise SetupError(_explain_flag(str(error), [*options, *settings])) from error
    model = create_model(command, **options)
    try:
        validated = model(**{name: flags.pop(name) for name in options if name in flags})
    except ValidationError as error:
        raise SetupError(explain(error, model.model_fields)) from error
    if hparams:
        flags["hparams"] = hparams
    return Layer(variables, ENV_PREFIX), Layer(flags), validated.model_dump()


def _create_flag_source(command: str, fields: dict[str, Any]) -> Any:
    """Creates the parser of a command's flags; pydantic builds it from ``fields``."""
    source: Any = CliSettingsSource(
        create_model(command, __base__=BaseSettings, **fields),
        cli_prog_name=f"python -m ctl_core {command}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        cli_parse_none_str="null",
        formatter_class=GroupedFormatter,
    )
    flags = COMMANDS[command]
    source.root_parser.description = describe_command(flags.text, ENV_PREFIX, bool(flags.settings))
    source.root_parser.epilog = list_examples(command)
    source.root_parser.usage = f"%(prog)s {flags.usage}"
    return source


def _split_hparams(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separates hyperparameters from other flags; ``--hparams.a.b 3`` becomes {a: {b: "3"}}.

    ``--no-hparams.a`` becomes {a: "false"}.

    Raises:
        SetupError: the last flag has no value.
    """
    others: list[str] = []
    hparams: dict[str, Any] = {}
    remaining = iter(words)
    for word in remaining:
        flag, equals, text = word.partition("=")
        is_off = flag.startswith("--no-hparams.") and not equals
        if not is_off and not flag.startswith("--hparams."):
            others.append(word)
            continue
        value: Any = "false"
        if not is_off:
            value = text if equals else next(remaining, None)
        if value is None:
            raise SetupError(f"{format_name(flag)}: expected a value after it.")
        for name in reversed(flag.split(".")[1:]):
            value = {name: value}
        hparams = merge_hparams(hparams, value)
    return others, hparams


def _spell_out_jit_compile(words: Sequence[str]) -> list[str]:
    """Adds the value to ``--jit-compile`` and ``--no-jit-compile`` if the user left it out.

    pydantic-settings supports flags without a value and flags with a value, but no flag whose value
    is optional.
    """
    spelled_out = []
    for word, next_word in itertools.pairwise([*words, "--"]):
        if word == "--no-jit-compile":
            word = "--jit-compile=false"
        elif word == "--jit-compile" and next_word.startswith("-"):
            word = "--jit-compile=true"
        spelled_out.append(word)
    return spelled_out


def _explain_flag(text: str, names: Sequence[str]) -> str:
    """Rewrites a message of argparse, to name the wrong flag and to suggest a similar one.

    Args:
        text: the message of argparse
        names: the names of the options and settings that the command has as flags
    """
    text = text.removeprefix("error parsing CLI: ")
    unknown = re.match(r"unrecognized arguments: ([^\s=]*)", text)
    if unknown is None:
        return make_line(text.replace("one argument", "a value after it"))
    flags = ["--" + name.replace("_", "-") for name in names]
    hint = suggest(unknown[1].replace("_", "-"), flags) or (
        "; settings are passed as --name value."
    )
    return f"there is no setting {quote(unknown[1])}{hint}"


def find_run(runs_dir: Path, run_name: str | None) -> Path:
    """Returns the folder of an existing run; without a name, the folder of the newest run.

    Raises:
        SetupError: there is no such run.
    """
    runs = {path.parent.name: path.parent for path in sorted(runs_dir.glob("*/config.yaml"))}
    where = format_name(relative_path(runs_dir))
    if not runs:
        raise SetupError(f"{where}: there is no run yet; train one first.")
    if run_name is None:
        return max(runs.values(), key=lambda run: (run / "config.yaml").stat().st_mtime)
    if run_name not in runs:
        hint = suggest(run_name, runs) or f" (there: {make_line(', '.join(runs), 100)})"
        raise SetupError(f"run_name: there is no run {quote(run_name)} in {where}{hint}")
    return runs[run_name]
