"""Predictions of several processes: each writes those of its batches to a part, the chief joins.

Batches are dealt out in groups, of as many as a process has replicas; every process reads all of
them, which costs little beside the model. The parts are in the run folder, which processes share.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ctl_core.cluster.sync import Cluster
from ctl_core.npz import ArraysOnDisk
from ctl_core.numerics.joining import on_host

# An output of a batch: its name, the array, and by axis how much of each example is its own.
_Output = tuple[str, np.ndarray, dict[int, np.ndarray]]


class Part:
    """The outputs of one process, one after the other in a file; as ``ArraysOnDisk`` is filled."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, name: str, value: Any) -> None:
        """Adds an output of the next batch: an eager tensor, dense, ragged or sparse.

        Raises:
            OSError: the disk is full.
        """
        array, sizes = on_host(value)
        for each in (np.array(name), array, np.array([*sizes], np.int64), *sizes.values()):
            np.save(self._file, each, allow_pickle=False)


def read_part(file: BinaryIO) -> Iterator[_Output]:
    """Yields what was added to a part, in that order."""
    while file.read(1):
        file.seek(-1, 1)
        name, array, axes = (np.load(file, allow_pickle=False) for _ in range(3))
        yield str(name), array, {int(axis): np.load(file, allow_pickle=False) for axis in axes}


class Shared:
    """One prediction that the processes of a cluster share.

    Attributes:
        folder: where the parts are
    """

    def __init__(self, cluster: Cluster, run: Path, replicas: int) -> None:
        """``replicas`` is how many a process has; every process makes this object."""
        self._cluster, self._replicas = cluster, replicas
        # The chief's number names the folder: what an earlier start has left is not taken for it.
        number = int(cluster.gather([secrets.randbits(62)])[0, 0])
        self.folder = run / f".predictions-{number:x}"

    @contextlib.contextmanager
    def parts(self) -> Iterator[None]:
        """Makes the folder, and takes it away again."""
        chief = self._cluster.task.chief
        if chief:
            self.folder.mkdir()
        try:
            self._cluster.gather([0])
            yield
        finally:
            if chief:
                shutil.rmtree(self.folder, ignore_errors=True)

    def own(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields those batches that are this process's."""
        task, several = self._cluster.task, self._replicas
        for number, batch in enumerate(batches):
            if number // several % task.processes == task.index:
                yield batch

    def file(self) -> BinaryIO:
        """Opens this process's part for writing."""
        return (self.folder / str(self._cluster.task.index)).open("wb")

    def join(self, arrays: ArraysOnDisk) -> None:
        """Waits for all parts; the chief adds them to ``arrays`` in the order of the batches.

        Raises:
            PeerLost: another process is gone.
            RunError: outputs do not fit into one array.
        """
        self._cluster.gather([0])
        if not self._cluster.task.chief:
            return
        with contextlib.ExitStack() as opened:
            parts = [
                _batches(read_part(opened.enter_context((self.folder / str(index)).open("rb"))))
                for index in range(self._cluster.task.processes)
            ]
            for part in itertools.cycle(parts):
                group = list(itertools.islice(part, self._replicas))
                for name, array, sizes in itertools.chain(*group):
                    arrays.add_array(name, array, sizes)
                if len(group) < self._replicas:
                    return


def _batches(outputs: Iterator[_Output]) -> Iterator[list[_Output]]:
    """Yields the outputs of a batch together: each batch has the same names."""
    batch: list[_Output] = []
    for output in outputs:
        if batch and output[0] == batch[0][0]:
            yield batch
            batch = []
        batch.append(output)
    if batch:
        yield batch
