"""What a redesign of the engine would lose without a word, each as its user would notice it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small

DEVICES = pytest.mark.parametrize("devices", [1, 2])


def train_small(
    train: engine.Train, hooks: Any, steps: int | None = 6, **more: Any
) -> ctl_core.State:
    return train(
        hooks, **{"steps": steps, "batch_size": small.BATCH, "learning_rate": small.RATE, **more}
    )


def assert_trained(state: Any, expected: Any) -> None:
    compare.assert_close(state.train_model.weights, expected.weights)


# ---- Models ------------------------------------------------------------------------------------


class Wrapped(tf.Module):
    """A model that takes no ``training``, around Keras layers."""

    def __init__(self, net: keras.Model) -> None:
        super().__init__()
        self.net = net

    def __call__(self, inputs: Any) -> Any:
        return self.net(inputs)


class Switch(keras.layers.Layer):
    """Shows whether it runs in training, as Dropout would by chance."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs * (1.5 if training else 1.0)


class NoArgument(keras.Model):
    """A Keras model of one's own whose ``call`` has no ``training``."""

    def __init__(self, net: keras.Model) -> None:
        super().__init__()
        self.net = net

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)


@DEVICES
@pytest.mark.parametrize("kind", [Wrapped, NoArgument, lambda net: lambda inputs: net(inputs)])
def test_layers_train_as_in_training_and_are_evaluated_without_it(
    train: engine.Train, kind: Any, devices: int
) -> None:
    nets: list[keras.Model] = []

    def create_model() -> Any:
        nets[:] = [small.model_with(Switch())]
        return kind(nets[0])

    hooks = small.hooks(
        create_model=create_model,
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        grad_pre=lambda loss: (loss, 0.0, nets[0].trainable_variables),
    )
    state = train_small(train, hooks, virtual_devices=devices)
    plain = small.plain(6, model=small.model_with(Switch()))
    compare.assert_close(nets[0].weights, plain.weights)
    for name, value in small.errors(plain).items():
        assert state.metrics[name] == pytest.approx(value, rel=1e-5)


@DEVICES
def test_dropout_drops_in_training_only(train: engine.Train, devices: int) -> None:
    """Each replica draws a mask of its own."""
    seen: list[np.ndarray] = []
    hooks = small.hooks(
        create_model=lambda: Wrapped(
            keras.Sequential(
                [keras.Input((5,)), keras.layers.Dense(64, "relu", bias_initializer="ones"),
                 keras.layers.Dropout(0.5, seed=1)]
            )
        ),
        create_loss=lambda: lambda pair: tf.reduce_sum(pair[0], 1),
        input_pre=lambda batch: 0.0 * batch[0],
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"mean": keras.metrics.Mean()},
        metric_pre=lambda output: (output,),
        every_steps={1: lambda output: seen.append(output.numpy())},
    )  # fmt: skip
    state = train_small(train, hooks, steps=1, learning_rate=1e-9, virtual_devices=devices)
    assert 0.3 < (seen[0] == 0).mean() < 0.7
    assert set(np.unique(seen[0].round(5))) == {0.0, 2.0}
    assert not np.array_equal(seen[0][:8], seen[0][8:])
    assert state.metrics["mean"] == pytest.approx(1.0)


class Adds(keras.layers.Layer):
    """Adds a loss of the examples that this replica has, and one that is of the weights."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs: Any) -> Any:
        outputs = inputs * self.scale
        self.add_loss(0.1 * tf.reduce_mean(outputs**2))
        return outputs


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_losses_that_layers_add_are_those_of_one_device(train: engine.Train, devices: int) -> None:
    """A mean over a replica's share, and regularisation, each counted once."""

    def create_model() -> keras.Model:
        model = small.model_with(Adds())
        model.layers[0].kernel.regularizer = keras.regularizers.L2(0.05)
        return model

    hooks = small.hooks(create_model=create_model)
    assert_trained(
        train_small(train, hooks, virtual_devices=devices), small.plain(6, model=create_model())
    )


class Lazy(keras.Model):
    """Its variables are there after the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, "tanh", kernel_initializer="ones")
        self.out = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))


def test_variables_made_at_the_first_call_are_loaded(train: engine.Train) -> None:
    hooks = small.hooks(create_model=Lazy, create_eval_dataset=small.create_eval_dataset)
    state = train_small(train, hooks)
    inputs, _ = small.data()
    expected = state.train_model(inputs).numpy()
    loaded = ctl_core.load(state.run_dir, callbacks=hooks)
    np.testing.assert_allclose(loaded(inputs), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(Lazy()(inputs), expected)
    again = train_small(train, hooks)
    assert again.metrics == state.metrics


def test_the_average_of_ema_is_loaded(train: engine.Train) -> None:
    hooks = small.hooks(create_eval_dataset=small.create_eval_dataset)
    state = train_small(train, hooks, ema=0.5)
    inputs, target = small.data()
    found = ctl_core.load(state.run_dir, callbacks=hooks)(inputs[-37:])
    error = small.squared_error((found, target[-37:])).numpy().mean()
    assert state.metrics["loss"] == pytest.approx(error, rel=1e-5)
    assert not np.allclose(found, state.train_model(inputs[-37:]))


class Parts(tf.Module):
    """A tf.Module of Keras layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small.create_model()

    def __call__(self, inputs: Any) -> Any:
        return self.net(inputs)


def test_a_layer_of_a_module_is_frozen_from_the_next_step_on(train: engine.Train) -> None:
    def freeze(train_model: Parts) -> None:
        train_model.net.layers[0].trainable = False

    seen: dict[int, list[np.ndarray]] = {}
    hooks = small.hooks(
        create_model=Parts,
        at_step={3: freeze},
        every_steps={
            1: lambda step, train_model: seen.update({step: train_model.net.get_weights()})
        },
    )
    train_small(train, hooks, steps=4)
    state = train_small(train, hooks, steps=6)  # frozen also where it goes on
    for step in (2, 3):
        assert not np.array_equal(seen[step][0], seen[step - 1][0])
    for step in (4, 5, 6):
        np.testing.assert_array_equal(seen[step][0], seen[3][0])
        assert not np.array_equal(seen[step][2], seen[step - 1][2])
    assert state.train_model.net.layers[0].trainable is False


# ---- The learning rate -------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [lambda lr: lr * 0.1, lambda lr: lr / 4.0], ids=["*", "/"])
def test_a_product_of_lr_follows_it(train: engine.Train, factor: Any) -> None:
    hooks = small.hooks(
        create_opt=lambda lr: keras.optimizers.SGD(factor(lr)),
        at_step={3: lambda lr: lr.assign(0.4)},
    )
    state = train_small(train, hooks)
    assert_trained(state, small.plain(6, lambda step: factor(small.RATE if step <= 3 else 0.4)))


def test_a_schedule_and_a_warm_up(train: engine.Train) -> None:
    rates: list[float] = []
    hooks = small.hooks(every_steps={1: lambda lr: rates.append(float(lr))})
    state = train_small(train, hooks, steps=8, lr_schedule="linear", warmup=2)
    assert len(rates) == 8 and rates[-1] < max(rates)
    used: list[float] = []
    again = small.hooks(
        input_pre=lambda batch, lr: (tf.summary.scalar("lr", lr), batch[0])[1],
    )
    train_small(train, again, steps=8, lr_schedule="linear", warmup=2, run_name="again")
    used = read_summaries(state.run_dir.parent / "again", "lr")
    assert_trained(state, small.plain(8, lambda step: used[step - 1]))


def read_summaries(run: Path, tag: str) -> list[float]:
    """Returns the values of a scalar summary of training, by their steps."""
    found = {
        event.step: float(tf.make_ndarray(value.tensor))
        for file in (run / "tb" / "train").glob("events.out.tfevents.*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag == tag
    }
    assert list(sorted(found)) == list(range(1, len(found) + 1))
    return [found[step] for step in sorted(found)]


# ---- Hooks -------------------------------------------------------------------------------------


@DEVICES
def test_summaries_in_hooks_of_the_graph(train: engine.Train, devices: int) -> None:
    """Each step once, with its number, whatever the devices, also where a run goes on."""

    def update_pre(gradients: Any, step: Any) -> Any:
        tf.summary.scalar("step", tf.cast(step, tf.float32))
        return gradients, gradients

    hooks = small.hooks(update_pre=update_pre)
    for steps in (3, 5):
        state = train_small(train, hooks, steps=steps, virtual_devices=devices)
    assert read_summaries(state.run_dir, "step") == [1, 2, 3, 4, 5]


def test_at_step_runs_once_and_state_is_kept(train: engine.Train) -> None:
    ran: list[int] = []

    def count(state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1

    hooks = small.hooks(
        at_step={3: lambda step: ran.append(step)},
        every_steps={1: count},
    )
    for steps in (3, 4, 6):
        state = train_small(train, hooks, steps=steps)
    assert ran == [3]
    assert state.hook_state == {"count": 6}


def test_a_hook_ends_training_and_it_stays_ended(train: engine.Train) -> None:
    def stop(step: int) -> None:
        raise ctl_core.StopTraining("enough")

    reasons: list[str] = []
    hooks = small.hooks(at_step={4: stop}, at_end=lambda reason: reasons.append(reason))
    state = train_small(train, hooks, steps=9)
    assert (state.step, reasons) == (4, ["ended"])
    assert (state.run_dir / "ckpt" / "ckpt-4.index").is_file()
    assert train_small(train, hooks, steps=9).step == 4


def test_hooks_restore_and_keep_checkpoints_by_themselves(train: engine.Train) -> None:
    """``create_ckpt`` says how many are kept; ``ckpt.restore`` goes back, weights and moments."""

    def create_ckpt(ckpt_path: str, step: Any, lr: Any, optimizer: Any, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(step=step, lr=lr, optimizer=optimizer, train_model=train_model)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=2)

    seen: list[list[np.ndarray]] = []
    hooks = small.hooks(
        create_ckpt=create_ckpt,
        create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5),
        every_steps={2: lambda manager: manager.save()},
    )
    state = train_small(train, hooks, steps=7, ckpt_every=0)
    names = sorted(path.name for path in (state.run_dir / "ckpt").glob("ckpt-*.index"))
    assert names == ["ckpt-6.index", "ckpt-7.index"]

    def go_back(ckpt: Any, train_model: Any) -> None:
        ckpt.restore(str(state.run_dir / "ckpt" / "ckpt-7"))
        seen.append(train_model.get_weights())

    hooks.at_step = {9: go_back}
    train_small(train, hooks, steps=9, ckpt_every=0)
    momentum = keras.optimizers.SGD(small.RATE, momentum=0.5)
    plain = small.create_model()
    for inputs, target in small.create_dataset(small.BATCH).repeat().take(7):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(small.squared_error((plain(inputs), target)))
        momentum.apply(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables)
    compare.assert_close(seen[0], plain.weights)


def test_a_loss_that_is_a_function_may_stand_in_a_checkpoint(train: engine.Train) -> None:
    """Also with all that hooks may ask of the manager."""

    def create_ckpt(
        ckpt_path: str, step: Any, lr: Any, optimizer: Any, train_model: Any, train_loss: Any
    ) -> Any:
        parts = {"step": step, "lr": lr, "optimizer": optimizer, "train_model": train_model}
        ckpt = tf.train.Checkpoint(**parts, train_loss=train_loss)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

    seen: list[Any] = []

    def look(manager: Any, train_model: Any) -> None:
        weights = train_model.get_weights()
        manager.restore()
        seen.append((manager.max_to_keep, manager.checkpoints, manager.latest_checkpoint))
        assert not np.array_equal(train_model.get_weights()[0], weights[0])

    hooks = small.hooks(create_ckpt=create_ckpt, at_step={5: look})
    state = train_small(train, hooks, ckpt_every=2)
    paths = [str(state.run_dir / "ckpt" / f"ckpt-{step}") for step in (2, 4)]
    assert seen == [(3, paths, paths[1])]
    assert state.step == 6


def test_arguments_may_be_named_in_any_order(train: engine.Train) -> None:
    seen: list[Any] = []
    hooks = small.hooks(
        every_steps={3: [lambda lr, step, loss: seen.append((step, float(lr), float(loss)))]},
        grad_pre=lambda train_model, loss: (loss, 0.0, train_model.trainable_variables),
    )
    train_small(train, hooks)
    assert [step for step, *_ in seen] == [3, 6]
    assert all(lr == pytest.approx(small.RATE) and loss > 0 for _, lr, loss in seen)


# ---- Evaluation and what it decides ------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 16, 37])
def test_each_example_is_evaluated_once(train: engine.Train, size: int) -> None:
    inputs, target = (part[:size] for part in small.data())

    def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((inputs, target)).batch(per_replica_batch_size)

    hooks = small.hooks(
        create_eval_dataset=create_eval_dataset,
        create_metrics=lambda: {"seen": keras.metrics.Sum(), "error": keras.metrics.Mean()},
        metric_pre=lambda output, batch: {
            "seen": (tf.ones_like(output),),
            "error": (tf.abs(output - batch[1]),),
        },
    )
    state = train_small(train, hooks, steps=0, virtual_devices=4)
    error = np.abs(small.create_model()(inputs).numpy() - target)
    expected = {"seen": size, "error": error.mean(), "loss": (error**2).mean()}
    assert state.metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("size", [5, 16])
def test_vectors_are_one_number_for_each_example(
    train: engine.Train, devices: int, size: int
) -> None:
    hooks = small.hooks(
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        metric_pre=lambda output, batch: (batch[1][:, 0], output[:, 0]),
    )
    state = train_small(train, hooks, steps=0, virtual_devices=devices, eval_batch_size=size)
    inputs, target = (part[-37:] for part in small.data())
    error = np.abs(small.create_model()(inputs).numpy() - target).mean()
    assert state.metrics["error"] == pytest.approx(error, rel=1e-5)


def test_training_does_not_notice_an_evaluation(train: engine.Train) -> None:
    hooks = small.hooks(create_model=lambda: small.model_with(keras.layers.Dropout(0.3, seed=2)))
    without = train_small(train, hooks, run_name="without")
    hooks.create_eval_dataset = small.create_eval_dataset
    evaluated = train_small(train, hooks, eval_every=1, run_name="evaluated")
    for value, other in zip(
        evaluated.train_model.weights, without.train_model.weights, strict=True
    ):
        np.testing.assert_array_equal(value.numpy(), other.numpy())


def test_the_best_is_kept_and_training_stops_early(train: engine.Train) -> None:
    hooks = small.hooks(
        create_eval_dataset=small.create_eval_dataset,
        at_step={4: lambda lr: lr.assign(2.0)},  # from here on it only gets worse
    )
    more = {"eval_every": 1, "keep_best": "loss", "early_stop": "loss:2"}
    state = train_small(train, hooks, steps=20, **more)
    assert state.step < 20
    (best,) = (state.run_dir / "ckpt" / "best").glob("ckpt-*.index")
    kept = tf.train.Checkpoint(train_model=small.create_model())
    kept.read(str(best).removesuffix(".index")).expect_partial()
    step = int(best.name.removeprefix("ckpt-").removesuffix(".index"))
    assert step in (3, 4)
    compare.assert_close(kept.train_model.weights, small.plain(step).weights)


# ---- Numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_a_last_batch_that_is_kept(train: engine.Train, devices: int, accumulate: int) -> None:
    """Four examples are left of a pass: of 4 replicas each has one, of 2 x 2 shares, too."""
    hooks = small.hooks(
        create_dataset=lambda per_replica_batch_size: tf.data.Dataset.from_tensor_slices(
            small.data()
        ).batch(per_replica_batch_size)
    )
    more = {"virtual_devices": devices, "accumulate_steps": accumulate, "last_batch": "keep"}
    state = train_small(train, hooks, steps=None, epochs=2, **more)
    batches = tf.data.Dataset.from_tensor_slices(small.data()).batch(small.BATCH)
    assert state.step == 14
    assert_trained(state, small.plain(14, batches=batches))


@DEVICES
def test_extra_loss_counts_once(train: engine.Train, devices: int) -> None:
    def grad_pre(loss: Any, train_model: Any) -> Any:
        extra = 0.1 * tf.add_n([tf.reduce_sum(v**2) for v in train_model.trainable_variables])
        return loss, extra, train_model.trainable_variables

    state = train_small(train, small.hooks(grad_pre=grad_pre), virtual_devices=devices)
    model = small.create_model()
    for inputs, target in small.create_dataset(small.BATCH).take(6):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(small.squared_error((model(inputs), target)))
            loss += 0.1 * tf.add_n([tf.reduce_sum(v**2) for v in model.trainable_variables])
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(small.RATE * gradient)
    assert_trained(state, model)


@DEVICES
def test_the_default_update_drops_nan_and_clips_the_sum(train: engine.Train, devices: int) -> None:
    """One weight's gradient is NaN; the others' norm is far above 10."""
    hooks = small.hooks(
        grad_pre=lambda loss, train_model: (
            100.0 * loss + tf.reduce_sum(train_model.weights[-1]) * math.nan,
            0.0,
            train_model.trainable_variables,
        ),
    )
    del hooks.update_pre
    state = train_small(train, hooks, steps=2, on_nan="ignore", virtual_devices=devices)
    model = small.create_model()
    for inputs, target in small.create_dataset(small.BATCH).take(2):
        with tf.GradientTape() as tape:
            loss = 100.0 * tf.reduce_mean(small.squared_error((model(inputs), target)))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients[-1] = tf.zeros_like(gradients[-1])
        clipped, norm = tf.clip_by_global_norm(gradients, 10.0)
        assert norm > 10.0
        for variable, gradient in zip(model.trainable_variables, clipped, strict=True):
            variable.assign_sub(small.RATE * gradient)
    assert_trained(state, model)


def poison(step: int) -> Any:
    """Returns a create_dataset whose given batch has a target that is NaN."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        inputs, target = small.data()
        target = target.copy()
        target[step * small.BATCH - 1] = math.nan
        return tf.data.Dataset.from_tensor_slices((inputs, target)).batch(
            per_replica_batch_size, drop_remainder=True
        )

    return create_dataset


def test_a_loss_that_is_not_finite(train: engine.Train, capsys: pytest.CaptureFixture[str]) -> None:
    """``stop`` ends the run and names the step, what was saved before stays; ``warn`` goes on."""
    hooks = small.hooks(create_dataset=poison(4))
    with pytest.raises(ctl_core.RunError, match="step 4"):
        train_small(train, hooks, on_nan="stop", ckpt_every=2)
    hooks.create_dataset = poison(5)
    warned = train_small(train, hooks, on_nan="warn", run_name="warned")
    assert warned.step == 6 and warned.diverged
    assert "step 5" in capsys.readouterr().out


@pytest.mark.parametrize("devices", [1, 3])
def test_the_average_of_ema_is_evaluated_and_the_weights_are_trained(
    train: engine.Train, devices: int
) -> None:
    seen: list[Any] = []
    hooks = small.hooks(
        create_eval_dataset=small.create_eval_dataset,
        after_eval=lambda train_model: seen.append(train_model.get_weights()),
    )
    for steps in (4, 6):
        state = train_small(train, hooks, steps=steps, ema=0.8, virtual_devices=devices)
    assert_trained(state, small.plain(6))
    average = small.create_model().get_weights()
    for step in range(1, 7):
        weights = small.plain(step).get_weights()
        average = [0.8 * one + 0.2 * other for one, other in zip(average, weights, strict=True)]
    averaged = small.create_model()
    averaged.set_weights(average)
    assert state.metrics["loss"] == pytest.approx(small.errors(averaged)["loss"], rel=1e-5)
    for value, other in zip(seen[-1], average, strict=True):  # as after_eval sees them
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-7)


# ---- Runs that begin from others ---------------------------------------------------------------


def test_fork_and_init_from(train: engine.Train) -> None:
    """A fork goes on with data and moments, ``init_from`` begins with the weights alone."""
    hooks = small.hooks(create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5))
    whole = train_small(train, hooks, steps=9, run_name="whole", ckpt_every=4)
    forked = train_small(train, hooks, steps=9, run_name="forked", fork="whole@4")
    for value, other in zip(forked.train_model.weights, whole.train_model.weights, strict=True):
        np.testing.assert_array_equal(value.numpy(), other.numpy())
    begun = train_small(train, small.hooks(), steps=2, run_name="begun", init_from="whole@8")
    saved = tf.train.Checkpoint(train_model=small.create_model())
    saved.read(str(whole.run_dir / "ckpt" / "ckpt-8")).expect_partial()
    assert_trained(begun, small.plain(2, model=saved.train_model))
