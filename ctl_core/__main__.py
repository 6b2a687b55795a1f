"""The command line: ``python -m ctl_core <command>``.

Exit codes: 0 done, 1 failed while running, 2 wrong usage, settings or hooks, 130 and 143 stopped
by SIGINT or SIGTERM after saving.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from ctl_core.config import COMMANDS, Command, nearest, parse_command
from ctl_core.errors import CtlError, SetupError, one_line


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv or os.environ.get("CTL_DEBUG", "").lower() in ("1", "true", "yes")
    try:
        return _run(argv)
    except CtlError as error:
        _complain(str(error), debug)
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted", debug)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        _complain(
            f"{type(error).__name__}: {one_line(error)} ({Path(where.filename).name}:"
            f"{where.lineno}; --debug shows the traceback)",
            debug,
        )
        return 1


def _complain(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr, flush=True)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m ctl_core <command> [settings]\n\ncommands:")
        for name, text in COMMANDS.items():
            print(f"  {name:10}{text}")
        print("\n<command> --help shows its settings.")
        return 0 if argv else 2
    name = argv[0]
    if name not in COMMANDS:
        raise SetupError(f"unknown command {name!r}{nearest(name, COMMANDS)}")
    if name == "hooks":
        from ctl_core.table import print_table

        _expect_no_more(argv[1:])
        print_table()
        return 0
    try:
        command = parse_command(argv)
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)
    # TensorFlow's C++ messages are about the machine, not about the run.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if command.config.debug else "2")
    callbacks = load_callbacks(Path("callbacks.py"))
    if name == "train":
        from ctl_core.loop import train

        state = train(callbacks, command.config)
        return 0 if state.stopped_by is None else 128 + state.stopped_by
    return _use_run(command, callbacks)


def _expect_no_more(rest: list[str]) -> None:
    if rest and rest[0] in ("-h", "--help"):
        print("usage: python -m ctl_core hooks\n\nPrints the table of hooks.")
        raise SystemExit(0)
    if rest:
        raise SetupError(f"unexpected word {rest[0]!r}: hooks takes no settings.")


def _use_run(command: Command, callbacks: ModuleType) -> int:
    """Runs evaluate, predict or export on a run's checkpoint."""
    from ctl_core import commands

    run = getattr(commands, command.name)
    run(callbacks, command.config, command.options)
    return 0


def load_callbacks(path: Path) -> ModuleType:
    """Imports callbacks.py from the current folder.

    Raises:
        SetupError: it is missing, or cannot be imported; with its own line and message.
    """
    if not path.exists():
        raise SetupError(f"no {path.name} in {Path.cwd()}; run this in the project's folder.")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{Path(error.filename or path.name).name}:{error.lineno}"
        raise SetupError(f"{where}: {type(error).__name__}: {error.msg}") from error
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path.resolve())
        ]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        raise SetupError(f"{where}: {type(error).__name__}: {one_line(error)}") from error
    return module


if __name__ == "__main__":
    sys.exit(main())
