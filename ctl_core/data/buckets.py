"""Length buckets: global batches of examples that are about as long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def bucket_by_length(
    dataset: tf.data.Dataset,
    length_of: Callable[..., Any],
    boundaries: Sequence[int],
    global_batch_size: int,
    padded_shapes: Any = None,
    padding_values: Any = None,
) -> tf.data.Dataset:
    """Groups examples of about the same length into global batches, and pads each as a whole.

    In a hook that names ``global_batch_size``::

        def create_dataset(global_batch_size):
            return bucket_by_length(
                examples, lambda words, label: tf.shape(words)[0], [10, 20, 40], global_batch_size
            )

    The engine cuts a global batch into the replicas' shares: a step has the same examples with the
    same padding on any number of replicas. (Grouped per replica, the replicas of a step would get
    batches of different buckets, and which examples meet would depend on their number.)

    Examples that fill no batch of their bucket at the end of a pass are left out, and counted by
    the engine; to lose none, use it on the repeated dataset, in ``make_batches``.

    Args:
        dataset: single examples, shuffled if they are to be; not sharded by the hook
        length_of: called with the parts of an example, returns its length, an integer scalar
        boundaries: where a bucket ends and the next begins; a length that equals one is in the next
        global_batch_size: examples in a batch
        padded_shapes: to what to pad, as of ``Dataset.padded_batch``; default: the longest
        padding_values: with what, as of ``Dataset.padded_batch``; default: 0 or ""

    Raises:
        ValueError: the boundaries are none, or do not increase.
    """
    if not boundaries or list(boundaries) != sorted(set(boundaries)):
        raise ValueError(f"boundaries must increase, got {list(boundaries)}")
    return dataset.bucket_by_sequence_length(
        lambda *example: tf.cast(length_of(*example), tf.int32),
        list(boundaries),
        [global_batch_size] * (len(boundaries) + 1),
        padded_shapes=padded_shapes,
        padding_values=padding_values,
    )
