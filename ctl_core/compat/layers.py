"""Wraps private APIs of Keras layers and losses."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_losses
from tensorflow.python.eager.polymorphic_function import function_context

from ctl_core.compat.patches import Scope, replace_attribute, set_attributes, wrap_function
from ctl_core.compat.randomness import draw_from
from ctl_core.types import UserObject

_KERAS_NEW = vars(keras.Layer)["__new__"]


class _ThreadState(threading.local):
    """The state of a thread. Each replica is traced in its own thread.

    Attributes:
        training: the value of ``training`` for layers that are called without this argument
        keeps_means: whether Keras must not divide the mean of a loss by the number of replicas
        losses: the losses that each layer passed to ``add_loss`` on this thread's replica
    """

    training: bool | None = None
    keeps_means = False

    def __init__(self) -> None:
        self.losses: weakref.WeakKeyDictionary[keras.Layer, list[tf.Tensor]]
        self.losses = weakref.WeakKeyDictionary()


_thread = _ThreadState()


def flatten_layers(model: UserObject) -> list[keras.Layer]:
    """Returns a Keras model and all its layers, parents first; [] for any other model."""
    if isinstance(model, keras.Layer):
        return list(model._flatten_layers())
    return []


def read_added_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """Returns the losses that a layer has passed to ``add_loss`` since the model was called.

    The losses of its sublayers are not included.
    """
    return list(layer._losses or ())


@contextlib.contextmanager
def watch_new_layers(notify: Callable[[keras.Layer], None]) -> Iterator[None]:
    """Calls a function with each layer that is created within the context.

    This replaces ``__new__``, because a subclass need not call ``__init__`` of ``keras.Layer``.
    """
    outer_new = vars(keras.Layer)["__new__"]

    def create(kind: type[keras.Layer], *args: Any, **options: Any) -> keras.Layer:
        layer: keras.Layer = outer_new(kind, *args, **options)
        notify(layer)
        return layer

    with _replace_new(create):
        yield


def hide_new_layers() -> Scope:
    """Hides layers that are created within the context from every ``watch_new_layers``."""
    return _replace_new(_KERAS_NEW)


@contextlib.contextmanager
def _replace_new(new: Any) -> Iterator[None]:
    before = vars(keras.Layer)["__new__"]
    setattr(keras.Layer, "__new__", new)  # noqa: B010
    try:
        yield
    finally:
        setattr(keras.Layer, "__new__", before)  # noqa: B010


@contextlib.contextmanager
def run_layers(training: bool) -> Iterator[None]:
    """Sets the value of ``training`` for Keras layers that are called without this argument.

    A layer inside another layer uses the value of the outer layer. A tf.function that calls layers
    is traced once for each value of ``training``.
    """
    layers = wrap_function(keras.Layer, "_get_call_context", _get_call_context)
    functions = wrap_function(function_context, "make_function_context", _make_function_context)
    with layers, functions, set_attributes(_thread, training=training):
        yield


def _get_call_context(of_keras: Callable[..., Any], layer: keras.Layer) -> Any:
    call_context = of_keras(layer)
    if call_context.get_value("training") is None:
        call_context.set_value("training", _thread.training)
    return call_context


def _make_function_context(of_tensorflow: Callable[..., Any], scope_type: Any = None) -> Any:
    return of_tensorflow((scope_type, _thread.training))


def separate_losses() -> Scope:
    """Gives each replica its own list of ``add_loss`` losses, if there is more than one replica.

    Replicas are traced alternately if they exchange values, as in synchronized batch normalization.
    If replicas shared the list of a layer, one replica would clear the list, or append to it,
    before another replica has read its own losses.
    """
    losses = property(_get_losses, _set_losses)
    return replace_attribute(keras.Layer, "_losses", lambda _: losses)


def _get_losses(layer: keras.Layer) -> list[tf.Tensor] | None:
    replica_context = tf.distribute.get_replica_context()
    if replica_context is None or replica_context.num_replicas_in_sync == 1:
        return vars(layer).get("_losses")
    return _thread.losses.setdefault(layer, [])


def _set_losses(layer: keras.Layer, losses: list[tf.Tensor]) -> None:
    vars(layer)["_losses"] = losses


@contextlib.contextmanager
def run_replica(generator: keras.random.SeedGenerator | None) -> Iterator[None]:
    """Prepares this thread for the work of a replica.

    Within the context, ``keras.random`` draws from ``generator`` (see ``draw_from``), and Keras
    does not divide the mean of a loss by the number of replicas.
    """
    means = wrap_function(keras_losses, "scale_loss_for_distribution", _scale_loss)
    with draw_from(generator), means, set_attributes(_thread, keeps_means=True):
        yield


def _scale_loss(of_keras: Callable[..., Any], value: tf.Tensor) -> tf.Tensor:
    if _thread.keeps_means:
        return value
    scaled: tf.Tensor = of_keras(value)
    return scaled
