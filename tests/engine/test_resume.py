"""A resumed run is the run that was never interrupted, bit for bit: separate processes, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.conftest import Train, make_hooks, regression_data

STEPS = 100
ROOT = Path(__file__).parents[2]

# Shuffling by a buffer, random augmentation in a parallel map, Dropout, and a hook at each step.
CALLBACKS = """
import time

import keras
import numpy as np
import tensorflow as tf

from ctl_core import data, report

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(203, 6, 6, 1)).astype("float32")
LABELS = RANDOM.integers(0, 3, 203)


def create_dataset(per_replica_batch_size, config):
    examples = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(50, seed=config.seed)

    def augment(example, seed):
        image, label = example
        noise = tf.random.stateless_normal(image.shape, seed)
        return image + 0.1 * noise, label

    augmented = data.with_seeds(examples, config.seed).map(augment, num_parallel_calls=2)
    return augmented.batch(per_replica_batch_size)


def create_eval_dataset(per_replica_batch_size):
    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(per_replica_batch_size)


def create_model():
    return keras.Sequential([
        keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)])


def create_loss():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda loss_input: loss(loss_input[1], loss_input[0])


def halve(lr):
    lr.assign(lr * 0.5)


def slow(step, loss, hparams):
    report(step, loss=loss)
    time.sleep(hparams.get("pause", 0.0))


every_steps = {1: slow}
at_step = {30: halve, 60: halve}
"""


def command(*flags: str) -> list[str]:
    settings = "--steps=100 --batch-size=16 --ckpt-every=7 --eval-every=20 --deterministic"
    return [sys.executable, "-m", "ctl_core", "train", *settings.split(), *flags]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "callbacks.py").write_text(CALLBACKS)
    return folder


def start(project: Path, *flags: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command(*flags), cwd=project, env=environ, stdout=subprocess.DEVNULL)


def lines(project: Path, run: str) -> list[dict[str, float]]:
    path = project / "runs" / run / "metrics.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def when_at(project: Path, run: str, step: int, act: Callable[[], None]) -> None:
    """Waits until the run has reported ``step``, then acts."""
    limit = time.monotonic() + 120
    while not any(line["step"] >= step for line in lines(project, run)):
        assert time.monotonic() < limit, "the run does not get on"
        time.sleep(0.05)
    act()


def tensors(project: Path, run: str) -> dict[str, bytes]:
    """Everything in the last checkpoint but the data pipeline's own serialized form."""
    found = {}
    for part in ("", "engine/"):
        reader = tf.train.load_checkpoint(
            str(project / "runs" / run / "ckpt" / f"{part}ckpt-{STEPS}")
        )
        for key in reader.get_variable_to_shape_map():
            if "OBJECT_GRAPH" not in key and "ITERATOR" not in key and "save_counter" not in key:
                found[part + key] = np.asarray(reader.get_tensor(key)).tobytes()
    return found


@pytest.fixture(scope="module")
def whole(project: Path) -> str:
    assert start(project, "--run-name", "whole").wait() == 0
    return "whole"


def assert_same(project: Path, run: str, whole: str) -> None:
    expected, found = tensors(project, whole), tensors(project, run)
    assert expected.keys() == found.keys() and len(expected) > 10
    assert [key for key in expected if expected[key] != found[key]] == []
    assert lines(project, run) == lines(project, whole)


def test_two_halves_equal_the_whole(project: Path, whole: str) -> None:
    assert start(project, "--run-name", "halves", "--steps", "50").wait() == 0
    halfway = json.loads((project / "runs/halves/ckpt/engine/ckpt-50.json").read_text())
    assert halfway["step"] == 50 and halfway["done"] == [30]
    assert start(project, "--run-name", "halves").wait() == 0
    # The first half also ends with an evaluation, which the whole has no reason for at step 50.
    expected = lines(project, whole)
    found = [x for x in lines(project, "halves") if (x["step"], x["split"]) != (50, "eval")]
    assert found == expected
    assert tensors(project, "halves") == tensors(project, whole)


def test_killed_and_terminated_equal_the_whole(project: Path, whole: str) -> None:
    name, pause = ("--run-name", "killed"), ("--hparams.pause", "0.02")
    for at, number, code in (
        (25, signal.SIGKILL, -signal.SIGKILL),
        (47, signal.SIGTERM, 143),
        (72, signal.SIGINT, 130),
    ):
        process = start(project, *name, *pause)
        when_at(project, "killed", at, partial(process.send_signal, number))
        assert process.wait() == code
    assert start(project, *name).wait() == 0
    assert_same(project, "killed", whole)


def weights(train: Train, name: str, cuts: list[int], replicas: list[int]) -> list[np.ndarray]:
    for steps, count in zip(cuts, replicas, strict=True):
        hooks = make_hooks(create_dataset=unbatched_shuffle)
        state = train(hooks, steps=steps, virtual_devices=count, run_name=name)
    return state.train_model.get_weights()  # type: ignore[no-any-return]


def unbatched_shuffle(per_replica_batch_size: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(regression_data())
    return dataset.shuffle(40, seed=3).batch(per_replica_batch_size)


def test_resuming_on_two_replicas_is_exact(train: Train) -> None:
    whole = weights(train, "whole", [17], [2])
    parts = weights(train, "parts", [5, 11, 17], [2, 2, 2])
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_resuming_on_another_number_of_replicas_goes_on_with_the_next_example(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = weights(train, "whole", [17], [1])
    parts = weights(train, "parts", [5, 11, 17], [1, 2, 4])
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert "saved with 1 replica, batch_size 16" in capsys.readouterr().out


def test_a_generator_is_reached_by_skipping(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, target = regression_data()

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        def examples():  # type: ignore[no-untyped-def]
            yield from zip(inputs, target, strict=True)

        signature = (tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32))
        return tf.data.Dataset.from_generator(examples, output_signature=signature).batch(
            per_replica_batch_size
        )

    hooks = make_hooks(create_dataset=create_dataset)
    whole = train(hooks, steps=15, run_name="whole").train_model.get_weights()
    train(hooks, steps=9, run_name="parts")
    assert "cannot be saved" in capsys.readouterr().out
    parts = train(hooks, steps=15, run_name="parts").train_model.get_weights()
    assert "reading and dropping 144 examples" in capsys.readouterr().out
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_changed_learning_rate_replaces_the_one_in_the_checkpoint(train: Train) -> None:
    assert float(train(make_hooks(), steps=2, learning_rate=0.01).lr) == pytest.approx(0.01)
    assert float(train(make_hooks(), steps=4, learning_rate=0.01).lr) == pytest.approx(0.01)
    assert float(train(make_hooks(), steps=6, learning_rate=0.5).lr) == pytest.approx(0.5)


def test_epochs_count_whole_global_batches(train: Train) -> None:
    assert train(make_hooks(), steps=None, epochs=2, batch_size=16).step == 12  # 100 = 6 * 16 + 4
    assert train(make_hooks(), steps=None, epochs=3, batch_size=16).step == 18
    unknown = make_hooks(create_dataset=lambda per_replica_batch_size: unbatched_shuffle(
        per_replica_batch_size).filter(lambda x, y: True))  # fmt: skip
    for replicas in (1, 2, 4):
        state = train(
            unknown, steps=None, epochs=2, virtual_devices=replicas, run_name=f"of-{replicas}"
        )
        assert state.step == 12
