"""Variants of the programs: other optimizers, other ways to write them, resumed runs, messages."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.catalogue import SETTINGS, STEPS, Program
from tests.golden.programs import (
    codebook,
    diffusion,
    distillation,
    fine_tuning,
    lora,
    mixed_precision,
    recommender,
    vae,
    wgan_gp,
)

VARIANTS = {
    "adamw": Program(partial(diffusion.hooks, diffusion.adamw), settings={"learning_rate": 0.01}),
    "adam": Program(
        partial(fine_tuning.hooks, fine_tuning.adam),
        partial(fine_tuning.train_plainly, fine_tuning.adam, 0.01),
        settings={"learning_rate": 0.01},
    ),
    "adagrad": dataclasses.replace(
        recommender.PROGRAM,
        hooks=partial(recommender.hooks, recommender.Module, recommender.adagrad),
        settings={"learning_rate": 0.1},
    ),
    "a model of no base class": dataclasses.replace(
        recommender.PROGRAM, hooks=partial(recommender.hooks, recommender.Plain)
    ),
    "layers in a dict of a Keras model": dataclasses.replace(
        recommender.PROGRAM, hooks=partial(recommender.hooks, recommender.Model)
    ),
    "all of the loss in create_loss": dataclasses.replace(vae.PROGRAM, hooks=vae.hooks),
    "a layer's own noise, on one device": Program(
        partial(vae.hooks, own_noise=True), settings={"virtual_devices": 1}
    ),
    "a teacher in a global": Program(
        distillation.global_hooks, settings=distillation.PROGRAM.settings
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_other_ways_to_write_a_program(train: engine.Train, name: str) -> None:
    program = VARIANTS[name]
    teacher = compare.read_numbers(distillation.TEACHER.weights)
    state = train(program.hooks(), **SETTINGS | {"virtual_devices": 2} | program.settings)
    program.assert_plain(program.weights(state), state.metrics)
    compare.assert_same(distillation.TEACHER.weights, teacher)


def assert_resumes(
    train: engine.Train, runs: Path, create_hooks: Callable[[], Any], at: int
) -> None:
    """Asserts that 12 steps give the same checkpoint in one run and in two parts.

    The hooks are created again for each part.
    """
    for run_name, steps in (("whole", 12), ("parts", at), ("parts", 12)):
        train(create_hooks(), **{**SETTINGS, "steps": steps}, run_name=run_name)
    compare.assert_same_checkpoint(runs / "parts", runs / "whole", 12)


# For each name: a function that returns the hooks, and the step at which the run resumes.
RESUMED: dict[str, tuple[Callable[[], Any], int]] = {
    "noise and loss of a layer": (partial(vae.hooks, own_noise=True, adds_loss=True), 5),
    "unfrozen with the last step": (partial(fine_tuning.hooks, fine_tuning.adam, 0.2, 5), 5),
    "unfrozen later": (partial(fine_tuning.hooks, fine_tuning.adam, 0.2, 8), 5),
    "before the skipped update": (mixed_precision.hooks, 6),
    "after the skipped update": (mixed_precision.hooks, 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_other_programs_resume(train: engine.Train, runs: Path, name: str) -> None:
    create_hooks, at = RESUMED[name]
    assert_resumes(train, runs, create_hooks, at)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_teacher_it_began_with(
    train: engine.Train, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process creates the global teacher again, and here its third creation differs.

    The resumed run must therefore load the weights of the teacher that it began with.
    """
    seeds = iter([1, 1, 2])

    def create_hooks() -> SimpleNamespace:
        monkeypatch.setattr(distillation, "TEACHER", distillation.create_teacher(next(seeds)))
        return distillation.global_hooks(dropout=0.2)

    assert_resumes(train, runs, create_hooks, 5)
    compare.assert_close(distillation.TEACHER.weights, distillation.create_teacher(1).weights)


def test_a_policy_of_the_models_own_is_put_back(train: engine.Train) -> None:
    state = train(mixed_precision.hooks(), **{**SETTINGS, "steps": 1})
    assert state.train_model.layers[1].compute_dtype == "float16"
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
def test_codes_that_replicas_do_not_exchange_are_refused(train: engine.Train, runs: Path) -> None:
    alone = codebook.hooks(exchange=lambda values: values)
    assert train(alone, **{**SETTINGS, "steps": 1}).step == 1
    config = ctl_core.Config(**SETTINGS, runs_dir=str(runs))
    with pytest.raises(ctl_core.SetupError, match=r"\(codebook.py:\d+\): .*/codes "):
        ctl_core.check(alone, config)


@pytest.mark.slow
def test_codes_that_each_micro_batch_moves_are_pointed_out(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ctl_core.Config(**SETTINGS, accumulate_steps=2, runs_dir=str(runs))
    ctl_core.check(codebook.hooks(), config)
    printed = " ".join(capsys.readouterr().out.split())
    differing = printed.partition("the variables ")[2].partition(" differ: ")[0]
    for name in ("codes", "counts", "sums"):
        assert f"/{name} of the layer 'codebook' (Codebook)" in differing


@pytest.mark.parametrize("suffix", small.slow_but("weights.h5", of=("keras", "weights.h5")))
def test_a_base_from_a_file_leaves_adapters_as_they_are_created(
    train: engine.Train, tmp_path: Path, suffix: str
) -> None:
    """Keras' ``load_weights`` would set both matrices of each adapter to 0."""
    file = tmp_path / f"base.{suffix}"
    hooks = lora.hooks(create_model=lambda: lora.adapted(lora.create_base()))
    base = keras.models.load_model(lora.write_base())
    (base.save if suffix == "keras" else base.save_weights)(file)
    settings = {**SETTINGS, "init_from": str(file), "virtual_devices": 2}
    with pytest.raises(ctl_core.SetupError) as error:
        train(hooks, **{**settings, "steps": 1})
    message = str(error.value)
    assert message.count("lora_") == 12
    assert message.count("not in the source") == 6
    assert "--init-skip 'dense/lora_kernel_a'" in message
    assert "/*" not in message
    begun = train(lora.hooks(), **{**settings, "steps": 0, "init_from": None})
    compare.assert_close(begun.train_model.weights, lora.create_adapted().weights)


def test_a_file_of_a_trained_model_is_taken_without_its_optimizer(train: engine.Train) -> None:
    base = lora.write_base()
    begun = train(
        lora.hooks(create_model=lora.create_base), **{**SETTINGS, "steps": 0}, init_from=base
    )
    compare.assert_close(begun.train_model.weights, keras.models.load_model(base).weights)


def test_a_part_of_a_loss_is_logged(train: engine.Train, runs: Path) -> None:
    train(wgan_gp.hooks(), **SETTINGS, log_every=1)
    lines = map(json.loads, (runs / "run/metrics.jsonl").read_text().splitlines())
    logged = [line["penalty"] for line in lines if line["split"] == "train"]
    np.testing.assert_allclose(logged, wgan_gp.train_plainly()[1], rtol=1e-4)
    assert len(logged) == STEPS


@pytest.mark.parametrize("hook", ["create_model", "at_step"])
def test_keras_fit_in_a_hook_trains_as_without_the_engine(train: engine.Train, hook: str) -> None:
    fitted = {}

    def fit(strategy: tf.distribute.Strategy) -> None:
        with strategy.scope():
            model = small.create_model()
            model.compile("sgd", "mse")
        model.fit(*small.data(16), batch_size=8, shuffle=False, verbose=0)
        fitted[strategy.num_replicas_in_sync] = model.get_weights()

    def fit_in_create_model() -> keras.Model:
        fit(tf.distribute.get_strategy())
        return small.create_model()

    def fit_at_step() -> None:
        reduction = tf.distribute.ReductionToOneDevice()
        fit(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], reduction))

    fitting: dict[str, Any] = {"create_model": fit_in_create_model}
    if hook == "at_step":
        fitting = {"at_step": {1: fit_at_step}}
    train(small.hooks(**fitting), virtual_devices=2, steps=2)
    fit(tf.distribute.get_strategy())
    compare.assert_close(fitted[2], fitted[1])
