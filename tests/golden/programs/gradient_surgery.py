"""Two tasks whose gradients are projected where they conflict, after Yu et al. 2020 (PCGrad).

Both tasks train a shared layer. If the gradient of one task opposes that of the other, the opposing
component is removed. Each task is an objective with its own head and optimizer.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import STEPS, Program, Trained, whole_batches
from tests.golden.reference import RATE

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.normal(size=(44, 5)).astype("float32")
TASKS = {
    "sum": POINTS.sum(axis=1, keepdims=True),
    "square": -(POINTS**2).sum(axis=1, keepdims=True),
}
create_dataset = small.slices((POINTS, TASKS))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, activation="tanh", name="shared")(inputs)
    return keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(hidden) for name in TASKS})


def train_loss(loss_input: Any) -> Any:
    output, target = loss_input
    return {name: tf.reduce_sum((output[name] - target[name]) ** 2, 1) for name in TASKS}


def create_opt(lr: Any) -> dict[str, keras.Optimizer]:
    return {name: keras.optimizers.SGD(lr, momentum=0.5) for name in TASKS}


def find_variables(model: keras.Model, name: str) -> list[Any]:
    layers = [model.get_layer(layer_name) for layer_name in ("shared", name)]
    return [variable for layer in layers for variable in layer.trainable_variables]


def grad_pre(loss: Any, train_model: Any) -> Any:
    return {name: (loss[name], 0.0, find_variables(train_model, name)) for name in TASKS}


def update_pre(gradients: Any, objective: str, all_gradients: Any) -> Any:
    (other,) = (
        gradients_of_task[:2]
        for name, gradients_of_task in all_gradients.items()
        if name != objective
    )
    shared = gradients[:2]
    head = gradients[2:]
    along = sum(
        tf.reduce_sum(gradient * projected_on)
        for gradient, projected_on in zip(shared, other, strict=True)
    )
    share = tf.minimum(along, 0.0) / sum(tf.reduce_sum(gradient**2) for gradient in other)
    projected = [
        gradient - share * projected_on
        for gradient, projected_on in zip(shared, other, strict=True)
    ]
    return [*projected, *head], gradients


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_model,
    create_loss=lambda: train_loss,
    create_opt=create_opt,
    grad_pre=grad_pre,
    update_pre=update_pre,
)


def train_plainly() -> Trained:
    model = create_model()
    optimizers = create_opt(RATE)
    conflicts = 0
    for inputs, target in whole_batches(create_dataset):
        with tf.GradientTape(persistent=True) as tape:
            losses = train_loss((model(inputs), target))
            means = {name: tf.reduce_mean(losses[name]) for name in TASKS}
        gradients = {
            name: [g.numpy() for g in tape.gradient(means[name], find_variables(model, name))]
            for name in TASKS
        }
        flat = {name: np.concatenate([g.ravel() for g in gradients[name][:2]]) for name in TASKS}
        for name, other in (("sum", "square"), ("square", "sum")):
            along = float(flat[name] @ flat[other])
            projected = gradients[name]
            if along < 0.0:
                conflicts += 1
                share = along / float(flat[other] @ flat[other])
                pairs = zip(gradients[name][:2], gradients[other][:2], strict=True)
                projected = [
                    gradient - share * projected_on for gradient, projected_on in pairs
                ] + gradients[name][2:]
            optimizers[name].apply(list(map(tf.constant, projected)), find_variables(model, name))
    assert 0 < conflicts < 2 * STEPS
    return model.weights, {}


PROGRAM = Program(hooks, train_plainly)
