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
from ctl_core.tools.table_source import load_pyarrow
from tests.helpers.cases import make_hooks, regression_data, sgd, small_model
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED, Cli, refused, source_of

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
        return {"of model": (model(inputs), inputs[:, 1]), "ragged": positive}

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


TABULAR = """
import keras
import numpy as np
import tensorflow as tf

random = np.random.default_rng(0)
inputs = {"age": random.integers(1, 90, 40), "size": random.normal(size=(40, 1)).astype("float32"),
          "kind": np.array(["a", "b", "c", "d"] * 10)}


def create_dataset(per_replica_batch_size):
    data = tf.data.Dataset.from_tensor_slices((inputs, inputs["size"]))
    return data.batch(per_replica_batch_size)


def create_model():
    age, size = keras.Input((), dtype="int64", name="age"), keras.Input((1,), name="size")
    kind = keras.Input((), dtype="string", name="kind")
    one_hot = keras.layers.StringLookup(vocabulary=list("abcd"), output_mode="one_hot")(kind)
    ages = keras.layers.Reshape((1,))(keras.ops.cast(age, "float32"))
    joined = keras.layers.Concatenate()([ages, size, one_hot])
    return keras.Model({"age": age, "size": size, "kind": kind}, keras.layers.Dense(2)(joined))


def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)


every_steps = {}
"""


def test_tables_have_a_column_for_each_input(cli: Cli) -> None:
    """In any order, beside others; the outputs are those of the same rows in a .npz file."""
    flags = ("--steps", "2", "--batch-size", "8", "--run-name", "a")
    assert cli(TABULAR, command=("train", *flags)).code == 0
    random = np.random.default_rng(1)
    age, size = random.integers(1, 90, 21), random.normal(size=21).astype("float32")
    kind = random.choice(list("abcdz"), 21)
    np.savez("x.npz", age=age, size=size[:, None], kind=kind)
    columns = zip(kind, map(float, size), age, strict=True)
    rows = [";".join(map(str, (number, *row))) for number, row in enumerate(columns)]
    Path("x.csv").write_text("\n".join(["id;kind;size;age", *rows]) + "\n")
    pa, parquet = load_pyarrow()
    table = pa.table({"kind": list(kind), "age": age, "id": range(21), "size": size})
    parquet.write_table(table, "x.parquet", row_group_size=5)
    found = []
    for name in ("x.npz", "x.csv", "x.parquet"):
        outcome = cli(None, "--input", name, "--output", "o.npz", command=("predict",))
        assert outcome.code == 0, outcome
        with np.load("o.npz") as file:
            found.append(file["output"])
        assert (name == "x.npz") != (
            f"{name}: columns that the model does not take: id." in outcome.out
        )
    assert found[0].shape == (21, 2)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    header, *lines = Path("x.csv").read_text().splitlines()
    for wrong, said in (
        ([header, *lines[:11], "11;a;0.5"], "w.csv:13: has 3 fields, expected 4"),
        ([header, *lines[:11], "11;a;much;3"], "w.csv:13: size: expected a number, got 'much'"),
        ([header, *lines[:11], "11;a;0.5;3.5"], "age: the model takes int64 [None], got numbers"),
        (
            [header.replace("age", "Age"), *lines],
            "the model takes age, int64 [None]; expected a col",
        ),
        ([header], "w.csv holds no examples"),
        ([], "w.csv: is empty; expected a line with the columns' names"),
    ):
        Path("w.csv").write_text("\n".join(wrong))
        refused(cli(None, "--input", "w.csv", "--output", "w.npz", command=("predict",)), said)
    Path("w.parquet").write_text("no table")
    refused(cli(None, "--input", "w.parquet", command=("predict",)), "cannot be read as a Parquet")
    refused(
        cli(None, "--input", "none.csv", command=("predict",)), "none.csv cannot be read: No su"
    )


def test_a_table_may_be_one_input(cli: Cli) -> None:
    flags = ("--steps", "2", "--batch-size", "16", "--run-name", "a")
    assert cli(EVALUATED, command=("train", *flags)).code == 0
    np.save("x.npy", INPUTS[:20])
    lines = [",".join(map(repr, map(float, row))) for row in INPUTS[:20]]
    Path("x.csv").write_text("\n".join(["a,b,c,d,e", *lines]))
    found = []
    for name in ("x.npy", "x.csv"):
        outcome = cli(None, "--input", name, "--output", "o.npz", command=("predict",))
        assert outcome.code == 0, outcome
        with np.load("o.npz") as file:
            found.append(file["output"])
    np.testing.assert_array_equal(found[0], found[1])
    Path("x.csv").write_text("a,b\n1,2\n")
    refused(
        cli(None, "--input", "x.csv", command=("predict",)), "a table of 5 columns (there: a, b)"
    )


OF_SEVERAL_SHAPES = """\
def create_inference_model(model):
    def outputs(inputs):
        lengths = tf.cast(tf.abs(inputs[:, 0]) * 3, tf.int32)
        ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(inputs[:, 1], lengths), lengths)
        texts = tf.strings.as_string(inputs[:, 0])
        return {"of model": model(inputs), "texts": texts, "ragged": ragged,
                "sum": tf.reduce_sum(inputs)}

    return outputs
"""


@pytest.mark.slow
def test_processes_share_predictions(cli: Cli) -> None:
    """Those of one process, bit for bit and in its order, also on two devices each; no part is
    left behind, and what cannot be done is said in one line.
    """
    assert cli(source_of(create_inference_model=OF_SEVERAL_SHAPES)).code == 0
    np.save("x.npy", np.random.default_rng(3).normal(size=(41, 2)).astype("float32"))
    found = []
    for flags in ("--workers 1", "--workers 2", "--workers 2 --virtual-devices 2"):
        words = ("--input", "x.npy", "--batch-size", "4", "--output", "out.npz", *flags.split())
        outcome = cli(None, *words, command=("predict",))
        assert outcome.code == 0, outcome.err
        with np.load("out.npz") as file:
            found.append(dict(file))
    assert found[0].keys() == {"of model", "texts", "ragged", "ragged.lengths", "sum"}
    assert found[0]["of model"].shape == (41, 1) and found[0]["sum"].shape == (11,)
    for others in found[1:]:
        assert others.keys() == found[0].keys()
        for name, values in found[0].items():
            np.testing.assert_array_equal(others[name], values, err_msg=name)
    assert not list(Path("runs/a").glob(".pred*")) and not list(Path("runs/a").glob("worker*"))
    outcome = cli(None, "--input", "none.npy", "--workers", "2", command=("predict",))
    refused(outcome, "input: none.npy cannot be read")
