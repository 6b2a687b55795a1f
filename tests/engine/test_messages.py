"""What TensorFlow says in its own way is not what a user reads; ``--debug`` shows all of it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import tensorflow as tf

from ctl_core.run_state.folder import repair_list
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.project import Cli, failed, mistakes, refused, source_of, where

INTERNAL = ("{{", "[Op:", "WARNING:tensorflow", "function_node", "Traceback", "T=DT_")
WIDER = """\
def create_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
"""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What TensorFlow's logger shows, as it does outside of tests."""
    monkeypatch.setattr(tf.get_logger(), "level", logging.WARNING)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    tf.get_logger().addHandler(handler)
    yield messages
    tf.get_logger().removeHandler(handler)


def test_a_checkpoint_of_other_shapes_is_one_line(cli: Cli, shown: list[str]) -> None:
    assert cli(source_of()).code == 0
    source = source_of(create_model=WIDER)
    for command in (("train", "--steps=20", "--batch-size=8"), ("evaluate",)):
        outcome = cli(source, command=(*command, "--run-name", "a"))
        refused(outcome, "does not fit the model any more", "has shape [2, 3]")
        gc.collect()  # TensorFlow warns when what it could not restore is deleted
        assert shown == []


def test_a_missing_list_of_checkpoints_is_made_anew_without_a_word(
    train: Train, shown: list[str]
) -> None:
    """From Python, where TensorFlow's logger is left as it is."""
    folder = train(make_hooks(), steps=4, ckpt_every=2).run_dir / "ckpt"
    before = tf.train.get_checkpoint_state(folder)
    (folder / "checkpoint").unlink()
    repair_list(folder)
    after = tf.train.get_checkpoint_state(folder)
    assert after.model_checkpoint_path == before.model_checkpoint_path
    assert list(after.all_model_checkpoint_paths) == list(before.all_model_checkpoint_paths)
    assert len(after.all_model_checkpoint_paths) == 2
    assert shown == []


def test_what_a_hook_logs_by_tensorflows_logger_is_shown(cli: Cli, shown: list[str]) -> None:
    hook = "every_steps = {10: lambda: tf.get_logger().warning('a word of the user')}\n"
    assert cli(source_of(every_steps=hook)).code == 0
    assert shown == ["a word of the user"]


SHAPES = mistakes(
    """
== the first batch
def create_dataset():  # here
    torn = data.map(lambda a, b: (a[: 1 + tf.cast(b[0] > 0.1, tf.int32)], b))
    return torn.batch(8, True)
-> create_dataset | reading the | Cannot add tensor to the batch
== a graph hook
def input_pre(batch):
    return batch[0] @ batch[0]  # here
-> input_pre | ValueError: Dimensions must be equal, but are 2 and 8 for MatMul with input
-> shapes: [8,2], [8,2]. [batch:
== a graph hook while running, whose shapes are known then only
def blur(value):
    shape = [None] * len(value.shape)
    return tf.ensure_shape(tf.numpy_function(lambda v: v, [value], tf.float32), shape)
def input_pre(batch):
    return tf.reshape(blur(batch[0]), [-1, 3])[:, :2]  # here
-> input_pre | InvalidArgumentError: Input to reshape is a tensor with 16 values, but the
-> requested shape requires a multiple of 3, after step 0.
== a host hook
every_steps = {1: lambda output: tf.matmul(output, output)}  # here
-> every_steps[1] | InvalidArgumentError: Matrix size-incompatible: In[0]: [8,1],
"""
)


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("devices", ["1", "2"])
def test_shapes_that_do_not_fit(cli: Cli, shown: list[str], case: str, devices: str) -> None:
    code, words = SHAPES[case]
    source = source_of(own=code)
    outcome = cli(source, "--virtual-devices", devices)
    if devices == "1":
        found = failed if outcome.code == 1 else refused
        found(outcome, where(source), *words)
    assert outcome.code in (1, 2) and len(outcome.err.splitlines()) == 1
    assert not any(text in outcome.out + outcome.err for text in INTERNAL)
    assert shown == []
