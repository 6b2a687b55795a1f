"""Tests of ``ctl.data.own_rows``: the rows of each process, and the pipelines that are refused."""

import dataclasses
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ctl_core as ctl
from ctl_core.commands.check import check as ctl_check
from ctl_core.input.batches import find_start
from ctl_core.input.own_rows import RowSelection
from ctl_core.run.errors import CtlError, SetupError
from ctl_core.session.messages import describe_shared_preparation
from tests.golden import small
from tests.helpers.project import Train

SEED = 3


def make_cheap(examples: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(examples).shuffle(examples, seed=SEED)


def read_plainly(examples: int, batch: int, keeps_last_batch: bool) -> list[list[int]]:
    """Returns some batches of two passes and more, as one process reads them."""
    batches = make_cheap(examples).batch(batch, drop_remainder=not keeps_last_batch).repeat()
    steps = 2 * (examples // batch) + 3
    return [rows.numpy().tolist() for rows in batches.take(steps)]


def read_rows(selection: RowSelection, examples: int, steps: int) -> list[list[int]]:
    """Returns the rows that a process prepares in each step, without placeholders."""
    with selection.note_marks():
        prepared = ctl.data.own_rows(make_cheap(examples)).map(lambda index: index).batch(4)
    count = examples if selection.keeps_last_batch else None
    rows_of_steps = []
    for element in selection.join_rows(prepared, count).take(steps):
        rows, size = element, selection.batch
        if isinstance(element, tuple):
            rows, size = element[0], int(element[1])
        elif selection.has_all_rows:
            size = len(rows)
        bounds = (selection.process_leaves.start, selection.process_leaves.stop)
        first, end = (int(find_start(leaf, size, selection.leaves)) for leaf in bounds)
        assert len(rows) == max(end - first, 1)
        rows_of_steps.append(rows.numpy().tolist()[: end - first])
    return rows_of_steps


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    examples=st.integers(1, 30),
    batch=st.integers(1, 12),
    processes=st.integers(1, 4),
    leaves_per_process=st.integers(1, 2),
    keeps_last_batch=st.booleans(),
    start=st.integers(0, 9),
)
# A global batch that is smaller than the number of processes.
@example(examples=7, batch=2, processes=4, leaves_per_process=1, keeps_last_batch=False, start=1)
def test_joined_rows_are_those_of_one_process(
    examples: int,
    batch: int,
    processes: int,
    leaves_per_process: int,
    keeps_last_batch: bool,
    start: int,
) -> None:
    batch = min(batch, examples)
    whole = read_plainly(examples, batch, keeps_last_batch)
    start = min(start, len(whole) - 1)
    used = sum(map(len, whole[:start]))
    leaves = processes * leaves_per_process
    rows_of_processes = []
    for process in range(processes):
        process_leaves = range(process * leaves_per_process, (process + 1) * leaves_per_process)
        selection = RowSelection(batch, leaves, process_leaves, keeps_last_batch, start=start)
        count = examples if keeps_last_batch else None
        assert selection.count_batches(used, count) == start
        rows_of_processes.append(read_rows(selection, examples, len(whole) - start))
    joined = [list(chain(*rows)) for rows in zip(*rows_of_processes, strict=True)]
    assert joined == whole[start:]


def test_an_index_shuffle_starts_anywhere_without_computing_what_comes_before() -> None:
    for make in (ctl.data.index_shuffle, ctl.data.index_shuffle_with_seeds):
        far = RowSelection(6, 2, range(1, 2), keeps_last_batch=False, start=10**9)
        with far.note_marks() as marks:
            rows = ctl.data.own_rows(make(1000, 4, SEED))
        first = next(iter(rows.batch(3)))
        near = dataclasses.replace(far, start=10**9 - 1)
        with near.note_marks():
            earlier = ctl.data.own_rows(make(1000, 4, SEED))
        (expected,) = earlier.batch(3).skip(1).take(1)
        tf.nest.map_structure(np.testing.assert_array_equal, first, expected)
        assert marks[0].is_endless


def test_without_the_engine_all_rows_are_returned() -> None:
    assert [int(index) for index in ctl.data.own_rows(tf.data.Dataset.range(3))] == [0, 1, 2]
    indices = ctl.data.own_rows(ctl.data.index_shuffle(9, 3, SEED))
    assert sorted(index.numpy() for index in indices.take(9)) == list(range(9))


# ---- Refusals ------------------------------------------------------------------------------------

INPUTS, TARGET = small.data()


def load(index: tf.Tensor) -> Any:
    return tf.gather(INPUTS, index), tf.gather(TARGET, index)


def mark() -> tf.data.Dataset:
    return ctl.data.own_rows(tf.data.Dataset.range(small.EXAMPLES))


def add_noise(index: tf.Tensor) -> Any:
    inputs, target = load(index)
    return inputs + tf.random.uniform([small.FEATURES]), target


DROPOUT = keras.layers.GaussianNoise(0.1)


def add_layer_noise(index: tf.Tensor) -> Any:
    inputs, target = load(index)
    return DROPOUT(inputs, training=True), target


def make_lengths() -> tf.data.Dataset:
    lengths = tf.data.Dataset.range(small.EXAMPLES)
    buckets = ctl.data.bucket_by_length(lengths, lambda length: length, [50], 16)
    return ctl.data.own_rows(buckets.unbatch()).map(load).batch(16)


PIPELINES: dict[str, tuple[Callable[[], tf.data.Dataset], str]] = {
    "filter": (lambda: mark().filter(lambda index: index > 3).map(load).batch(16), "filter"),
    "shuffle": (lambda: mark().shuffle(30).map(load).batch(16), "shuffle"),
    "repeat": (lambda: mark().map(load).batch(16).repeat(), "repeat"),
    "cache": (lambda: mark().map(load).cache().batch(16), "cache"),
    "flat_map": (
        lambda: mark().flat_map(lambda i: tf.data.Dataset.range(i)).map(load).batch(16),
        "flat_map",
    ),
    "seeds": (
        lambda: ctl.data.with_seeds(mark(), 1).map(lambda i, _: load(i)).batch(16),
        "before ctl.data.own_rows",
    ),
    "remainder": (lambda: mark().map(load).batch(16, drop_remainder=True), "drop_remainder"),
    "padding": (
        lambda: mark().map(lambda i: (tf.range(i), i)).padded_batch(16),
        "padded_batch without fixed shapes",
    ),
    "no batch": (lambda: mark().map(load), "batch 0 times"),
    "two batches": (lambda: mark().map(load).batch(4).batch(4), "batch 2 times"),
    "random op": (lambda: mark().map(add_noise).batch(16), "with_seeds"),
    "random layer": (lambda: mark().map(add_layer_noise).batch(16), "with_seeds"),
    "twice": (lambda: ctl.data.own_rows(mark()).map(load).batch(16), "twice"),
    "free order": (
        lambda: mark().map(load, 2, deterministic=False).batch(16),
        "deterministic=False",
    ),
    "buckets": (make_lengths, "by length"),
    "shapes": (
        lambda: ctl.data.own_rows(mark().map(lambda i: tf.range(i))).batch(16),
        "may differ in shape",
    ),
    "a list": (
        lambda: ctl.data.own_rows(cast("Any", [1, 2])),
        "expected a tf.data.Dataset, got list",
    ),
    "in a function": (
        lambda: tf.data.Dataset.range(2).flat_map(lambda _: mark()),
        "in the hook itself",
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_that_would_depend_on_the_processes_is_refused(train: Train, name: str) -> None:
    create_dataset, words = PIPELINES[name]
    with pytest.raises(CtlError) as raised:
        train(small.hooks(create_dataset=lambda: create_dataset()))
    message = str(raised.value)
    assert words in message
    assert message.startswith("create_dataset (")
    assert len(message.split()) <= 32, message


def refuse(train: Train, hooks: SimpleNamespace, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        train(hooks)


def test_two_ways_to_select_rows_are_refused(train: Train) -> None:
    def create_dataset(input_context: Any) -> tf.data.Dataset:
        assert input_context.num_input_pipelines == 1
        return mark().map(load).batch(16)

    refuse(train, small.hooks(create_dataset=create_dataset), "input_context")


def test_elements_that_are_shares_are_refused(train: Train) -> None:
    hooks = small.hooks(
        create_dataset=lambda: mark().map(load).batch(16),
        count_examples=lambda batch: 2 * tf.shape(batch[0])[0],
    )
    refuse(train, hooks, "count_examples does not count the rows")


def test_too_few_examples_are_reported(train: Train) -> None:
    def create_dataset() -> tf.data.Dataset:
        return ctl.data.own_rows(tf.data.Dataset.range(7)).map(load).batch(16)

    with pytest.raises(CtlError, match="returned 7 examples, fewer than one global batch of 16"):
        train(small.hooks(create_dataset=create_dataset))


def test_examples_that_must_be_counted_are_counted_once(train: Train) -> None:
    """TensorFlow does not know how many examples a filter keeps."""

    def create_dataset() -> tf.data.Dataset:
        kept = tf.data.Dataset.range(small.EXAMPLES).filter(lambda index: index % 3 > 0)
        return ctl.data.own_rows(kept).map(load).batch(16)

    state = train(small.hooks(create_dataset=create_dataset), steps=None, epochs=2)
    assert state.step == 2 * (66 // 16)


# ---- --check -------------------------------------------------------------------------------------


def subtract_mean(inputs: tf.Tensor, target: tf.Tensor) -> Any:
    return inputs - tf.reduce_mean(inputs, 0), target


def make_sets(function: Callable[..., Any]) -> dict[str, Callable[[], tf.data.Dataset]]:
    """Returns the data hooks of a program whose pipeline ends with a function of batches."""

    def create_dataset() -> tf.data.Dataset:
        indices = tf.data.Dataset.range(small.EXAMPLES).shuffle(small.EXAMPLES, seed=1)
        return ctl.data.own_rows(indices).map(load).batch(7).map(function)

    def create_eval_dataset() -> tf.data.Dataset:
        return ctl.data.own_rows(tf.data.Dataset.range(35)).map(load).batch(7).map(function)

    return {"create_dataset": create_dataset, "create_eval_dataset": create_eval_dataset}


def check(tmp_path: Path, hooks: Any, **settings: Any) -> Any:
    config = ctl.Config(
        steps=4, batch_size=16, learning_rate=0.01, last_batch="keep", runs_dir=str(tmp_path),
        **settings,
    )  # fmt: skip
    return ctl_check(hooks, config)


def test_check_compares_the_data_of_one_and_of_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(tmp_path, small.hooks(**make_sets(lambda *rows: rows)))
    printed = capsys.readouterr().out
    assert "the data of one and of 2 processes were compared: training, evaluation" in printed
    assert "on one and on 3 devices were compared" in printed


@pytest.mark.parametrize("hook", ["create_dataset", "create_eval_dataset"])
def test_check_finds_functions_that_treat_rows_together(tmp_path: Path, hook: str) -> None:
    sets = make_sets(lambda *rows: rows)
    sets[hook] = make_sets(subtract_mean)[hook]
    with pytest.raises(SetupError, match=rf"{hook} \(.*batch 0 .* two processes") as raised:
        check(tmp_path, small.hooks(**sets))
    assert len(str(raised.value).split()) <= 38


# ---- The line about what every process prepares --------------------------------------------------


def read_in_python(index: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(lambda number: INPUTS[number], [index], tf.float32)


def decode_if(index: tf.Tensor) -> tf.Tensor:
    """Decodes a picture in a function that the function of the map calls."""
    nothing = tf.zeros([1, 1, 3], tf.uint8)
    return tf.cond(index > 2, lambda: tf.io.decode_jpeg(b"", channels=3), lambda: nothing)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (read_in_python, "PyFunc"),
        (lambda _: tf.io.decode_image(tf.io.read_file("picture.jpg")), "DecodeImage"),
        (decode_if, "DecodeJpeg"),
        (load, None),
    ],
)
def test_a_map_that_every_process_repeats_is_named(
    function: Callable[..., Any], op: str | None
) -> None:
    dataset = tf.data.Dataset.range(9).map(function).prefetch(2)

    def describe(processes: int, mark: object = None) -> str | None:
        state: Any = SimpleNamespace(
            data=SimpleNamespace(dataset=dataset, mark=mark, hook="create_dataset"),
            cluster=SimpleNamespace(task=SimpleNamespace(processes=processes)),
        )
        return describe_shared_preparation(state)

    line = describe(3)
    if op is None:
        assert line is None
        return
    assert line is not None
    assert f"each of the 3 processes prepares every example ({op})" in line
    assert "ctl.data.own_rows" in line
    assert describe(1) is None
    assert describe(3, mark="a mark") is None
