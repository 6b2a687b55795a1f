"""``--shard-optimizer`` divides the state of optimizers among devices, and changes no weight.

Tests of logical replicas train with shards, too: objectives, turns, LoRA, embeddings, float16,
compiled runs, processes, and all programs.
"""

from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.logical_features import make_small_hooks

DEVICES = 3
SHARDS: dict[str, Any] = {"virtual_devices": DEVICES, "shard_optimizer": True}


def test_the_bits_are_those_of_a_run_without_shards(train: engine.Train) -> None:
    """Also if a run has begun without shards, on another number of devices."""
    hooks = make_small_hooks(create_opt=lambda lr: keras.optimizers.AdamW(lr, weight_decay=0.1))
    settings = {**small.settings(4), "logical_replicas": 6, "ema": 0.9, "eval_every": 2}
    expected = train(hooks, run_name="whole", **settings)
    train(hooks, run_name="shards", **{**settings, "steps": 2, "virtual_devices": 2})
    state = train(hooks, run_name="shards", **settings, **SHARDS)
    for subfolder in ("", "engine"):
        saved, others = (
            compare.read_checkpoint(each.run_dir, 4, subfolder) for each in (state, expected)
        )
        assert saved.keys() == others.keys()
        for key, value in others.items():
            assert saved[key].tobytes() == value.tobytes(), key
    assert state.metrics == expected.metrics


def create_adam(lr: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(lr)


@pytest.mark.parametrize("devices", [2, 3])
def test_each_device_has_only_its_part_of_the_state(
    train: engine.Train, capsys: pytest.CaptureFixture[str], devices: int
) -> None:
    """Adam's moments and the averages are on one device each; a line says how large they are."""
    state = train(
        small.hooks(create_opt=create_adam),
        **small.settings(3, virtual_devices=devices, shard_optimizer=True, ema=0.9),
    )
    slots = [variable.value for variable in state.optimizer.variables if variable.shape.rank > 0]
    slots += [v for name, v in state.recording.variables.items() if name.startswith("ema/")]
    assert len(slots) == 3 * len(state.train_model.weights)
    sizes: dict[str, int] = {}
    for slot in slots:
        assert not isinstance(slot, tf.distribute.DistributedValues)
        sizes[slot.device] = sizes.get(slot.device, 0) + slot.shape.num_elements()
    # The kernels have 40 and 8 elements, the biases 8 and 1.
    assert sorted(sizes.values()) == {2: [3 * 17, 3 * 40], 3: [3 * 8, 3 * 9, 3 * 40]}[devices]
    line = "variables on each device: weights 0.2 KiB, optimizer 0.1 to 0.3 KiB, averages "
    assert line in capsys.readouterr().out


# These optimizers cannot be divided: Adafactor does not say to which weight its state belongs.
REFUSED = ["Adafactor"]
NO_OPTIMIZERS = ["Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"]
DIVIDED = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and name not in (*NO_OPTIMIZERS, *REFUSED)
)


def test_every_optimizer_of_keras_trains_as_without_shards(train: engine.Train) -> None:
    """The weights, the slots and the numbers that all devices have are those of one device."""
    assert len(DIVIDED) > 10

    def create_model() -> keras.Model:
        inputs = keras.Input((small.FEATURES,))
        outputs = [keras.layers.Dense(1, name=name)(inputs) for name in DIVIDED]
        return keras.Model(inputs, keras.layers.Add()(outputs))

    def create_opt(lr: Any, train_model: Any) -> list[Any]:
        return [
            (getattr(keras.optimizers, name)(lr), train_model.get_layer(name).trainable_variables)
            for name in DIVIDED
        ]

    hooks = small.hooks(create_model=create_model, create_opt=create_opt)
    whole = train(hooks, run_name="whole", **small.settings(3))
    shards = train(hooks, run_name="shards", **small.settings(3, **SHARDS))
    compare.assert_close(shards.train_model.weights, whole.train_model.weights)
    for name, optimizer, other in zip(
        DIVIDED, shards.optimizer.optimizers, whole.optimizer.optimizers, strict=True
    ):
        compare.assert_close(optimizer.variables, other.variables)
        for variable in optimizer.variables:
            parts = [part.numpy() for part in list_components(variable.value)]
            assert len(parts) in (1, DEVICES), name
            assert all((part == parts[0]).all() for part in parts), (name, variable.path)


def list_components(variable: Any) -> list[tf.Variable]:
    """Returns the variables of all devices that a variable stands for."""
    return list(getattr(variable, "values", [variable]))


class Doubling(keras.optimizers.SGD):
    """Changes momenta after all updates, for all weights at once."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        for momentum in self.momentums:
            momentum.assign(2 * momentum)


def apply_again(optimizer: Any, train_model: Any) -> None:
    optimizer.apply([tf.ones_like(weight) for weight in train_model.weights])


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"create_opt": lambda lr: keras.optimizers.Adafactor(lr)},
            r"create_opt \(test_shards.py:\d+\): shard_optimizer cannot divide the state of "
            "adafactor, because it does not say to which weight adafactor/.* belongs",
        ),
        (
            {"create_opt": lambda lr: keras.optimizers.Adam(lr, use_ema=True)},
            "of adam, whose use_ema averages .* pass --ema",
        ),
        (
            {"create_opt": lambda lr: keras.optimizers.SGD(lr, gradient_accumulation_steps=2)},
            "of sgd, whose gradient_accumulation_steps .* pass --accumulate-steps",
        ),
        (
            {"create_opt": lambda lr: Doubling(lr, momentum=0.5)},
            "of an optimizer that changes doubling/.*_momentum outside of update_step",
        ),
        (
            {"create_opt": create_adam, "update_post": apply_again},
            r"update_post \(test_shards.py:\d+\): applies an optimizer itself, which shard_opt",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    train: engine.Train, replaced: dict[str, Any], message: str
) -> None:
    with pytest.raises(ctl_core.SetupError, match=message):
        train(small.hooks(**replaced), **small.settings(3, **SHARDS))


class Counting(keras.Model):
    """Counts the calls of ``update_pre``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small.create_model()
        self.count = self.add_weight(name="count", trainable=False, initializer="zeros")

    def call(self, inputs: Any) -> Any:
        return self.model(inputs)


def count(gradients: Any, train_model: Any) -> Any:
    train_model.count.assign_add(1)
    return gradients, gradients


def summarize(train_model: Any) -> None:
    """Writes a summary, which XLA cannot compile."""
    tf.summary.scalar("calls", train_model.count)


def test_a_stage_that_cannot_be_compiled_runs_once(train: engine.Train) -> None:
    """In a compiled run, only ``update_post`` is not compiled here."""
    hooks = small.hooks(
        create_model=Counting, create_opt=create_adam, update_pre=count, update_post=summarize
    )
    settings = small.settings(4, virtual_devices=2, jit_compile=True)
    expected = train(hooks, run_name="whole", **settings)
    state = train(hooks, run_name="shards", shard_optimizer=True, **settings)
    assert state.train_model.count.numpy() == 4
    compare.assert_close(state.train_model.weights, expected.train_model.weights)


def test_a_single_device_has_the_whole_state(
    train: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = small.hooks(create_opt=create_adam)
    expected = train(hooks, run_name="whole", **small.settings(2))
    state = train(hooks, run_name="shards", **small.settings(2, shard_optimizer=True))
    compare.assert_same(state.train_model.weights, expected.train_model.weights)
    assert "shard_optimizer has no effect with a single device." in capsys.readouterr().out
