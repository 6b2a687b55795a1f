"""EDIT THIS FILE: a small language model learns Python's documentation, byte by byte (GPT).

The model is a Transformer, as in Radford et al., "Improving Language Understanding by Generative
Pre-Training", 2018. Several short texts share a row of the batch, but the attention of the model
never crosses from one text to another.

    required:   create_dataset, create_model, create_loss
    used here:  create_eval_dataset, input_pre, loss_pre, batch_weight, create_metrics, metric_pre,
                serve, create_inference_model, every_steps

`python -m ctl_core hooks` lists all hooks, and `python -m ctl_core hooks batch_weight` explains
one. After an edit, `./train.sh --check` tries every hook in about half a minute.
"""

import glob
from pathlib import Path
from pydoc_data.topics import topics

import keras
import numpy as np
import tensorflow as tf

LENGTH = 128  # bytes that the network sees at once
INPUTS = ("byte", "piece", "place")


# ---- Data: rows of bytes, each from one long text or from several short ones --------------------


def load_texts(split, hparams):
    """Returns the texts of a split, bytes: the documentation that Python brings, or your files.

    Args:
        split: "train" or "test", which has every tenth text
        hparams: `files` is a pattern such as docs/**/*.md, or empty
    """
    if hparams["files"]:
        paths = sorted(glob.glob(hparams["files"], recursive=True))
        if not paths:
            raise ValueError(f"hparams.files: no file matches {hparams['files']}")
        texts = [Path(path).read_bytes() for path in paths]
    else:
        texts = [topics[name].encode() for name in sorted(topics)]
    is_test = split == "test"
    return [text for number, text in enumerate(texts) if (number % 10 == 9) == is_test]


def cut(texts):
    """Cuts texts into pieces of at most LENGTH + 1 bytes.

    The last byte of a piece is the first one of the next, because it is predicted only there.
    """
    pieces = []
    for text in texts:
        for start in range(0, len(text), LENGTH):
            piece = text[start : start + LENGTH + 1]
            if len(piece) > 1:
                pieces.append(piece)
    return pieces


def count_inputs(row):
    """Returns how many bytes of a row the network sees: all but the last one of each piece."""
    return sum(len(piece) - 1 for piece in row)


def share_rows(pieces):
    """Returns lists of pieces that fit into a row together, found first-fit, the longest first."""
    full = [[piece] for piece in pieces if len(piece) > LENGTH]
    short = [piece for piece in pieces if len(piece) <= LENGTH]
    shared = []
    for piece in sorted(short, key=len, reverse=True):
        for row in shared:
            if count_inputs([*row, piece]) <= LENGTH:
                row.append(piece)
                break
        else:
            shared.append([piece])
    return full + shared


def pack(texts):
    """Returns texts as a dict of arrays [rows, LENGTH], int32, with padding on the left.

    "byte" holds the bytes, and "next" those that follow them. "piece" is the number of the piece in
    its row, from 1 on, and 0 for padding. "place" is the place in the piece.
    """
    rows = share_rows(cut(texts))
    arrays = {
        name: np.zeros((len(rows), LENGTH), np.int32) for name in ("byte", "next", "piece", "place")
    }
    for number, row in enumerate(rows):
        start = LENGTH - count_inputs(row)
        for count, piece in enumerate(row, 1):
            codes = np.frombuffer(piece, np.uint8)
            end = start + len(codes) - 1
            arrays["byte"][number, start:end] = codes[:-1]
            arrays["next"][number, start:end] = codes[1:]
            arrays["piece"][number, start:end] = count
            arrays["place"][number, start:end] = np.arange(end - start)
            start = end
    return arrays


def create_dataset(global_batch_size, config, hparams):
    """Returns the rows of the training texts."""
    rows = tf.data.Dataset.from_tensor_slices(pack(load_texts("train", hparams)))
    return rows.shuffle(len(rows), config.seed).batch(global_batch_size)


def create_eval_dataset(global_batch_size, hparams):
    """Returns the rows of the test texts, once."""
    rows = tf.data.Dataset.from_tensor_slices(pack(load_texts("test", hparams)))
    return rows.batch(global_batch_size)


# ---- Model: each byte sees the bytes before it in its piece -------------------------------------


def add_block(x, mask, heads):
    """Adds a Transformer block: attention, then two dense layers, each with a shortcut."""
    width = x.shape[-1]
    y = keras.layers.LayerNormalization()(x)
    attention = keras.layers.MultiHeadAttention(heads, width // heads)
    x += attention(y, y, attention_mask=mask, use_causal_mask=True)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * width, activation="gelu")(y)
    x += keras.layers.Dense(width)(y)
    return x


def create_model(hparams):
    """Builds the network: from bytes, pieces and places to logits [b, LENGTH, 256]."""
    width = hparams["width"]
    inputs = {name: keras.Input((LENGTH,), name=name, dtype="int32") for name in INPUTS}
    piece = inputs["piece"]
    is_same_piece = keras.ops.equal(piece[:, :, None], piece[:, None, :])

    x = keras.layers.Embedding(256, width)(inputs["byte"])
    x += keras.layers.Embedding(LENGTH, width)(inputs["place"])
    for _ in range(hparams["layers"]):
        x = add_block(x, is_same_piece, hparams["heads"])
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(256)(x))


# ---- Loss: each byte counts the same, whatever row and batch it is in ---------------------------


def input_pre(batch):
    """Returns what the network sees: everything but the bytes to predict."""
    return {name: batch[name] for name in INPUTS}


def get_mask(batch):
    """Returns 1 for each byte and 0 for padding, float32 [b, LENGTH]."""
    return tf.cast(batch["piece"] > 0, tf.float32)


def loss_pre(output, batch):
    """Returns the loss of each byte, [b, LENGTH], 0 for padding."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["next"], output)
    return losses * get_mask(batch)


def create_loss():
    """Returns the loss function: the sum over each row."""

    def train_loss(losses):
        return tf.reduce_sum(losses, axis=1)

    return train_loss


def batch_weight(batch):
    """Returns what the sum of the losses is divided by: the number of bytes, not of rows."""
    return tf.reduce_sum(get_mask(batch))


def create_metrics():
    """Returns the metrics that an evaluation reports next to the loss."""
    return {"bits_per_byte": keras.metrics.Mean()}


def metric_pre(output, batch):
    """Returns the values to average, in bits, and their weights."""
    bits = loss_pre(output, batch) / np.log(2)
    return tf.reshape(bits, [-1]), tf.reshape(get_mask(batch), [-1])


# ---- Results: generated text --------------------------------------------------------------------


@tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
def serve(inputs):
    """Turns texts of any length, which clients send, into rows that hold the ends of the texts."""
    letters = tf.strings.bytes_split(tf.strings.join(["\n", inputs]))
    # The last LENGTH bytes, from back to front, so that to_tensor pads at what becomes the left.
    reversed_letters = letters[:, : -LENGTH - 1 : -1]

    def decode(flat_letters):
        return tf.cast(tf.io.decode_raw(flat_letters, tf.uint8)[:, 0], tf.int32)

    codes = tf.ragged.map_flat_values(decode, reversed_letters)
    byte = codes.to_tensor(shape=[None, LENGTH])[:, ::-1]
    piece = tf.ones_like(codes).to_tensor(shape=[None, LENGTH])[:, ::-1]
    place = tf.maximum(0, tf.cumsum(piece, axis=1) - 1)
    return {"byte": byte, "piece": piece, "place": place}


@tf.function
def generate(model, rows, hparams):
    """Continues rows byte by byte, drawn with the model's probabilities; returns texts [b]."""

    def add_byte(rows, step):
        logits = model(rows)[:, -1] / hparams["temperature"]
        place = rows["place"][:, -1:] + 1
        added = {
            "byte": tf.random.stateless_categorical(logits, 1, [0, step], tf.int32),
            "piece": rows["piece"][:, -1:],
            "place": place,
        }
        rows = {name: tf.concat([rows[name][:, 1:], added[name]], axis=1) for name in rows}
        # Places begin with 0 again when the first bytes have been shifted out.
        shifted_out = tf.maximum(0, place - (LENGTH - 1))
        rows["place"] = tf.maximum(0, rows["place"] - shifted_out)
        return rows

    steps = tf.range(hparams["written"])
    written = tf.scan(add_byte, steps, rows)["byte"][:, :, -1]
    letters = tf.constant([bytes([code]) for code in range(256)])
    return tf.strings.reduce_join(tf.gather(letters, written), axis=0)


def create_inference_model(model, hparams):
    """Returns what predict, load and export run: rows in, continuations out."""

    def continue_rows(rows):
        return generate(model, rows, hparams)

    return continue_rows


def write_sample(step, train_model, hparams):
    """Prints a continuation of the prompt, and shows it in TensorBoard."""
    prompt = hparams["prompt"]
    text = generate(train_model, serve(tf.constant([prompt])), hparams)[0]
    tf.summary.text("sample", text)
    print(f"step {step}: {prompt}{text.numpy().decode(errors='replace')}", flush=True)


every_steps = {500: write_sample}
