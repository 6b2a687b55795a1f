"""Each hook: overriding it changes what it should and only that; leaving it out, the default."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.hooks import defaults
from ctl_core.hooks.callbacks_file import Source, load_callbacks
from ctl_core.hooks.load import is_default
from ctl_core.hooks.table import SPECS, TEXT
from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    small_model,
    squared_error,
)
from tests.helpers.fixtures import Train

BATCH = 16
ROOT = Path(__file__).parents[2]


def test_make_batches_gets_the_repeated_dataset_and_may_batch_it(train: Train) -> None:
    sizes: list[int] = []
    seen: list[np.ndarray] = []

    def make_batches(dataset: Any, per_replica_batch_size: int) -> Any:
        sizes.append(per_replica_batch_size)
        return dataset.batch(per_replica_batch_size)

    hooks = make_hooks(
        create_dataset=lambda: tf.data.Dataset.from_tensor_slices(regression_data()),
        make_batches=make_batches,
        every_steps={1: lambda batch: seen.append(batch[0].numpy())},
    )
    train(hooks, steps=7, virtual_devices=2)
    assert set(sizes) == {BATCH // 2}
    # No example is left out: the seventh batch runs over the end of the pass.
    inputs = regression_data()[0]
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate([inputs, inputs])[: 7 * 16])


@pytest.mark.parametrize("devices", [1, 2])
def test_update_pre_sees_the_summed_gradients_and_the_summed_loss(
    train: Train, devices: int
) -> None:
    """So do host hooks."""
    seen: list[Any] = []

    def update_pre(gradients: Any, loss: Any) -> Any:
        return [tf.sign(g) * loss for g in gradients], ["shown"]

    def see(loss: Any, gradients: Any, display_gradients: Any) -> None:
        seen.extend([loss, *gradients, display_gradients])

    hooks = make_hooks(create_opt=sgd, update_pre=update_pre, every_steps={1: see})
    state = train(hooks, steps=1, virtual_devices=devices)
    model = small_model()
    x, y = (part[:BATCH] for part in regression_data())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(squared_error((model(x), y))) / BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    for found, expected in zip(seen[:-1], [loss, *gradients], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [part.numpy() for part in seen[-1]] == [b"shown"]
    for variable, gradient in zip(model.trainable_variables, seen[1:-1], strict=True):
        variable.assign_sub(0.01 * np.sign(gradient) * float(loss))
    assert_weights(state, model, rtol=1e-5)


def test_every_hook_may_name_config_and_hparams(train: Train) -> None:
    seen: list[float] = []
    hooks = make_hooks(
        create_opt=lambda lr, hparams: keras.optimizers.SGD(hparams["rate"]),
        update_pre=lambda gradients, config: (
            [g * 0.0 + config.seed for g in gradients],
            gradients,
        ),
        every_steps={1: lambda config, hparams: seen.append(hparams["rate"] * config.seed)},
    )
    state = train(hooks, steps=1, seed=3, hparams={"rate": 0.5})
    assert_weights(state, [w - 1.5 for w in small_model().get_weights()])
    assert seen == [1.5]


@pytest.mark.parametrize("stub", ["digits.py", "blank.py"])
def test_the_stubs_show_the_defaults(stub: str, tmp_path: Path) -> None:
    """Also with docstrings and type hints they are the engine's own, which are not converted."""
    text = (ROOT / "templates" / "examples" / stub).read_text()
    hinted = re.sub(r"(?m)^(def \w+\(.*\)):$", r"\1 -> 'Any':\n    'What it does.'", text)
    assert hinted.count("What it does") > 10
    names = {*SPECS, "print_step", "print_loss"} & {*vars(defaults)}
    names -= {"turns", "create_train_metrics", "train_metric_pre"}  # which few need
    names -= {"create_metrics"} if stub == "digits.py" else set()
    for source in (text, hinted):
        file = tmp_path / "callbacks.py"
        file.write_text(source)
        shown = vars(load_callbacks(Source(file, file)))
        for name in names - {"every_steps", "at_step"}:
            assert is_default(name, shown[name]), name
        assert shown["at_step"] == {}
        assert {n: f.__name__ for n, f in shown["every_steps"].items()} == {
            1: "print_step",
            10: "print_loss",
        }
    for name in ("create_dataset", "create_model", "create_loss", "batch_weight"):
        assert name in text


def leading_dimension(batch: Any) -> Any:
    return tf.shape(batch[0])[0] // 2


def count_examples(batch: Any) -> Any:
    return leading_dimension(batch)


def test_what_only_looks_like_a_default_is_called(train: Train) -> None:
    """A default that is decorated; one whose helper is another function."""
    sizes: list[int] = []

    @functools.wraps(defaults.make_batches)
    def make_batches(dataset: Any) -> Any:
        sizes.append(1)
        return dataset

    train(make_hooks(make_batches=make_batches), steps=1)
    assert sizes
    with pytest.raises(ctl_core.SetupError, match="of 8 examples"):
        train(make_hooks(count_examples=count_examples), steps=1, run_name="own")


def test_the_docs_show_the_table() -> None:
    assert f"```text\n{TEXT}```\n" in (ROOT / "docs" / "hooks.md").read_text()
