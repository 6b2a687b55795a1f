"""The line on what a model holds: what counts, and when it is said."""

from __future__ import annotations

import keras
import tensorflow as tf

from ctl_core.summary import describe_parameters


def nested() -> keras.Model:
    """5 to 8, a model of its own with 4 statistics that are not trained, 4 to 1."""
    inner = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4), keras.layers.BatchNormalization()], name="inner"
    )
    first, last = keras.layers.Dense(8, name="first"), keras.layers.Dense(1, name="last")
    return keras.Sequential([keras.Input((5,)), first, keras.layers.Dropout(0.1), inner, last])


class Tied(tf.Module):
    """A variable under two names, a layer, and an integer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.zeros([3, 4]))
        self.tied = self.weight
        self.layer = keras.layers.Dense(2)
        self.layer.build((None, 4))
        self.index = tf.Variable([1, 2], trainable=False)


def test_weights_count_once_whatever_the_model_is() -> None:
    model = nested()
    assert model.count_params() == 105
    assert describe_parameters(model, None) == "105 parameters, 97 of them trainable, 0.42 kB"
    both = {"generator": model, "critic": model.layers[2]}
    assert describe_parameters(both, None) == describe_parameters(model, None)
    assert describe_parameters(nested(), Tied()).startswith("129 parameters, 119 of them")
    model.layers[2].trainable = False
    assert describe_parameters(model, None).startswith("105 parameters, 53 of them trainable")
    scale = tf.Variable([1.0, 2.0])
    said = describe_parameters(lambda x: x * scale, None)
    assert said == "2 parameters, all of them trainable, 0.008 kB"
