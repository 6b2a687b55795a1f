"""What a step does after its update, in turns and by its number, with layers that are frozen."""

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
from tests.golden.reference import Reference
from tests.helpers.cases import (
    FEATURES,
    Followed,
    assert_weights,
    dropout_model,
    make_hooks,
    nadam,
    norm_model,
    set_weights,
    small_model,
)
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED, Cli

STEPS, BATCH, RATE = 12, 16, 0.1


def follow(train_model: Any, step: Any) -> None:
    """A soft update at each step; and a hard one at each fifth."""
    decay = tf.where(step % 5 == 0, 0.0, 0.9)
    for target, online in zip(
        train_model.target.variables, train_model.online.variables, strict=True
    ):
        target.assign(decay * target + (1 - decay) * online)
        online.assign(tf.clip_by_value(online, -0.4, 0.4))


def loop() -> Followed:
    """The same as a plain loop."""
    model = Followed()
    for step, batch in enumerate(small.create_dataset(BATCH).repeat().take(STEPS), 1):
        small.plain(1, lambda _: RATE, model, tf.data.Dataset.from_tensors(batch))
        follow(model, tf.constant(step))
    return model


@pytest.mark.parametrize(
    "settings", [{"accumulate_steps": 2, "virtual_devices": 2}, {"jit_compile": True}]
)
def test_a_target_network_follows_as_in_a_plain_loop(train: Train, settings: Any) -> None:
    own = small.hooks(create_model=Followed, update_post=follow, every_steps={4: lambda loss: None})
    state = train(own, steps=STEPS, learning_rate=RATE, **settings)
    assert_weights(state, loop(), rtol=2e-5)


def test_an_update_that_is_skipped_has_nothing_after_it(train: Train) -> None:
    """With a loss scale, an update that is not finite is skipped."""

    def count(train_model: Any, step: Any) -> None:
        train_model.count.assign_add(1.0)

    def model() -> Any:
        made = small_model()
        made.count = made.add_weight(shape=(), initializer="zeros", trainable=False)
        return made

    def grad_pre(loss: Any, train_model: Any, step: Any) -> Any:
        return tf.where(step == 3, np.inf, 1.0) * loss, 0.0, train_model.trainable_variables

    own = small.hooks(create_model=model, update_post=count, grad_pre=grad_pre)
    state = train(own, steps=6, precision="float16", on_nan="ignore")
    assert float(state.train_model.count) == int(state.optimizer.iterations) < 6


def test_the_number_of_the_step_in_the_graph(train: Train) -> None:
    """A warm-up, with steps of their own and many in one call."""

    def update_pre(gradients: Any, step: Any) -> Any:
        share = tf.minimum(tf.cast(step, tf.float32) / 6.0, 1.0)
        return [gradient * share for gradient in gradients], gradients

    seen: list[int] = []
    every = {3: lambda loss: None, 5: lambda step: seen.append(step)}
    own = small.hooks(update_pre=update_pre, every_steps=every)
    state = train(own, steps=STEPS, learning_rate=RATE, virtual_devices=2)
    assert seen == [5, 10] and all(type(step) is int for step in seen)
    assert_weights(state, small.plain(STEPS, lambda step: RATE * min(step / 6, 1)), rtol=2e-5)


def test_training_may_be_named(train: Train) -> None:
    """Other inputs in training only; the loss of the evaluation is that of the clean inputs."""

    def input_pre(batch: Any, training: bool) -> Any:
        return batch[0] * 2.0 if training else batch[0]

    def loss_pre(output: Any, batch: Any, training: bool) -> Any:
        return output, batch[1] + (3.0 if training else 0.0)

    def loss(pair: Any, training: bool) -> Any:
        return small.squared_error(pair) * (0.5 if training else 1.0)

    own = small.hooks(
        input_pre=input_pre,
        loss_pre=loss_pre,
        create_loss=lambda: loss,
        create_eval_dataset=small.create_eval_dataset,
    )
    state = train(own, steps=3, learning_rate=RATE, virtual_devices=2)
    batches = small.create_dataset(BATCH).map(lambda x, y: (2.0 * x, y + 3.0))
    model = small.plain(3, lambda _: RATE / 2, batches=batches)
    assert_weights(state, model, rtol=2e-5)
    assert state.metrics["loss"] == pytest.approx(small.errors(model)["loss"], rel=1e-5)


# ---- Objectives in turns: several updates a step on one batch ------------------------------------

TURNS = ["critic", "generator"]


def of_objective(loss: Any, train_model: Any, objective: str) -> Any:
    return loss, 0.0, getattr(train_model, objective).trainable_variables


def gan_hooks(**more: Any) -> SimpleNamespace:
    """The golden program of a GAN, with one turn of the critic and no penalty."""
    own = {
        "turns": TURNS,
        "create_opt": lambda lr: {name: keras.optimizers.SGD(lr, momentum=0.5) for name in TURNS},
        "input_pre": lambda batch, turn: wgan_gp.input_pre(batch, turn or 0),
        "grad_pre": of_objective,
    }
    return SimpleNamespace(**{**vars(wgan_gp.hooks()), **own, **more})


def play(steps: int, clip: float = 9.0) -> tuple[list[list[np.ndarray]], list[list[float]]]:
    """A plain loop with the critic's weights clipped: all weights, and losses, of each step."""
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


def test_after_each_turn_and_the_average_after_the_step(train: Train) -> None:
    """WGAN clips its critic's weights after each of its updates; a metric counts in its turns."""
    clip, losses = 0.3, []

    def update_post(train_model: Any, objective: str, turn: int) -> None:
        assert turn == TURNS.index(objective)
        if objective == "critic":
            for variable in train_model.critic.trainable_variables:
                variable.assign(tf.clip_by_value(variable, -clip, clip))

    own = gan_hooks(
        update_post=update_post,
        create_train_metrics=lambda: {name: keras.metrics.Mean() for name in TURNS},
        train_metric_pre=lambda loss, objective: {objective: loss},
        every_steps={1: lambda loss: losses.append([float(loss[name]) for name in TURNS])},
    )
    settings = {"batch_size": 8, "learning_rate": RATE, "virtual_devices": 2, "log_every": 1}
    state = train(own, steps=7, ema=0.9, **settings)
    (average, *weights), seen = play(7, clip)
    assert_weights(state, weights[-1], rtol=2e-5)
    lines = [line for line in state.history if line["split"] == "train"]
    for found in (losses, [[line[name] for name in TURNS] for line in lines]):
        np.testing.assert_allclose(found, seen, rtol=1e-4, atol=1e-6)
    for new in weights:
        average = [0.9 * old + 0.1 * one for old, one in zip(average, new, strict=True)]
    with state.average.replace_weights():  # type: ignore[union-attr]
        assert_weights(state, average, rtol=2e-5)


# ---- Freezing and unfreezing layers from hooks, also across a resume -----------------------------

LENGTH = 14
TRAINABLE = {3: True, 7: False, 10: True}  # from the step after


def set_hidden(value: bool) -> Any:
    def change(train_model: Any) -> None:
        for layer in train_model.layers[:-1]:
            layer.trainable = value

    return change


CHANGES = {step: set_hidden(value) for step, value in TRAINABLE.items()}


def test_a_frozen_layer_keeps_its_statistics_from_the_next_step_on(train: Train) -> None:
    seen: list[list[np.ndarray]] = []
    hooks = make_hooks(
        create_model=norm_model,
        at_step=CHANGES,
        every_steps={1: lambda train_model: seen.append(train_model.get_weights())},
    )
    train(hooks, steps=LENGTH)
    for step in range(1, LENGTH):
        moved = [not np.array_equal(*pair) for pair in zip(*seen[step - 1 : step + 1], strict=True)]
        assert moved == [not 7 <= step < 10] * 6 + [True] * 2, step


# ---- A dict of optimizers ---------------------------------------------------------------------


def frozen_model() -> keras.Model:
    model = small.create_model()
    model.layers[0].trainable = False
    return model


def each_by_its_own(lr: Any) -> dict[str, keras.Optimizer]:
    return {
        "hidden": keras.optimizers.SGD(lr, momentum=0.9),
        "out": keras.optimizers.SGD(lr, momentum=0.5),
    }


def losses(loss: Any, train_model: Any) -> Any:
    hidden, out = (layer.trainable_variables for layer in train_model.layers)
    return {"hidden": (2.0 * loss, 0.0, hidden), "out": (loss, 0.0, out)}


def train_each() -> keras.Model:
    model, optimizers = small.create_model(), each_by_its_own(small.RATE)
    hidden, out = (layer.trainable_variables for layer in model.layers)
    trained = False
    batches = small.create_dataset(small.BATCH).repeat().take(LENGTH)
    for step, (inputs, target) in enumerate(batches):
        trained = TRAINABLE.get(step, trained)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(small.squared_error((model(inputs), target)))
        of_hidden, of_out = tape.gradient(loss, [hidden, out])
        if trained:
            optimizers["hidden"].apply([2.0 * gradient for gradient in of_hidden], hidden)
        optimizers["out"].apply(of_out, out)
    return model


def test_an_objective_whose_variables_are_all_frozen_waits_until_they_are_unfrozen(
    train: Train,
) -> None:
    hooks = make_hooks(
        create_model=frozen_model, create_opt=each_by_its_own, grad_pre=losses, at_step=CHANGES,
        update_pre=small.update_pre,
    )  # fmt: skip
    settings = {"learning_rate": small.RATE, "virtual_devices": 2}
    for steps in (5, LENGTH):
        state = train(hooks, steps=steps, **settings)
    assert_weights(state, train_each(), rtol=1e-5)
    assert [int(o.iterations.numpy()) for o in state.optimizer.values()] == [8, LENGTH]


# ---- Lower precision, and many steps in one XLA executable ---------------------------------------


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

FEW = 8


@pytest.mark.slow
@pytest.mark.parametrize("unit", [10, 0])
def test_where_it_is_cut_changes_no_bit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], unit: int
) -> None:
    """With Dropout, batch normalisation and Nadam; a layer is frozen on the way.

    Ten steps are read at once: at a resume they are used in part, as a whole, and not begun. Or
    batches are too large to be read many at once: then each step is by itself.
    """
    own = {"create_model": dropout_model, "create_opt": nadam, "at_step": {6: set_hidden(False)}}
    settings = {"batch_size": FEW, "jit_compile": True, "deterministic": True}
    whole = train(make_hooks(**own), steps=23, run_name="whole", **settings)
    every = {7: lambda loss, output: None}
    monkeypatch.setattr(prefetch, "UNIT_BYTES", unit * FEW * (FEATURES + 1) * 4 or 1)
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
