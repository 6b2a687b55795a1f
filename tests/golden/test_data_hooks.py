"""A run depends on the values that data hooks return, not on the way the hooks are written."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.uneven_batches import (
    SEED,
    assert_trained,
    batches_of,
    shuffled,
    train_on,
    train_plainly,
)

STEPS = 5  # training ends in the second pass


# ---- The defaults, written in other ways -------------------------------------------------------


def count_examples(batch: Any) -> Any:
    return ctl_core.leading_dimension(batch)


def make_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


def count_in_steps(batch: Any) -> Any:
    """Counts the examples of a batch."""
    inputs, _ = batch
    number_of_rows = tf.shape(inputs)[0]
    return number_of_rows


def return_by_another_name(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset unchanged, under another name."""
    batches = dataset
    return batches


SPELLINGS: dict[str, dict[str, Callable[..., Any]]] = {
    "written out": {"count_examples": count_examples, "make_batches": make_batches},
    "refactored": {
        "count_examples": count_in_steps,
        "make_batches": return_by_another_name,
    },
    "lambdas": {
        "count_examples": lambda batch: (
            len(batch[1]) if tf.executing_eagerly() else tf.shape(batch[1])[0]
        ),
        "make_batches": lambda dataset: dataset,
    },
}


@pytest.mark.parametrize("last_batch", small.slow_but("keep", of=["drop", "keep"]))
@pytest.mark.parametrize("devices", small.slow_but(3, of=[1, 3]))
def test_spelling_of_defaults_changes_nothing(
    train: engine.Train, devices: int, last_batch: str
) -> None:
    """The weights are the same bit for bit, and so are the element specs and the number of traces.

    On three devices, the static shapes of the elements include the number of rows.
    """

    def make_elements() -> tf.data.Dataset:
        return shuffled(98).batch(7, drop_remainder=devices == 3)

    def run(name: str, hooks_of_data: dict[str, Callable[..., Any]]) -> tuple[Any, int]:
        traces = 0

        def input_pre(batch: Any) -> Any:
            nonlocal traces
            traces += 1
            return batch[0]

        hooks = small.hooks(create_dataset=make_elements, input_pre=input_pre, **hooks_of_data)
        more = {"steps": STEPS, "last_batch": last_batch, "run_name": name.replace(" ", "-")}
        return train_on(train, hooks, devices, 32, **more), traces

    keras.utils.set_random_seed(SEED)  # The shuffle reads the global seed when it is defined.
    default, traces = run("left out", {})
    batches = batches_of(shuffled(98), 32, last_batch)
    plain_hooks = small.hooks(input_pre=lambda batch: batch[0])
    assert_trained(default, train_plainly(plain_hooks, STEPS, batches))
    for name, hooks_of_data in SPELLINGS.items():
        state, its_traces = run(name, hooks_of_data)
        compare.assert_same(state.train_model.weights, default.train_model.weights)
        assert its_traces == traces, name
        assert state.data.dataset.element_spec == default.data.dataset.element_spec, name
        assert state.data.share_spec == default.data.share_spec, name


# ---- Elements that contradict the first --------------------------------------------------------


def make_graphs(sizes: list[int]) -> tf.data.Dataset:
    """Returns elements of 8 graphs, each with the given total number of nodes."""
    random = tf.random.Generator.from_seed(1)
    elements = [(random.normal([size, small.FEATURES]), tf.zeros([8, 1])) for size in sizes]
    spec = (tf.TensorSpec([None, small.FEATURES]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)


def test_element_that_contradicts_the_first_is_refused(train: engine.Train) -> None:
    """In the first element, each graph has one node, so nodes cannot be distinguished from rows."""
    hooks = small.hooks(
        create_dataset=lambda: make_graphs([8, 8, 8, 11, 8]),
        count_examples=lambda batch: tf.shape(batch[1])[0],
    )
    message = r"^create_dataset \(test_data_hooks.py:\d+\): count_examples returns 8 .*first"
    with pytest.raises(ctl_core.CtlError, match=message) as refusal:
        train(hooks, batch_size=8, steps=8)
    assert "\n" not in str(refusal.value)


def test_element_that_contradicts_the_default_is_refused(train: engine.Train) -> None:
    hooks = small.hooks(create_dataset=lambda: make_graphs([8, 8, 8, 11, 8]))
    message = r"^create_dataset .*differ in their first dimension.*batch\[1\]"
    with pytest.raises(ctl_core.CtlError, match=message):
        train(hooks, batch_size=8, steps=8)


def select_rows(dataset: tf.data.Dataset, per_replica_batch_size: int) -> tf.data.Dataset:
    """Returns batches whose last entries contain only the rows with a positive first feature."""

    def select(inputs: tf.Tensor, target: tf.Tensor) -> Any:
        is_selected = inputs[:, 0] > 0
        selected = (tf.boolean_mask(inputs, is_selected), tf.boolean_mask(target, is_selected))
        return inputs, (target, target), selected

    return dataset.batch(per_replica_batch_size, drop_remainder=True).map(select)


def test_refusal_names_make_batches_and_a_cure_that_works(train: engine.Train) -> None:
    examples = tf.data.Dataset.from_tensor_slices(small.data(96))
    hooks = small.hooks(
        create_dataset=lambda: examples,
        make_batches=select_rows,
        input_pre=lambda batch: batch[0],
        loss_pre=lambda output, batch: (output, batch[1][0]),
    )
    with pytest.raises(ctl_core.SetupError, match=r"^make_batches ") as refusal:
        train(hooks, batch_size=8, steps=5)
    cure = re.search(r"def count_examples\(batch\): return .*?\[0\](?=[.,;]|$)", str(refusal.value))
    assert cure, str(refusal.value)
    names: dict[str, Any] = {"tf": tf}
    exec(cure[0], names)
    hooks.count_examples = names["count_examples"]
    state = train_on(train, hooks, 1, 8, steps=5, run_name="cured")
    batches = iter(select_rows(examples.repeat(), 8))
    assert_trained(state, train_plainly(hooks, 5, batches))


def test_a_free_order_of_examples_is_reported(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--deterministic``, the order is fixed. ``--check`` does not blame the model."""

    def read(per_replica_batch_size: int, deterministic: bool = False) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(small.data())

        def wait(inputs: tf.Tensor, target: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            size = tf.cast(tf.abs(inputs[0]) * 300, tf.int32)  # examples take different times
            cost = tf.reduce_sum(tf.ones([size, 300]) @ tf.ones([300, 300]))
            return inputs + 0.0 * cost, target

        waited = examples.map(wait, num_parallel_calls=8, deterministic=deterministic)
        return waited.batch(per_replica_batch_size, drop_remainder=True)

    state = train_small(small.hooks(create_dataset=read), deterministic=True)
    compare.assert_close(state.train_model.weights, small.plain(6).weights)
    assert "another order" not in capsys.readouterr().out
    train_small(small.hooks(create_dataset=read), run_name="free")
    out = capsys.readouterr().out
    assert "warning: read (test_data_hooks.py:" in out or "warning: create_dataset (test_" in out
    assert "with deterministic=False, the examples have another order in each run" in out
    ctl_core.check(small.hooks(create_dataset=read), ctl_core.Config(**small.settings(6)))
    out = capsys.readouterr().out
    assert "the examples have another order" in out
    assert "check: all well" in out


def test_an_element_that_cannot_be_read_is_named(train_small: engine.Train, tmp_path: Path) -> None:
    """By its path if the pipeline begins with paths, otherwise by its index."""
    for number, row in enumerate(np.hstack(small.data())):
        (tmp_path / f"{number:03}.txt").write_text(" ".join(map(str, row)))
    paths = sorted(map(str, tmp_path.glob("*.txt")))
    (tmp_path / "077.txt").write_text("<html>404</html>")

    def read(path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        row = tf.strings.to_number(tf.strings.split(tf.io.read_file(path)))
        return tf.ensure_shape(row[:5], [5]), tf.ensure_shape(row[5:], [1])

    def read_paths(per_replica_batch_size: int) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(paths).shuffle(9, seed=1)
        examples = examples.map(read, num_parallel_calls=2).shuffle(9, seed=2)
        return examples.batch(per_replica_batch_size, drop_remainder=True)

    with pytest.raises(ctl_core.RunError) as raised:
        train_small(small.hooks(create_dataset=read_paths))
    message = str(raised.value)
    assert "reading the data: " in message
    assert "\n" not in message
    expected = (
        f"; the element of '{tmp_path}/077.txt' cannot be read, so repair it or leave it out."
    )
    assert message.endswith(expected), message

    def read_nested(per_replica_batch_size: int) -> tf.data.Dataset:
        groups = tf.data.Dataset.from_tensor_slices(np.reshape(paths, [10, 10]))
        nested = groups.flat_map(lambda group: tf.data.Dataset.from_tensor_slices(group).map(read))
        return nested.batch(per_replica_batch_size, drop_remainder=True)

    with pytest.raises(ctl_core.RunError, match=r"; element 7 \(counted from 0\) cannot be read"):
        train_small(small.hooks(create_dataset=read_nested), run_name="nested")
