"""Elements read many at once: the same as one by one, also from the middle of a unit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core import units
from ctl_core.units import Units, begin
from tests.helpers.fixtures import Train
from tests.helpers.resume import values
from tests.helpers.stretched import words_hooks


def numbered() -> tf.data.Dataset:
    """Elements that are nested: 0, 1, 2 … in shuffled passes of 10."""
    numbers = tf.data.Dataset.range(10).shuffle(10, seed=4).repeat()
    return numbers.map(lambda n: {"row": tf.fill([2], n), "pair": (n, tf.cast(n, tf.uint8))})


def make(number: int = 6) -> Units:
    dataset = numbered()
    return Units(dataset, dataset.element_spec, number)


@tf.function(autograph=False)
def drawn(source: Any) -> Any:
    return next(source)


@tf.function(autograph=False)
def taken(source: Units, limit: tf.Tensor) -> Any:
    unit, first, number = source.take(limit)
    return unit["row"][first : first + number, 0], number


def test_elements_are_those_of_the_dataset_from_the_middle_of_a_unit_too(tmp_path: Path) -> None:
    expected = [int(element["pair"][0]) for element in numbered().take(40)]
    source, found = make(), []
    found += [int(drawn(source)["row"][1]) for _ in range(4)]
    for limit in (1, 9, 9):  # one; what is left, which is one; a whole unit
        rows, number = taken(source, tf.constant(limit, tf.int64))
        assert len(rows) == number == {1: 1, 9: 1 if len(found) < 6 else 6}[limit]
        found += rows.numpy().tolist()
    found.append(int(next(source)["pair"][1]))  # eager
    path = tf.train.Checkpoint(it=source).write(str(tmp_path / "position"))
    following = [int(drawn(source)["pair"][0]) for _ in range(20)]
    restored = make()
    next(restored)
    tf.train.Checkpoint(it=restored).read(path).assert_consumed()
    assert [int(drawn(restored)["pair"][0]) for _ in range(20)] == following
    assert found + following == expected[: len(found) + 20]


def test_a_unit_is_bounded_in_steps_and_bytes() -> None:
    def of(features: int, micro_batches: int = 1, rows: int | None = 8) -> int:
        dataset = tf.data.Dataset.from_tensors(tf.zeros([features])).repeat().batch(8)
        return getattr(begin(dataset, rows, micro_batches), "number", 0)

    assert of(16) == 100 and of(16, 3) == 300
    assert of(1024) == 32 and of(1024, 2) == 32
    assert of(4096) == 0  # so large that drawing it is not what takes the time
    assert of(16, 0) == of(16, rows=None) == 0


@pytest.mark.slow
def test_a_run_is_cut_in_the_middle_of_a_unit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Units of ten steps: at a resume, units are used in part, as a whole, and not begun."""
    element, tally = 8 * 5 * 4 + 8 * 4, 1 + 4 * 8  # bytes; elements carry what a pass leaves out
    monkeypatch.setattr(units, "UNIT_BYTES", 10 * (element + tally))
    settings = {"batch_size": 8, "jit_compile": True}
    whole = train(words_hooks(), steps=23, run_name="whole", **settings)
    assert whole.data.unit == 10
    for stop in (4, 10, 11, 23):
        cut = train(words_hooks(), steps=stop, run_name="cut", **settings)
    for path, value in values(whole).items():
        np.testing.assert_array_equal(value, values(cut)[path], err_msg=path)
    assert "reading and dropping" not in "".join(capfd.readouterr())
    plain = train(words_hooks(), steps=24, run_name="cut", batch_size=8, jit_compile=False)
    assert "since it was saved with stretches that are compiled" in "".join(capfd.readouterr())
    whole = train(words_hooks(), steps=24, run_name="whole", **settings)
    for ours, other in zip(plain.train_model.weights, whole.train_model.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), other.numpy(), 1e-4, 1e-5)


PROGRAM = """
import sys
import ctl_core
from tests.helpers.stretched import words_hooks
settings = {"steps": 9, "ckpt_every": 1, "batch_size": 8, "jit_compile": True}
ctl_core.train(words_hooks(), ctl_core.Config(runs_dir=sys.argv[1], **settings))
"""


@pytest.mark.slow
def test_one_executable_is_for_every_place_in_a_unit(tmp_path: Path) -> None:
    """XLA would make another for each value of what it takes as a constant."""
    environ = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path / 'xla'}"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs")]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    made = [path.name for path in (tmp_path / "xla").glob("*before_optimizations.txt")]
    assert len([name for name in made if "stretch" in name]) == 1
