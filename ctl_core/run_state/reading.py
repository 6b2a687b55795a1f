"""What a restore reads: the record, the user's part and the engine's, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from ctl_core.console import Console
from ctl_core.errors import op_message
from ctl_core.run_state.fitting import KEY_END, UNREADABLE, differing_variables, unfitting
from ctl_core.run_state.record import Damaged, Record, read_record, regular
from ctl_core.run_state.remainder import Remainder
from ctl_core.run_state.vocabularies import Vocabularies
from ctl_core.sources import NOT_BEGUN
from ctl_core.state import State


class CheckpointReader:
    """Reads checkpoints into the variables that there are."""

    def __init__(
        self,
        state: State,
        console: Console,
        remainder: Remainder,
        vocabularies: Vocabularies,
        engine_part: Callable[[list[str]], tf.train.Checkpoint],
    ) -> None:
        self._state = state
        self._console = console
        self._remainder = remainder
        self._vocabularies = vocabularies
        self._engine_part = engine_part
        self._restore = state.ckpt.restore
        self._fork: str | None = None  # where the checkpoint was copied from just now
        self._relearnt: list[str] = []  # what the last restore has put back into layers

    def read(self, folder: Path, step: int) -> Record:
        """Reads the record and all variables.

        Raises:
            Damaged: a file is cut short, altered or gone.
            SetupError: the checkpoint does not fit the model.
        """
        self._fork = self._state.config.fork if (folder / NOT_BEGUN).exists() else None
        engine = folder / "engine"
        record = read_record(engine, step)
        user_part = regular(str(folder / record.path))
        engine_part = regular(str(engine / f"ckpt-{step}"))
        self._relearnt = []
        if record.vocabularies is not None:
            file = engine / record.vocabularies
            try:
                self._relearnt = self._vocabularies.put_back(file, self._console)
            except (OSError, ValueError) as error:
                raise Damaged(f"{file.name} cannot be read") from error
        try:
            remainder = self._fitting_remainder(record.remainder, engine_part)
            self._restore_user_part(user_part)
            self._engine_part(remainder).read(engine_part).expect_partial()
            self._remainder.put_back(remainder)
        except UNREADABLE as error:
            raise Damaged(op_message(error, 160)) from error
        if self._state.step != step:
            raise Damaged(f"its files are of step {self._state.step}")
        for layer in self._state.found.adapted.values():
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # it computes with constants made of its variables
        return record

    def _restore_user_part(self, path: str) -> None:
        status = None
        try:
            status = self._restore(path)
            status.assert_consumed()
        except (ValueError, AssertionError) as error:
            if status is not None:
                status.expect_partial()
            differences = differing_variables(self._state.ckpt, path)
            if not differences:  # unequal in a way that no variable shows
                differences = [op_message(error, 200)]
            raise unfitting(path, [*differences, *self._relearnt], self._fork) from error

    def _fitting_remainder(self, names: list[str] | None, engine_part: str) -> list[str]:
        """Compares what the engine's part holds for the user's with what there is.

        Returns:
            The paths to be read.

        Raises:
            SetupError: it does not fit the model any more.
        """
        if names is None:
            if self._remainder.names:
                self._console.warn(
                    f"the checkpoint is of an earlier engine, which did not keep "
                    f"{', '.join(self._remainder.names[:5])}: as created."
                )
            return []
        shapes = tf.train.load_checkpoint(engine_part).get_variable_to_shape_map()
        keys = [f"remainder/{i}{KEY_END}VARIABLE_VALUE" for i in range(len(names))]
        differences, changes = self._remainder.compare(names, [shapes.get(key) for key in keys])
        if differences:
            raise unfitting(engine_part, [*differences, *self._relearnt], self._fork)
        if changes:
            self._console.warn(f"of what hooks hold, compared with the checkpoint: {changes}.")
        return names
