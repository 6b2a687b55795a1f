"""Hooks may change the learning rate, write summaries, keep state, stop and restore."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small


@pytest.mark.parametrize("factor", [lambda lr: lr * 0.1, lambda lr: lr / 4.0], ids=["*", "/"])
def test_a_product_of_lr_follows_it(train_small: engine.Train, factor: Any) -> None:
    hooks = small.hooks(
        create_opt=lambda lr: keras.optimizers.SGD(factor(lr)),
        at_step={3: lambda lr: lr.assign(0.4)},
    )
    state = train_small(hooks)
    plain = small.plain(6, lambda step: factor(small.RATE if step <= 3 else 0.4))
    compare.assert_close(state.train_model.weights, plain.weights)


def test_a_schedule_and_a_warm_up(train_small: engine.Train) -> None:
    """Each step uses the learning rate that hooks in the graph receive."""

    def note(batch: Any, lr: Any) -> Any:
        tf.summary.scalar("lr", lr)
        return batch[0]

    state = train_small(small.hooks(input_pre=note), steps=8, lr_schedule="linear", warmup=2)
    used = read_summaries(state.run_dir, "lr")
    assert used[0] < used[2] == max(used) > used[-1]
    plain = small.plain(8, lambda step: used[step - 1])
    compare.assert_close(state.train_model.weights, plain.weights)


def read_summaries(run: Path, tag: str) -> list[float]:
    """Returns the values of a scalar summary of training, in the order of the steps."""
    summaries = {
        event.step: float(tf.make_ndarray(value.tensor))
        for file in (run / "tb" / "train").glob("events.out.tfevents.*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag == tag
    }
    assert sorted(summaries) == [*range(1, len(summaries) + 1)]
    return [summaries[step] for step in sorted(summaries)]


def test_summaries_in_hooks_of_the_graph(train_small: engine.Train) -> None:
    """Each step writes one summary with its number, on any devices and after a restart."""

    def update_pre(gradients: Any, step: Any) -> Any:
        tf.summary.scalar("step", tf.cast(step, tf.float32))
        return gradients, gradients

    for steps, devices in ((3, 1), (5, 2)):
        hooks = small.hooks(update_pre=update_pre)
        state = train_small(hooks, steps=steps, virtual_devices=devices)
    assert read_summaries(state.run_dir, "step") == [1, 2, 3, 4, 5]


def test_at_step_runs_once_and_state_is_kept(train_small: engine.Train) -> None:
    ran: list[int] = []

    def count(state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1

    hooks = small.hooks(at_step={3: lambda step: ran.append(step)}, every_steps={1: count})
    for steps in (3, 4, 6):
        state = train_small(hooks, steps=steps)
    assert ran == [3]
    assert state.hook_state == {"count": 6}


def test_a_hook_ends_training_and_it_stays_ended(train_small: engine.Train) -> None:
    def stop(step: int) -> None:  # noqa: ARG001  (hooks take values by name)
        raise ctl_core.StopTraining("enough")

    reasons: list[str] = []
    hooks = small.hooks(at_step={4: stop}, at_end=lambda reason: reasons.append(reason))
    state = train_small(hooks, steps=9)
    assert (state.step, reasons) == (4, ["ended"])
    assert (state.run_dir / "ckpt" / "ckpt-4.index").is_file()
    assert train_small(hooks, steps=9).step == 4


def test_arguments_may_be_named_in_any_order(train_small: engine.Train) -> None:
    seen: list[Any] = []
    hooks = small.hooks(
        every_steps={3: [lambda lr, step, loss: seen.append((step, float(lr), float(loss)))]},
        grad_pre=lambda train_model, loss: (loss, 0.0, train_model.trainable_variables),
    )
    train_small(hooks)
    assert [step for step, *_ in seen] == [3, 6]
    assert all(lr == pytest.approx(small.RATE) and loss > 0 for _, lr, loss in seen)


@pytest.mark.parametrize(
    "how",
    [{"virtual_devices": 3}, *small.slow_but(of=[{}, {"jit_compile": True}])],
    ids=str,
)
def test_variables_are_those_of_the_gradients(train_small: engine.Train, how: Any) -> None:
    """Hooks receive the trained variables, each of which moved by its gradient.

    This is true even after a hook has frozen a layer.
    """
    before: dict[str, np.ndarray] = {}
    moved: list[list[str]] = []

    def update_pre(gradients: Any, variables: Any) -> Any:
        kernels = [len(variable.shape) > 1 for variable in variables]
        scaled = [g * (0.5 if k else 1.0) for g, k in zip(gradients, kernels, strict=True)]
        return scaled, gradients

    def follow(variables: Any, gradients: Any, update_gradients: Any, train_model: Any) -> None:
        for variable, gradient, update in zip(variables, gradients, update_gradients, strict=True):
            np.testing.assert_allclose(update, gradient * (0.5 if len(variable.shape) > 1 else 1.0))
            by = small.RATE * update
            np.testing.assert_allclose(
                before[variable.path] - variable.numpy(), by, rtol=1e-3, atol=1e-6
            )
        moved.append([variable.path.split("/")[-2] for variable in variables])
        look(train_model)

    def look(train_model: Any) -> None:
        before.update({variable.path: variable.numpy() for variable in train_model.variables})

    def freeze(train_model: Any) -> None:
        train_model.get_layer("hidden").trainable = False

    train_small(
        small.hooks(
            update_pre=update_pre,
            every_steps={2: follow},
            at_step={1: look, 3: look, 4: freeze, 5: look},
        ),
        **how,
    )
    assert moved == [["hidden", "hidden", "out", "out"]] * 2 + [["out", "out"]]


def momentum(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr, momentum=0.5)


@pytest.mark.slow
def test_hooks_restore_and_keep_checkpoints_by_themselves(train_small: engine.Train) -> None:
    """``create_ckpt`` limits the number of checkpoints; ``ckpt.restore`` restores the weights."""

    def create_ckpt(ckpt_path: str, step: Any, lr: Any, optimizer: Any, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(step=step, lr=lr, optimizer=optimizer, train_model=train_model)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=2)

    seen: list[list[np.ndarray]] = []
    hooks = small.hooks(
        create_ckpt=create_ckpt,
        create_opt=momentum,
        every_steps={2: lambda manager: manager.save()},
    )
    state = train_small(hooks, steps=7, ckpt_every=0)
    names = sorted(path.name for path in (state.run_dir / "ckpt").glob("ckpt-*.index"))
    assert names == ["ckpt-6.index", "ckpt-7.index"]

    def go_back(ckpt: Any, train_model: Any) -> None:
        ckpt.restore(str(state.run_dir / "ckpt" / "ckpt-7"))
        seen.append(train_model.get_weights())

    hooks.at_step = {9: go_back}
    train_small(hooks, steps=9, ckpt_every=0)
    plain = small.plain(7, optimizer=momentum(small.RATE))
    compare.assert_close(seen[0], plain.weights)


def test_create_dataset_is_called_twice_at_most(train_small: engine.Train) -> None:
    """``create_dataset`` is not called again to count a pass or to test a scalar loss."""
    calls: list[int] = []

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        calls.append(1)
        data = tf.data.Dataset.from_tensor_slices(small.data()).shuffle(50, seed=2)
        return data.filter(lambda x, y: y[0] < 9).batch(per_replica_batch_size)

    hooks = small.hooks(create_dataset=create_dataset)
    hooks.create_loss = lambda: lambda pair: tf.reduce_sum(small.squared_error(pair))
    for epochs in (1, 2):
        train_small(hooks, steps=None, epochs=epochs)
    assert len(calls) == 4


class Noise(keras.layers.Layer):
    """Concatenates the input after Dropout with the input plus noise from a separate generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        noise = self.generator.normal(tf.shape(inputs)) if training else 0.0
        return tf.concat([self.dropout(inputs, training=training), inputs + noise], axis=1)


def test_replicas_that_a_hook_restores_keep_random_numbers_of_their_own(
    train_small: engine.Train,
) -> None:
    seen: list[np.ndarray] = []
    hooks = small.hooks(
        create_model=lambda: keras.Sequential([keras.layers.Dense(1), Noise()]),
        input_pre=lambda batch: tf.ones_like(batch[0]),
        every_steps={1: lambda output: seen.append(np.array(output))},
        at_step={4: lambda manager: manager.restore()},
    )
    train_small(hooks, virtual_devices=2, ckpt_every=2)
    for output in seen:  # the first 8 rows are from one replica, the last 8 from the other
        assert (output[:8] != output[8:]).any(axis=0).all()


def test_hooks_see_variables_as_numbers_on_any_devices(train_small: engine.Train) -> None:
    numbers = []

    def look(optimizer: Any, train_model: Any) -> None:
        numbers.append(
            (int(optimizer.iterations), float(train_model.scale), float(train_model.own))
        )

    def create_model() -> Any:
        model = small.create_model()
        model.scale = model.add_weight(shape=(), initializer="ones", trainable=False)
        model.own = tf.Variable(2.0, trainable=False)
        return model

    for devices in (1, 2):
        hooks = small.hooks(create_model=create_model, at_step={2: look})
        train_small(hooks, run_name=f"on-{devices}", virtual_devices=devices)
    assert numbers == [(2, 1.0, 2.0)] * 2


def test_a_loss_that_is_a_function_may_stand_in_a_checkpoint(train_small: engine.Train) -> None:
    """If a function is the loss in a checkpoint, hooks can still restore and list checkpoints."""

    def create_ckpt(
        ckpt_path: str, step: Any, lr: Any, optimizer: Any, train_model: Any, train_loss: Any
    ) -> Any:
        objects = {"step": step, "lr": lr, "optimizer": optimizer, "train_model": train_model}
        ckpt = tf.train.Checkpoint(**objects, train_loss=train_loss)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

    seen: list[Any] = []

    def look(manager: Any, train_model: Any) -> None:
        weights = train_model.get_weights()
        manager.restore()
        seen.append((manager.max_to_keep, manager.checkpoints, manager.latest_checkpoint))
        assert not np.array_equal(train_model.get_weights()[0], weights[0])

    hooks = small.hooks(create_ckpt=create_ckpt, at_step={5: look})
    state = train_small(hooks, ckpt_every=2)
    paths = [str(state.run_dir / "ckpt" / f"ckpt-{step}") for step in (2, 4)]
    assert seen == [(3, paths, paths[1])]
    assert state.step == 6


@pytest.mark.slow
def test_fork_and_init_from(train_small: engine.Train) -> None:
    """A fork continues with the data and the momenta; ``init_from`` loads only the weights."""
    hooks = small.hooks(create_opt=momentum)
    whole = train_small(hooks, steps=9, run_name="whole", ckpt_every=4)
    forked = train_small(hooks, steps=9, run_name="forked", fork="whole@4")
    compare.assert_same(forked.train_model.weights, whole.train_model.weights)
    begun = train_small(small.hooks(), steps=2, run_name="begun", init_from="whole@8")
    saved = tf.train.Checkpoint(train_model=small.create_model())
    saved.read(str(whole.run_dir / "ckpt" / "ckpt-8")).expect_partial()
    plain = small.plain(2, model=saved.train_model)
    compare.assert_close(begun.train_model.weights, plain.weights)
