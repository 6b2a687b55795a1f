"""With any global batch size, any number of devices trains the weights of a plain loop."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.programs import simclr
from tests.golden.uneven_batches import (
    assert_trained,
    batches_of,
    data,
    shuffled,
    split,
    train_on,
    train_plainly,
)

SEED, FEATURES = 3, small.FEATURES


@pytest.fixture(autouse=True)
def seed_plain_loops() -> None:
    """Sets the global seed, which the shuffle of a plain loop uses when it is defined."""
    keras.utils.set_random_seed(SEED)


@pytest.mark.parametrize("last_batch", small.slow_but("keep", of=["drop", "keep"]))
@pytest.mark.parametrize(
    ("devices", "accumulate", "batch", "examples", "scale"),
    small.slow_but(
        (3, 2, 43, 131, 100), of=[(1, 1, 64, 200, 1), (5, 1, 64, 200, 100), (3, 2, 43, 131, 100)]
    ),
)
def test_batches_that_devices_do_not_divide(
    train: engine.Train, devices: int, accumulate: int, batch: int, examples: int, scale: float,
    last_batch: str,
) -> None:  # fmt: skip
    """A batch that devices cannot share evenly gives the weights of a plain loop.

    The third case has 131 examples in batches of 43, so that a last batch of 2 examples is split
    into 6 shares. With a scale of 100, the default update clips the gradients.
    """
    hooks = small.hooks(create_dataset=lambda: shuffled(examples).batch(7))
    hooks.create_loss = lambda: lambda pair: scale * small.squared_error(pair)
    if scale > 1:
        del hooks.update_pre
    more = {"accumulate_steps": accumulate, "last_batch": last_batch}
    seen: list[int] = []
    hooks.at_step = {1: lambda batch, output: seen.extend([len(batch[0]), len(output)])}
    state = train_on(train, hooks, devices, batch, steps=8, **more)
    batches = batches_of(shuffled(examples), batch, last_batch)
    assert seen == [batch, batch]
    assert_trained(state, train_plainly(hooks, 8, batches))


def test_a_dataset_that_drops_its_remainders_loses_no_batch(train: engine.Train) -> None:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return shuffled(128).batch(per_replica_batch_size, drop_remainder=True)

    hooks = small.hooks(create_dataset=create_dataset)
    state = train_on(train, hooks, 3, 64, steps=None, epochs=3)
    assert state.step == 6
    assert_trained(state, train_plainly(hooks, 6, batches_of(shuffled(128), 64)))


@pytest.mark.parametrize("last_batch", small.slow_but("keep", of=["keep", "drop"]))
def test_run_resumes_on_other_devices(train: engine.Train, last_batch: str) -> None:
    """A run that resumes on other devices in the middle of a pass has the weights of a plain loop.

    On the same number of devices, it is the uninterrupted run bit for bit.
    """
    hooks = small.hooks(create_dataset=lambda: shuffled(200).batch(7))
    more = {"last_batch": last_batch}
    for devices, steps in ((1, 2), (3, 5), (2, 9)):
        others = train_on(train, hooks, devices, 64, steps=steps, **more)
    batches = batches_of(shuffled(200), 64, last_batch)
    assert_trained(others, train_plainly(hooks, 9, batches))
    whole = train_on(train, hooks, 3, 64, steps=9, run_name="whole", ckpt_every=5, **more)
    resumed = train_on(train, hooks, 3, 64, steps=9, run_name="on", fork="whole@5", **more)
    compare.assert_same(resumed.train_model.weights, whole.train_model.weights)


# ---- Elements ----------------------------------------------------------------------------------


def of_lengths() -> tf.data.Dataset:
    """Returns single examples of 2 to 9 words."""
    random = np.random.default_rng(6)
    lengths = random.integers(2, 10, size=70)
    words = random.normal(size=(lengths.sum(), FEATURES)).astype("float32")
    ragged = tf.RaggedTensor.from_row_lengths(words, lengths)
    examples = tf.data.Dataset.from_tensor_slices((ragged, data(70)[1]))
    return examples.map(lambda words, target: (tf.identity(words), target))


def in_buckets(global_batch_size: int) -> tf.data.Dataset:
    def length_of(words: Any, _: Any) -> Any:
        return tf.shape(words)[0]

    return ctl_core.data.bucket_by_length(of_lengths(), length_of, [4, 7], global_batch_size)


def numbered(per_replica_batch_size: int) -> tf.data.Dataset:
    """Returns batches of a given size, in which the inputs are divided by the batch's number."""
    batches = split(50).batch(per_replica_batch_size).enumerate(1)
    return batches.map(lambda number, pair: (pair[0] / tf.cast(number, tf.float32), pair[1]))


def mean_of_words(batch: Any) -> Any:
    return tf.reduce_mean(batch[0], axis=1)


# For each kind of elements: a create_dataset hook, and a function that returns the model's input.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dict": (
        lambda: split(50).map(lambda x, y: ({"in": x, "id": y[0]}, y)).batch(5),
        lambda batch: batch[0]["in"],
    ),
    "ragged": (lambda: of_lengths().ragged_batch(5), mean_of_words),
    "sparse": (
        lambda: split(50).batch(5).map(lambda x, y: (tf.sparse.from_dense(tf.nn.relu(x)), y)),
        lambda batch: tf.sparse.to_dense(batch[0]),
    ),
    "buckets": (in_buckets, mean_of_words),
    "numbered batches": (numbered, lambda batch: batch[0]),
}


@pytest.mark.parametrize(("devices", "last_batch"), [(1, "drop"), (3, "keep")])
@pytest.mark.parametrize("kind", small.slow_but("ragged", of=KINDS))
def test_elements_of_different_widths_are_left_out_or_kept(
    train: engine.Train, kind: str, devices: int, last_batch: str
) -> None:
    """Remaining rows of different widths cannot be joined into one batch.

    They are dropped, or the rows of each width are a batch of their own.
    """
    create, prepare = KINDS[kind]
    is_sized = kind in ("buckets", "numbered batches")
    batches = list(create(12) if is_sized else create().rebatch(12))
    if last_batch == "drop":
        assert len(batches[-1][1]) < 12
        batches = [batch for batch in batches if len(batch[1]) == 12]
    hooks = small.hooks(create_dataset=create, input_pre=prepare)
    if last_batch == "keep":
        hooks.create_eval_dataset = lambda: create(12) if is_sized else create()
    more: dict[str, Any] = {"steps": None, "epochs": 2, "last_batch": last_batch}
    state = train_on(train, hooks, devices, 12, **more)
    assert state.step == 2 * len(batches)
    plain = train_plainly(hooks, state.step, batches * 2)
    assert_trained(state, plain)
    expected = plain.evaluate(batches) if last_batch == "keep" else {}
    assert state.metrics == pytest.approx(expected, rel=1e-5)


def as_graphs(words: tf.RaggedTensor, target: tf.Tensor) -> dict[str, Any]:
    return {"nodes": words.values, "graph": words.value_rowids(), "target": target}


def test_graphs_on_two_devices(train: engine.Train) -> None:
    """Each element is a set of graphs, which is one replica's share of a batch.

    Of the six elements, the last one has too few graphs, and the fifth one has no partner for the
    other replica. Both are dropped.
    """

    dataset = of_lengths().take(21).ragged_batch(4).map(as_graphs)
    hooks = small.hooks(
        create_dataset=lambda: dataset,
        count_examples=lambda batch: tf.shape(batch["target"])[0],
        input_pre=lambda batch: tf.math.segment_sum(batch["nodes"], batch["graph"]),
        loss_pre=lambda output, batch: (output, batch["target"]),
    )
    state = train_on(train, hooks, 2, 8, steps=None, epochs=2)
    elements = list(dataset)
    batches = [[elements[0], elements[1]], [elements[2], elements[3]]]
    assert state.step == 4
    assert_trained(state, train_plainly(hooks, 4, batches * 2, split=list))


def test_another_number_of_shares_is_no_other_size_of_the_dataset(
    train: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas drop fewer elements that are too small for a share, so a pass has more steps."""
    examples = of_lengths()

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        groups = [examples.take(12), examples.skip(12).take(12)]
        first, second = (group.ragged_batch(per_replica_batch_size) for group in groups)
        return first.concatenate(second).map(as_graphs)

    hooks = small.hooks(
        create_dataset=create_dataset,
        count_examples=lambda batch: tf.shape(batch["target"])[0],
        input_pre=lambda batch: tf.math.segment_sum(batch["nodes"], batch["graph"]),
        loss_pre=lambda output, batch: (output, batch["target"]),
    )
    assert train_on(train, hooks, 1, 8, steps=None, epochs=1, run_name="a").step == 2
    assert train_on(train, hooks, 2, 8, steps=None, epochs=2, run_name="a").step == 5
    out = capsys.readouterr().out
    assert "a pass over the data has 3 steps now, and had 2 until now" in out
    assert "the size of the dataset has changed" not in out


@pytest.mark.slow
def test_graphs_of_logical_replicas_have_the_same_bits_on_any_devices(
    train: engine.Train,
) -> None:
    """Each element is the share of one logical replica, however many of them a device computes."""
    dataset = of_lengths().take(24).ragged_batch(4).map(as_graphs)
    elements = list(dataset)
    hooks = small.hooks(
        create_dataset=lambda: dataset,
        create_eval_dataset=lambda: dataset.take(2),
        count_examples=lambda batch: tf.shape(batch["target"])[0],
        input_pre=lambda batch: tf.math.segment_sum(batch["nodes"], batch["graph"]),
        loss_pre=lambda output, batch: (output, batch["target"]),
    )
    single, *others = (
        train_on(train, hooks, devices, 12, steps=4, logical_replicas=3, run_name=f"on-{devices}")
        for devices in (1, 2, 3)
    )
    plain = train_plainly(hooks, 4, [elements[:3], elements[3:]] * 2, split=list)
    assert_trained(single, plain)
    assert single.metrics == pytest.approx(plain.evaluate(elements[:2]), rel=1e-5)
    for state in others:
        assert state.metrics == single.metrics
        compare.assert_same(state.train_model.weights, single.train_model.weights)


# ---- Fewer rows than devices -------------------------------------------------------------------


def make_views(output: Any) -> Any:
    return simclr.with_all([output, tf.sin(3.0 * output)])


def centre(output: Any, batch: Any) -> Any:
    return output - 0.5 * ctl_core.all_reduce(tf.reduce_mean(output, 0), "mean"), batch[1]


def limit(output: Any, batch: Any) -> Any:
    """Scales outputs by their range in the batch."""
    highest = ctl_core.all_reduce(tf.reduce_max(output, 0), "max")
    lowest = ctl_core.all_reduce(tf.reduce_min(output, 0), "min")
    return output / (1.0 + highest - lowest), batch[1]


def scale_by_mean(gradients: Any, output: Any) -> Any:
    scale = 1 + ctl_core.all_reduce(tf.reduce_mean(output), "mean")
    return [scale * gradient for gradient in gradients], gradients


def find_own_rows(gradients: Any, output: Any) -> Any:
    """Scales the gradients, unless each replica finds its own rows among the gathered ones."""
    places = ctl_core.row_offset() + tf.range(tf.shape(output)[0])
    others = tf.gather(ctl_core.all_gather(output), places) - output
    scale = 1.0 + ctl_core.all_reduce(tf.reduce_sum(tf.abs(others)))
    return [scale * gradient for gradient in gradients], gradients


class Centre(keras.layers.Layer):
    """Subtracts a moving average, with a factor that shrinks, and adds a loss that is a mean."""

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.calls = self.add_weight(dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(inputs**2))
        if training:
            mean = ctl_core.all_reduce(tf.reduce_mean(inputs, 0), "mean")
            self.average.assign(0.9 * self.average + 0.1 * mean)
            self.calls.assign_add(1)
        return inputs - self.average / tf.sqrt(1.0 + tf.cast(self.calls, tf.float32))


def with_norm() -> keras.Model:
    norm = keras.layers.BatchNormalization(momentum=0.8, synchronized=True)
    return small.model_with(norm, Centre())


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS]


class Switches(keras.layers.Layer):
    """Reduces the output in every second step, with one variable of each dtype as a switch."""

    def build(self, shape: Any) -> None:
        off = [tf.zeros([], dtype) for dtype in DTYPES]
        self.switches = [tf.Variable(value, trainable=False) for value in off]

    def call(self, inputs: Any, training: bool = False) -> Any:
        scale: Any = 1.0
        for number, switch in enumerate(self.switches, start=2):
            is_on = tf.math.real(tf.cast(switch, tf.complex64))
            scale -= 0.1 * is_on / number
            if training:
                switch.assign(tf.cast(1.0 - is_on, switch.dtype))
        return inputs * scale


CASES: dict[str, dict[str, Any]] = {
    "simclr": {"create_loss": simclr.create_loss, "loss_pre": make_views},
    "mean": {"loss_pre": centre},
    "maximum": {"loss_pre": limit},
    "mean in update_pre": {"update_pre": scale_by_mean},
    "places in update_pre": {"update_pre": find_own_rows},
    "layers": {"create_model": with_norm},
    "switches": {"create_model": lambda: small.model_with(Switches())},
}


LOSSES = ("simclr", "mean", "maximum")  # these losses use collectives
WAYS = [
    (33, case, accumulate)
    for case in CASES
    for accumulate in (1, 2)
    if accumulate == 1 or case not in LOSSES
]
# Shares that differ by a row are those of any batch, so only some cases end with such a batch.
WAYS += [(45, "simclr", 1), (45, "layers", 1), (45, "layers", 2), (45, "switches", 2)]


@pytest.mark.parametrize(
    ("examples", "case", "accumulate"),
    small.slow_but((33, "layers", 1), (33, "maximum", 1), of=WAYS),
)
def test_last_batches_of_few_rows(
    train: engine.Train, case: str, examples: int, accumulate: int
) -> None:
    """A last batch with fewer rows than shares gives the weights of a plain loop.

    After 32 of 33 examples, one is left for four shares. After 32 of 45, 13 are left, and the
    shares differ by one row. Each of two micro-batches of two devices is normalized alone, and the
    second one may have no rows. ``update_pre`` gets the output of both.
    """

    def split_batch(batch: Any) -> list[Any]:
        """Returns the rows of the first leaves of both devices, and of their second leaves."""
        first, second, third, last = np.array_split(np.arange(len(batch[0])), 4)
        halves = [np.concatenate(pair) for pair in ((first, third), (second, last))]
        return [[tf.gather(array, half) for array in batch] for half in halves if len(half)]

    def find_written(parts: Any) -> list[Any]:
        layers = parts.train_model.layers
        switches = [switch for layer in layers for switch in getattr(layer, "switches", [])]
        return [*parts.train_model.non_trainable_variables, *switches]

    hooks = small.hooks(create_dataset=lambda: split(examples).batch(5), **CASES[case])
    # An evaluation has no micro-batches. Its shares are those of training only if there are none in
    # training either.
    if accumulate == 1:
        hooks.create_eval_dataset = hooks.create_dataset
    more: dict[str, Any] = {"accumulate_steps": accumulate, "last_batch": "keep"}
    state = train_on(train, hooks, 4 // accumulate, 16, steps=7, **more)
    how: dict[str, Any] = {}
    if accumulate > 1:
        how = {"split": split_batch, "find_written": find_written}
    plain = train_plainly(hooks, 7, batches_of(split(examples), 16), **how)
    assert_trained(state, plain)
    expected = plain.evaluate(split(examples).batch(16)) if accumulate == 1 else {}
    assert state.metrics == pytest.approx(expected, rel=1e-5)


def reduce_by_tensorflow(loss: Any) -> Any:
    count = tf.cast(tf.size(loss), tf.float32)
    context = tf.distribute.get_replica_context()
    return loss / context.all_reduce(tf.distribute.ReduceOp.SUM, count)


def gather_in_a_layer() -> keras.Model:
    class Gathers(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs + tf.reduce_mean(ctl_core.all_gather(inputs))

    return small.model_with(Gathers())


def exchange_under_a_condition(loss: Any, train_model: Any, step: Any) -> Any:
    if step > 3:
        loss = loss / ctl_core.all_reduce(tf.reduce_sum(loss))
    return loss, 0.0, train_model.trainable_variables


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("hook", "hooks"),
    [
        ("loss_pre", CASES["simclr"]),
        ("loss_pre", CASES["mean"]),
        ("grad_pre", {"grad_pre": exchange_under_a_condition}),
        (
            "create_loss",
            {"create_loss": lambda: lambda pair: reduce_by_tensorflow(small.squared_error(pair))},
        ),
        ("create_model", {"create_model": gather_in_a_layer}),
    ],
)
def test_a_loss_that_exchanges_something_is_refused_in_micro_batches(
    train: engine.Train, devices: int, hook: str, hooks: dict[str, Any]
) -> None:
    """A loss that uses collectives would be that of a micro-batch, and not that of the batch.

    A layer of a model may call ``all_reduce`` to compute statistics, as in the tests above.
    """
    with pytest.raises(ctl_core.SetupError, match=rf"^{hook} \(\w+\.py:\d+\): all_.*micro-batch"):
        train_on(train, small.hooks(**hooks), devices, 16, steps=1, accumulate_steps=2)


def test_synchronized_normalization_within_a_loss_in_micro_batches(train: engine.Train) -> None:
    """Keras' synchronized normalization is allowed in a loss, and normalizes over a micro-batch."""

    class Loss(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = keras.layers.BatchNormalization(synchronized=True)

        def call(self, pair: Any, training: bool = False) -> Any:
            return small.squared_error((self.norm(pair[0], training=training), pair[1]))

    state = train_on(train, small.hooks(create_loss=Loss), 2, 16, steps=2, accumulate_steps=2)
    assert state.step == 2


def test_moving_statistics_move_as_far_by_each_example(train: engine.Train) -> None:
    """Replicas with 6, 5 and 5 rows move the moving statistics in proportion to their rows.

    Each replica uses the statistics of its own rows. The saved value is the mean over all rows.
    """
    norm = keras.layers.BatchNormalization
    hooks = small.hooks(
        create_dataset=lambda: split(16).batch(5),
        create_model=lambda: keras.Sequential([norm(momentum=0.8), keras.layers.Dense(1)]),
    )
    state = train_on(train, hooks, 3, 16, steps=1)
    compare.assert_close([state.train_model.layers[0].moving_mean], [0.2 * data(16)[0].mean(0)])


def test_hooks_see_each_row_once(train: engine.Train) -> None:
    seen: list[Any] = []
    look = lambda batch, output: seen.append((batch[0].numpy(), len(output)))  # noqa: E731
    hooks = small.hooks(create_dataset=lambda: split(33).batch(5), every_steps={1: look})
    train_on(train, hooks, 4, 16, steps=3, last_batch="keep")
    assert [rows for _, rows in seen] == [16, 16, 1]
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in seen]), data(33)[0])
