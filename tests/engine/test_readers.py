"""Readers in Python: the data of a plain loop over them, resumed by their state, not by reading."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    small_model,
    squared_error,
    unclipped,
)
from tests.helpers.fixtures import Train
from tests.helpers.readers import Batches, Endless, Loader, generator, grain_loader, passes
from tests.helpers.rendering import ROOT, TEMPLATE

BATCH, STEPS, RATE = 16, 20, 0.01
# How many elements are read to find out their sizes, and to try the state.
LOOKED = 5


def need_grain(batch_size: int) -> Any:
    pytest.importorskip("grain")
    return grain_loader(batch_size)


KINDS: dict[str, Callable[..., Any]] = {
    "a PyDataset": Batches,
    "a PyDataset read by threads": functools.partial(Batches, workers=3, max_queue_size=4),
    "state_dict": Loader,
    "get_state": Endless,
    "grain": need_grain,
    "grain's iterator": lambda batch_size: iter(need_grain(batch_size)),
}


def hooks_of(make: Callable[[int], Any], **hooks: Any) -> SimpleNamespace:
    """Trains on global batches; ``Endless`` gives dicts."""

    def pair(batch: Any) -> Any:
        return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch

    return make_hooks(
        **{
            "create_dataset": lambda global_batch_size: make(global_batch_size),
            "create_opt": sgd,
            "input_pre": lambda batch: pair(batch)[0],
            "loss_pre": lambda output, batch: (output, pair(batch)[1]),
            "update_pre": unclipped,
            **hooks,
        }
    )


def by_hand(make: Callable[[int], Any], steps: int, keep: bool = False) -> list[np.ndarray]:
    """The weights that a plain loop comes to; batches that are not full are left out."""
    keras.utils.set_random_seed(0)
    model, stream = small_model(), passes(lambda: make(BATCH))
    for _ in range(steps):
        inputs, target = next(b for b in stream if keep or len(b[0]) == BATCH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squared_error((model(inputs), target)))
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
    return model.get_weights()  # type: ignore[no-any-return]


def position(state: ctl_core.State, step: int) -> Any:
    path = Path(state.run_dir) / f"ckpt/engine/input-{step}-0.json"
    return json.loads(path.read_text())["position"]


SLOW = ("a PyDataset read by threads", "grain's iterator")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in KINDS]
)
def test_weights_of_a_plain_loop_also_when_resumed(
    train: Train, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """On one replica; on two in parts, in the middle and at the end of passes, bit for bit."""
    make = KINDS[kind]
    hooks, expected = hooks_of(make), by_hand(make, STEPS)
    for steps in (4, 6, STEPS):  # a pass has six
        parts = train(hooks, steps=steps, run_name="parts")
    assert_weights(parts, expected)
    whole = train(hooks, steps=STEPS, run_name="two", virtual_devices=2)
    assert_weights(whole, expected)
    for steps in (6, 13, STEPS):
        parts = train(hooks, steps=steps, run_name="parts-of-two", virtual_devices=2)
    assert_weights(whole, parts, rtol=0)
    assert "dropping" not in capsys.readouterr().out


def test_array_records_as_the_page_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each digit once a pass, in another order in the next."""
    pytest.importorskip("grain")
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(TEMPLATE / "data")
    page = (ROOT / "docs" / "data-and-resume.md").read_text()
    codes = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    write, read = (code for code in codes if "digits.array_record" in code)
    exec(write, {})
    hooks: dict[str, Any] = {}
    exec(read, hooks)

    config = ctl_core.Config(steps=1)
    (first, *_), (second, *_) = (
        zip(*itertools.islice(hooks["create_dataset"](599, config), 3 * n, 3 * n + 3), strict=True)
        for n in range(2)
    )
    digits = np.load("data/digits.npz")["images"] / np.float32(16)
    for images in (np.concatenate(first), np.concatenate(second)):
        ink = images.sum(axis=(1, 2, 3))  # which a shift leaves as it is
        np.testing.assert_allclose(np.sort(ink), np.sort(digits.sum(axis=(1, 2))), rtol=1e-6)
    assert not np.array_equal(first, second)


# What is read first after ``step`` steps; a pass has six, and a seventh batch that is left out.
NEXT: dict[str, Callable[[int], int]] = {
    "a PyDataset": lambda step: step % 6,
    "state_dict": lambda step: step % 6 * BATCH,
    "get_state": lambda step: step,
}


@pytest.mark.parametrize("kind", NEXT)
def test_nothing_is_read_again_on_resume(train: Train, kind: str) -> None:
    """Also on another number of replicas; the state is that after the step, not what is ahead."""
    before = 0
    for steps, replicas in ((23, 1), (31, 2), (40, 4)):
        reads: list[Any] = []
        hooks = hooks_of(functools.partial(KINDS[kind], reads=reads))
        state = train(hooks, steps=steps, virtual_devices=replicas)
        assert reads[LOOKED] == NEXT[kind](before)
        assert NEXT[kind](steps - 1) in reads[LOOKED:]
        if kind == "a PyDataset":
            assert position(state, steps) == {"pass": steps // 6, "index": steps % 6}
        before = steps
    assert_weights(state, by_hand(KINDS[kind], 40))


@pytest.mark.slow
def test_batches_of_each_replica(train: Train) -> None:
    """Elements of per_replica_batch_size, of which a step takes two."""

    def create_dataset(per_replica_batch_size: int) -> Any:
        return Loader(per_replica_batch_size)

    hooks = hooks_of(Loader, create_dataset=create_dataset)
    whole = train(hooks, steps=11, run_name="whole", virtual_devices=2)
    for steps in (3, 6, 8, 11):
        parts = train(hooks, steps=steps, run_name="parts", virtual_devices=2)
    assert_weights(whole, parts, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a PyDataset", "state_dict", "grain"])
def test_the_last_batch_is_kept(train: Train, kind: str) -> None:
    settings: dict[str, Any] = {"last_batch": "keep", "steps": None}
    hooks = hooks_of(KINDS[kind])
    whole = train(hooks, epochs=3, run_name="whole", **settings)
    assert whole.step == 21
    assert_weights(whole, by_hand(KINDS[kind], 21, keep=True))
    two = train(hooks, epochs=3, run_name="two", virtual_devices=2, **settings)
    assert_weights(two, whole)
    for steps, replicas in ((3, 2), (7, 1), (12, 2), (20, 4), (21, 1)):
        settings["steps"] = steps
        parts = train(hooks, run_name="parts", virtual_devices=replicas, **settings)
    assert_weights(parts, whole)


@pytest.mark.slow
def test_compiled_stretches(train: Train) -> None:
    hooks = hooks_of(Loader)
    whole = train(hooks, run_name="whole", jit_compile=True)
    for steps in (5, 6, STEPS):
        parts = train(hooks, steps=steps, run_name="parts", jit_compile=True)
    assert_weights(whole, parts, rtol=0)
    assert_weights(whole, by_hand(Loader, STEPS), rtol=1e-5)


def test_a_generator_is_made_anew_for_each_pass_and_skipped_forward(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = hooks_of(generator)
    whole = train(hooks, run_name="whole")
    assert_weights(whole, by_hand(generator, STEPS))
    for steps in (4, 15, STEPS):
        parts = train(hooks, steps=steps, run_name="parts")
    assert_weights(whole, parts, rtol=0)
    output = capsys.readouterr().out
    assert "a generator has neither get_state and set_state nor state_dict" in output
    assert "dropping 64 examples" in output and "dropping 240 examples" in output


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "a generator"])
def test_evaluation_reads_the_same_each_time(train: Train, kind: str) -> None:
    """Each example once, the last batch smaller, whatever the replicas; training goes on."""
    if kind == "get_state":
        pytest.skip("it never ends")
    make = {**KINDS, "a generator": generator}[kind]
    keras.utils.set_random_seed(0)
    reader = make(BATCH)
    seen = list(reader) if not isinstance(reader, Batches) else [reader[i] for i in range(7)]
    means = [np.concatenate([batch[part] for batch in seen]).mean() for part in (0, 1)]
    hooks = hooks_of(
        Batches,
        create_eval_dataset=lambda per_replica_batch_size: {"a": make(BATCH), "b": make(50)},
        create_metrics=lambda: {"x": keras.metrics.Mean(), "y": keras.metrics.Mean()},
        metric_pre=lambda batch: {"x": (batch[0],), "y": (batch[1],)},
    )
    found: list[Any] = []
    hooks.after_eval = lambda metrics: found.append(metrics)
    state = train(hooks, steps=6, eval_every=2, virtual_devices=2)
    assert_weights(state, by_hand(Batches, 6))
    assert len(found) >= 3
    for metrics in found:
        np.testing.assert_allclose([metrics["a/x"], metrics["a/y"]], means, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(metrics["b/y"], means[1], rtol=1e-5)


class Few(Batches):
    """Takes some of the examples, after each epoch others."""

    def __len__(self) -> int:
        return 3


def reseeded(batch_size: int) -> tf.data.Dataset:
    """Seeds that the run gives to NumPy and to TensorFlow, and a function that nothing can save."""
    x, y = regression_data()
    order = np.random.permutation(len(x))

    def find(row: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(lambda r: x[r], [row], "float32"), [5])

    rows = tf.data.Dataset.from_tensor_slices(order).shuffle(len(x))
    return rows.map(lambda row: (find(row), tf.gather(y, row))).batch(batch_size)


EVALUATED: dict[str, Callable[[int], Any]] = {
    "a PyDataset": Few,
    "state_dict": Loader,
    "tf.data that cannot be saved": reseeded,
}


@pytest.mark.parametrize("kind", EVALUATED)
@pytest.mark.slow
def test_a_resumed_run_evaluates_on_what_the_whole_one_does(train: Train, kind: str) -> None:
    """On a part of the data, so that their order shows; a set by name has readers of its own."""
    makes: list[int] = []

    def create_eval_dataset(per_replica_batch_size: int) -> Any:
        makes.append(1)
        return {name: EVALUATED[kind](per_replica_batch_size) for name in "ab"}

    def hooks() -> SimpleNamespace:
        return hooks_of(Batches, create_eval_dataset=create_eval_dataset)

    settings = {"eval_every": 2, "limit_eval": 3, "deterministic": True}
    whole = train(hooks(), steps=4, run_name="whole", **settings)
    assert len(makes) <= 3 + 2  # at first, as it is traced, and for each evaluation
    train(hooks(), steps=2, run_name="parts", **settings)
    parts = train(hooks(), steps=4, run_name="parts", **settings)
    assert whole.metrics == parts.metrics
    found = [[line for line in run.history if line["split"] == "eval"] for run in (whole, parts)]
    assert found[0] == found[1] and len(found[0]) == 2
