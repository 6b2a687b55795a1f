"""Any global batch on any number of devices has the weights of a plain loop on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import NAME, compare, engine, small

pytestmark = pytest.mark.skipif(NAME != "new", reason="the old engine shares out what divides")

RATE, SEED = small.RATE, 3
LAST = pytest.mark.parametrize("last_batch", ["drop", "keep"])


def data(examples: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(4)
    inputs = random.normal(size=(examples, small.FEATURES)).astype("float32")
    return inputs, (inputs @ random.normal(size=(small.FEATURES, 1)) + 0.5).astype("float32")


def shuffled(examples: int) -> tf.data.Dataset:
    """Reads single examples, in another order in each pass."""
    return tf.data.Dataset.from_tensor_slices(data(examples)).shuffle(30, seed=5)


def sizes_of(dataset: tf.data.Dataset, batch: int, last_batch: str) -> Iterator[Any]:
    """Global batches without end, as one device reads them."""
    keras.utils.set_random_seed(SEED)
    return iter(dataset.batch(batch, drop_remainder=last_batch == "drop").repeat())


def clipped(gradients: list[Any]) -> list[Any]:
    found, norm = tf.clip_by_global_norm(gradients, 10.0)
    assert norm > 10.0
    return list(found)


def squared_error(model: keras.Model, batch: Any) -> Any:
    return small.squared_error((model(batch[0], training=True), batch[1]))


def train_plainly(
    steps: int,
    batches: Iterable[Any],
    model: keras.Model | None = None,
    loss: Callable[[keras.Model, Any], Any] = squared_error,
    change: Callable[[list[Any]], list[Any]] = list,
) -> keras.Model:
    """Trains on one device by plain SGD.

    Args:
        loss: of the model and a batch, one number for each example
        change: is given the gradients of a step and returns those that are applied
    """
    model = model or small.create_model()
    for _, batch in zip(range(steps), batches, strict=False):
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(loss(model, batch))
        gradients = change(tape.gradient(mean, model.trainable_variables))
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
    return model


def train_on(train: engine.Train, hooks: Any, devices: int, batch: int, **more: Any) -> Any:
    settings = {"learning_rate": RATE, "seed": SEED, "log_every": 1000, **more}
    return train(hooks, batch_size=batch, virtual_devices=devices, **settings)


# ---- Batches that do not divide ----------------------------------------------------------------


@LAST
@pytest.mark.parametrize("devices", [1, 3, 5])
def test_batches_of_64_of_batches_of_7(train: engine.Train, devices: int, last_batch: str) -> None:
    """Of 200 examples 8 are left over; 7 steps are more than two passes."""
    hooks = small.hooks(create_dataset=lambda: shuffled(200).batch(7))
    state = train_on(train, hooks, devices, 64, steps=7, last_batch=last_batch)
    plain = train_plainly(7, sizes_of(shuffled(200), 64, last_batch))
    compare.assert_close(state.train_model.weights, plain.weights)


@pytest.mark.parametrize("devices", [1, 3, 5])
def test_the_default_update_clips_the_sum(train: engine.Train, devices: int) -> None:
    hooks = small.hooks(
        create_dataset=lambda: shuffled(200).batch(7),
        create_loss=lambda: lambda pair: 100.0 * small.squared_error(pair),
    )
    del hooks.update_pre
    state = train_on(train, hooks, devices, 64, steps=5, last_batch="keep")
    batches = sizes_of(shuffled(200), 64, "keep")

    def loss(model: keras.Model, batch: Any) -> Any:
        return 100.0 * small.squared_error((model(batch[0]), batch[1]))

    plain = train_plainly(5, batches, loss=loss, change=clipped)
    compare.assert_close(state.train_model.weights, plain.weights)


@LAST
@pytest.mark.parametrize("examples", [200, 131])
def test_micro_batches_of_uneven_shares(
    train: engine.Train, last_batch: str, examples: int
) -> None:
    """43 are shared by 3 x 2; of 131 examples 2 are left over, which fill two shares."""
    hooks = small.hooks(create_dataset=lambda: shuffled(examples).batch(7))
    more = {"accumulate_steps": 2, "last_batch": last_batch}
    state = train_on(train, hooks, 3, 43, steps=8, **more)
    plain = train_plainly(8, sizes_of(shuffled(examples), 43, last_batch))
    compare.assert_close(state.train_model.weights, plain.weights)


def test_a_dataset_that_drops_its_remainders_loses_no_batch(train: engine.Train) -> None:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return shuffled(128).batch(per_replica_batch_size, drop_remainder=True)

    hooks = small.hooks(create_dataset=create_dataset)
    state = train_on(train, hooks, 3, 64, steps=None, epochs=3)
    assert state.step == 6
    plain = train_plainly(6, sizes_of(shuffled(128), 64, "drop"))
    compare.assert_close(state.train_model.weights, plain.weights)


# ---- Resumed on other devices ------------------------------------------------------------------


@LAST
@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 2), (3, 3)])
def test_resumed_in_the_middle_of_a_pass(
    train: engine.Train, first: int, then: int, last_batch: str
) -> None:
    """After 5 of 3 or 4 steps a pass; on as many devices it is the whole run bit for bit."""
    hooks = small.hooks(create_dataset=lambda: shuffled(200).batch(7))
    more = {"last_batch": last_batch}
    whole = train_on(train, hooks, then, 64, steps=9, run_name="whole", **more)
    train_on(train, hooks, first, 64, steps=5, **more)
    resumed = train_on(train, hooks, then, 64, steps=9, **more)
    assert resumed.step == 9
    pairs = zip(resumed.train_model.weights, whole.train_model.weights, strict=True)
    if first == then:
        for value, other in pairs:
            np.testing.assert_array_equal(value.numpy(), other.numpy())
    compare.assert_close(resumed.train_model.weights, whole.train_model.weights)


# ---- Elements ----------------------------------------------------------------------------------

FIT = 12  # B


def split(examples: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data(examples))


def of_lengths() -> tf.data.Dataset:
    """Single examples of 2 to 9 words, in an order of lengths that is mixed."""
    _, target = data(70)
    random = np.random.default_rng(6)
    numbers = random.integers(2, 10, size=70)
    words = tf.RaggedTensor.from_row_lengths(
        random.normal(size=(numbers.sum(), small.FEATURES)).astype("float32"), numbers
    )
    examples = tf.data.Dataset.from_tensor_slices((words, target))
    return examples.map(lambda words, target: (tf.identity(words), target))


def in_buckets(global_batch_size: int) -> tf.data.Dataset:
    return ctl_core.data.bucket_by_length(
        of_lengths(), lambda words, _: tf.shape(words)[0], [4, 7], global_batch_size
    )


def sparsely(global_batch_size: int) -> tf.data.Dataset:
    inputs, target = data(50)
    inputs = tf.sparse.from_dense(np.where(inputs > 0, inputs, 0.0))
    return tf.data.Dataset.from_tensor_slices((inputs, target)).batch(5)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dict": (
        lambda: split(50).map(lambda x, y: ({"in": x, "id": y[0]}, y)).batch(5),
        lambda batch: batch[0]["in"] * 0.5,
    ),
    "ragged": (
        lambda: of_lengths().ragged_batch(5),
        lambda batch: tf.reduce_mean(batch[0], axis=1),
    ),
    "sparse": (sparsely, lambda batch: tf.sparse.to_dense(batch[0])),
    "padded": (
        lambda: of_lengths().padded_batch(FIT, padded_shapes=([None, small.FEATURES], [1])),
        lambda batch: tf.reduce_mean(batch[0], axis=1),
    ),
    "buckets": (in_buckets, lambda batch: tf.reduce_mean(batch[0], axis=1)),
}


def global_batches(kind: str, last_batch: str) -> list[Any]:
    """A pass of a kind, each batch as (inputs, target) on one device."""
    create, prepare = KINDS[kind]
    dataset = create(FIT) if create in (in_buckets, sparsely) else create()
    if kind not in ("padded", "buckets"):
        dataset = dataset.rebatch(FIT)
    found = [(prepare(batch), batch[1]) for batch in dataset]
    return [pair for pair in found if last_batch == "keep" or len(pair[1]) == FIT]


@LAST
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_elements(train: engine.Train, kind: str, devices: int, last_batch: str) -> None:
    """Two passes; leftovers of several widths cannot be joined: left out, or each a step."""
    create, prepare = KINDS[kind]
    batches = global_batches(kind, last_batch)
    assert len(batches) != len(global_batches(kind, "keep")) or last_batch == "keep"
    hooks = small.hooks(create_dataset=create, input_pre=prepare)
    more: dict[str, Any] = {"steps": None, "epochs": 2, "last_batch": last_batch}
    state = train_on(train, hooks, devices, FIT, **more)
    assert state.step == 2 * len(batches)
    plain = train_plainly(state.step, batches * 2)
    compare.assert_close(state.train_model.weights, plain.weights)


def graphs(per_replica_batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Graphs of 1 to 4 nodes each, several in an element: their nodes one behind the other."""
    _, target = data(21)
    random = np.random.default_rng(8)
    for start in range(0, 21, per_replica_batch_size):
        own = target[start : start + per_replica_batch_size]
        graph = np.repeat(np.arange(len(own)), random.integers(1, 5, size=len(own)))
        nodes = random.normal(size=(len(graph), small.FEATURES)).astype("float32")
        yield {"nodes": nodes, "graph": graph, "target": own}


def read_graphs(per_replica_batch_size: int) -> tf.data.Dataset:
    signature = {
        "nodes": tf.TensorSpec([None, small.FEATURES], tf.float32),
        "graph": tf.TensorSpec([None], tf.int64),
        "target": tf.TensorSpec([None, 1], tf.float32),
    }
    return tf.data.Dataset.from_generator(
        lambda: graphs(per_replica_batch_size), output_signature=signature
    )


def pool(batch: Any) -> Any:
    return tf.math.segment_sum(batch["nodes"], batch["graph"])


@pytest.mark.parametrize("devices", [1, 2])
def test_graphs(train: engine.Train, devices: int) -> None:
    """Each element is a replica's; of 21 graphs in elements of 4 the last element is left out."""
    hooks = small.hooks(
        create_dataset=read_graphs,
        count_examples=lambda batch: tf.shape(batch["target"])[0],
        input_pre=pool,
        loss_pre=lambda output, batch: (output, batch["target"]),
    )
    size = 4
    state = train_on(train, hooks, devices, size * devices, steps=None, epochs=2)
    elements = [(pool(one), one["target"]) for one in read_graphs(size)][:5]
    groups = [elements[i : i + devices] for i in range(0, 5 - 5 % devices, devices)]
    batches = [tuple(tf.concat(parts, 0) for parts in zip(*group, strict=True)) for group in groups]
    assert state.step == 2 * len(batches)
    plain = train_plainly(state.step, batches * 2)
    compare.assert_close(state.train_model.weights, plain.weights)


# ---- One row on four devices -------------------------------------------------------------------


def contrast(output: Any, everything: Any, first: Any) -> Any:
    """For each example: how near it is to itself, beside all others of the batch."""
    scores = tf.matmul(output, everything, transpose_b=True)
    own = first + tf.range(tf.shape(output)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores) + tf.reduce_sum(output**2, 1)


def gather_all(output: Any) -> Any:
    sizes = ctl_core.all_gather(tf.shape(output)[:1])
    return output, ctl_core.all_gather(output), tf.reduce_sum(sizes[: ctl_core.replica_id()])


def centre(output: Any, batch: Any) -> Any:
    mean = ctl_core.all_reduce(tf.reduce_mean(output, 0), "mean")
    return output - 0.5 * mean, batch[1]


def scale_by_mean(gradients: Any, output: Any) -> Any:
    scale = 1 + ctl_core.all_reduce(tf.reduce_mean(output), "mean")
    return [scale * gradient for gradient in gradients], gradients


class Centre(keras.layers.Layer):
    """Takes off a moving average of its inputs, which it keeps."""

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="average"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            mean = ctl_core.all_reduce(tf.reduce_mean(inputs, 0), "mean")
            self.average.assign(0.9 * self.average + 0.1 * mean)
        return inputs - self.average


class Adds(keras.layers.Layer):
    """Adds a loss that is a mean over the examples that it sees."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(inputs**2))
        return inputs


def with_norm() -> keras.Model:
    norm = keras.layers.BatchNormalization(momentum=0.8, synchronized=True)
    return small.model_with(norm)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "simclr": (
        {"create_loss": lambda: lambda parts: contrast(*parts), "loss_pre": gather_all},
        {"loss": lambda model, batch: contrast(*[model(batch[0])] * 2, 0)},
    ),
    "norm": ({"create_model": with_norm}, {"model": with_norm}),
    "mean": (
        {"loss_pre": centre},
        {"loss": lambda model, batch: small.squared_error(centre(model(batch[0]), batch))},
    ),
    "mean of the output": (
        {"update_pre": scale_by_mean},
        {
            "loss": lambda model, batch: (
                squared_error(model, batch) * tf.stop_gradient(1 + tf.reduce_mean(model(batch[0])))
            )
        },
    ),
    "added loss": (
        {"create_model": lambda: small.model_with(Adds())},
        {
            "model": lambda: small.model_with(Adds()),
            "loss": lambda model, batch: (
                small.squared_error((model(batch[0]), batch[1])) + tf.add_n(model.losses)
            ),
        },
    ),
    "moving average": (
        {"create_model": lambda: small.model_with(Centre())},
        {"model": lambda: small.model_with(Centre())},
    ),
}


@pytest.mark.parametrize("examples", [33, 45])
@pytest.mark.parametrize("case", CASES)
def test_last_batches_of_few_rows(train: engine.Train, case: str, examples: int) -> None:
    """Of 33 examples 1 is left, so that three replicas have none; of 45 13, which differ by one."""
    own, plainly = CASES[case]
    hooks = small.hooks(create_dataset=lambda: split(examples).batch(5), **own)
    state = train_on(train, hooks, 4, 16, steps=7, last_batch="keep")
    batches = sizes_of(split(examples), 16, "keep")
    if "model" in plainly:
        plainly = plainly | {"model": plainly["model"]()}
    plain = train_plainly(7, batches, **plainly)
    compare.assert_close(state.train_model.weights, plain.weights)


@pytest.mark.parametrize(("devices", "examples"), [(2, 33), (3, 40)])
@pytest.mark.parametrize("case", ["norm", "mean", "moving average", "mean of the output"])
def test_micro_batches_without_rows(
    train: engine.Train, case: str, devices: int, examples: int
) -> None:
    """A micro-batch that nobody has rows of leaves no trace; of 40 examples 8 are left for 6."""
    own, plainly = CASES[case]
    hooks = small.hooks(create_dataset=lambda: split(examples).batch(5), **own)
    more: dict[str, Any] = {"accumulate_steps": 2, "last_batch": "keep"}
    state = train_on(train, hooks, devices, 16, steps=3, **more)
    model = plainly["model"]() if "model" in plainly else small.create_model()
    loss = plainly.get("loss", squared_error)

    def in_two(model: keras.Model, batch: Any) -> Any:
        """The losses of the two micro-batches, each of its shares."""
        shares, rows = 2 * devices, len(batch[0])
        size = sum(rows // shares + (share < rows % shares) for share in range(devices))
        parts = [[part[:size] for part in batch], [part[size:] for part in batch]]
        return tf.concat([loss(model, part) for part in parts if len(part[0])], 0)

    batches = sizes_of(split(examples), 16, "keep")
    whole = case == "mean of the output"  # update_pre has that of all micro-batches
    plain = train_plainly(3, batches, model, loss if whole else in_two)
    compare.assert_close(state.train_model.weights, plain.weights)


def test_moving_statistics_move_as_far_by_each_example(train: engine.Train) -> None:
    """Those of each replica's own batch, whose mean is saved, after one step of 6, 5 and 5."""

    def create_model() -> keras.Model:
        norm = keras.layers.BatchNormalization(momentum=0.8)
        return keras.Sequential([keras.Input((small.FEATURES,)), norm, keras.layers.Dense(1)])

    hooks = small.hooks(create_dataset=lambda: split(16).batch(5), create_model=create_model)
    state = train_on(train, hooks, 3, 16, steps=1)
    expected = 0.2 * data(16)[0].mean(axis=0)
    compare.assert_close([state.train_model.layers[0].moving_mean], [expected])


def test_hooks_see_each_row_once(train: engine.Train) -> None:
    seen: dict[int, Any] = {}

    def look(step: int, batch: Any, output: Any) -> None:
        seen[step] = (batch[0].numpy(), len(output))

    hooks = small.hooks(create_dataset=lambda: split(33).batch(5), every_steps={1: look})
    train_on(train, hooks, 4, 16, steps=3, last_batch="keep")
    assert [rows for _, rows in seen.values()] == [16, 16, 1]
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in seen.values()]), data(33)[0])
