"""Trains on Ray: it places the workers, starts them again after a loss, and shows what they report.

    pip install -e ".[ray]"
    python launch/ray_job.py --num-workers 4 --use-gpu -- --run-name a --steps 10000
    ray job submit --working-dir . -- python launch/ray_job.py -- --runs-dir /shared/runs

What follows ``--`` are settings, as for train.sh. Each worker is an actor that runs
``python -m ctl_core train`` with the cluster that Ray has made of the workers; runs/ has to be in a
folder that all nodes share. A lost worker or node: Ray starts all workers anew, and training goes
on at the last checkpoint. A hook or setting that fails ends the job. Ctrl-C, or ``ray job stop``,
lets the workers save first. The file is yours to change.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

# Ray imports TensorFlow in each of its processes, which has much to say of the machine.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

try:
    import ray
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f'error: {error.name} is missing: python -m pip install -e ".[ray]"', file=sys.stderr)
    sys.exit(2)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctl_core.commands.cli import parse_command
from ctl_core.run.errors import CtlError, SetupError
from ctl_core.run.files import choose_run_name

PROJECT = Path(__file__).resolve().parents[1]
# Exit codes of ``ctl_core train`` that no new start would change: done, failed, wrong settings or
# hooks, interrupted. All others mean that something was lost.
FINAL = (0, 1, 2, 128 + signal.SIGINT)
# The folder in which Ray keeps what ``ray job submit --working-dir`` has uploaded.
UPLOADED = "working_dir_files"
PAUSE = 0.5  # seconds between two looks at a worker
LATE = 60.0  # seconds that others may take to end after the first one


@dataclasses.dataclass(frozen=True)
class Job:
    """What the workers are told.

    Attributes:
        settings: of ``ctl_core train``, with the run's name and an absolute runs_dir
        run: the run's folder
        project: the project's folder
    """

    settings: list[str]
    run: str
    project: str


class Board:
    """What all workers know of each other: Ray wants the same reports from each of them."""

    def __init__(self) -> None:
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._codes: list[int] = []
        self._stopping = False

    def stop(self) -> None:
        """Asks the workers to save and to end."""
        self._stopping = True

    def stopping(self) -> bool:
        """Whether they are asked to."""
        return self._stopping

    def add(self, group: str, report: dict[str, Any]) -> None:
        """Takes a report of the chief of a group of workers."""
        self._reports.setdefault(group, []).append(report)

    def report(self, group: str, number: int) -> dict[str, Any] | None:
        """Returns one of them, if it is there already."""
        return dict(enumerate(self._reports.get(group, []))).get(number)

    def end(self, code: int) -> None:
        """Takes an exit code that is final."""
        self._codes.append(code)

    def code(self) -> int | None:
        """Returns the one that says most: of what failed, if anything did."""
        return max(self._codes, key=bool, default=None)


def create_board() -> Any:
    """Makes the board on the node of this program, which the job does not outlive anyway."""
    here = ray.get_runtime_context().get_node_id()
    placed = NodeAffinitySchedulingStrategy(here, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=placed)(Board).remote()


class Metrics:
    """Reads what a run writes to metrics.jsonl, and which its newest checkpoint is."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)
        self._position = 0
        self._values: dict[str, Any] = {}

    def news(self) -> dict[str, Any]:
        """Returns the newest values, such as train_loss and eval_accuracy, if any are new."""
        records = self._run.glob("ckpt/engine/ckpt-*.json")
        newest = max(records, key=lambda path: path.stat().st_mtime, default=None)
        found = {**self._read(), "checkpoint": newest and newest.stem}
        before, self._values = self._values, self._values | found
        news = "step" in self._values and self._values != before
        return {**self._values, "run": str(self._run)} if news else {}

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError), open(self._run / "metrics.jsonl", "rb") as file:
            if os.fstat(file.fileno()).st_size < self._position:
                self._position = 0  # a resumed run takes back what it will compute again
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                values = json.loads(line)
                split = values.pop("split")
                found["step"] = values.pop("step")
                found |= {f"{split}_{name}": value for name, value in values.items()}
        return found

    def report(self, values: dict[str, Any]) -> None:
        """Reports values to Ray, and where the newest checkpoint is: it stays there.

        Ray's result has the metrics of the last report that came with a checkpoint.
        """
        with tempfile.TemporaryDirectory() as folder:
            pointer = {"run": str(self._run), "checkpoint": values["checkpoint"]}
            Path(folder, "pointer.json").write_text(json.dumps(pointer))
            checkpoint = values["checkpoint"] and ray.train.Checkpoint.from_directory(folder)
            ray.train.report(values, checkpoint)


def worker(options: dict[str, Any]) -> None:
    """Runs one worker of the cluster; Ray calls it in each, with TF_CONFIG in the environment."""
    job, board = Job(**options["job"]), options["board"]
    logging.disable(logging.INFO)  # Ray's lines for each report
    if ray.get(board.code.remote()) is not None:
        return  # Ray starts all anew when one is lost: also by what ended another for good
    if ray.get(board.stopping.remote()):  # lost while it was to save: it goes on another time
        ray.get(board.end.remote(128 + signal.SIGINT))
        return
    cluster = json.loads(os.environ["TF_CONFIG"])
    group, index = json.dumps(cluster["cluster"]), cluster["task"]["index"]
    if not Path(job.project).is_dir():
        raise RuntimeError(f"no folder {job.project} on this node: share it, or use ray job submit")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("TF_USE_LEGACY_KERAS", None)  # Ray sets it, and means Keras 2
    command = [sys.executable, "-m", "ctl_core", "train", *job.settings]
    process = subprocess.Popen(command, cwd=job.project, env=environment, preexec_fn=end_with_us)
    metrics, reported = Metrics(job.run), 0
    ended: float | None = None
    told = False
    while True:
        code = process.poll()
        if code is None and not told and ray.get(board.stopping.remote()):
            told = True
            process.send_signal(signal.SIGINT)
        if code is not None and ended is None:
            ended = time.monotonic()
            if code in FINAL:
                ray.get(board.end.remote(code))
        if index == 0 and (news := metrics.news()):
            ray.get(board.add.remote(group, news))
        if index == 0 and code is not None:
            ray.get(board.add.remote(group, {}))  # the end
        while (report := ray.get(board.report.remote(group, reported))) is not None:
            if not report:
                break
            reported += 1
            (metrics.report if index == 0 else ray.train.report)(report)
        late = ended is not None and time.monotonic() - ended > LATE
        if code is not None and (report == {} or late):
            break
        time.sleep(PAUSE)
    if code not in FINAL and ray.get(board.code.remote()) is None:
        raise RuntimeError(f"worker {index} was lost (exit code {code})")


def end_with_us() -> None:
    """Lets a process hear SIGINT, and end when Ray kills the actor that started it (Linux)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which Ray's block
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def make_job(settings: list[str]) -> Job:
    """Checks the settings, here and before any worker starts; gives the run its name and folder.

    Raises:
        CtlError: one of them cannot be.
    """
    here = os.getcwd()
    os.chdir(PROJECT)
    config = parse_command(["train", *settings]).config
    os.chdir(here)
    runs_dir = Path(PROJECT, config.runs_dir).resolve()
    if UPLOADED in PROJECT.parts and runs_dir.is_relative_to(PROJECT):
        raise SetupError(
            "runs_dir: Ray removes this copy of the project some time after the job, with the run "
            "in it; name a folder that all nodes share: -- --runs-dir /shared/runs"
        )
    name = config.run_name or choose_run_name(runs_dir)
    own = ["--run-name", name, "--runs-dir", str(runs_dir), "--workers", "1"]
    return Job([*settings, *own], str(runs_dir / name), str(PROJECT))


def train(
    settings: list[str],
    num_workers: int = 1,
    use_gpu: bool = False,
    cpus_per_worker: float = 1,
    max_failures: int = 3,
    callbacks: list[Any] | None = None,
    board: Any = None,
) -> tuple[int, ray.train.Result]:
    """Trains on a cluster that ``ray.init`` has connected to; Ray Tune may call it, too.

    Args:
        settings: as for train.sh
        num_workers: how many processes
        use_gpu: whether each gets a GPU
        cpus_per_worker: how many CPUs Ray counts for each
        max_failures: how often a lost worker is made good; -1 for no end
        callbacks: of Ray Train, such as Ray Tune's TuneReportCallback
        board: what the workers know of each other, where somebody is to stop them by it

    Returns:
        The exit code of training, and Ray's result, with the newest metrics.

    Raises:
        CtlError: a setting cannot be.
    """
    job, board = make_job(settings), board or create_board()
    trainer = TensorflowTrainer(
        worker,
        train_loop_config={"job": dataclasses.asdict(job), "board": board},
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": cpus_per_worker, **({"GPU": 1} if use_gpu else {})},
        ),
        run_config=ray.train.RunConfig(
            name=Path(job.run).name,
            storage_path=str(Path(job.run).parent / ".ray"),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
            callbacks=callbacks,
        ),
    )
    result = trainer.fit()
    return ray.get(board.code.remote()) or 0, result


def train_until_told(**options: Any) -> tuple[int, ray.train.Result]:
    """The same; at a SIGINT or SIGTERM, the workers save and end; at the next, all ends at once."""
    board = create_board()

    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.default_int_handler)
        print(f"{signal.Signals(number).name}: the run is saved, and the job ends.", flush=True)
        board.stop.remote()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    # Not in the main thread, where Ray would take the signals.
    found: Future[tuple[int, ray.train.Result]] = Future()

    def run() -> None:
        try:
            found.set_result(train(**options, board=board))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result()


def main() -> int:
    """Reads the command line, and trains."""
    parser = argparse.ArgumentParser(
        description="Trains on Ray.", usage="%(prog)s [options] -- [settings of ctl_core train]"
    )
    parser.add_argument("--num-workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--use-gpu", action="store_true", help="give each of them a GPU")
    parser.add_argument("--cpus-per-worker", type=float, default=1, help="(default: 1)")
    parser.add_argument(
        "--max-failures", type=int, default=3, help="how often to make good a loss (default: 3)"
    )
    parser.add_argument("--address", help="of a Ray cluster; default: the one here, or a new one")
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    try:
        make_job(options["settings"])  # before anything is started
        ray.init(
            address=options.pop("address"),
            runtime_env={"env_vars": {"TF_CPP_MIN_LOG_LEVEL": "3"}},
            logging_level="warning",
        )
        code, result = train_until_told(**options)
    except CtlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)  # with it, Ray ends the workers
    except ray.train.TrainingFailedError as error:
        print(f"error: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 75
    if result.metrics:
        print("  ".join(f"{name} {value}" for name, value in result.metrics.items()))
    return code


if __name__ == "__main__":
    sys.exit(main())
