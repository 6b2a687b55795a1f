"""SimCLR, after the paper's own code: two views per image, and the rest of the batch as negatives.

The negatives are from the global batch: each replica gathers the embeddings of all replicas, and
``row_offset`` tells it which rows are its own. Importing this module does not start TensorFlow.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.golden.catalogue import Program

FEATURES = 6
TEMPERATURE = 0.5
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(40, FEATURES))
VIEWS = tuple(
    (IMAGES + RANDOM.normal(scale=0.3, size=IMAGES.shape)).astype("float32") for _ in range(2)
)
EVALUATED = 19  # this number is not divisible by the batch size, so that the last batch is smaller
create_dataset = small.slices(VIEWS)
create_eval_dataset = small.slices(tuple(view[:EVALUATED] for view in VIEWS))


class Encoder(keras.Model):
    """An encoder and a projection head, which are applied to both views."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
        self.network = keras.Sequential([keras.Input((FEATURES,)), *layers])

    def call(self, views: Any) -> Any:
        return [tf.math.l2_normalize(self.network(view), axis=1) for view in views]


def with_all(output: Any) -> Any:
    """Returns this replica's embeddings, those of all replicas, and the index of its first row."""
    return output, ctl_core.all_gather(output), ctl_core.row_offset()


def scores(loss_input: Any) -> Any:
    """Returns the index of each example's other view, and the similarities of both its views.

    A view is compared with all other views in the batch.
    """
    (view, other_view), (all_ones, all_others), first = loss_input
    own_columns = first + tf.range(tf.shape(view)[0])
    itself = 1e9 * tf.one_hot(own_columns, tf.shape(all_ones)[0])
    of_one = [tf.matmul(view, all_others, transpose_b=True),
              tf.matmul(view, all_ones, transpose_b=True) - itself]  # fmt: skip
    of_other = [tf.matmul(other_view, all_ones, transpose_b=True),
                tf.matmul(other_view, all_others, transpose_b=True) - itself]  # fmt: skip
    return own_columns, tf.concat(of_one, 1) / TEMPERATURE, tf.concat(of_other, 1) / TEMPERATURE


def contrastive(loss_input: Any) -> Any:
    own_columns, of_one, of_other = scores(loss_input)
    return 0.5 * sum(
        tf.nn.sparse_softmax_cross_entropy_with_logits(own_columns, each)
        for each in (of_one, of_other)
    )


def create_loss() -> Any:
    return contrastive


def found_itself(loss_input: Any) -> Any:
    own_columns, of_one, _ = scores(loss_input)
    return tf.cast(tf.argmax(of_one, 1, tf.int32) == own_columns, tf.float32)


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_eval_dataset,
    create_model=Encoder,
    create_loss=create_loss,
    create_metrics=lambda: {"accuracy": keras.metrics.Mean()},
    input_pre=lambda batch: batch,
    loss_pre=with_all,
    metric_pre=lambda output: found_itself(with_all(output)),
)


# A micro-batch has fewer negatives than the batch.
PROGRAM = Program(hooks, settings={"eval_every": 5}, accumulates=False)
