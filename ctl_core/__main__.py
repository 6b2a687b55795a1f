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
    from ctl_core.callbacks_file import Source, check_compiles, find_callbacks, load_callbacks
    from ctl_core.cli import Command, as_evaluator, parse_command
    from ctl_core.cluster import supervisor
    from ctl_core.cluster.signals import INTERRUPTED, interruptible
    from ctl_core.cluster.task import Task, read_task
    from ctl_core.options import COMMANDS
    from ctl_core.settings import Config, free_name, nearest
    from ctl_core.sources import check_start
    from ctl_core.table import TEXT
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
    try:
        command = _read(argv)
        if isinstance(command, int):
            return command
        debug = command.config.debug
        return _run(command, argv)
    except CtlError as error:
        # Of a lost peer, the supervisor can say more: which one, and how.
        if not (isinstance(error, PeerLost) and supervisor.is_supervised() and not debug):
            _complain(str(error), debug)
        return _leave(error.exit_code)
    except KeyboardInterrupt:
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
        return parse_command(argv)
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)


def _print_hooks(rest: list[str]) -> int:
    if rest and rest[0] in ("-h", "--help"):
        print("usage: python -m ctl_core hooks\n\nPrints the table of hooks.")
    elif rest:
        raise SetupError(f"unexpected word {rest[0]!r}: hooks takes no settings.")
    else:
        print(TEXT, end="")
    return 0


def _run(command: Command, argv: list[str]) -> int:
    if command.name == "train":
        check_start(command.config)  # at once; a program's Run looks by itself
    # TensorFlow's C++ messages are about the machine, not about the run; those of a cluster that
    # loses a process are many, and say what one line of ours says.
    task = read_task(command.config) if command.name == "train" else Task()
    for note in () if supervisor.is_supervised() else command.notes:  # the supervisor has said it
        print(note, flush=True)
    if task.processes > 1 and not supervisor.is_supervised():
        print(f"cluster: {task.shown(task.index)}, of {task.processes}", flush=True)
    if task.kind == "ps":
        print("ps: gradients are summed between the workers; no parameter server is needed.")
        return 0
    if task.kind == "evaluator":
        print("cluster: this is the evaluator: evaluate --watch", flush=True)
        with interruptible():
            command = as_evaluator(command)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if command.config.debug else "3")
    source = find_callbacks(
        command.config.callbacks, command.run, command.trained_with, command.name == "train"
    )
    if source.note and not supervisor.is_supervised():
        print(source.note, flush=True)
    check_compiles(source)
    if command.name != "train" or command.options["check"]:
        command = _leave_cluster(command)
    if command.config.workers > 1 and not supervisor.is_supervised():
        name = command.config.run_name or free_name(Path(command.config.runs_dir))
        return supervisor.start_cluster(argv, dataclasses.replace(command.config, run_name=name))
    return _run_here(command, source)


def _leave_cluster(command: Command) -> Command:
    """Returns the command for this process alone: a check, or of a run that is there."""
    os.environ.pop("TF_CONFIG", None)  # of which libraries know, too
    strategy = command.config.strategy.replace("multi_worker", "auto")
    config = dataclasses.replace(command.config, workers=1, strategy=strategy)  # type: ignore[arg-type]
    return dataclasses.replace(command, config=config)


def _run_here(command: Command, source: Source) -> int:
    """Runs a command in this process."""
    if command.name in ("train", "predict"):
        _prepare(command.config)
    here = Path.cwd()
    callbacks = _load(source, command.config)
    config = command.config
    if source.path != source.stands_for:
        config = dataclasses.replace(config, callbacks=command.trained_with)
    if Path.cwd() != here:  # callbacks.py has gone elsewhere; the run stays where it was to be
        config = dataclasses.replace(config, runs_dir=here / config.runs_dir)  # type: ignore[arg-type]
    if command.name == "train":
        options = command.options
        if options["check"]:
            from ctl_core.rehearsal import check

            state = check(callbacks, config)
        else:
            from ctl_core.trainer import train

            state = train(callbacks, config, bool(options["continue"]), options["note"])
        return int(state.diverged) if state.stopped_by is None else 128 + state.stopped_by
    with interruptible():
        return _use_run(dataclasses.replace(command, config=config), callbacks)


def _prepare(config: Config) -> None:
    """Starts TensorFlow as the settings have it, before callbacks.py may start it otherwise."""
    with interruptible():
        _import_libraries(config.debug)
    from ctl_core.cluster.strategy import prepare

    prepare(config)


def _load(source: Source, config: Config) -> ModuleType:
    """Imports the file with the hooks."""
    with interruptible():
        _import_libraries(config.debug)
        from ctl_core.console import quiet_libraries

        quiet_libraries(not config.debug)
        return load_callbacks(source)


def _import_libraries(debug: bool) -> None:
    """Imports TensorFlow and Keras without looking for garbage meanwhile, a sixth of the time.

    What they have made stays to the end, and later searches leave it out.
    """
    if "tensorflow" in sys.modules:
        return
    gc.disable()
    try:
        with _silence(debug):
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


@contextlib.contextmanager
def _silence(debug: bool) -> Iterator[None]:
    """Drops what TensorFlow's C++ prints within, to the file descriptor itself; not in debugging.

    As it is imported, it says what processor it runs on, whatever its log level is.
    """
    if debug:
        yield
        return
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _use_run(command: Command, callbacks: ModuleType) -> int:
    """Runs evaluate, predict or export on a run's checkpoint."""
    from ctl_core.tools import commands

    run = getattr(commands, command.name)
    run(callbacks, command.config, command.options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
