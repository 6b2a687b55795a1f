"""Searches settings by trials, each a run of its own: python sweep.py --trials 20 --parallel 2.
Started again, it goes on; failed trials do not count. What trial 7 prints: runs/sweep-007.log."""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.storages import JournalStorage, journal
from optuna.trial import Trial, TrialState

NAME = "sweep"  # another metric or other choices need another one
METRIC, HIGHEST = "loss", False  # of the evaluations, and whether more of it is better


def flags(trial: Trial) -> list[str]:
    """Returns what a trial is trained with, as train.sh takes it."""
    rate = trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
    size = trial.suggest_categorical("batch_size", [32, 64, 128])
    return [f"--learning-rate={rate}", f"--batch-size={size}"]


def train(trials: Iterator[Trial], options: dict) -> Iterator[subprocess.Popen]:
    """Trains one trial after the other; yields the process that does it at each look at it."""
    for trial in trials:
        name, settings = f"{NAME}-{trial.number:03d}", flags(trial)
        command = [sys.executable, "-m", "ctl_core", "train", f"--run-name={name}", *settings]
        print(f"{name}:", *settings, flush=True)
        for _ in range(20):  # starts: one that is killed, for want of memory say, goes on
            with open(f"runs/{name}.log", "a") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, **options)
            while process.poll() is None:
                if report(trial, Path("runs", name, "metrics.jsonl")):
                    process.terminate()  # it saves, and ends with 143
                yield process
            if process.returncode in (0, 1, 2, 143):
                break
        report(trial, Path("runs", name, "metrics.jsonl"))
        values = trial.study.trials[trial.number].intermediate_values.values()
        how = {0: "COMPLETE", 143: "PRUNED"}.get(process.returncode, "FAIL") if values else "FAIL"
        best = (max if HIGHEST else min)(values, default=None)
        trial.study.tell(trial, best if how == "COMPLETE" else None, TrialState[how])
        print(f"{name}: {how.lower()}, {METRIC} {best}", flush=True)


def report(trial: Trial, file: Path) -> bool:
    """Tells Optuna of new evaluations; returns whether most trials were better at that step."""
    known = trial.study.trials[trial.number].intermediate_values
    rows = map(json.loads, re.findall('.*"eval".*\n', file.read_text() if file.exists() else ""))
    new = [row for row in rows if row.get(METRIC) is not None and row["step"] not in known]
    for row in new:
        trial.report(row[METRIC], row["step"])
    return bool(new) and trial.should_prune()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20, help="how many in all")
    parser.add_argument("--parallel", type=int, default=1, help="how many at a time")
    most, parallel = vars(parser.parse_args()).values()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.chdir(Path(__file__).resolve().parent)
    os.makedirs("runs", exist_ok=True)
    lock = os.open(file := os.path.abspath(f"runs/{NAME}.journal"), os.O_RDWR | os.O_CREAT)
    print(f"{NAME}: begins; if another process is at work on it, once that ends", flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)  # which trials that a killed sweep has left hold, too
    Path(f"{file}.lock").unlink(missing_ok=True)  # Optuna's, of a sweep that was killed
    study = optuna.create_study(
        storage=JournalStorage(journal.JournalFileBackend(file)), study_name=NAME,
        direction="maximize" if HIGHEST else "minimize", load_if_exists=True,
    )  # fmt: skip
    old = [Trial(study, t._trial_id) for t in study.trials if t.state == TrialState.RUNNING]
    ended = study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])
    trials = (old.pop(0) if old else study.ask() for _ in range(len(ended), most))
    gpus = re.findall(r"^GPU (\d+):", subprocess.getoutput("nvidia-smi -L"), re.M)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus)).split(",")
    cores = str(-(-(os.cpu_count() or 1) // parallel))
    env = os.environ | {"CTL_RUNS_DIR": "runs", "TF_NUM_INTRAOP_THREADS": cores}
    envs = [env | {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} for n in range(parallel)]
    workers = [train(trials, {"env": e, "pass_fds": [lock], "process_group": 0}) for e in envs]
    going: list[subprocess.Popen | None] = []
    try:
        while any(going := [next(worker, None) for worker in workers]):
            time.sleep(0.5)
    finally:
        for end in (subprocess.Popen.terminate, subprocess.Popen.wait):  # it saves, to go on later
            for process in filter(None, going):
                end(process)
    if not study.get_trials(states=[TrialState.COMPLETE]):
        sys.exit(f"no trial has come to an end with a {METRIC!r}: runs/{NAME}-*.log say why")
    print(f"best: {NAME}-{study.best_trial.number:03d}, {METRIC} {study.best_value}")
