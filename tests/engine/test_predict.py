"""What ``predict`` writes: the same on any number of devices, and never over what it reads."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.tools import commands
from tests.helpers.cases import make_hooks, regression_data, sgd, small_model
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED, Cli, refused

BATCH = 12
INPUTS = regression_data()[0]
OPTIONS: dict[str, Any] = {"input": None, "output": None, "checkpoint": None}
seen: list[set[str]] = []


class Told(keras.layers.Layer):
    """Notes for which device it is traced."""

    def call(self, inputs: Any) -> Any:
        outputs = tf.identity(inputs)
        seen[-1].add(outputs.device)
        return outputs


def create_eval_dataset(per_replica_batch_size: int) -> Any:
    """100 examples, of which the last batch has 4; the other set is not asked for."""
    data = tf.data.Dataset.from_tensor_slices(regression_data())
    return {"all": data.batch(per_replica_batch_size), "few": data.take(5).batch(2)}


def create_inference_model(model: Any) -> Any:
    def outputs(inputs: Any) -> Any:
        positive = tf.RaggedTensor.from_tensor(inputs, lengths=tf.cast(inputs[:, 0] > 0, tf.int32))
        texts = tf.strings.as_string(inputs[:, 0])
        pair = (model(inputs), inputs[:, 1])
        return {"of model": pair, "ragged": positive, "texts": texts, "sum": tf.reduce_sum(inputs)}

    return outputs


@pytest.mark.parametrize("kind", ["a file", "the evaluation data"])
def test_predictions_are_those_of_one_device(train: Train, kind: str, tmp_path: Path) -> None:
    """On 1, 2 and 3, in their order, bit for bit; 9 batches, which 2 do not divide."""
    hooks = make_hooks(
        create_model=lambda: keras.Sequential([keras.Input((5,)), small_model(), Told()]),
        create_opt=sgd,
        create_eval_dataset=create_eval_dataset,
        create_inference_model=create_inference_model,
    )
    seen.append(set())
    state = train(hooks, steps=3, batch_size=BATCH)
    np.save(tmp_path / "x.npy", INPUTS)
    own = {"input": str(tmp_path / "x.npy")} if kind == "a file" else {"dataset": "all"}
    found = []
    for devices in (1, 2, 3):
        seen.append(set())
        config = dataclasses.replace(state.config, virtual_devices=devices)
        path = commands.predict(hooks, config, {**OPTIONS, **own})
        with np.load(path) as file:
            found.append(dict(file))
        assert devices == 1 or len(seen[-1]) >= devices
    name = "predictions-x.npz" if kind == "a file" else "predictions.npz"
    assert path == Path(state.run_dir) / name
    for others in found:
        assert others.keys() == found[0].keys() >= {"of model/0", "of model/1", "ragged.lengths"}
        for key, values in others.items():
            np.testing.assert_array_equal(values, found[0][key], err_msg=key)
    assert found[0]["sum"].shape == (9,) and found[0]["texts"].shape == (100,)
    output = found[0]["of model/0"]
    np.testing.assert_allclose(output, state.train_model(INPUTS), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[0]["of model/1"], INPUTS[:, 1])


def test_what_is_read_is_not_written_over(cli: Cli, tmp_path: Path) -> None:
    flags = ("--steps", "2", "--batch-size", "16", "--run-name", "a")
    assert cli(EVALUATED, command=("train", *flags)).code == 0
    np.savez("x.npz", INPUTS)
    os.link("x.npz", "hard.npz")
    os.symlink("x.npz", "soft.npz")
    before = Path("x.npz").read_bytes()
    for output in ("x.npz", "./x.npz", "hard.npz", "soft.npz"):
        outcome = cli(None, "--input", "x.npz", "--output", output, command=("predict",))
        refused(outcome, "output: ", "is the file of --input", "name another one")
        assert Path("x.npz").read_bytes() == before
    assert cli(None, command=("predict",)).code == 0
    first = Path("runs/a/predictions.npz").read_bytes()
    outcome = cli(None, "--input", "x.npz", command=("predict",))
    assert outcome.code == 0 and "to runs/a/predictions-x.npz" in outcome.out
    assert Path("runs/a/predictions.npz").read_bytes() == first
