"""Copies runs to a mirror and fetches them again, so that they survive the loss of a machine.

A mirror is the folder or bucket that the setting ``mirror`` names. In it, the copy of a run,
MIRROR/NAME, has the layout of the run's folder:

    config.yaml, callbacks.py, metrics.jsonl
    modules/                            copies of the project's modules, in their folders
    tb/, tb/train/, tb/eval/            the event files of TensorBoard
    ckpt/, ckpt/engine/                 the newest checkpoints, and the best one

As in checkpoints.py, the record of a checkpoint is written last and removed first, so a checkpoint
that was only partly copied is ignored, both in the mirror and in the run's folder.

A run never replaces checkpoints that it does not continue. If the mirror has a newer checkpoint
that cannot be fetched, the run does not start. If the mirror cannot be listed, the run starts from
its own checkpoint, but copies nothing until a list shows that the mirror has no newer checkpoint.

copying.py decides when a checkpoint is copied. This module does not import TensorFlow, because a
run is fetched before its settings are known.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctl_core.checkpoint.record import (
    Damaged,
    Record,
    check_digests,
    find_best_step,
    find_newest_usable,
    group_by_step,
    list_files,
    list_names,
    list_saved_steps,
    read_complete_records,
    read_record,
    read_run_id,
)
from ctl_core.checkpoint.stores import FolderStore, Store, open_store
from ctl_core.cluster.task import read_task, wait_for_chief
from ctl_core.hooks.callbacks_file import MODULE_COPIES
from ctl_core.run.errors import SetupError, format_error
from ctl_core.run.files import (
    atomic_write,
    explain_failure,
    flush_to_disk,
    format_checkpoint_list,
    is_run_locked,
    lock_run,
    refuse_patterns,
    relative_path,
    release_run,
    remove,
)
from ctl_core.run.settings import Config

# The name of a temporary folder in a run's folder. It contains files to be copied to the mirror,
# and fetched files before they are moved to their final location.
STAGING = "mirror.tmp"
# Files of a run, and folders with event files, that are copied together with a checkpoint.
_FILES = ("config.yaml", "callbacks.py", "metrics.jsonl")
_EVENT_FOLDERS = ("tb", "tb/train", "tb/eval")
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.[\w.-]+")
# The name of a copied module or of its folder. No such name leads to another folder, on any system.
_MODULE_NAME = re.compile(r"(?!\.)[^/\\:\x00-\x1f]+")


class NotCopied(RuntimeError):
    """Copying would replace checkpoints in the mirror that this run does not continue."""


class OtherRun(SetupError):
    """The mirror has the checkpoints of another run with the same name."""


class Mirror:
    """The copy of a run in a mirror.

    Attributes:
        shown: the address of the copy, for messages
        copied_bytes: the total size of the checkpoint files that were copied to the mirror so far
    """

    def __init__(self, config: Config) -> None:
        """Opens the mirror that the settings name.

        Raises:
            SetupError: the mirror cannot be used, or is the folder of the run itself.
        """
        assert config.mirror is not None
        if config.run_name is None:
            raise SetupError(
                f"mirror: {config.mirror} needs run_name, because a later start finds the run "
                "by its name: --run-name NAME."
            )
        self._run = Path(config.runs_dir, config.run_name).absolute()
        self._store = open_store(config.mirror, config.run_name)
        self._keep = config.mirror_keep
        self.shown = f"{config.mirror.rstrip('/')}/{config.run_name}"
        self.copied_bytes = 0
        # The newest usable checkpoint of the run on this machine. Later checkpoints in the mirror
        # were either copied by this process, or come from another machine.
        self._newest_here = find_newest_usable(self._run / "ckpt", _needs_finite(config))
        self._copied_steps: set[int] = set()
        self._is_own = False  # whether the mirror is known to belong to this run
        # The modification time and size that each file had when it was last copied. Files of
        # checkpoints are not included.
        self._copied_along: dict[str, tuple[int, int]] = {}
        self._has_removed_modules = False  # those in the mirror that the run no longer imports
        if isinstance(self._store, FolderStore) and _is_same(self._store.root, self._run):
            raise SetupError(f"mirror: {config.mirror} is runs_dir itself; choose another folder.")

    # ---- Fetching -------------------------------------------------------------------------------

    def list_steps(self) -> list[int]:
        """Returns the steps of the checkpoints in the mirror that have a record, newest first."""
        return _list_recorded(self._list_checkpoints())

    def fetch(self, newer_than: int) -> int | None:
        """Fetches the newest complete checkpoint, and the other files of the run.

        All files are downloaded before the first one is moved to its place. Checkpoints that are
        damaged in the mirror are left out.

        Args:
            newer_than: the step of the newest checkpoint in the run's folder, or -1. Only a newer
                checkpoint is fetched.

        Returns:
            The step of the fetched checkpoint; None if no newer checkpoint is complete.

        Raises:
            OSError: the mirror cannot be read, or the run's folder cannot be written.
            SetupError: another version of the engine wrote the checkpoint.
            OtherRun: the checkpoint belongs to another run.
        """
        files = self._list_checkpoints()
        folder = self._run / STAGING
        for step in _list_recorded(files):
            if step <= newer_than:
                break
            _print(f"mirror: fetching the checkpoint of step {step} from {self.shown}")
            remove(folder)
            try:
                record = self._download_checkpoint(files[step], step, folder / "ckpt")
                self._compare_ids(record.run_id, self._read_own_id(), step)
                self._download_best(files, record, folder / "ckpt" / "best")
                self._download_along(folder)
                _put_in_place(folder, step, self._run)
                return step
            except (Damaged, FileNotFoundError) as error:
                _print(
                    f"warning: mirror: the checkpoint of step {step} in {self.shown} is damaged "
                    f"({format_error(error, 160).removeprefix('Damaged: ')})"
                )
            except OtherRun:
                raise
            except SetupError as error:
                raise SetupError(
                    f"mirror: the checkpoint of step {step} in {self.shown} was written by a "
                    "version of ctl_core whose checkpoints this version cannot resume; choose "
                    "another run_name."
                ) from error
            finally:
                remove(folder)
        return None

    def refuse_other_run(self) -> None:
        """Refuses to train if the mirror has the checkpoints of another run with the same name.

        Raises:
            OtherRun: the ids of the runs differ.
            OSError: the mirror cannot be read.
        """
        own_id = self._read_own_id()
        for step in self.list_steps():
            run_id = self._fetch_run_id(step)
            if run_id:
                self._compare_ids(run_id, own_id, step)
                return

    def _read_own_id(self) -> str:
        """Returns the id of the run in the run's folder; an empty string if it is not known."""
        records = read_complete_records(self._run / "ckpt")
        return next((record.run_id for record in records), "")

    def _fetch_run_id(self, step: int) -> str:
        """Returns the id in a record of the mirror; an empty string if there is none."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "record")
            try:
                self._download(f"ckpt/engine/ckpt-{step}.json", target)
            except FileNotFoundError:
                return ""
            return read_run_id(target)

    def _compare_ids(self, mirrored_id: str, local_id: str, step: int) -> None:
        """Compares the id in the mirror with that of the run; an unknown id fits every run.

        Raises:
            OtherRun: the ids differ.
        """
        if mirrored_id and local_id and mirrored_id != local_id:
            raise OtherRun(
                f"mirror: {self.shown} belongs to another run: its checkpoint of step {step} has "
                f"the run_id {mirrored_id[:8]}, but {relative_path(self._run)} has "
                f"{local_id[:8]}; choose another run_name, or give each project its own mirror."
            )

    def _list_checkpoints(self) -> dict[int, list[str]]:
        """Returns the checkpoint files in the mirror by step.

        Files with other names are left out. This ensures that a fetched file is never written
        outside of the run's folder.
        """
        return group_by_step(self._store.list_names("ckpt"), self._store.list_names("ckpt/engine"))

    def _download_checkpoint(self, paths: Sequence[str], step: int, target: Path) -> Record:
        """Downloads a checkpoint to a new folder, and checks that it is complete and unchanged.

        Raises:
            Damaged, FileNotFoundError: the checkpoint is damaged in the mirror.
            OSError: a file cannot be downloaded completely.
        """
        (target / "engine").mkdir(parents=True)
        for path in paths:
            self._download(f"ckpt/{path}", target / path)
        record = read_record(target, step)
        check_digests(target, record)
        return record

    def _download(self, path: str, target: Path) -> None:
        """Downloads a file.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the file cannot be downloaded, or the connection was cut. The checkpoint would
                otherwise seem to be damaged.
        """
        size = self._store.measure(path)
        self._store.download(path, target)
        received = target.stat().st_size
        if size not in (None, received):
            raise OSError(f"{path}: {received} of {size} bytes were received")

    def _download_best(self, files: dict[int, list[str]], record: Record, target: Path) -> None:
        """Downloads the best checkpoint to a new folder, unless it is the newest one.

        If the best checkpoint is damaged, it is left out, because a run can be resumed without it.
        """
        best = find_best_step(record.progress["best"])
        if best == record.step or best not in files:
            return
        try:
            self._download_checkpoint(files[best], best, target)
        except (Damaged, FileNotFoundError):
            remove(target)

    def _download_along(self, target: Path) -> None:
        """Downloads the settings, the hooks and modules, the metrics and the event files."""
        names = self._store.list_names("")
        for name in _FILES:
            if name in names:
                self._download(name, target / name)
        for folder in _EVENT_FOLDERS:
            (target / folder).mkdir(exist_ok=True)
            for name in self._store.list_names(folder):
                if _EVENT_FILE.fullmatch(name):
                    self._download(f"{folder}/{name}", target / folder / name)
        for path in _list_modules(self._store):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            self._download(path, target / path)

    # ---- Copying --------------------------------------------------------------------------------

    def copy(self, folder: Path, step: int, best: int) -> None:
        """Copies a checkpoint and other files of the run; removes old checkpoints from the mirror.

        Nothing is removed before the checkpoint is complete in the mirror.

        Args:
            folder: a folder with the checkpoint in ``newest``, and possibly the best one in
                ``best``; it is also used for temporary files
            step: the step of the checkpoint
            best: the step of the best checkpoint, or -1

        Raises:
            OSError: a file cannot be copied. The mirror then has its earlier checkpoints, and
                possibly the new one.
            NotCopied: the mirror has a newer checkpoint from another machine. Nothing was changed.
            OtherRun: the mirror has the checkpoints of another run. Nothing was changed.
        """
        files = self._list_checkpoints()
        if not self._is_own:
            self.refuse_other_run()
            self._is_own = True
        self._refuse_newer(files, folder)
        self._copy_along(folder)
        if best not in _list_recorded(files) and list_saved_steps(folder / "best") == [best]:
            self._copied_steps.add(best)
            self._upload(folder / "best", best, files.get(best, []))
        self._copied_steps.add(step)
        self._upload(folder / "newest", step, files.get(step, []))
        files = self._list_checkpoints()
        newest = [other for other in _list_recorded(files) if other <= step]
        kept = {best, *newest[: self._keep]}
        for old in sorted(files.keys() - kept, reverse=True):
            self._remove(files[old])

    def _refuse_newer(self, files: dict[int, list[str]], folder: Path) -> None:
        """Refuses to copy if the mirror has a newer checkpoint from another machine.

        This method downloads a newer checkpoint, to find out whether it is damaged. A damaged
        checkpoint may be replaced, because no run can resume from it.

        Args:
            files: the files of the mirror's checkpoints
            folder: a folder for temporary files

        Raises:
            NotCopied: there is such a checkpoint.
            OSError: the mirror cannot be read.
        """
        for step in _list_recorded(files):
            if step <= self._newest_here or step in self._copied_steps:
                continue
            if self._is_damaged(files[step], step, folder / "newer"):
                self._copied_steps.add(step)
                continue
            raise NotCopied(
                f"{self.shown} has a checkpoint of step {step}, which this run does not continue, "
                "so nothing is copied or removed there; stop the run, and start it again to "
                "resume from that checkpoint, or choose another run_name"
            )

    def _is_damaged(self, paths: Sequence[str], step: int, target: Path) -> bool:
        """Returns True if a checkpoint in the mirror is incomplete or has changed.

        Raises:
            OSError: the checkpoint cannot be downloaded.
        """
        remove(target)
        try:
            self._download_checkpoint(paths, step, target)
        except (Damaged, FileNotFoundError):
            return True
        except SetupError:  # another version of the engine wrote it
            return False
        finally:
            remove(target)
        return False

    def _upload(self, folder: Path, step: int, replaced: Sequence[str]) -> None:
        """Uploads a checkpoint, after removing the files in ``replaced`` from the mirror."""
        self._remove(replaced)
        for path in list_files(folder, step):
            self._store.upload(path, f"ckpt/{path.relative_to(folder).as_posix()}")
            self.copied_bytes += path.stat().st_size

    def _remove(self, paths: Sequence[str]) -> None:
        """Removes the files of a checkpoint, the record first."""
        for path in reversed(paths):
            self._store.remove(f"ckpt/{path}")

    def _copy_along(self, folder: Path) -> None:
        """Uploads the settings, hooks, modules, metrics and event files that have changed.

        The run may append to a file during the upload, so a copy of the file is uploaded.
        """
        modules = _list_modules(FolderStore(self._run))
        paths = [*_FILES, *modules]
        for place in _EVENT_FOLDERS:
            names = list_names(self._run / place)
            paths += [f"{place}/{name}" for name in names if _EVENT_FILE.fullmatch(name)]
        for path in paths:
            source = self._run / path
            if not source.is_file():
                continue
            status = source.stat()
            state = (status.st_mtime_ns, status.st_size)
            if self._copied_along.get(path) == state:
                continue
            copy = folder / "along"
            shutil.copyfile(source, copy)
            self._store.upload(copy, path)
            self._copied_along[path] = state
        if not self._has_removed_modules:  # a run writes its modules only when it starts
            for path in set(_list_modules(self._store)).difference(modules):
                self._store.remove(path)
            self._has_removed_modules = True


def _needs_finite(config: Config) -> bool:
    """Returns True if the run resumes only from checkpoints whose weights are finite."""
    return config.on_nan != "ignore"


def _is_same(mirror: Path, run: Path) -> bool:
    """Returns True if two folders, or the folders above them, are the same.

    A folder may have several paths, for example through a bind mount.
    """
    if mirror.resolve() == run.resolve():
        return True
    for first, second in ((mirror, run), (mirror.parent, run.parent)):
        with contextlib.suppress(OSError):  # one of them does not exist
            if os.path.samefile(first, second):
                return True
    return False


def _list_modules(store: Store, folder: str = MODULE_COPIES) -> list[str]:
    """Returns the paths of the copied modules in a folder of a run, and in the folders in it.

    Other names are left out. This ensures that a fetched file is never written outside of the
    run's folder.
    """
    paths = []
    for name in store.list_names(folder):
        if _MODULE_NAME.fullmatch(name) and name.endswith(".py"):
            paths.append(f"{folder}/{name}")
        elif _MODULE_NAME.fullmatch(name):
            paths += _list_modules(store, f"{folder}/{name}")
    return paths


def _list_recorded(files: dict[int, list[str]]) -> list[int]:
    """Returns the steps of the checkpoints that have a record, newest first."""
    steps = [step for step, paths in files.items() if f"engine/ckpt-{step}.json" in paths]
    return sorted(steps, reverse=True)


def _put_in_place(folder: Path, step: int, run: Path) -> None:
    """Moves fetched files to the folder of a run, the record last.

    Args:
        folder: the folder with the fetched files
        step: the step of the fetched checkpoint
        run: the folder of the run
    """
    ckpt = run / "ckpt"
    for path in reversed(list_files(ckpt, step)):  # the remaining files of a damaged checkpoint
        path.unlink()
    best = folder / "ckpt" / "best"
    if best.is_dir():
        flush_to_disk(*(path for path in best.rglob("*") if path.is_file()))
        remove(ckpt / "best")
        ckpt.mkdir(exist_ok=True)
        os.replace(best, ckpt / "best")
    along = [folder / name for name in _FILES if (folder / name).is_file()]
    along += [path for place in _EVENT_FOLDERS for path in (folder / place).glob("events.*")]
    along += (folder / MODULE_COPIES).rglob("*.py")
    remove(run / MODULE_COPIES)
    *files, record = list_files(folder / "ckpt", step)
    for source in [*along, *files]:
        _move(source, run / source.relative_to(folder))
    _write_list(ckpt)
    flush_to_disk(ckpt, ckpt / "engine", run)
    _move(record, run / record.relative_to(folder))
    flush_to_disk(ckpt / "engine")


def _move(source: Path, target: Path) -> None:
    """Flushes a file to the disk, then moves it to its place."""
    flush_to_disk(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)


def _write_list(folder: Path) -> None:
    """Writes the file ``checkpoint``, in which TensorFlow's manager lists its checkpoints.

    Without the list, the manager would never delete the fetched checkpoints.
    """
    files = group_by_step(list_names(folder), ())
    names = [name for step in sorted(files) for name in files[step] if name.endswith(".index")]
    times = {name.removesuffix(".index"): (folder / name).stat().st_mtime for name in names}
    with atomic_write(folder / "checkpoint") as temporary:
        temporary.write_text(format_checkpoint_list([*times][-1], times), encoding="utf-8")


def fetch_run(config: Config) -> None:
    """Fetches the run that the settings name, if the mirror has a newer checkpoint of it.

    In a cluster, the chief fetches the run, and the other processes wait for it. The supervisor of
    ``--workers`` fetches the run before it starts its workers.

    Raises:
        SetupError: the mirror has a newer checkpoint that cannot be fetched; or the run has no
            checkpoint on this machine, and the mirror cannot be listed or has only damaged
            checkpoints; or the mirror has the checkpoints of another run. Otherwise, the run would
            replace the checkpoints in the mirror.
        PeerLost: the chief does not answer.
    """
    if config.mirror is None:
        return
    refuse_patterns("runs_dir", config.runs_dir)
    mirror = Mirror(config)
    task = read_task(config)
    if task.kind != "worker" or task.shares_gpus:
        return
    run = Path(config.runs_dir, str(config.run_name)).absolute()
    if not task.chief:
        wait_for_chief(task, lambda: _measure(run / STAGING))
        return
    local_step = find_newest_usable(run / "ckpt", _needs_finite(config))
    try:
        steps = mirror.list_steps()
        if steps and steps[0] <= local_step:
            mirror.refuse_other_run()
    except OSError as error:
        problem = f"mirror: {mirror.shown} cannot be read: {format_error(error)}"
        if local_step < 0:
            raise SetupError(
                f"{problem}; to start from scratch, leave out mirror or choose another run_name."
            ) from error
        _print(
            f"warning: {problem}; the run resumes from its own checkpoint of step {local_step}, "
            "and nothing is copied while the mirror cannot be read or has a newer checkpoint"
        )
        return
    if not steps:
        _print(f"mirror: {mirror.shown} has no checkpoint yet")
    elif steps[0] > local_step and not is_run_locked(run):
        _fetch_locked(mirror, run, local_step)


def _fetch_locked(mirror: Mirror, run: Path, local_step: int) -> None:
    """Fetches a run while holding its lock, so that no other process can train it.

    Raises:
        SetupError: a newer checkpoint cannot be fetched, or the run has no checkpoint on this
            machine and none in the mirror is complete.
    """
    with explain_failure("runs_dir", run):
        run.mkdir(parents=True, exist_ok=True)
        lock = lock_run(run)
    if lock is None:  # another process trains the run, so this training will not start
        return
    try:
        fetched = mirror.fetch(local_step)
    except OSError as error:
        raise SetupError(
            f"mirror: {mirror.shown} has a newer checkpoint, which cannot be fetched: "
            f"{format_error(error)}; try again, or choose another run_name, because the run "
            "would replace that checkpoint."
        ) from error
    finally:
        release_run(run, lock)
    if fetched is None and local_step < 0:
        raise SetupError(
            f"mirror: {mirror.shown} has checkpoints, but all of them are damaged; to start "
            "over, choose another run_name."
        )
    if fetched is not None:
        _print(f"mirror: the checkpoint of step {fetched} was fetched to {relative_path(run)}")


def _measure(folder: Path) -> int:
    """Returns the total size of the files in a folder (bytes)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _print(text: str) -> None:
    """Prints a line immediately; the console does not exist yet."""
    print(text, flush=True)
