"""Distillation of a large network into a small one, after Keras' example.

The teacher is not trained. Users keep it in a global variable, which is created outside of any
strategy, or next to the student in one model. There are hooks for both. Only tests of resumed runs
use the student's Dropout, because its random numbers differ on each device and could not be
compared with a plain loop.
"""

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

FEATURES = 6
CLASSES = 3
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(40, FEATURES)).astype("float32")
LABELS = RANDOM.integers(0, CLASSES, size=40)
ALPHA = 0.3
TEMPERATURE = 4.0
LEARNING_RATE = 0.5
create_dataset = small.slices((INPUTS, LABELS))


def create_teacher(seed: int = 1) -> keras.Model:
    """Returns a network that represents a pretrained teacher."""
    teacher = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(12, activation="tanh", name="teacher_hidden"),
            keras.layers.BatchNormalization(name="teacher_norm"),
            keras.layers.Dropout(0.5, seed=seed),
            keras.layers.Dense(CLASSES, name="teacher_out"),
        ]
    )
    random = np.random.default_rng(seed)
    teacher.set_weights([random.uniform(-1.0, 1.0, w.shape) ** 2 for w in teacher.get_weights()])
    return teacher


TEACHER = create_teacher()


def create_student(dropout: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(CLASSES),
        ]
    )


class Distiller(keras.Model):
    """A model that contains the student and the teacher, and returns the student's output."""

    def __init__(self) -> None:
        super().__init__()
        self.student = create_student()
        self.teacher = create_teacher()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.student(inputs, training=training)


def soft_and_hard(loss_input: Any) -> Any:
    (student, teacher), label = loss_input
    hard = keras.losses.sparse_categorical_crossentropy(label, student, from_logits=True)
    soft = keras.losses.kl_divergence(
        tf.nn.softmax(teacher / TEMPERATURE), tf.nn.softmax(student / TEMPERATURE)
    )
    return ALPHA * hard + (1.0 - ALPHA) * TEMPERATURE**2 * soft


def ask_global(output: Any, batch: Any) -> Any:
    inputs, label = batch
    return (output, TEACHER(inputs, training=False)), label


def ask_model(output: Any, batch: Any, train_model: Any) -> Any:
    inputs, label = batch
    return (output, train_model.teacher(inputs, training=False)), label


def train_student(loss: Any, train_model: Any) -> Any:
    return loss, sum(train_model.student.losses), train_model.student.trainable_variables


hooks = functools.partial(
    small.hooks, create_dataset=create_dataset, create_loss=lambda: soft_and_hard
)
model_hooks = functools.partial(
    hooks, create_model=Distiller, loss_pre=ask_model, grad_pre=train_student
)


def global_hooks(dropout: float = 0.0) -> SimpleNamespace:
    return hooks(create_model=lambda: create_student(dropout), loss_pre=ask_global)


def find_weights(state: Any) -> list[Any]:
    """Returns the weights of the student, and those of the teacher, which must not change."""
    return [*state.train_model.student.weights, *state.train_model.teacher.weights]


PROGRAM = Program(
    model_hooks, weights=find_weights, settings={"learning_rate": LEARNING_RATE}, frozen="teacher"
)
