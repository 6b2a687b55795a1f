"""The command line: ``python -m ctl_core <command>``.

Exit codes: 0 done, 1 failed while running or ended with a loss that is not finite, 2 wrong usage,
settings or hooks, 75 lost another process of its cluster, 130 and 143 stopped by SIGINT or SIGTERM
after saving; 130, too, ended by a second SIGINT.
"""

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import sys
import time
import traceback
from pathlib import Path

from ctl_core.run.errors import CtlError, PeerLost, format_error

try:
    from ctl_core.checkpoint.source import find_start
    from ctl_core.cluster import supervisor
    from ctl_core.cluster.signals import INTERRUPTED
    from ctl_core.cluster.task import LONGEST, Task, read_task
    from ctl_core.commands.cli import COMMANDS, Command, parse_command
    from ctl_core.hooks.callbacks_file import check_compiles, find_callbacks, load_callbacks
    from ctl_core.hooks.reference import find_spec, format_hook, format_table
    from ctl_core.run.files import choose_run_name
    from ctl_core.run.settings import Config
except ModuleNotFoundError as error:
    install = f"{sys.executable} -m pip install --editable ."
    where = f"is not installed in {sys.prefix}; in the project's folder"
    print(f"error: {error.name} {where}: {install}", file=sys.stderr)
    sys.exit(2)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    supervised = supervisor.die_with_supervisor()
    alone = argv is None  # the process is this command's
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m ctl_core <command> [settings]\n\ncommands:")
        for name, flags in COMMANDS.items():
            print(f"  {name:10}{flags.text}")
        print("\n<command> --help shows its settings.")
        return 0 if argv else 2
    try:
        command = parse_command(argv)
        debug = command.config.debug
        return _run(command, argv, supervised)
    except SystemExit as ended:  # --help, or a signal
        return int(ended.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, text = _describe(error)
        # Of a lost peer, the supervisor can say more: which one, and how.
        if debug or not (isinstance(error, PeerLost) and supervised):
            print(f"error: {text}", file=sys.stderr, flush=True)
        strategy = sys.modules.get("ctl_core.cluster.strategy")
        # TensorFlow's own end would wait for the other processes of a cluster, which wait for this
        # one in a collective. Of a process that was interrupted, some thread may never end.
        if (alone and code == INTERRUPTED) or (strategy is not None and strategy.has_joined()):
            logging.shutdown()
            with contextlib.suppress(OSError):  # nobody may read it any more
                sys.stdout.flush()
            os._exit(code)
        return code


def _describe(error: BaseException) -> tuple[int, str]:
    """Returns the exit code of a failure, and what to say of it in one line."""
    if isinstance(error, CtlError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return 1, f"{format_error(error)} ({where}; --debug shows the traceback)"


def _run(command: Command, argv: list[str], supervised: bool) -> int:
    config, training = command.config, command.name == "train"
    if command.name == "hooks":
        name = command.options["hook"]
        print(format_table() if name is None else format_hook(find_spec(name)), end="")
        return 0
    task = Task()
    if training:
        find_start(config)  # at once; a program's Run looks by itself
        task = read_task(config)
    notes = list(command.notes)
    if task.processes > 1:
        notes.append(f"cluster: {task.describe(task.index)}, of {task.processes}")
    if task.kind == "ps":
        print("ps: gradients are summed between the workers; no parameter server is needed.")
        return 0
    if task.kind == "evaluator":
        print("cluster: this is the evaluator: evaluate --watch", flush=True)
        return _run(_await_run(config), argv, supervised)
    # TensorFlow's C++ messages are about the machine, not about the run; those of a cluster that
    # loses a process are many, and say what one line of ours says.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if config.debug else "3")
    source = find_callbacks(config.callbacks, command.run, command.trained_with, training)
    # The supervisor has said the rest.
    for note in () if supervised else filter(None, (*notes, source.note)):
        print(note, flush=True)
    check_compiles(source)
    if not training or command.options["check"]:  # in this process alone
        os.environ.pop("TF_CONFIG", None)  # of which libraries know, too
        alone = "auto" if config.strategy == "multi_worker" else config.strategy
        config = dataclasses.replace(config, workers=1, strategy=alone)
    if config.workers > 1 and not supervised:
        name = config.run_name or choose_run_name(Path(config.runs_dir))
        return supervisor.start_cluster(argv, dataclasses.replace(config, run_name=name))
    here = Path.cwd()
    _import_libraries(config.debug)
    from ctl_core.cluster.strategy import prepare
    from ctl_core.run.console import quiet_libraries

    if training:  # before callbacks.py may start TensorFlow otherwise; a check has 3 devices
        devices = max(3 if command.options["check"] else 1, config.virtual_devices)
        prepare(dataclasses.replace(config, virtual_devices=devices))
    quiet_libraries(not config.debug)
    callbacks = load_callbacks(source)
    if Path.cwd() != here:  # callbacks.py has gone elsewhere; the run stays where it was to be
        config = dataclasses.replace(config, runs_dir=str(here / config.runs_dir))
    if source.path != source.stands_for:
        config = dataclasses.replace(config, callbacks=command.trained_with)
    if not training:
        from ctl_core.commands import use

        getattr(use, command.name)(callbacks, config, **command.options)
        return 0
    if command.options["check"]:
        from ctl_core.commands.check import check

        state = check(callbacks, config)
    else:
        from ctl_core.commands.train import train

        state = train(callbacks, config, command.options["continue"], command.options["note"])
    return int(state.diverged) if state.stopped_by is None else 128 + state.stopped_by


def _await_run(config: Config) -> Command:
    """Returns the command of an evaluator in the cluster of a training, when the run has begun."""
    run, end = Path(config.runs_dir, str(config.run_name)), time.monotonic() + LONGEST
    while not (run / "config.yaml").is_file():
        if time.monotonic() > end:
            raise PeerLost(f"after {LONGEST:.0f} s, there is no run to evaluate: {run}")
        time.sleep(0.2)
    return parse_command(["evaluate", run.name, "--watch", f"--runs-dir={config.runs_dir}"])


def _import_libraries(debug: bool) -> None:
    """Imports TensorFlow and Keras: quietly, and without looking for garbage, a sixth of the time.

    As it is imported, TensorFlow's C++ says what processor it runs on, whatever its log level is;
    what it has made stays to the end, and later searches for garbage leave it out.
    """
    if "tensorflow" in sys.modules:
        return
    gc.disable()
    stderr = os.dup(2)
    if not debug:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
    try:
        importlib.import_module("keras")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        gc.enable()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
