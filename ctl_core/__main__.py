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

from ctl_core.errors import CtlError, PeerLost, SetupError, brief

_INSTALL = f"{sys.executable} -m pip install --editable ."

try:
    from ctl_core.callbacks_file import Source, check_compiles, find_callbacks, load_callbacks
    from ctl_core.cli import COMMANDS, Command, as_evaluator, parse_command
    from ctl_core.cluster import supervisor
    from ctl_core.cluster.signals import INTERRUPTED, interruptible
    from ctl_core.cluster.task import Task, read_task
    from ctl_core.settings import free_name, nearest
    from ctl_core.sources import check_start
    from ctl_core.table import TEXT
except ModuleNotFoundError as error:
    where = f"is not installed in {sys.prefix}; in the project's folder"
    print(f"error: {error.name} {where}: {_INSTALL}", file=sys.stderr)
    sys.exit(2)


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
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        _complain(f"{brief(error)} ({where}; --debug shows the traceback)", debug)
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
    name = argv[0] if argv else "--help"
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
        print(TEXT, end="")
        return 0
    try:
        return parse_command(argv)
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)


def _run(command: Command, argv: list[str]) -> int:
    config, training = command.config, command.name == "train"
    if training:
        check_start(config)  # at once; a program's Run looks by itself
    task = read_task(config) if training else Task()
    supervised = supervisor.is_supervised()  # then the supervisor has said the rest
    for note in () if supervised else command.notes:
        print(note, flush=True)
    if task.processes > 1 and not supervised:
        print(f"cluster: {task.shown(task.index)}, of {task.processes}", flush=True)
    if task.kind == "ps":
        print("ps: gradients are summed between the workers; no parameter server is needed.")
        return 0
    if task.kind == "evaluator":
        print("cluster: this is the evaluator: evaluate --watch", flush=True)
        with interruptible():
            command, training = as_evaluator(command), False
    # TensorFlow's C++ messages are about the machine, not about the run; those of a cluster that
    # loses a process are many, and say what one line of ours says.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if config.debug else "3")
    source = find_callbacks(config.callbacks, command.run, command.trained_with, training)
    if source.note and not supervised:
        print(source.note, flush=True)
    check_compiles(source)
    if not training or command.options["check"]:  # in this process alone
        os.environ.pop("TF_CONFIG", None)  # of which libraries know, too
        alone = "auto" if config.strategy == "multi_worker" else config.strategy
        config = dataclasses.replace(config, workers=1, strategy=alone)
    if config.workers > 1 and not supervised:
        name = config.run_name or free_name(Path(config.runs_dir))
        return supervisor.start_cluster(argv, dataclasses.replace(config, run_name=name))
    return _run_here(dataclasses.replace(command, config=config), source)


def _run_here(command: Command, source: Source) -> int:
    """Runs a command in this process."""
    config, options, training = command.config, command.options, command.name == "train"
    here = Path.cwd()
    with interruptible():
        _import_libraries(config.debug)
        from ctl_core.cluster.strategy import prepare
        from ctl_core.console import quiet_libraries

        if training:
            devices = max(3 if options["check"] else 1, config.virtual_devices)
            # Before callbacks.py may start TensorFlow otherwise; a check compares devices.
            prepare(dataclasses.replace(config, virtual_devices=devices))
        quiet_libraries(not config.debug)
        callbacks = load_callbacks(source)
    if source.path != source.stands_for:
        config = dataclasses.replace(config, callbacks=command.trained_with)
    if Path.cwd() != here:  # callbacks.py has gone elsewhere; the run stays where it was to be
        config = dataclasses.replace(config, runs_dir=str(here / config.runs_dir))
    if not training:
        from ctl_core.tools import commands

        with interruptible():
            getattr(commands, command.name)(callbacks, config, options)
        return 0
    if options["check"]:
        from ctl_core.commands.check import check

        state = check(callbacks, config)
    else:
        from ctl_core.trainer import train

        state = train(callbacks, config, options["continue"], options["note"])
    return int(state.diverged) if state.stopped_by is None else 128 + state.stopped_by


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
    except Exception as error:
        again = f"install it anew: {_INSTALL} --force-reinstall"
        raise SetupError(f"TensorFlow cannot be imported: {brief(error)}; {again}") from error
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


if __name__ == "__main__":
    sys.exit(main())
