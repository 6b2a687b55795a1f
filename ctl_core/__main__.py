"""Runs the command line: ``python -m ctl_core COMMAND``.

Exit codes:

- 0: The command succeeded.
- 1: The command failed while running, or training ended with a loss that is not finite.
- 2: The command line, a setting or a hook is wrong.
- 75: Another process of the cluster was lost.
- 130: Training saved a checkpoint and stopped after SIGINT, or stopped without saving after a
  second SIGINT.
- 143: Training saved a checkpoint and stopped after SIGTERM, SIGUSR1 or SIGHUP, or stopped without
  saving because it made no progress for ``stall_seconds``, or because it had not begun.
"""

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.getcwd():
    # Otherwise, a file of the project such as numbers.py would hide the module of this name that
    # libraries import. ``load_callbacks`` adds the folder again.
    del sys.path[0]

import contextlib
import dataclasses
import gc
import importlib
import logging
import time
import traceback
import types
from pathlib import Path
from typing import Any

from ctl_core.cluster import signals

if __name__ == "__main__":  # before the slow imports
    signals.end_quietly()

from ctl_core.machine.facts import has_avx
from ctl_core.machine.installation import describe_missing_package
from ctl_core.run.errors import CtlError, PeerLost, SetupError, format_error
from ctl_core.run.hash_seed import restart_with_fixed_seed

if __name__ == "__main__":  # before the imports that take time
    restart_with_fixed_seed()

try:
    from ctl_core.checkpoint.logical_replicas import settle_logical_replicas
    from ctl_core.checkpoint.source import find_start
    from ctl_core.checkpoint.stores import locate_mirror
    from ctl_core.cluster import background, supervisor
    from ctl_core.cluster.task import LONGEST, Task, read_task
    from ctl_core.commands.cli import COMMANDS, Command, parse_command
    from ctl_core.commands.doctor import examine
    from ctl_core.commands.stub import format_hook_stub, format_stub
    from ctl_core.hooks.callbacks_file import (
        HooksFile,
        check_compiles,
        find_callbacks,
        find_modules,
        load_callbacks,
    )
    from ctl_core.hooks.project_modules import ProjectModules
    from ctl_core.hooks.reference import find_spec, format_hook, format_table
    from ctl_core.run.files import choose_run_name, relative_path
    from ctl_core.run.output import keep_outputs, silence_stderr
    from ctl_core.run.settings import Config
except ModuleNotFoundError as error:
    print(f"error: {describe_missing_package(str(error.name))}", file=sys.stderr)
    sys.exit(2)

# The setting ``max_time`` counts from the start of the command, before the slow imports.
_STARTED = time.monotonic()
# The number of virtual devices on which ``--check`` trains.
CHECK_DEVICES = 3


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the command and its flags; default: the arguments of the process

    Returns:
        The exit code.
    """
    is_supervised = supervisor.die_with_supervisor()
    owns_process = argv is None
    if argv is None:
        argv = sys.argv[1:]
        signals.end_on_signals()
        keep_outputs()
    if not argv or argv[0] in ("-h", "--help"):
        _print_usage()
        return 0 if argv else 2
    debug = "--debug" in argv
    try:
        command = parse_command(argv)
        debug = command.config.debug
        return _run(command, argv, is_supervised)
    except SystemExit as end:  # raised by --help, or after a signal
        return int(end.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, text = _describe_failure(error)
        background.tell_failure(f"error: {text}")
        # The supervisor reports a lost peer itself, and knows which one it was and how it ended.
        is_reported = is_supervised and isinstance(error, PeerLost)
        if debug or not is_reported:
            print(f"error: {text}", file=sys.stderr, flush=True)
        if _would_hang_at_exit(code, owns_process):
            logging.shutdown()
            with contextlib.suppress(OSError):  # stdout may be a pipe whose reader has ended
                sys.stdout.flush()
            os._exit(code)
        return code


def _print_usage() -> None:
    print("usage: python -m ctl_core <command> [settings]\n\ncommands:")
    for name, flags in COMMANDS.items():
        print(f"  {name:10}{flags.text}")
    print("\n<command> --help shows its settings.")


def _print_hooks(name: str | None, is_stub: bool) -> None:
    """Prints all hooks, or everything about one; a stub is the code of defaults and examples."""
    if name is None:
        text = format_stub() if is_stub else format_table()
    else:
        spec = find_spec(name)
        text = format_hook_stub(spec) if is_stub else format_hook(spec)
    print(text, end="")


def _describe_failure(error: BaseException) -> tuple[int, str]:
    """Returns the exit code and the one-line message of a failure."""
    if isinstance(error, CtlError):
        return error.exit_code, str(error)
    error = signals.find_end(error)
    if isinstance(error, signals.Terminated):
        return signals.TERMINATED, signals.describe_end(str(error))
    if isinstance(error, KeyboardInterrupt):
        return signals.INTERRUPTED, "interrupted"
    if isinstance(error, PermissionError) and error.filename is not None:
        return 1, (
            f"{relative_path(os.fsdecode(error.filename))}: cannot be read or written: "
            f"{error.strerror}; change its permissions, or choose another folder."
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return 1, f"{format_error(error)} ({where}; --debug shows the traceback)"


def _would_hang_at_exit(code: int, owns_process: bool) -> bool:
    """Returns True if Python's own shutdown after a failure might never end."""
    # After an interrupt, a thread of the user's program may never end.
    if owns_process and code in (signals.INTERRUPTED, signals.TERMINATED):
        return True
    # TensorFlow's shutdown waits for the other processes of a cluster, while these wait for this
    # process in a collective. The module is looked up in sys.modules rather than imported, because
    # importing it would import TensorFlow.
    strategy = sys.modules.get("ctl_core.cluster.strategy")
    return strategy is not None and bool(strategy.has_joined())


def _run(command: Command, argv: list[str], is_supervised: bool) -> int:
    """Runs a parsed command and returns its exit code.

    Args:
        command: the command
        argv: the command line, which is passed on to the processes of a cluster
        is_supervised: whether a supervisor has started this process
    """
    if command.name == "hooks":
        _print_hooks(command.options["hook"], command.options["stub"])
        return 0
    if command.name == "doctor":
        return examine(command.options["deep"])
    config = command.config
    is_training = command.name == "train"
    task = Task()
    if is_training:
        # Reports a wrong fork or init_from before TensorFlow is imported.
        start_over = command.options["start_over"] or command.options["check"]
        config = settle_logical_replicas(config, find_start(config, start_over))
        task = read_task(config)
    if task.kind == "ps":
        print("ps: gradients are summed between the workers; no parameter server is needed.")
        return 0
    if task.kind == "evaluator":
        print("cluster: this is the evaluator: evaluate --watch", flush=True)
        return _run(_await_run(config), argv, is_supervised)

    # TensorFlow's C++ messages are about the machine, not the run. When a cluster loses a process,
    # TensorFlow prints many messages, but the engine reports the loss in one line.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if config.debug else "3")
    hooks_file = find_callbacks(
        config.callbacks,
        command.run,
        command.trained_with,
        is_training,
        is_named=command.names_callbacks,
    )
    if not is_supervised:  # the supervisor has printed the notes already
        _print_notes(command, task)
    check_compiles(hooks_file)
    if not is_training or command.options["check"]:
        config = _leave_cluster(config)
    elif command.options["background"] and not background.is_in_background():
        _print_note(hooks_file)
        return _start_in_background(config, argv)
    elif config.workers > 1 and not is_supervised:
        name = config.run_name or choose_run_name(Path(config.runs_dir))
        return supervisor.start_cluster(argv, dataclasses.replace(config, run_name=name))
    # Each process prints the note, because the file may have changed before a cluster is restarted.
    _print_note(hooks_file)
    return _run_here(command, config, hooks_file)


def _start_in_background(config: Config, argv: list[str]) -> int:
    """Starts training in another process, and returns 0 once that process has taken a step.

    Args:
        config: the settings
        argv: the command line
    """
    name = config.run_name or choose_run_name(Path(config.runs_dir))
    words = [word for word in argv if word.partition("=")[0] != "--background"]
    return background.start([*words, "--run-name", name], Path(config.runs_dir) / name)


def _print_notes(command: Command, task: Task) -> None:
    """Prints notes about settings and the cluster."""
    for note in command.notes:
        print(note, flush=True)
    if task.processes > 1:
        print(f"cluster: {task.describe(task.index)}, of {task.processes}", flush=True)


def _print_note(hooks_file: HooksFile) -> None:
    """Prints a note if the hooks have changed since the run was trained."""
    if hooks_file.note:
        print(hooks_file.note, flush=True)


def _leave_cluster(config: Config) -> Config:
    """Returns the settings of a command that runs in this process only, even in a cluster."""
    os.environ.pop("TF_CONFIG", None)  # other libraries read this variable, too
    strategy = "auto" if config.strategy == "multi_worker" else config.strategy
    return dataclasses.replace(config, workers=1, strategy=strategy)


def _run_here(command: Command, config: Config, hooks_file: HooksFile) -> int:
    """Runs a command in this process.

    Args:
        command: the command
        config: the settings of the command that apply to this process
        hooks_file: the file with the hooks
    """
    is_training = command.name == "train"
    if is_training and sys.stdout.isatty():
        run = config.run_name or "a new run"
        print(f"{run}: loading TensorFlow …", flush=True)
    _import_libraries(config.debug)
    from ctl_core.run.console import quiet_libraries

    if is_training:
        _prepare_devices(config, command.options["check"])
    elif config.intra_op_threads is not None:  # the number of threads changes the order of sums
        _prepare_devices(dataclasses.replace(config, virtual_devices=1), is_check=False)
    quiet_libraries(not config.debug)
    if not is_training:
        signals.leave_to_system()
    if hooks_file.path == hooks_file.stands_for:
        return _run_hooks(command, config, hooks_file)
    modules = find_modules(hooks_file, Path.cwd())  # a run also has copies of the modules
    with modules.activate():
        return _run_hooks(command, config, hooks_file, modules)


def _run_hooks(
    command: Command,
    config: Config,
    hooks_file: HooksFile,
    modules: ProjectModules | None = None,
) -> int:
    """Imports the hooks and runs a command with them.

    Args:
        command: the command
        config: the settings of the command that apply to this process
        hooks_file: the file with the hooks
        modules: the modules of a copy, which are active; None if the file is not a copy
    """
    folder = Path.cwd()
    callbacks = load_callbacks(hooks_file, modules=modules)
    # If callbacks.py has changed the working directory, the folder of the run must stay the same.
    if Path.cwd() != folder:
        config = dataclasses.replace(
            config,
            runs_dir=str(folder / config.runs_dir),
            mirror=locate_mirror(config.mirror, folder),
        )
    if hooks_file.path != hooks_file.stands_for:
        config = dataclasses.replace(config, callbacks=command.trained_with)
    if command.name == "train":
        return _train(callbacks, config, command.options)
    from ctl_core.commands import use

    getattr(use, command.name)(callbacks, config, **command.options)
    return 0


def _prepare_devices(config: Config, is_check: bool) -> None:
    """Sets up TensorFlow's devices.

    Call this before callbacks.py is imported, because it may initialize TensorFlow, after which
    devices can no longer be set up.
    """
    from ctl_core.cluster.strategy import prepare

    devices = config.virtual_devices
    if is_check:
        devices = max(devices, CHECK_DEVICES)
    prepare(dataclasses.replace(config, virtual_devices=devices))


def _train(callbacks: types.ModuleType, config: Config, options: dict[str, Any]) -> int:
    """Trains, or checks the hooks.

    Returns:
        The exit code: 128 + N after signal N, 1 if the last loss is not finite, otherwise 0.
    """
    if options["check"]:
        from ctl_core.commands.check import check

        state = check(callbacks, config)
    else:
        from ctl_core.commands.train import Start, train_here

        start = Start(
            _STARTED,
            go_on=options["continue"],
            note=options["note"],
            start_over=options["start_over"],
        )
        state = train_here(callbacks, config, start)
    if state.stopped_by is not None:
        return 128 + state.stopped_by
    return int(state.diverged)


def _await_run(config: Config) -> Command:
    """Waits until the cluster has started its run, and returns the command that evaluates the run.

    Raises:
        PeerLost: the run has not started within ``LONGEST`` seconds.
    """
    run = Path(config.runs_dir, str(config.run_name))
    deadline = time.monotonic() + LONGEST
    while not (run / "config.yaml").is_file():
        if time.monotonic() > deadline:
            raise PeerLost(f"no run to evaluate appeared at {run} within {LONGEST:.0f} s")
        time.sleep(0.2)
    return parse_command(["evaluate", run.name, "--watch", f"--runs-dir={config.runs_dir}"])


def _import_libraries(debug: bool) -> None:
    """Imports TensorFlow and Keras with garbage collection off, which saves a sixth of the time.

    The objects that the import creates exist until the process ends, so later collections skip
    them as well. During the import, TensorFlow's C++ code prints the processor's features to stderr
    at any log level. Without ``debug``, these lines are dropped.
    """
    if "tensorflow" in sys.modules:
        return
    if not has_avx():  # TensorFlow would end the process without a message of its own
        raise SetupError(
            "this processor has no AVX instructions, which TensorFlow needs; "
            "python -m ctl_core doctor says what to do."
        )
    gc.disable()
    try:
        with silence_stderr(not debug):
            importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        raise SetupError(describe_missing_package(error.name)) from error
    finally:
        gc.enable()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
