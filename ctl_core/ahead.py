"""Reading ahead, and without tf.data's tuner where that has nothing to do.

The tuner is a thread of each iterator, and the iterator's end waits for it, with Python standing
still. Where the cores are busy, in one case of four that is until the tuner's next turn, which
comes after as long a time as the iterator has been there, up to a minute. (Seen in TensorFlow 2.21:
the thread is woken before it can see that it is to end, and waits again.)
"""

from __future__ import annotations

import tensorflow as tf

from ctl_core.compat import tuned_parts


def read_ahead(dataset: tf.data.Dataset, for_long: bool) -> tf.data.Dataset:
    """Prepares elements while others are used.

    Args:
        dataset: what is read
        for_long: as for ``without_tuner``
    """
    return without_tuner(dataset, for_long).prefetch(tf.data.AUTOTUNE)


def without_tuner(dataset: tf.data.Dataset, for_long: bool) -> tf.data.Dataset:
    """Leaves out the tuner, unless it has something to tune or its options ask for it.

    A prefetch tunes itself. The order of the elements stays, and the state of the iterator is
    saved and read with the tuner as without.

    Args:
        dataset: what is read
        for_long: whether it pays to tune how parallel stages are; if not, they take a fixed number
            of calls, as many as there are cores, but no more than 16
    """
    tuned = tuned_parts(dataset) - (set() if for_long else {"num_parallel_calls"})
    if tuned or dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
