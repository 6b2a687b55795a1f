"""Exchanges the results of logical replicas between the processes of a cluster.

Each function is called on every device of every process, and returns the same values on all of
them, except where its docstring says otherwise. The exchange does not change any bit, so every
device can compute the final sums by itself; see leaf_sum.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.cluster.exchange import decode_sum, encode_for_sum
from ctl_core.input.batches import pack_elements, take_rows, unpack_element
from ctl_core.types import AnyTensor


def get_device_number() -> int:
    """Returns the index of the calling device among the devices of all processes."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def gather(value: tf.Tensor) -> tf.Tensor:
    """Returns the tensors of all devices, stacked in the order of the devices.

    Args:
        value: a tensor of any dtype except string, with the same shape on each device
    """
    encoded = encode_for_sum(value)
    gathered = compat.gather_from_replicas(encoded[tf.newaxis])
    return decode_sum(tf.ensure_shape(gathered, [None, *encoded.shape]), value.dtype)


def gather_sparse(gradients: Sequence[tf.IndexedSlices], most: int) -> list[list[tf.IndexedSlices]]:
    """Returns the sparse gradients of all devices: a list for each device.

    Args:
        gradients: gradients of one variable, whose numbers of rows may differ; each device passes
            the same number of gradients
        most: the maximum number of rows that a gradient can have in any step
    """
    values = gather_rows([gradient.values for gradient in gradients], most)
    indices = gather_rows([gradient.indices for gradient in gradients], most)
    shape = gradients[0].dense_shape
    return [
        [tf.IndexedSlices(*rows, shape) for rows in zip(*of_device, strict=True)]
        for of_device in zip(values, indices, strict=True)
    ]


def gather_rows(tensors: Sequence[tf.Tensor], most: int) -> list[list[tf.Tensor]]:
    """Returns the tensors of all devices: a list for each device.

    The tensors are padded to ``most`` rows before they are exchanged, because a collective in a
    loop requires a fixed shape.

    Args:
        tensors: tensors that differ only in their number of rows; each device passes the same
            number of tensors
        most: the maximum number of rows that a tensor can have in any step
    """
    rows = gather(tf.stack([tf.shape(tensor)[0] for tensor in tensors]))  # shape [devices, tensors]
    no_padding = [[0, 0]] * (len(tensors[0].shape) - 1)
    padded = [
        tf.ensure_shape(
            tf.pad(tensor, [[0, most - tf.shape(tensor)[0]], *no_padding]),
            [most, *tensor.shape[1:]],
        )
        for tensor in tensors
    ]
    gathered = gather(tf.stack(padded))  # shape [devices, tensors, most, ...]
    devices = tf.distribute.get_strategy().num_replicas_in_sync
    return [
        [gathered[device, index, : rows[device, index]] for index in range(len(tensors))]
        for device in range(devices)
    ]


def gather_texts(texts: tf.Tensor) -> tf.Tensor:
    """Returns the strings of all devices, which are exchanged as integers.

    Args:
        texts: a string tensor of shape [n], with the same n on each device

    Returns:
        A string tensor of shape [devices, n].
    """
    separator = ","  # commas do not occur in Base64, which is plain ASCII
    joined = tf.strings.reduce_join(tf.io.encode_base64(texts), separator=separator)
    lengths = gather(tf.strings.length(joined))
    whole_numbers = tf.reduce_max(lengths) // 8 + 1  # an int64 has room for 8 characters
    padding = tf.repeat(" ", 8 * whole_numbers - tf.strings.length(joined))
    padded = tf.strings.join([joined, tf.strings.reduce_join(padding)])
    numbers = tf.bitcast(tf.reshape(tf.io.decode_raw(padded, tf.uint8), [-1, 8]), tf.int64)
    characters = tf.bitcast(gather(numbers), tf.uint8)  # shape [devices, whole_numbers, 8]
    characters = tf.reshape(characters, [tf.size(lengths), -1])
    lines = tf.strings.unicode_encode(tf.cast(characters, tf.int32), "UTF-8")
    lines = tf.strings.substr(lines, tf.zeros_like(lengths), lengths)
    return tf.io.decode_base64(tf.strings.split(lines, separator).to_tensor())


def gather_pieces(ranges: Sequence[range], pieces: list[list[AnyTensor]]) -> list[list[AnyTensor]]:
    """Returns the pieces of all logical replicas, in the order of the logical replicas.

    Host hooks receive the concatenated pieces of all devices of a process. Therefore, only the
    first device of a process returns pieces with rows, and the other devices return pieces without
    rows.

    Args:
        ranges: for each device, the indices of its logical replicas
        pieces: for each logical replica of this device, its tensors, which may be ragged or sparse;
            padding at the end of the list is ignored
    """
    device = get_device_number()
    specs = [tf.type_spec_from_value(piece) for piece in pieces[0]]
    most = max(map(len, ranges))
    with tf.device("CPU:0"):
        texts = pack_elements(pieces[: len(ranges[device])])
        missing = tf.fill([most - len(ranges[device]), texts.shape[1]], "")
        gathered = gather_texts(tf.reshape(tf.concat([texts, missing], 0), [-1]))
        rows = tf.reshape(gathered, [len(ranges), most, texts.shape[1]])
        all_pieces = [
            unpack_element(rows[number, position], specs)
            for number, leaves in enumerate(ranges)
            for position in range(len(leaves))
        ]
        if device % count_local_replicas(tf.distribute.get_strategy()) == 0:
            return all_pieces
        return [[take_rows(piece, 0, 0) for piece in pieces] for pieces in all_pieces]
