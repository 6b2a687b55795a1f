"""With --jit-compile, many steps in one executable: the same weights, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from ctl_core.input import prefetch
from ctl_core.run.errors import RunError
from tests.golden.programs import multi_task
from tests.helpers.cases import assert_weights, dropout_model, make_hooks, nadam
from tests.helpers.fixtures import Train

BATCH, STEPS = 8, 12


@pytest.mark.slow
def test_a_loss_that_a_hook_reads_comes_out_of_the_loop(train: Train) -> None:
    losses: dict[bool, list[Any]] = {False: [], True: []}
    for jit in losses:
        own = multi_task.hooks()
        own.every_steps = {4: lambda loss, jit=jit: losses[jit].append(loss)}
        settings = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 0.05}
        train(own, run_name=str(jit), jit_compile=jit, **settings)
    for read, expected in zip(losses[True], losses[False], strict=True):
        tf.nest.assert_same_structure(read, expected)
        np.testing.assert_allclose(tf.nest.flatten(read), tf.nest.flatten(expected), 1e-4)


def freeze(train_model: Any) -> None:
    train_model.layers[0].trainable = not train_model.layers[0].trainable


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Takes op determinism back after a test, for which TensorFlow has no public way."""
    yield
    config.disable_op_determinism()


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
def test_where_it_is_cut_changes_no_bit(train: Train) -> None:
    """With Dropout, batch normalisation and Nadam; a layer is frozen and unfrozen on the way."""
    own = {"create_model": dropout_model, "create_opt": nadam, "at_step": {6: freeze, 13: freeze}}
    settings = {"batch_size": BATCH, "jit_compile": True, "deterministic": True}
    whole = train(make_hooks(**own), steps=20, run_name="whole", **settings)
    every = {3: lambda loss, output: None, 7: lambda gradients: None}
    for stop in (4, 11, 20):
        cut = train(make_hooks(**own, every_steps=every), steps=stop, run_name="cut", **settings)
    variables = zip(cut.recording.variables.items(), whole.recording.variables.items(), strict=True)
    for (name, found), (_, expected) in variables:
        np.testing.assert_array_equal(found.numpy(), expected.numpy(), err_msg=name)


@pytest.mark.slow
def test_a_run_is_cut_in_the_middle_of_what_is_read_at_once(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ten steps are: at a resume they are used in part, as a whole, and not begun."""
    monkeypatch.setattr(prefetch, "UNIT_BYTES", 10 * BATCH * (5 + 1) * 4)
    settings = {"batch_size": BATCH, "jit_compile": True}
    whole = train(make_hooks(), steps=23, run_name="whole", **settings)
    assert whole.data.unit == 10
    for stop in (4, 10, 11, 23):
        cut = train(make_hooks(), steps=stop, run_name="cut", **settings)
    assert_weights(cut, whole, rtol=0)
    assert "reading and dropping" not in "".join(capfd.readouterr())


def test_what_xla_cannot_compile_is_named(train: Train) -> None:
    def input_pre(batch: Any) -> Any:
        return tf.strings.to_number(tf.strings.as_string(batch[0]))

    with pytest.raises(RunError, match="AsString"):
        train(make_hooks(input_pre=input_pre), steps=2, jit_compile=True)
