"""Tests of training steps: ``update_post``, objectives in turns, and frozen layers."""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.input import prefetch
from ctl_core.run.errors import RunError
from tests.golden import small
from tests.golden.programs import wgan_gp
from tests.helpers.cases import (
    FEATURES,
    Followed,
    assert_weights,
    dropout_model,
    make_hooks,
    norm_model,
    small_model,
)
from tests.helpers.project import EVALUATED, Cli, Train

STEPS, BATCH, RATE = 12, 16, 0.1


def follow(train_model: Any, step: Any) -> None:
    """Updates the target network softly at each step, and copies the weights at each fifth step."""
    decay = tf.where(step % 5 == 0, 0.0, 0.9)
    for target, online in zip(
        train_model.target.variables, train_model.online.variables, strict=True
    ):
        target.assign(decay * target + (1 - decay) * online)
        online.assign(tf.clip_by_value(online, -0.4, 0.4))


def loop() -> Followed:
    """Returns the model that a plain loop trains."""
    model = Followed()
    for step, batch in enumerate(small.create_dataset(BATCH).repeat().take(STEPS), 1):
        small.plain(1, lambda _: RATE, model, tf.data.Dataset.from_tensors(batch))
        follow(model, tf.constant(step))
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_steps": 2, "virtual_devices": 2},
        {"jit_compile": True},
        pytest.param({"jit_compile": True, "virtual_devices": 3}, marks=pytest.mark.slow),
    ],
)
def test_a_target_network_follows_as_in_a_plain_loop(train: Train, settings: Any) -> None:
    hooks = small.hooks(
        create_model=Followed, update_post=follow, every_steps={4: lambda loss: None}
    )
    state = train(hooks, steps=STEPS, learning_rate=RATE, **settings)
    assert_weights(state, loop(), rtol=2e-5)


@pytest.mark.parametrize("settings", [{}, {"jit_compile": True, "virtual_devices": 2}])
def test_an_update_that_is_skipped_has_nothing_after_it(train: Train, settings: Any) -> None:
    """With a loss scale, an update that is not finite is skipped, together with ``update_post``."""

    def count(train_model: Any, step: Any) -> None:  # noqa: ARG001  (hooks take values by name)
        train_model.count.assign_add(1.0)

    def model() -> Any:
        network = small_model()
        network.count = network.add_weight(shape=(), initializer="zeros", trainable=False)
        return network

    def grad_pre(loss: Any, train_model: Any, step: Any) -> Any:
        return tf.where(step == 3, np.inf, 1.0) * loss, 0.0, train_model.trainable_variables

    hooks = small.hooks(create_model=model, update_post=count, grad_pre=grad_pre)
    state = train(hooks, steps=6, precision="float16", on_nan="ignore", **settings)
    assert state.train_model.count.numpy() == state.optimizer.iterations.numpy() < 6


def test_hooks_are_told_whether_they_train(train: Train) -> None:
    """Hooks can change inputs, targets and losses in training without affecting evaluations."""

    def input_pre(batch: Any, training: bool) -> Any:
        return batch[0] * 2.0 if training else batch[0]

    def loss_pre(output: Any, batch: Any, training: bool) -> Any:
        return output, batch[1] + (3.0 if training else 0.0)

    def loss(pair: Any, training: bool) -> Any:
        return small.squared_error(pair) * (0.5 if training else 1.0)

    hooks = small.hooks(
        input_pre=input_pre,
        loss_pre=loss_pre,
        create_loss=lambda: loss,
        create_eval_dataset=small.create_eval_dataset,
    )
    state = train(hooks, steps=3, learning_rate=RATE, virtual_devices=2)
    batches = small.create_dataset(BATCH).map(lambda x, y: (2.0 * x, y + 3.0))
    model = small.plain(3, lambda _: RATE / 2, batches=batches)
    assert_weights(state, model, rtol=2e-5)
    assert state.metrics["loss"] == pytest.approx(small.errors(model)["loss"], rel=1e-5)


# ---- Objectives in turns: several updates per step on one batch ----------------------------------

TURNS = ["critic", "generator"]


def of_objective(loss: Any, train_model: Any, objective: str) -> Any:
    return loss, 0.0, getattr(train_model, objective).trainable_variables


def gan_hooks(**more: Any) -> SimpleNamespace:
    """Returns the hooks of the golden GAN program, with one critic turn and without penalty."""
    gan = {
        "turns": TURNS,
        "create_opt": lambda lr: {name: keras.optimizers.SGD(lr, momentum=0.5) for name in TURNS},
        "input_pre": lambda batch, turn: wgan_gp.input_pre(batch, turn or 0),
        "grad_pre": of_objective,
    }
    return SimpleNamespace(**{**vars(wgan_gp.hooks()), **gan, **more})


def play(steps: int, clip: float = 9.0) -> tuple[list[list[np.ndarray]], list[list[float]]]:
    """Trains a plain loop that clips the critic's weights; returns weights and losses per step."""
    model, optimizers = wgan_gp.create_model(), gan_hooks().create_opt(RATE)
    weights, seen = [model.get_weights()], []
    for batch in wgan_gp.create_dataset(8).repeat().take(steps):
        losses = []
        for turn, name in enumerate(TURNS):
            variables = getattr(model, name).trainable_variables
            with tf.GradientTape() as tape:
                output = model(wgan_gp.input_pre(batch, turn))
                loss = tf.reduce_mean(wgan_gp.create_loss()((output, name)))
            optimizers[name].apply(tape.gradient(loss, variables), variables)
            for variable in variables if name == "critic" else []:
                variable.assign(tf.clip_by_value(variable, -clip, clip))
            losses.append(float(loss))
        seen.append(losses)
        weights.append(model.get_weights())
    return weights, seen


def test_update_post_follows_each_turn_and_the_average_each_step(train: Train) -> None:
    """``update_post`` runs after each turn, so that WGAN can clip the critic's weights.

    The metric of an objective is updated in the turns of this objective only.
    """
    clip, losses = 0.3, []

    def update_post(train_model: Any, objective: str, turn: int) -> None:
        assert turn == TURNS.index(objective)
        if objective == "critic":
            for variable in train_model.critic.trainable_variables:
                variable.assign(tf.clip_by_value(variable, -clip, clip))

    hooks = gan_hooks(
        update_post=update_post,
        create_train_metrics=lambda: {name: keras.metrics.Mean() for name in TURNS},
        train_metric_pre=lambda loss, objective: {objective: loss},
        every_steps={1: lambda loss: losses.append([float(loss[name]) for name in TURNS])},
    )
    settings = {"batch_size": 8, "learning_rate": RATE, "virtual_devices": 2, "log_every": 1}
    state = train(hooks, steps=7, ema=0.9, **settings)
    (average, *weights), seen = play(7, clip)
    assert_weights(state, weights[-1], rtol=2e-5)
    lines = [line for line in state.history if line["split"] == "train"]
    for reported in (losses, [[line[name] for name in TURNS] for line in lines]):
        np.testing.assert_allclose(reported, seen, rtol=1e-4, atol=1e-6)
    for new in weights:
        average = [0.9 * old + 0.1 * weight for old, weight in zip(average, new, strict=True)]
    with state.average.replace_weights():  # type: ignore[union-attr]
        assert_weights(state, average, rtol=2e-5)


# ---- Freezing and unfreezing layers from hooks, also across a resume -----------------------------


def set_hidden(value: bool) -> Any:
    def change(train_model: Any) -> None:
        for layer in train_model.layers[:-1]:
            layer.trainable = value

    return change


def test_a_frozen_layer_keeps_its_statistics_from_the_next_step_on(train: Train) -> None:
    seen: list[list[np.ndarray]] = []
    hooks = make_hooks(
        create_model=norm_model,
        at_step={3: set_hidden(True), 7: set_hidden(False), 10: set_hidden(True)},
        every_steps={1: lambda train_model: seen.append(train_model.get_weights())},
    )
    train(hooks, steps=14)
    for step in range(1, 14):
        moved = [not np.array_equal(*pair) for pair in zip(*seen[step - 1 : step + 1], strict=True)]
        assert moved == [not 7 <= step < 10] * 6 + [True] * 2, step


def test_an_objective_whose_variables_are_all_frozen_waits(train: Train) -> None:
    """An objective without trainable variables is not updated, even after the run is resumed."""

    def freeze(train_model: Any) -> None:
        train_model.generator.trainable = False

    hooks = gan_hooks(at_step={3: freeze})
    for steps in (4, 6):
        state = train(hooks, steps=steps, batch_size=8)
    assert [int(state.optimizer[name].iterations) for name in TURNS] == [6, 3]


# ---- Lower precision -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_used_in_its_own_precision(cli: Cli) -> None:
    flags = ("--batch-size", "16", "--precision", "bfloat16", "--accumulate-steps", "2")
    first_line = "batch size 16 in 2 micro-batches, 1 replica on CPU, in bfloat16."
    assert first_line in cli(EVALUATED, *flags).out
    for command in ("evaluate", "predict", "export"):
        assert cli(None, command=(command,)).code == 0
    with np.load("runs/a/predictions.npz") as predictions:
        output = predictions["output"]
    assert output.dtype == np.float32
    assert output.shape == (37, 1)
    loaded = tf.saved_model.load("runs/a/export/1")
    served = loaded.serve(tf.constant(small.data()[0][-37:]))
    assert served.dtype == tf.float32
    np.testing.assert_array_equal(served, output)


# ---- Many steps in one XLA executable ------------------------------------------------------------

FEW = 8


@pytest.mark.slow
def test_splitting_a_run_into_calls_changes_no_bit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that is resumed several times has the bits of an uninterrupted run.

    The model has dropout and batch normalization, and a layer is frozen after step 6. If ``unit``
    is 10, ten batches are read at once, and the run stops within such a unit and at its end. If
    ``unit`` is 0, the batches are too large for this, so each step reads its own batch.
    """
    hooks = {"create_model": dropout_model, "at_step": {6: set_hidden(False)}}
    settings = {"batch_size": FEW, "jit_compile": True, "deterministic": True}
    whole = train(make_hooks(**hooks), steps=23, run_name="whole", **settings)
    every = {7: lambda loss, output: None}
    for unit, stops in ((10, (4, 10, 23)), (0, (4, 23))):
        monkeypatch.setattr(prefetch, "UNIT_BYTES", unit * FEW * (FEATURES + 1) * 4 or 1)
        for stop in stops:
            observed = make_hooks(**hooks, every_steps=every)
            cut = train(observed, steps=stop, run_name=f"in-units-of-{unit}", **settings)
        assert cut.data.unit == unit
        assert whole.data.unit > unit
        expected = whole.recording.variables
        assert cut.recording.variables.keys() == expected.keys()
        for name, value in cut.recording.variables.items():
            np.testing.assert_array_equal(value.numpy(), expected[name].numpy(), err_msg=name)
    assert "reading and dropping" not in "".join(capfd.readouterr())


def test_what_xla_cannot_compile_is_named(train: Train) -> None:
    def input_pre(batch: Any) -> Any:
        return tf.strings.to_number(tf.strings.as_string(batch[0]))

    with pytest.raises(RunError, match="AsString"):
        train(make_hooks(input_pre=input_pre), steps=2, jit_compile=True)
