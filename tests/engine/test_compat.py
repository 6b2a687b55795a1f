"""The private names of TensorFlow and Keras that the engine uses; these fail when they change."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from ctl_core import compat


def test_global_seed_generator() -> None:
    keras.utils.set_random_seed(1)
    assert compat.global_seed_generator() is None
    keras.random.normal(())
    made = compat.global_seed_generator()
    assert isinstance(made, keras.random.SeedGenerator)
    before = made.state.numpy()
    keras.random.normal(())
    assert (made.state.numpy() != before).any()
    with compat.global_seed_generator_kept():
        keras.utils.set_random_seed(1)
        assert compat.global_seed_generator() is None
    assert compat.global_seed_generator() is made


def test_is_deterministic() -> None:
    assert compat.is_deterministic() is False


def test_flatten_layers() -> None:
    inner = keras.Sequential([keras.layers.Dense(1)])
    model = keras.Sequential([inner, keras.layers.Dense(2)])
    assert compat.flatten_layers(model) == [model, inner, inner.layers[0], model.layers[1]]
    assert compat.flatten_layers(object()) == []


def test_rate_of() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 9)
    optimizer = keras.optimizers.SGD(schedule)
    assert compat.rate_of(optimizer) is schedule and compat.rate_of(object()) is None
    assert float(compat.rate_of(keras.optimizers.SGD(0.5))) == 0.5
    with pytest.raises(TypeError, match="hence its learning rate is not settable"):  # errors.brief
        optimizer.learning_rate = 0.1


def test_written_resources() -> None:
    read, written, deep, captured = (tf.Variable(float(i)) for i in range(4))

    @tf.function(autograph=False)
    def function(steps: tf.Tensor) -> tf.Tensor:
        def body(done: tf.Tensor) -> tuple[tf.Tensor]:
            tf.cond(done > 0, lambda: deep.assign_add(read.read_value()), lambda: deep.read_value())
            return (done + 1,)

        written.assign(2.0)
        tf.while_loop(lambda done: done < steps, body, (tf.constant(0),))
        return captured + 1.0

    graph = function.get_concrete_function(tf.constant(3)).graph
    handles = compat.written_resources(graph)
    assert {id(handle) for handle in handles} == {id(written.handle), id(deep.handle)}
