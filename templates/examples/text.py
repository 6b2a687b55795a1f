"""GPT (Radford and others, 2018): a Transformer learns Python's documentation, byte by byte, and
writes on. All hooks and their defaults: `python -m ctl_core hooks`.
"""

import glob
from pathlib import Path
from pydoc_data.topics import topics

import keras
import numpy as np
import tensorflow as tf

LENGTH = 128  # bytes that the network sees at once


# ---- Data: rows of bytes, each of one long text or of several short ones ------------------------
def texts(part, hparams):
    """Returns the documentation in Python's library, or files; every tenth is held out."""
    files = sorted(glob.glob(hparams["files"], recursive=True)) if hparams["files"] else []
    if hparams["files"] and not files:
        raise ValueError(f"hparams.files: {hparams['files']} names no file")
    found = [Path(file).read_bytes() for file in files]
    found = found or [topics[name].encode() for name in sorted(topics)]
    return [text for number, text in enumerate(found) if (number % 10 == 9) == (part == "test")]


def packed(texts):
    """Cuts texts into pieces, and packs those that are short together into rows of LENGTH bytes.

    Returns arrays [rows, LENGTH], with padding, if any, on the left: the bytes; those that come
    next; the number of the piece in its row, 0 for padding; the place in the piece.
    """
    cut = [text[at : at + LENGTH + 1] for text in texts for at in range(0, len(text), LENGTH)]
    rows, short = [[piece] for piece in cut if len(piece) > LENGTH], []
    for piece in sorted((each for each in cut if 1 < len(each) <= LENGTH), key=len, reverse=True):
        fits = (row for row in short if len(b"".join([*row, piece])) - len(row) < LENGTH + 1)
        row = next(fits, None)
        short.append([piece]) if row is None else row.append(piece)
    arrays = np.zeros((4, len(rows + short), LENGTH), np.int32)
    for number, row in enumerate(rows + short):
        end = LENGTH - len(b"".join(row)) + len(row)
        for count, piece in enumerate(row, 1):
            codes, begin, end = np.frombuffer(piece, np.uint8), end, end + len(piece) - 1
            places = np.arange(end - begin)
            arrays[:, number, begin:end] = codes[:-1], codes[1:], 0 * places + count, places
    return dict(zip(("byte", "next", "piece", "place"), arrays, strict=True))


def create_dataset(global_batch_size, config, hparams):
    rows = tf.data.Dataset.from_tensor_slices(packed(texts("train", hparams)))
    return rows.shuffle(len(rows), config.seed).batch(global_batch_size)


def create_eval_dataset(global_batch_size, hparams):
    rows = tf.data.Dataset.from_tensor_slices(packed(texts("test", hparams)))
    return rows.batch(global_batch_size)


# ---- The network: bytes see those before them in their piece ------------------------------------
def create_model(hparams):
    layers, width = keras.layers, hparams["width"]
    inputs = {n: keras.Input((LENGTH,), name=n, dtype="int32") for n in ("byte", "piece", "place")}
    piece = inputs["piece"]  # a byte looks at those of its own, and (causal) at none after it
    same = keras.ops.equal(piece[:, :, None], piece[:, None, :])
    x = layers.Embedding(256, width)(inputs["byte"])
    x += layers.Embedding(LENGTH, width)(inputs["place"])
    for _ in range(hparams["layers"]):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(hparams["heads"], width // hparams["heads"])
        x += attention(y, y, attention_mask=same, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(y)
    return keras.Model(inputs, layers.Dense(256)(layers.LayerNormalization()(x)))


# ---- The loss: each byte counts the same, whatever row and batch it is in -----------------------
def input_pre(batch):
    return {name: batch[name] for name in ("byte", "piece", "place")}


def counts(batch):
    return tf.cast(batch["piece"] > 0, tf.float32)


def loss_pre(output, batch):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["next"], output) * counts(batch)


def create_loss():
    """Returns the loss of each row."""
    return lambda loss_input: tf.reduce_sum(loss_input, axis=1)


def batch_weight(batch):
    """Returns what the sum of the losses is divided by: bytes, not rows."""
    return tf.reduce_sum(counts(batch))


def create_metrics():
    return {"bits_per_byte": keras.metrics.Mean()}


def metric_pre(output, batch):
    return tf.reshape(loss_pre(output, batch), [-1]) / np.log(2), tf.reshape(counts(batch), [-1])


# ---- Writing ------------------------------------------------------------------------------------
@tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
def serve(inputs):
    """Makes rows of texts of any length, from their ends: what clients of a model send."""
    letters = tf.strings.bytes_split(tf.strings.join(["\n", inputs]))[:, : -LENGTH - 1 : -1]
    codes = tf.ragged.map_flat_values(lambda text: tf.io.decode_raw(text, tf.uint8)[:, 0], letters)
    codes, piece = tf.cast(codes, tf.int32), tf.ones_like(codes, tf.int32)
    byte, piece = (part.to_tensor(shape=[None, LENGTH])[:, ::-1] for part in (codes, piece))
    return {"byte": byte, "piece": piece, "place": tf.maximum(0, tf.cumsum(piece, 1) - 1)}


@tf.function
def write(model, rows, hparams):
    """Goes on with rows, a byte at a time, drawn as likely as the network says. Returns [b]."""

    def once(rows, step):
        logits = model(rows)[:, -1] / hparams["temperature"]
        more = {name: part[:, -1:] for name, part in rows.items()}  # of the same piece,
        more["byte"] = tf.random.stateless_categorical(logits, 1, [0, step], tf.int32)
        more["place"] += 1  # at the next place; the first bytes slide out
        rows = {name: tf.concat([part[:, 1:], more[name]], 1) for name, part in rows.items()}
        slid = tf.maximum(0, more["place"] - (LENGTH - 1))
        return {**rows, "place": tf.maximum(0, rows["place"] - slid)}

    written = tf.scan(once, tf.range(hparams["written"]), rows)["byte"][:, :, -1]
    letters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), written)
    return tf.strings.reduce_join(letters, axis=0)


def create_inference_model(model, hparams):
    """Returns what predict, load and export run."""
    return lambda rows: write(model, rows, hparams)


def write_sample(step, train_model, hparams):
    text = write(train_model, serve(tf.constant([hparams["prompt"]])), hparams)[0]
    tf.summary.text("sample", text)  # into the run's TensorBoard folder
    print(f"step {step}: {hparams['prompt']}{text.numpy().decode(errors='replace')}", flush=True)


every_steps = {500: write_sample}
