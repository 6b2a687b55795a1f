"""Tests of the examples that use the digits: training, resuming, serving, images and metrics."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example, assert_lives
from tests.helpers.project import Cli

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.uniform(size=(5, 8, 8, 1)).astype("float32")
# For each example: the input that clients send to the served model, and the flags of its runs.
EXAMPLES: dict[str, tuple[Any, str]] = {
    "digits": (IMAGES, "--hparams.width 4 --batch-size 16 --limit-eval 2"),
    "contrastive": (IMAGES, "--hparams.width 4 --batch-size 8 --eval-batch-size 64"),
    "gan": (
        {"noise": RANDOM.normal(size=(5, 32)).astype("float32")},
        "--hparams.width 2 --batch-size 8 --eval-batch-size 64 --log-every 3",
    ),
    "diffusion": (
        {"noise": RANDOM.normal(size=(5, 8, 8, 1)).astype("float32")},
        "--hparams.width 4 --hparams.drawing_steps 3 --hparams.ema 0.5 --batch-size 8 "
        "--eval-batch-size 64",
    ),
}
# For each example that repeats a turn or a block: its source, and what the test replaces it with,
# because each repetition takes seconds to trace.
REPEATED = {
    "gan": ('"critic", "critic", "critic", "generator"', '"critic", "generator"'),
    "diffusion": ("for _ in range(3):", "for _ in range(1):"),
}
# The pictures of a resumed run are the same bytes.
PICTURES = {"contrastive": "neighbors", "gan": "samples", "diffusion": "samples"}


@pytest.mark.parametrize(
    "name", ["digits", *(pytest.param(name, marks=pytest.mark.slow) for name in PICTURES)]
)
def test_example_is_trained_killed_resumed_and_served(cli: Cli, tmp_path: Path, name: str) -> None:
    inputs, settings = EXAMPLES[name]
    example = Example(name, cli, tmp_path, *settings.split())
    hooks, often = tmp_path / "callbacks.py", "every_steps = {3:"
    source = hooks.read_text().replace("every_steps = {100:", often)
    source = source.replace("every_steps = {500:", often)
    if name in REPEATED:
        repeated, once = REPEATED[name]
        assert repeated in source
        source = source.replace(repeated, once)
    hooks.write_text(source)
    assert_lives(example, inputs)
    if name in PICTURES:
        sheet = f"{PICTURES[name]}/000006.png"
        whole, resumed = (tmp_path / "runs" / run / sheet for run in ("whole", "parts"))
        assert whole.read_bytes() == resumed.read_bytes()
    if name == "gan":
        assert_frechet(tmp_path / "runs" / "whole")
    if name == "diffusion":
        assert_draws_by_the_average(tmp_path / "runs" / "whole", inputs["noise"])


@pytest.mark.slow
def test_default_project_has_the_same_bits_on_any_number_of_devices(
    cli: Cli, tmp_path: Path
) -> None:
    """Training has the same weights, bit for bit, on any number of devices.

    Max-pooling turns a difference in rounding into a different gradient, so that even the smallest
    difference would show.
    """
    flags = ("--batch-size", "32", "--limit-eval", "2", "--logical-replicas", "6")
    example = Example("digits", cli, tmp_path, *flags)
    for devices in ("1", "3"):
        example.train(f"on-{devices}", "--virtual-devices", devices)
    example.train("resumed", "--virtual-devices", "5", "--steps", "3")
    example.train("resumed", "--virtual-devices", "2")
    expected = example.numbers("on-1")
    evaluations = read_evaluations(tmp_path / "runs" / "on-1")
    for run in ("on-3", "resumed"):
        numbers = example.numbers(run)
        assert numbers.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(numbers[name], value, err_msg=f"{run}: {name}")
        assert read_evaluations(tmp_path / "runs" / run) == evaluations


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """Returns the evaluation lines of a run's ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [line for line in lines if line["split"] == "eval"]


def assert_frechet(run: Path) -> None:
    """Asserts that ``frechet`` is the Fréchet distance of held-out digits and predicted images.

    The expected distance is computed in NumPy.
    """
    with np.load(run.parents[1] / "data" / "digits.npz") as file:
        real = file["images"][file["test"]] / 16.0
    with np.load(run / "predictions.npz") as file:
        generated = file["output"]
    assert generated.shape == (359, 8, 8, 1)
    assert 0.0 <= generated.min() < generated.max() <= 1.0
    real, generated = (images.reshape(359, 64).astype("float64") for images in (real, generated))
    a, b = np.cov(real.T, bias=True), np.cov(generated.T, bias=True)
    shared = np.sqrt(np.linalg.eigvals(a @ b).astype(complex)).real.sum()
    distance = ((real.mean(0) - generated.mean(0)) ** 2).sum()
    expected = distance + np.trace(a + b) - 2.0 * shared
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    (reported,) = (line["frechet"] for line in lines if line["step"] == 6 and "frechet" in line)
    np.testing.assert_allclose(reported, expected, rtol=1e-3)


def assert_draws_by_the_average(run: Path, noise: np.ndarray) -> None:
    """Asserts that the served model draws by DDIM, with the averaged weights.

    The expected images are computed in NumPy.
    """
    served = ctl_core.load(run)
    drawn = np.asarray(served({"noise": noise}))
    network = served.model.__self__.network
    image = noise.astype("float64")
    for time in (1.0, 2.0 / 3.0, 1.0 / 3.0):
        much, of_image, less, of_clean = *rates(time), *rates(time - 1.0 / 3.0)
        waves = 2.0 * np.pi * much * np.exp(np.linspace(0.0, 4.0, 8))
        rate = np.tile(np.concatenate([np.sin(waves), np.cos(waves)]), (5, 1, 1, 1))
        noises = network([tf.constant(image, tf.float32), tf.constant(rate, tf.float32)]).numpy()
        clean = np.clip((image - much * noises) / of_image, -1.0, 1.0)
        image = of_clean * clean + less * noises
    np.testing.assert_allclose(drawn, clean, atol=1e-4)
    # The first kernel: trained is the value in the optimizer, followed is its moving average.
    reader = tf.train.load_checkpoint(str(run / "ckpt" / "ckpt-6"))
    trained = reader.get_tensor("optimizer/_trainable_variables/0/.ATTRIBUTES/VARIABLE_VALUE")
    (followed,) = (w.numpy() for w in network.weights if w.shape == (3, 3, 1, 4))
    assert trained.shape == followed.shape
    assert 1e-6 < np.abs(trained - followed).max() < 0.1


def rates(time: float) -> tuple[float, float]:
    """Returns the rates of noise and of image in the paper's cosine schedule."""
    start, end = np.arccos(0.95), np.arccos(0.02)
    return np.sin(start + time * (end - start)), np.cos(start + time * (end - start))


def test_the_loss_is_that_of_all_pairs_of_views(cli: Cli, tmp_path: Path) -> None:
    Example("contrastive", cli, tmp_path)
    hooks = SimpleNamespace(**runpy.run_path(str(tmp_path / "callbacks.py")))
    hparams = {"width": 4, "labels": 100, "temperature": 0.2, "contrast": 1.0}
    data = hooks.create_dataset(256, SimpleNamespace(seed=0), hparams)
    views, labels = next(iter(data))
    assert views.shape == (256, 2, 8, 8, 1)
    assert 0.0 <= np.min(views) < np.max(views) <= 1.4
    assert np.abs(views[:, 0] - views[:, 1]).mean() > 0.05
    assert 0 < np.sum(labels >= 0) < 60  # 100 of 1438 examples are labeled
    batch = views[:8], labels[:8]
    output = hooks.create_model(hparams)(batch[0])
    losses = hooks.create_loss()(hooks.loss_pre(output, batch, True, hparams))
    flat = np.reshape(output["embedding"], [16, 4])
    expected = np.zeros(16)
    for row in range(16):
        nears = {two: float(flat[row] @ flat[two]) / 0.2 for two in range(16) if two != row}
        expected[row] = np.log(sum(np.exp(near) for near in nears.values())) - nears[row ^ 1]
    np.testing.assert_allclose(losses, expected.reshape(8, 2).mean(1), rtol=1e-4)
