"""What a model holds, in one line; what it is made of, ``keras.Model.summary`` shows."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ctl_core.model.recording import Recording
from ctl_core.model.variables import plain_variable, trainable_variables


def describe_parameters(recording: Recording, train_model: Any, train_loss: Any) -> str:
    """Returns ``105 parameters, 97 of them trainable, 0.42 kB``, of a model and of its loss.

    States of random generators are none, and what is frozen now is not trainable.
    """
    generators = set(map(id, recording.generators))
    variables = [
        variable
        for name, variable in recording.variables.items()
        if name.startswith(("create_model/", "create_loss/")) and id(variable) not in generators
    ]
    both = [*trainable_variables(train_model), *trainable_variables(train_loss)]
    free = {id(plain_variable(variable)) for variable in both}
    sizes = {id(v): int(tf.size(v)) for v in variables}
    number, trained = sum(sizes.values()), sum(n for v, n in sizes.items() if v in free)
    size = sum(sizes[id(v)] * tf.as_dtype(v.dtype).size for v in variables)
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:.2g} kB"
    of_them = f"{trained:,}" if trained < number else "all"
    return f"{number:,} parameters, {of_them} of them trainable, {shown}"


def is_normalizing(layer: keras.Layer) -> bool:
    """Whether a layer normalizes what each replica has of a batch by itself."""
    kind = keras.layers.BatchNormalization
    return isinstance(layer, kind) and layer.trainable and not layer.synchronized


def describe_nature(recording: Recording) -> str | None:
    """Says why weights depend on the number of replicas; None where no layer is known to."""
    layers, kind = recording.layers, keras.random.SeedGenerator
    noisy = [one for one in layers if any(isinstance(v, kind) for v in vars(one).values())]
    names = sorted({type(layer).__name__ for layer in noisy})
    said = [f"draws random numbers of its own ({', '.join(names)})"] * bool(names)
    if any(map(is_normalizing, layers)):
        said.append("normalizes its own part of a batch (BatchNormalization; not so synchronized)")
    if not said:
        return None
    return f"by nature, weights depend on the number of replicas: each {' and '.join(said)}."
