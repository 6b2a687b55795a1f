"""Small programs with noise and batch statistics, each with a different feature of the engine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

import ctl_core
from tests.golden import small

layers = keras.layers


def create_row_counter() -> tf.Variable:
    """Returns a counter that each replica updates on its own; its value is their sum."""
    return tf.Variable(
        0,
        trainable=False,
        dtype=tf.int64,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def make_small_hooks(**replaced: Any) -> SimpleNamespace:
    """Returns the hooks of a small program with noise and batch statistics."""
    return small.hooks(
        **{
            "create_model": lambda: small.model_with(
                layers.BatchNormalization(momentum=0.9), layers.Dropout(0.3)
            ),
            "create_opt": keras.optimizers.Adam,
            "create_eval_dataset": small.create_eval_dataset,
            **replaced,
        }
    )


class Rows:
    """Reads arrays in Python, 10 rows at a time; the reader's state is its position in the pass."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < small.EXAMPLES:
            first = self.position
            self.position += 10
            yield tuple(array[first : self.position] for array in small.data())
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def clip(gradients: Any) -> Any:
    """Clips the gradients of every step, because their norms are around 3."""
    return tf.clip_by_global_norm(gradients, 0.5)[0], gradients


def clip_sparse(gradients: Any) -> Any:
    assert isinstance(gradients[0], tf.IndexedSlices)
    return clip(gradients)


def weigh(batch: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.abs(batch[1]))


def log_parts(loss: tf.Tensor, train_model: Any) -> Any:
    penalty = 0.1 * tf.reduce_sum(train_model.layers[0].kernel ** 2)
    variables = train_model.trainable_variables
    return loss, penalty, variables, {"error": loss, "penalty": penalty}


def look(step: int, loss: Any, gradients: Any) -> None:
    ctl_core.report(step, loss=loss, norm=tf.linalg.global_norm(gradients))


def create_pair_of_optimizers(lr: Any) -> dict[str, Any]:
    return {"first": keras.optimizers.SGD(lr), "second": keras.optimizers.SGD(lr, momentum=0.9)}


def pursue_two(loss: tf.Tensor, output: Any, train_model: Any) -> Any:
    """Returns two objectives that train different layers."""
    first, *_, last = train_model.layers
    return {
        "first": (loss, 0.0, first.trainable_variables),
        "second": (tf.abs(output[:, 0]), 0.0, last.trainable_variables, {"size": output[0, 0]}),
    }


def group(lr: Any, train_model: Any) -> Any:
    first, *others = train_model.layers
    variables = [variable for layer in others for variable in layer.trainable_variables]
    return [
        (keras.optimizers.SGD(lr), first.trainable_variables),
        (keras.optimizers.SGD(0.5 * lr, momentum=0.9), variables),
    ]


def create_low_rank() -> keras.Model:
    """Returns a model with a frozen base and a LoRA adapter, with noise and batch statistics."""
    model = small.model_with(
        layers.Dense(8), layers.BatchNormalization(momentum=0.9), layers.Dropout(0.3)
    )
    model.get_layer(index=1).enable_lora(2)
    return model


def create_embedding() -> keras.Model:
    """Returns a model with an embedding.

    Most rows of its table occur in no batch, and some occur in many logical replicas.
    """
    return keras.Sequential(
        [
            keras.Input((small.FEATURES,), dtype="int32"),
            layers.Embedding(40, 3),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


def count(batch: Any) -> tf.Tensor:
    """Returns the features as word indices."""
    return tf.cast(5.0 * tf.abs(batch[0]), tf.int32)


def create_train_metrics() -> dict[str, keras.Metric]:
    return {"error": keras.metrics.MeanAbsoluteError(), "auc": keras.metrics.AUC(num_thresholds=9)}


def judge(output: Any, batch: Any) -> Any:
    chance = tf.sigmoid(output)
    return {"error": (batch[1], output), "auc": (tf.cast(batch[1] > 0, tf.float32), chance)}


def large_error(pair: Any) -> tf.Tensor:
    """Returns losses whose gradients overflow in float16 until the loss scale has been reduced."""
    return 100.0 * small.squared_error(pair)


OBJECTIVES: dict[str, Any] = {"create_opt": create_pair_of_optimizers, "grad_pre": pursue_two}
TRAIN_METRICS: dict[str, Any] = {
    "create_train_metrics": create_train_metrics,
    "train_metric_pre": judge,
}
EMBEDDING: dict[str, Any] = {"create_model": create_embedding, "input_pre": count}
# The last batch of a pass has 4 rows, fewer than there are logical replicas.
ROWS: dict[str, Any] = {"create_dataset": small.slices(small.data())}
# The feature "all" combines those that can be combined. A bit of any of them that differs would be
# seen in its run, so they have no runs of their own.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "objectives": (OBJECTIVES, {}),
    "lora, groups, logged and reported values": (
        {
            "create_model": create_low_rank,
            "create_opt": group,
            "grad_pre": log_parts,
            "every_steps": {2: look},
        },
        {},
    ),
    "embedding": ({**EMBEDDING, "update_pre": clip_sparse}, {}),
    "compiled": ({}, {"jit_compile": True}),
    "compiled, in turns": (
        {**OBJECTIVES, **EMBEDDING, **TRAIN_METRICS, "turns": ["first", "second"]},
        {"jit_compile": True},
    ),
    "all": (
        {
            **EMBEDDING,
            **OBJECTIVES,
            **TRAIN_METRICS,
            "create_dataset": Rows,
            "turns": ["first", "second", "first"],
            "batch_weight": weigh,
            "create_loss": lambda: large_error,
        },
        {"ema": 0.9, "last_batch": "keep", "precision": "float16"},
    ),
}


def make_feature(name: str) -> SimpleNamespace:
    """Returns the hooks that use a feature, with plain SGD and clipping unless it replaces them."""
    replaced, _ = FEATURES[name]
    return make_small_hooks(**{"create_opt": small.create_opt, "update_pre": clip, **replaced})
