"""The trials of a sweep, in a journal that several machines may share and that survives a kill.

A trial that was running when its sweep was killed is asked for again with its values and the name
of its run, which goes on from its checkpoint; Optuna has the old one as failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core.errors import SetupError
from ctl_core.files import alone_in, from_here
from ctl_core.run_process import locked
from ctl_core.sweep.plan import Plan
from ctl_core.sweep.rounding import rounding

SAMPLERS = ("tpe", "random", "grid", "cmaes")
JOURNAL = "journal.log"
# A lock of the journal that is so old is one that a killed process has left (seconds).
LEFT = 30
# Of a trial: the name of its run, the file that whoever runs it holds, its place in a grid, all
# that its run was told.
_RUN, _OWNER, _GRID, SETTINGS = "run", "owner", "grid", "settings"
# Of a study: the number of its first run.
_FIRST = "first"


def load_optuna() -> Any:
    """Imports Optuna.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise SetupError(
            "sweep: needs Optuna, which is not installed; in the project's folder: "
            f"{sys.executable} -m pip install --editable '.[sweep]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def number_of(run: str) -> int:
    """Returns the number in the name of a run."""
    return int(run.rpartition("-")[2])


class Sweep:
    """A sweep that is there or begins.

    Attributes:
        name: of the sweep; its runs are called NAME-0000 and so on
        folder: sweeps/NAME
        study: Optuna's
    """

    def __init__(
        self, folder: Path, plan: Plan, trials: int, sampler: str, seed: int | None
    ) -> None:
        """Opens the journal.

        Raises:
            SetupError: Optuna is not there, the folder cannot be written, or it is of another plan.
        """
        optuna = load_optuna()
        self.name, self.folder, self._plan = folder.name, folder, plan
        self._states = optuna.trial.TrialState
        combinations = plan.grid() if sampler == "grid" else []
        if sampler == "cmaes" and importlib.util.find_spec("cmaes") is None:
            raise SetupError(
                "sampler: cmaes needs the package cmaes, which is not installed: "
                f"{sys.executable} -m pip install cmaes"
            )
        self._most = min(trials, len(combinations)) if combinations else trials
        self._owner = folder / f".{platform.node()}-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with alone_in(folder):
                self._held = self._owner.open("w")
                if fcntl is not None:
                    with contextlib.suppress(OSError):  # a file system without locks
                        fcntl.flock(self._held, fcntl.LOCK_EX)
        except OSError as error:
            raise SetupError(
                f"{from_here(folder)}: cannot be written: {error.strerror}; name another by --name."
            ) from error
        try:
            with alone_in(folder):
                self._open(optuna, sampler, seed)
                self._enqueue(combinations[: self._most])
                self._take_over()
        except BaseException:
            self.close()
            raise

    def _open(self, optuna: Any, sampler: str, seed: int | None) -> None:
        # Optuna's own lock is a symbolic link, whose age it cannot tell where the path is relative:
        # one that a killed sweep has left would then be waited for without end.
        file, parts = str(self.folder / JOURNAL), optuna.storages.journal
        lock = parts.JournalFileOpenLock(file, grace_period=LEFT)
        journal = parts.JournalFileBackend(file, lock_obj=lock)
        storage = optuna.storages.JournalStorage(journal)
        self.study = self._made(optuna, storage)
        if self.study.user_attrs.get("plan") not in (None, self._plan.digest()):
            self._refuse_if_used()
            optuna.delete_study(study_name=self.name, storage=storage)
            self.study = self._made(optuna, storage)
        if self.study.user_attrs.get("plan") is None:
            self.study.set_user_attr(_FIRST, self._free())
            self.study.set_user_attr("plan", self._plan.digest())
        self._first = self.study.user_attrs.get(_FIRST, 0)
        # What comes after a start is not what came after the one before.
        seed = None if seed is None else seed + len(self.study.trials)
        kind = {
            "tpe": optuna.samplers.TPESampler,
            "cmaes": optuna.samplers.CmaEsSampler,
        }.get(sampler, optuna.samplers.RandomSampler)
        self.study.sampler = rounding(kind)(seed=seed)

    def _made(self, optuna: Any, storage: Any) -> Any:
        return optuna.create_study(
            storage=storage,
            study_name=self.name,
            direction="maximize" if self._plan.highest else "minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=0),
        )

    def _refuse_if_used(self) -> None:
        """Lets a sweep of another plan go only if it has found nothing, and nobody runs it.

        Raises:
            SetupError: as said.
        """
        well = (self._states.COMPLETE, self._states.PRUNED)
        for trial in self.study.trials:
            running = trial.state == self._states.RUNNING
            if trial.state in well or (running and self._lives(trial.user_attrs.get(_OWNER))):
                raise SetupError(
                    f"{from_here(self.folder)}: is a sweep of another metric, space or settings; "
                    "choose another --name."
                )
        print(
            f"{from_here(self.folder)}: begins anew, with another metric, space or settings; no "
            f"run had come through. Its runs begin with {self.name}-{self._free():04d}; those "
            "before stay as they are."
        )

    def _free(self) -> int:
        """Returns the number behind all runs that were ever started under this name."""
        told = (self.folder / SETTINGS).glob(f"{self.name}-*.yaml")
        return max((number_of(path.stem) + 1 for path in told), default=0)

    def _enqueue(self, combinations: list[dict[str, Any]]) -> None:
        """Asks for those of a grid that are not there yet."""
        there = {trial.user_attrs.get(_GRID) for trial in self.study.trials}
        for number, values in enumerate(combinations):
            if number not in there:
                self.study.enqueue_trial(values, user_attrs={_GRID: number})

    def _take_over(self) -> None:
        """Asks again for trials whose sweep is gone."""
        for owner in self.folder.glob(f".{platform.node()}-*"):
            if owner != self._owner and locked(owner) is False:
                owner.unlink(missing_ok=True)
        trials = self.study.trials
        for trial in trials:
            owner, run = (trial.user_attrs.get(name) for name in (_OWNER, _RUN))
            if trial.state != self._states.RUNNING or self._lives(owner):
                continue
            later = any(t.number > trial.number and t.user_attrs.get(_RUN) == run for t in trials)
            if run is not None and not later:
                self.study.enqueue_trial(trial.params, user_attrs={_RUN: run})
            elif run is None and _GRID in trial.user_attrs:
                self.study.enqueue_trial(trial.params, user_attrs={_GRID: trial.user_attrs[_GRID]})
            self.study.tell(trial.number, state=self._states.FAIL)

    def _lives(self, owner: str | None) -> bool:
        """Whether whoever ran a trial when this process came still does."""
        if owner in (None, self._owner.name):  # an earlier process of this number, in a container
            return False
        found = locked(self.folder / owner)
        if found is None:  # no locks here: another machine's is left alone
            return not owner.startswith(f".{platform.node()}-")
        return found

    def ask(self) -> tuple[Any, str, dict[str, Any]] | None:
        """Returns the next trial, the name of its run and its settings; None if there are enough.

        Raises:
            SetupError: ``sweep_space`` fails.
        """
        with alone_in(self.folder):
            trials = self.study.trials
            waiting = any(trial.state == self._states.WAITING for trial in trials)
            if not waiting and len(self.runs()) >= self._most:
                return None
            trial = self.study.ask()
            trial.set_user_attr(_OWNER, self._owner.name)
            run = trial.user_attrs.get(_RUN)
            if run is None:
                run = f"{self.name}-{self._first + len(self.runs()):04d}"
                trial.set_user_attr(_RUN, run)
        settings = self._plan.settings_of(trial)
        trial.set_user_attr(SETTINGS, settings)
        return trial, run, settings

    def runs(self) -> list[str]:
        """Returns the names of the runs, each once however often it was begun."""
        names = dict.fromkeys(trial.user_attrs.get(_RUN) for trial in self.study.trials)
        return [name for name in names if name is not None]

    def tell(self, trial: Any, value: float | None, state: str) -> None:
        """Says how a trial ended: ``complete``, ``pruned`` or ``fail``."""
        found = self._states[state.upper()]
        self.study.tell(trial, value if state == "complete" else None, state=found)

    def last_of(self) -> dict[str, Any]:
        """Returns by the name of the run its last trial."""
        trials = sorted(self.study.trials, key=lambda trial: trial.number)
        return {t.user_attrs[_RUN]: t for t in trials if _RUN in t.user_attrs}

    def close(self) -> None:
        """Lets go of what is held."""
        self._held.close()
        self._owner.unlink(missing_ok=True)
