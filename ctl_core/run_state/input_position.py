"""The position in the training data: saved by each process, and reached again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checks.position import data_files, holds_shuffles
from ctl_core.compat import GraphCheckpoint
from ctl_core.console import Console
from ctl_core.errors import op_message
from ctl_core.inputs import Input
from ctl_core.last_batch import skip_examples
from ctl_core.passes import skip_elements
from ctl_core.readers.stream import Unfitting
from ctl_core.run_state.fitting import UNREADABLE
from ctl_core.run_state.record import Damaged, Record, regular
from ctl_core.state import State

_LARGE = 64 * 2**20


class InputPosition:
    """This process's position in the training data."""

    def __init__(self, state: State, console: Console) -> None:
        self._state = state
        self._console = console
        self._made: Any = None

    def _part(self) -> GraphCheckpoint:
        iterator = self._state.data.iterator
        if self._made is None or self._made.input is not iterator:
            self._made = GraphCheckpoint(input=iterator)
        return self._made  # type: ignore[no-any-return]

    def save(self, prefix: Path) -> bool:
        """Writes the position; returns whether it is there, and exact."""
        why, stream = self._state.data.why_not_checkpointable, self._state.data.pipeline.stream
        if why is None and stream is not None:
            stream.save(self._file(prefix))
            return True
        try:
            if why is None:
                self._part().write(str(prefix))
        except tf.errors.FailedPreconditionError as error:
            why = op_message(error, 120)
        if why is not None:
            self._console.warn_once(
                f"the position in the training data cannot be saved exactly ({why}); a resumed "
                "run will read and drop what was used. For random changes to examples, see "
                "ctl_core.data.with_seeds."
            )
            return False
        size = sum(file.stat().st_size for file in data_files(prefix))
        if size > _LARGE:
            self._console.warn_once(
                f"the position in the training data takes {size / 2**20:.0f} MB in every "
                "checkpoint, most of it a shuffle buffer; for data in memory, "
                "ctl_core.data.index_shuffle shuffles as well and takes next to nothing."
            )
        return holds_shuffles(prefix, self._state.data.pipeline.dataset)

    def close(self) -> None:
        """Ends reading ahead, where a reader in Python has threads or processes of its own."""
        if (stream := self._state.data.pipeline.stream) is not None:
            stream.close()

    def restore(self, record: Record, prefix: Path) -> None:
        """Goes to the position of a record, by reading and dropping if need be.

        All processes of a cluster read, or all drop: those that do the one and those that do the
        other could not be told apart.
        """
        cluster, data = self._state.cluster, self._state.data
        why = self._why_not(record)
        if why is None:
            try:
                self._read(record, prefix)
            except Unfitting as error:
                why = str(error)
            except (*UNREADABLE, Damaged):
                why = "the saved position does not fit the data any more, or its file is damaged"
            if cluster.all(why is None):
                return
            why = why or "another process cannot read the position that it saved"
            self._state.renew_input()
            data = self._state.data
        self._console.warn(
            f"the position in the training data is reached by reading and dropping "
            f"{record.examples} examples, since {why}."
        )
        _skip(data, record.examples)

    def _read(self, record: Record, prefix: Path) -> None:
        """Goes to the position that was saved, if it is the same that would be saved now."""
        data = self._state.data
        if data.pipeline.stream is None:
            self._part().read(regular(str(prefix)))
            return
        if data.pipeline.stream.begun:  # TensorFlow holds elements that were read before
            self._state.renew_input()
            data = self._state.data
        assert data.pipeline.stream is not None
        if not data.pipeline.sharded:  # all processes read the same, however many there are
            prefix = prefix.with_name(f"input-{record.step}-0")
        data.pipeline.stream.restore(Path(regular(str(self._file(prefix)))))

    def _file(self, prefix: Path) -> Path:
        """Where the state of a reader is."""
        return prefix.with_name(f"{prefix.name}.json")

    def _why_not(self, record: Record) -> str | None:
        """Says why the saved position is not that of this run, if it is not."""
        context, processes = self._state.context, self._state.cluster.task.processes
        if not record.input_saved:
            return "it could not be saved"
        if record.overfit_batches != self._state.config.overfit_batches:
            return f"it was saved with overfit_batches {record.overfit_batches}"
        if record.last_batch != self._state.config.last_batch:
            return f"it was saved with last_batch {record.last_batch}"
        if record.unit != self._state.data.unit:
            return f"it was saved with{'' if record.unit else 'out'} stretches that are compiled"
        pipeline = self._state.data.pipeline
        same = (record.processes, record.replicas, record.batch_size, record.accumulate_steps) == (
            processes,
            context.replicas,
            context.batch_size,
            context.accumulate_steps,
        )
        # Steps of a reader are what its elements make them: global batches on any replicas.
        shared = pipeline.stream is not None and not pipeline.sharded
        if same or (shared and record.batch_size == context.batch_size):
            return None
        why = f"it was saved with {record.replicas} replica{'s' * (record.replicas > 1)}"
        if record.processes != processes:
            why += f" in {record.processes} process{'es' * (record.processes > 1)}"
        why += f", batch_size {record.batch_size}"
        if record.accumulate_steps > 1 or context.accumulate_steps > 1:
            why += f", accumulate_steps {record.accumulate_steps}"
        return why


def _skip(data: Input, examples: int) -> None:
    """Moves on by so many examples: the way to a position that could not be saved."""
    sizes, count = data.sizes, tf.constant(examples, tf.int64)
    if data.counted is not None:
        steps = int(skip_examples(data.iterator, count, data.replicas, sizes.accumulate_steps))
    else:
        skip_elements(data.iterator, count // sizes.per_replica // sizes.processes)
        steps = examples // sizes.batch
    if data.pipeline.stream is not None:
        data.pipeline.stream.took(steps)
