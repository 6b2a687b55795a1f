"""The command line: ``python -m ctl_core <command>``.

Exit codes: 0 done, 1 failed while running or ended with a loss that is not finite, 2 wrong usage,
settings or hooks, 75 lost another process of its cluster, 130 and 143 stopped by SIGINT or SIGTERM
after saving; 130, too, ended by a second SIGINT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ctl_core.errors import CtlError, PeerLost, SetupError, brief
from ctl_core.files import from_here


def _missing(package: str | None) -> str:
    """Says that a package is not installed, and what to do.

    Where an environment is active that is not the project's own, such as the one that holds
    cookiecutter, train.sh has taken it; without it, it makes and takes the project's.
    """
    install = f"{sys.executable} -m pip install --editable ."
    said = f"{package} is not installed in {sys.prefix}; "
    active, own = os.environ.get("VIRTUAL_ENV"), Path(__file__).resolve().parents[1] / ".venv"
    here = os.path.realpath(sys.prefix)
    taken = active and not os.environ.get("VENV") and os.path.realpath(active) == here
    if taken and here != os.path.realpath(own):
        return (
            f"{said}it is active, and not the project's own: `deactivate`, and ./train.sh makes "
            f"and takes {from_here(own)}; or install into it, in the project's folder: {install}"
        )
    return f"{said}in the project's folder: {install}"


try:
    from ctl_core import run_process, training_log
    from ctl_core.callbacks_file import Source, check_compiles, find_callbacks, load_callbacks
    from ctl_core.cli import Command, as_evaluator, parse_command
    from ctl_core.cluster import supervisor
    from ctl_core.cluster.place import find_place
    from ctl_core.cluster.signals import INTERRUPTED, interruptible
    from ctl_core.cluster.task import Place
    from ctl_core.options import COMMANDS, default_options
    from ctl_core.output import outlive_readers
    from ctl_core.settings import Config, free_name, nearest
    from ctl_core.sources import check_start
    from ctl_core.tensorboard import Board, check_board
    from ctl_core.tools.background import detach
    from ctl_core.tools.following import following
except ModuleNotFoundError as error:
    print("error:", _missing(error.name), file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:  # these take most of the time until main() is there to catch it
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    supervisor.die_with_supervisor()
    alone = argv is None  # the process is this command's
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without dashes and dots of ours gets "?"
            stream.reconfigure(errors="replace")
    debug = "--debug" in argv
    if alone and argv[:1] == ["train"]:
        outlive_readers()
    try:
        command = _read(argv)
        if isinstance(command, int):
            return command
        debug = command.config.debug
        return _run(command, [*argv, *command.taken_over])
    except CtlError as error:
        # Of a lost peer, the chief's supervisor can say more: which one, and how.
        if not (isinstance(error, PeerLost) and supervisor.chief() and not debug):
            _complain(str(error), debug)
        return _leave(error.exit_code)
    except KeyboardInterrupt as error:
        if not isinstance(error, run_process.Concluded):  # then it has said that it is saved
            _complain("interrupted", debug)
        return _leave(INTERRUPTED, at_once=alone)
    except BrokenPipeError:  # the reader of our output, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        _complain(
            f"{brief(error)} ({Path(where.filename).name}:{where.lineno}; --debug shows the "
            "traceback)",
            debug,
        )
        return _leave(1)


def _leave(code: int, at_once: bool = False) -> int:
    """Returns the exit code of a failure; a process of a cluster ends here and now.

    TensorFlow's own end would wait for the others, which wait for this one in a collective. Of a
    process that was interrupted, some thread may never end.
    """
    strategy = sys.modules.get("ctl_core.cluster.strategy")
    if at_once or (strategy is not None and strategy.joined()):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _complain(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr, flush=True)


def _read(argv: list[str]) -> Command | int:
    """Reads the command line; what it answers by itself, such as help, gives the exit code."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print("usage: python -m ctl_core <command> [settings]\n\ncommands:")
        for command, text in COMMANDS.items():
            print(f"  {command:10}{text}")
        print("\n<command> --help shows its settings.")
        return 0 if argv else 2
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}."
        raise SetupError(f"unknown command {name!r}{hint}")
    if name == "hooks":
        return _print_hooks(rest)
    try:
        if name == "tfrecords":
            return _write_records(rest)
        if name in ("runs", "stop", "logs"):
            return int(getattr(importlib.import_module("ctl_core.tools.runs"), name)(rest))
        return parse_command(argv)
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)


def _print_hooks(rest: list[str]) -> int:
    if rest and rest[0] in ("-h", "--help"):
        print("usage: python -m ctl_core hooks [--debug]\n\nPrints the table of hooks.")
    elif others := [word for word in rest if word != "--debug"]:
        raise SetupError(f"unexpected word {others[0]!r}: hooks takes no settings but --debug.")
    else:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if rest else "2")
        _import_libraries(debug=bool(rest))
        from ctl_core.tools.hook_table import print_table

        print_table()
    return 0


def _write_records(rest: list[str]) -> int:
    from ctl_core.tools.record_options import parse

    options = parse(rest)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if options.debug else "3")
    with interruptible():
        _import_libraries(options.debug)
        from ctl_core.tools.tfrecords import write_records
        from ctl_core.tools.verify import verify

        if options.verify is not None:
            verify(options.verify)
            return 0
        _find_devices(options.debug)
        with _without_greeting(options.debug, "JPEG"):  # libjpeg prints what we say in a line
            write_records(options)
    return 0


def _run(command: Command, argv: list[str]) -> int:
    if command.name == "train":
        check_start(command.config)  # at once; a program's Run looks by itself
    # TensorFlow's C++ messages are about the machine, not about the run; those of a cluster that
    # loses a process are many, and say what one line of ours says.
    place = find_place(command.config) if command.name == "train" else Place()
    if command.name == "train" and not (place.in_cluster or place.evaluates):
        _refuse(command)
    for note in () if supervisor.supervised() else command.notes:  # the supervisor has said it
        print(note, flush=True)
    for line in () if supervisor.supervised() else place.lines():
        print(line, flush=True)
    if place.evaluates:
        with interruptible():
            command = as_evaluator(command)
    in_cluster = command.config.workers > 1 or place.in_cluster
    level = "3" if in_cluster else "2"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if command.config.debug else level)
    source = find_callbacks(
        command.config.callbacks, command.run, command.trained_with, command.name == "train"
    )
    if source.note and not supervisor.supervised():
        print(source.note, flush=True)
    check_compiles(source)
    if command.options.get("tensorboard"):
        check_board()
    if checking := bool(command.options.get("check")):
        supervisor.check_folder(command.config)
    expected, background = (command.options.get(name) for name in ("note", "background"))
    several = command.name == "train" and command.config.workers > 1
    if (expected is not None or background or several) and not supervisor.supervised():
        name = command.config.run_name or free_name(Path(command.config.runs_dir))
        config = dataclasses.replace(command.config, run_name=name)
        command = dataclasses.replace(command, config=config)
        if expected is not None:
            training_log.check_note(expected, Path(config.runs_dir, name))
        if background:
            return detach(argv, config, expected, command.given)
        if several:
            start = supervisor.check_cluster if checking else supervisor.start_cluster
            code = start(argv, config)
            if code or not command.options["then"]:
                return code
            _prepare_alone(config)
            # Before callbacks.py may go elsewhere.
            config = dataclasses.replace(config, runs_dir=os.path.abspath(config.runs_dir))
            return _follow(dataclasses.replace(command, config=config), _load(source, config))
    wanted = command.options.get("tensorboard") if place.task.chief else False
    board = Board(Path(command.config.runs_dir)) if wanted else None
    try:
        code = _run_here(command, source, place)
        if board is not None and code == 0 and wanted == "keep":
            board.keep()
        elif board is not None:
            board.farewell()
        return code
    finally:
        if board is not None:
            board.close()


def _refuse(command: Command) -> None:
    """Refuses a training that another process is at work on, or a note of a run that has another.

    Before anything is said of it; training looks again, when it holds the run.
    """
    options = command.options
    if command.config.run_name is None or options["check"] or supervisor.supervised():
        return
    folder = Path(command.config.runs_dir, command.config.run_name)
    run_process.refuse_taken(folder)
    if options["note"] is not None:
        training_log.check_note(options["note"], folder)


def _run_here(command: Command, source: Source, place: Place) -> int:
    """Runs a command in this process."""
    if command.name == "train":
        _prepare(command.config)
    elif command.name == "predict":
        os.environ.pop("TF_CONFIG", None)
        _prepare_alone(command.config)
    here = Path.cwd()
    callbacks = _load(source, command.config)
    config = command.config
    if source.path != source.stands_for:
        config = dataclasses.replace(config, callbacks=command.trained_with)
    if Path.cwd() != here:  # callbacks.py has gone elsewhere; the run stays where it was to be
        config = dataclasses.replace(config, runs_dir=here / config.runs_dir)  # type: ignore[arg-type]
    if command.name == "train":
        from ctl_core.checks.hooks import check_following
        from ctl_core.rehearsal import check
        from ctl_core.trainer import train

        check_following(command.options["then"], callbacks)
        options = command.options
        with run_process.of_command(_names(command), command.given):
            if options["check"]:
                state = check(callbacks, config)
            else:
                state = train(callbacks, config, bool(options["continue"]), options["note"])
        if state.stopped_by is not None:
            return 128 + state.stopped_by
        command = dataclasses.replace(command, config=state.config)
        alone = state.cluster.task.chief and not supervisor.supervised()  # the supervisor does it
        code = int(state.diverged)
        del state  # with what only training needs
        return (
            _follow(command, callbacks) if command.options["then"] and alone and not code else code
        )
    with interruptible():
        return _use_run(dataclasses.replace(command, config=config), callbacks)


def _prepare(config: Config) -> None:
    """Starts TensorFlow as the settings have it, before callbacks.py may start it otherwise."""
    with interruptible():
        _import_libraries(config.debug)
    from ctl_core.cluster.strategy import prepare

    if config.virtual_devices > 1:
        _find_devices(config.debug)
    prepare(config)


def _prepare_alone(config: Config) -> None:
    """The same for a process that uses a run, on the devices of its own."""
    if config.strategy == "multi_worker":
        config = dataclasses.replace(config, strategy="auto")
    _prepare(config)


def _load(source: Source, config: Config) -> ModuleType:
    """Imports the file with the hooks."""
    with interruptible():
        _import_libraries(config.debug)
        from ctl_core.console import quiet_libraries

        quiet_libraries(not config.debug)
        callbacks = load_callbacks(source)
        _find_devices(config.debug)  # now: callbacks.py may say which are visible
    return callbacks


def _names(command: Command) -> list[str]:
    """Returns the commands of ``--then``."""
    then = command.options["then"]
    return then.split(",") if then else []


def _follow(command: Command, callbacks: ModuleType) -> int:
    """Runs the commands of ``--then``, one after the other."""
    folder = Path(command.config.runs_dir, command.config.run_name or "").absolute()
    for name in _names(command):
        with following(folder, name), interruptible():
            _use_run(
                dataclasses.replace(command, name=name, options=default_options(name)), callbacks
            )
    return 0


def _import_libraries(debug: bool) -> None:
    """Imports TensorFlow and Keras without looking for garbage meanwhile, a sixth of the time.

    What they have made stays to the end, and later searches leave it out.
    """
    if "tensorflow" in sys.modules:
        return
    gc.disable()
    try:
        with _without_greeting(debug):
            importlib.import_module("keras")
            importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        raise SetupError(_missing(error.name)) from error
    except Exception as error:
        # TensorFlow's own is the whole traceback of the one that it followed.
        first = error.__context__ if "Traceback (" in str(error) else None
        raise SetupError(
            f"TensorFlow cannot be imported: {brief(first or error)}; if this Python and machine "
            f"are right for it, install it anew: {sys.executable} -m pip install --force-reinstall "
            "--editable ."
        ) from error
    finally:
        gc.enable()
    gc.freeze()


def _find_devices(debug: bool) -> None:
    """Lets TensorFlow look for GPUs, which it does once, without a word where there are none."""
    with _without_greeting(debug):
        sys.modules["tensorflow"].config.list_physical_devices()


# What TensorFlow 2.21 says of oneDNN, the processor and missing GPUs, and of saying it so early: a
# driver or library that is there and fails is none of it.
_GREETING = (
    "^I[0-9]{4} |^WARNING: All log messages before absl|^To enable the following in|"
    r"cuInit: (UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)"
)


@contextlib.contextmanager
def _without_greeting(debug: bool, pattern: str = _GREETING) -> Iterator[None]:
    """Leaves out what TensorFlow's C++ prints within, whatever its log level is; not in debugging.

    It goes to the file descriptor itself. Another process reads it and passes on the rest, also
    what TensorFlow says when it ends this one, as on a processor that it was not built for.
    """
    sys.stderr.flush()
    reader = None
    if not debug:
        with contextlib.suppress(OSError):  # Windows has no sed
            reader = subprocess.Popen(
                ["sed", "-E", f"/{pattern}/d"],
                stdin=subprocess.PIPE,
                stdout=2,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C is not meant for it
            )
    if reader is None:
        yield
        return
    assert reader.stdin
    stderr = os.dup(2)
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        reader.wait()


def _use_run(command: Command, callbacks: ModuleType) -> int:
    """Runs evaluate, predict or export on a run's checkpoint, in no cluster."""
    os.environ.pop("TF_CONFIG", None)  # of which libraries know, too
    from ctl_core.tools import commands

    run = getattr(commands, command.name)
    run(callbacks, command.config, command.options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
