"""Lower precision, and many steps in one XLA executable: the weights they lead to."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.input import prefetch
from ctl_core.run.errors import RunError
from tests.golden import small
from tests.golden.reference import Reference
from tests.helpers.cases import FEATURES, dropout_model, make_hooks, nadam, set_weights
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED, Cli


def float64_model() -> keras.Model:
    """Sets a policy of Keras', too."""
    keras.config.set_dtype_policy("float64")
    return set_weights(keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)]))


@pytest.mark.slow
def test_a_run_is_used_in_its_own_precision(cli: Cli) -> None:
    flags = ("--batch-size", "16", "--precision", "bfloat16", "--accumulate-steps", "2")
    said = "batch size 16 in 2 micro-batches, 1 replica on CPU, in bfloat16."
    assert said in cli(EVALUATED, *flags).out
    for command in ("evaluate", "predict", "export"):
        assert cli(None, command=(command,)).code == 0
    with np.load("runs/a/predictions.npz") as predictions:
        output = predictions["output"]
    assert output.dtype == np.float32 and output.shape == (37, 1)
    loaded = tf.saved_model.load("runs/a/export/1")
    served = loaded.serve(tf.constant(small.data()[0][-37:]))
    assert served.dtype == tf.float32
    np.testing.assert_array_equal(served, output)


@pytest.mark.slow
def test_variables_of_another_type_are_trained_in_it(train: Train) -> None:
    def loss_of(pair: Any) -> Any:
        return tf.reduce_sum((pair[0] - tf.cast(pair[1], pair[0].dtype)) ** 2, axis=1)

    hooks = make_hooks(
        create_model=float64_model,
        create_loss=lambda: loss_of,
        create_opt=lambda lr: keras.optimizers.SGD(0.125),
    )
    before = keras.config.dtype_policy()
    state = train(hooks, steps=4, virtual_devices=2)
    assert keras.config.dtype_policy() == before
    reference = Reference(hooks)
    keras.config.set_dtype_policy(before)
    plain = reference.train(small.create_dataset(small.BATCH).take(4)).parts.train_model
    for variable, other in zip(state.train_model.variables, plain.variables, strict=True):
        assert variable.dtype == "float64"
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-12)


# ---- With --jit-compile, many steps in one executable: the same weights, wherever it is cut ------

BATCH = 8


def freeze(train_model: Any) -> None:
    train_model.layers[0].trainable = not train_model.layers[0].trainable


@pytest.mark.slow
@pytest.mark.parametrize("unit", [10, 0])
def test_where_it_is_cut_changes_no_bit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], unit: int
) -> None:
    """With Dropout, batch normalisation and Nadam; a layer is frozen and unfrozen on the way.

    Ten steps are read at once: at a resume they are used in part, as a whole, and not begun. Or
    batches are too large to be read many at once: then each step is by itself.
    """
    own = {"create_model": dropout_model, "create_opt": nadam, "at_step": {6: freeze, 13: freeze}}
    settings = {"batch_size": BATCH, "jit_compile": True, "deterministic": True}
    whole = train(make_hooks(**own), steps=23, run_name="whole", **settings)
    every = {3: lambda loss, output: None, 7: lambda gradients: None}
    monkeypatch.setattr(prefetch, "UNIT_BYTES", unit * BATCH * (FEATURES + 1) * 4 or 1)
    for stop in (4, 10, 11, 23):
        cut = train(make_hooks(**own, every_steps=every), steps=stop, run_name="cut", **settings)
    assert cut.data.unit == unit and whole.data.unit > unit
    variables = zip(cut.recording.variables.items(), whole.recording.variables.items(), strict=True)
    for (name, found), (_, expected) in variables:
        np.testing.assert_array_equal(found.numpy(), expected.numpy(), err_msg=name)
    assert "reading and dropping" not in "".join(capfd.readouterr())


def test_what_xla_cannot_compile_is_named(train: Train) -> None:
    def input_pre(batch: Any) -> Any:
        return tf.strings.to_number(tf.strings.as_string(batch[0]))

    with pytest.raises(RunError, match="AsString"):
        train(make_hooks(input_pre=input_pre), steps=2, jit_compile=True)
