"""Trains on Ray, which chooses the nodes of the workers, and restarts all workers if one is lost.

    pip install -e ".[{% if cookiecutter.accelerator == "auto" %}gpu,{% endif %}ray]"{% if cookiecutter.accelerator == "auto" %}   # without GPUs: ".[cpu,ray]"{% endif %}
    python launch/ray_job.py --num-workers 2-4 --use-gpu -- --run-name a --steps 10000

Each worker runs ``python -m ctl_core train`` with the settings that follow ``--``. Ray connects
them, so that they form one TensorFlow cluster. All nodes need this folder, including runs/, at the
same path. With ``--num-workers 2-4``, the run continues with at least 2 workers when nodes are lost, and
with up to 4 when nodes are added. Change this file as you like.

Use it only in trusted networks: the ports of Ray and of TensorFlow have no password and no
encryption, and anyone who can reach one can run programs as you. Allow connections only between
the nodes (SECURITY.md).
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray.train.collective
from ray.train.tensorflow import TensorflowTrainer

from ctl_core.commands.cli import parse_command
from ctl_core.run.errors import CtlError
from ctl_core.run.files import choose_run_name

PROJECT = Path(__file__).resolve().parents[1]
# Exit codes. FAILED: a hook or a setting fails, and would fail again after a restart. PEER_LOST:
# another worker was lost.
FAILED, PEER_LOST = (1, 2), 75


def train(job: dict) -> None:
    """Trains in one worker, and reports the newest evaluation to Ray, which has set TF_CONFIG."""
    logging.disable()  # hides Ray's line for each report, and its traceback for an exit code
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    del environment["TF_USE_LEGACY_KERAS"]  # Ray sets it, which would select Keras 2
    command = ["setpriv", "--pdeathsig", "KILL"]  # ends with this worker
    command += [sys.executable, "-m", "ctl_core", "train", *job["settings"]]
    process = subprocess.Popen(command, cwd=PROJECT, env=environment)
    code, ended, reported = None, False, None
    while code is None or not ended:
        time.sleep(1)
        code = process.poll()
        if code:
            if code == PEER_LOST:
                time.sleep(5)  # if another worker has failed, its error is reported first
            raise SystemExit(code)
        if not ended:  # all workers report the values of worker 0, as Ray requires
            news = code is not None, read_evaluation(job["metrics"])
            ended, evaluation = ray.train.collective.broadcast_from_rank_zero(news)
            if evaluation != reported:
                ray.train.report(evaluation)
                reported = evaluation


def read_evaluation(file: Path) -> dict[str, float] | None:
    """Returns the newest evaluation in a run's metrics.jsonl, if there is one."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return next((json.loads(line) for line in lines[::-1] if '"split": "eval"' in line), None)


class EndOnFailure(ray.train.UserCallback):
    """Decides whether Ray restarts the workers after an error."""

    def after_exception(self, run_context: object, worker_exceptions: dict) -> None:
        """Ends the job if a hook or a setting has failed; the worker has printed the error."""
        for error in worker_exceptions.values():
            if isinstance(error, SystemExit) and error.code in FAILED:
                logging.disable()
                raise ValueError(error.code)


def main() -> int:
    """Parses the command line, and trains; returns the exit code."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options] -- [settings of ctl_core train]")
    parser.add_argument("--num-workers", default="1", help="processes, such as 4 or 2-4")
    parser.add_argument("--use-gpu", action="store_true", help="give each of them a GPU")
    parser.add_argument("--cpus-per-worker", type=float, default=1, help="(default: 1)")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts; -1: no limit")
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.chdir(PROJECT)
    try:
        config = parse_command(["train", *options.settings]).config
    except CtlError as error:
        parser.error(str(error))
    runs = Path(config.runs_dir).resolve()
    name = config.run_name or choose_run_name(runs)
    own = ["--run-name", name, "--runs-dir", str(runs), "--workers", "1"]
    job = {"settings": [*options.settings, *own], "metrics": runs / name / "metrics.jsonl"}
    least, _, most = options.num_workers.partition("-")
    if most:  # without this, Ray waits 60 seconds for a lost node before it uses the remaining ones
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "5")
    ray.init(logging_level=logging.WARNING)
    trainer = TensorflowTrainer(
        train,
        train_loop_config=job,
        scaling_config=ray.train.ScalingConfig(
            num_workers=(int(least), int(most)) if most else int(least),
            use_gpu=options.use_gpu,
            resources_per_worker={"CPU": options.cpus_per_worker, "GPU": int(options.use_gpu)},
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(runs / ".ray"),
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures),
            callbacks=[EndOnFailure()],
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        failure = getattr(error, "controller_failure", None)
        return failure.args[0] if isinstance(failure, ValueError) else PEER_LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
