"""Readers in Python train like a plain loop, even if stopped or on other devices."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small

Batch = tuple[np.ndarray, np.ndarray]
SIZE = 10  # Elements of 10 examples do not fit batches of 16, and a pass of 100 examples leaves 4.


def pick(rows: Any, noise: Any = 0.0) -> Batch:
    """Returns the examples with the given indices."""
    x, y = small.data()
    return x[rows] + np.float32(noise), y[rows]


class Batches(keras.utils.PyDataset):
    """A PyDataset as in Keras' documentation, which is shuffled after each epoch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.random = np.random.default_rng(7)
        self.order = self.random.permutation(small.EXAMPLES)

    def __len__(self) -> int:
        return small.EXAMPLES // SIZE

    def __getitem__(self, index: int) -> Batch:
        return pick(self.order[index * SIZE : (index + 1) * SIZE])

    def on_epoch_end(self) -> None:
        self.random.shuffle(self.order)


class Loader:
    """A loader like torchdata's StatefulDataLoader, which keeps the state of its iterator.

    A single generator shuffles the passes and adds noise to the examples. Only the state can
    therefore restore a position in the middle of a pass.
    """

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)
        self.order = np.zeros(0, int)
        self.position = 0
        self.loaded = False

    def state_dict(self) -> dict[Any, Any]:
        state = self.random.bit_generator.state
        return {"random": state, "order": self.order, "position": self.position, 3: (b"", None)}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[3] == (b"", None)
        self.random.bit_generator.state = state["random"]
        self.order, self.position, self.loaded = state["order"], state["position"], True

    def __iter__(self) -> Iterator[Batch]:
        if not self.loaded or not len(self.order):
            self.order, self.position = self.random.permutation(small.EXAMPLES), 0
        self.loaded = False
        while self.position < len(self.order):
            rows = self.order[self.position : self.position + SIZE]
            self.position += SIZE
            yield pick(rows, self.random.normal(scale=0.01, size=[len(rows), 1]))


class Endless:
    """An endless iterator that saves and restores its state."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        rows = (np.arange(SIZE) + self.number * SIZE) % small.EXAMPLES
        self.number += 1
        return pick(rows, 0.01 * self.number)

    def get_state(self) -> bytes:
        return str(self.number).encode()

    def set_state(self, state: bytes) -> None:
        self.number = int(state.decode())


def generate() -> Iterator[Batch]:
    for first in range(0, small.EXAMPLES, SIZE):
        yield pick(np.arange(first, first + SIZE))


def load_by_grain() -> Any:
    """Returns a shuffled pass with noise that depends on the position of an example."""
    grain = pytest.importorskip("grain")

    def blur(row: int, random: np.random.Generator) -> Batch:
        return pick(row, random.normal(scale=0.01))

    rows = grain.MapDataset.range(small.EXAMPLES).seed(5).shuffle()
    return rows.random_map(blur).batch(SIZE).to_iter_dataset()


def load_by_a_loader_of_grain() -> Any:
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(100, shuffle=True, seed=2, num_epochs=3)

    class Pick(grain.transforms.Map):  # type: ignore[misc, name-defined]
        map = staticmethod(pick)

    source = grain.sources.RangeDataSource(0, 100, 1)
    operations = [Pick(), grain.transforms.Batch(SIZE)]
    return grain.DataLoader(data_source=source, sampler=sampler, operations=operations)


KINDS: dict[str, Callable[[], Any]] = {
    "a PyDataset": Batches,
    "a PyDataset read by threads": functools.partial(Batches, workers=3),
    "state_dict": Loader,
    "get_state": Endless,
    "grain": load_by_grain,
    "grain's loader": load_by_a_loader_of_grain,
    "grain's iterator": lambda: iter(load_by_grain()),
}
EACH = pytest.mark.parametrize("kind", small.slow_but("a PyDataset", of=KINDS))


def read_passes(make: Callable[[], Any]) -> Iterator[list[Batch]]:
    """Yields the passes of a plain loop; for an endless reader, each pass has 80 elements."""
    reader = make()
    while True:
        if isinstance(reader, Endless):
            yield [next(reader) for _ in range(80)]
        elif isinstance(reader, keras.utils.PyDataset):
            yield [reader[index] for index in range(reader.num_batches or 0)]
            reader.on_epoch_end()
        else:
            yield list(reader)
            reader = make() if hasattr(reader, "__next__") else reader


def train_plainly(make: Callable[[], Any], steps: int, batch: int, keep: bool = False) -> Any:
    def read_batches() -> Iterator[Batch]:
        for batches in read_passes(make):
            x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
            for first in range(0, len(x) if keep else len(x) - batch + 1, batch):
                yield x[first : first + batch], y[first : first + batch]

    return small.plain(steps, batches=read_batches()).get_weights()


def hooks_of(make: Callable[[], Any], **replaced: Any) -> Any:
    return small.hooks(create_dataset=lambda: make(), **replaced)


def run(train: engine.Train, make: Callable[[], Any], steps: int | None, **more: Any) -> Any:
    settings = {"learning_rate": small.RATE, "ckpt_every": 5, "seed": 3, **more}
    return train(hooks_of(make), steps=steps, **settings)


def assert_same(values: Any, expected: Any, exact: bool = True) -> None:
    alike = compare.assert_same if exact else compare.assert_close
    alike(values.train_model.weights, expected.train_model.weights)


@EACH
def test_readers_train_as_in_a_plain_loop_stopped_and_on_other_devices(
    train: engine.Train, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Runs stop in the middle of elements and around the ends of passes, which have six batches.

    A hook also fails at a time when more has been read than the checkpoint of step 10 includes.
    """

    def fail() -> None:
        raise OSError("the disk is gone")

    make = KINDS[kind]
    whole = run(train, make, 20, run_name="whole")
    compare.assert_close(whole.train_model.weights, train_plainly(make, 20, 16))
    run(train, make, 6)
    failing = hooks_of(make, at_step={13: fail})
    with pytest.raises(ctl_core.RunError, match="the disk is gone"):
        train(failing, steps=20, learning_rate=small.RATE, ckpt_every=5, seed=3)
    assert_same(run(train, make, 20), whole)
    for steps, devices in ((7, 3), (20, 2)):
        resumed = run(train, make, steps, run_name="others", virtual_devices=devices)
    assert_same(resumed, whole, exact=False)
    assert "dropping" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a PyDataset", "state_dict"])
def test_readers_keep_the_last_batch(train: engine.Train, kind: str) -> None:
    """Each example is used once per epoch, even on devices that get none of the last four."""
    make = KINDS[kind]
    more: dict[str, Any] = {"last_batch": "keep", "virtual_devices": 5}
    whole = run(train, make, None, epochs=2, run_name="whole", **more)
    assert whole.step == 14
    compare.assert_close(whole.train_model.weights, train_plainly(make, 14, 16, keep=True))
    for steps in (6, 14):
        resumed = run(train, make, steps, **more)
    assert_same(resumed, whole)


def test_reader_without_a_state_is_read_again(
    train: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(train, generate, 20, run_name="whole")
    compare.assert_close(whole.train_model.weights, train_plainly(generate, 20, 16))
    for steps in (15, 20):
        resumed = run(train, generate, steps)
    assert_same(resumed, whole)
    output = capsys.readouterr().out
    assert "a generator has no get_state" in output
    assert "dropping 240 examples" in output


class Noisy(Batches):
    """Returns different numbers each time an item is read."""

    def __getitem__(self, index: int) -> Batch:
        return pick(np.arange(SIZE), np.random.default_rng().normal())


class Unwritable(Endless):
    """Has a state that cannot be serialized without pickle."""

    def get_state(self) -> Any:
        return {"of": [object()]}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Noisy, "the reader returned other elements than before"),
        (Unwritable, "the reader's state contains a object"),
    ],
)
def test_reader_whose_state_does_not_lead_back_is_read_again(
    train: engine.Train, capsys: pytest.CaptureFixture[str], make: Callable[[], Any], why: str
) -> None:
    run(train, make, 5)
    run(train, make, 9)
    output = capsys.readouterr().out
    assert why in output
    assert "dropping 80 examples" in output


def test_reader_created_outside_of_hooks_begins_at_its_start(train: engine.Train) -> None:
    """The reader starts at its beginning, although checks before training have read from it."""
    reader = Endless()
    state = run(train, lambda: reader, 9)
    compare.assert_close(state.train_model.weights, train_plainly(Endless, 9, 16))


# ---- Elements ----------------------------------------------------------------------------------


class Padded(Endless):
    """Yields batches of 12 that are used unchanged, each padded to a different width."""

    element_spec: Any = (tf.TensorSpec([None, None]), tf.TensorSpec([None, 1]))

    def __next__(self) -> Batch:
        x, y = super().__next__()
        wide = np.pad(x, [(0, 2), (0, self.number % 3)])
        return wide, np.pad(y, [(0, 2), (0, 0)])


class Graphs(Padded):
    """Yields elements of six graphs, each of which has two nodes."""

    element_spec = None

    def __next__(self) -> Any:
        x, y = super().__next__()
        return {"nodes": x[:, : small.FEATURES], "target": y[:6]}


OWN_ELEMENTS: dict[str, Any] = {
    "padded": {
        "create_dataset": lambda: Padded(),
        "input_pre": lambda batch: batch[0][:, : small.FEATURES],
    },
    "graphs": {
        "create_dataset": lambda: Graphs(),
        "count_examples": lambda batch: tf.shape(batch["target"])[0],
        "input_pre": lambda batch: batch["nodes"][::2],
        "loss_pre": lambda output, batch: (output, batch["target"]),
    },
}


@pytest.mark.parametrize("kind", small.slow_but("graphs", of=OWN_ELEMENTS))
def test_readers_of_whole_batches_resume(
    train: engine.Train, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    hooks = small.hooks(**OWN_ELEMENTS[kind])
    more = {"batch_size": 12, "virtual_devices": 2, "learning_rate": small.RATE}
    whole = train(hooks, steps=9, run_name="whole", **more)
    for steps in (4, 9):
        resumed = train(hooks, steps=steps, **more)
    assert_same(resumed, whole)
    assert "dropping" not in capsys.readouterr().out


@pytest.mark.slow
def test_readers_resume_amid_a_compiled_stretch(train: engine.Train) -> None:
    """Many batches are read at once, and a checkpoint is saved in the middle of them."""
    whole = run(train, Loader, 30, run_name="whole", jit_compile=True)
    for steps in (13, 30):
        resumed = run(train, Loader, steps, jit_compile=True)
    assert_same(resumed, whole)
    assert_same(whole, run(train, Loader, 30, run_name="plain"), exact=False)


# ---- Evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", small.slow_but("a PyDataset", of=sorted(KINDS.keys() - {"get_state"}))
)
def test_evaluations_by_readers_read_each_example_once(train: engine.Train, kind: str) -> None:
    """Each evaluation reads every example once, or the same part with ``limit_eval``.

    A dataset with a name has its own reader. A reader with a state is created only once, because it
    may need gigabytes.
    """
    evaluated: list[Any] = []
    calls: list[int] = []
    sets = {"a": KINDS[kind], "b": generate}

    def create_eval_dataset() -> Any:
        calls.append(1)
        return {name: make() for name, make in sets.items()}

    hooks = hooks_of(
        Batches,
        create_eval_dataset=create_eval_dataset,
        create_metrics=lambda: {"y": keras.metrics.Mean()},
        metric_pre=lambda batch: {"y": (batch[1],)},
        after_eval=lambda metrics: evaluated.append(metrics),
    )
    more = {"eval_every": 2, "virtual_devices": 3, "learning_rate": small.RATE}
    train(hooks, steps=4, **more)
    assert len(evaluated) == 2
    for metrics in evaluated:
        np.testing.assert_allclose(metrics["a/y"], small.data()[1].mean(), rtol=1e-4)
        np.testing.assert_allclose(metrics["b/y"], small.data()[1].mean(), rtol=1e-4)
    del sets["b"], calls[:]
    train(hooks, steps=4, run_name="few", limit_eval=3, **more)
    assert len(calls) == (2 if kind == "grain's iterator" else 1)
    assert evaluated[2]["a/y"] == pytest.approx(evaluated[3]["a/y"], rel=1e-6)
    assert evaluated[2]["a/y"] != pytest.approx(evaluated[0]["a/y"], rel=1e-3)


class Stream:
    """A streamed dataset like those of Hugging Face.

    After ``load_state_dict``, each later iteration begins at the state that was loaded.
    """

    def __init__(self) -> None:
        self.state = {"row": 0}
        self.starting: dict[str, int] | None = None

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.starting = state

    def __iter__(self) -> Iterator[Batch]:
        self.state = {"row": 0}
        if self.starting is not None:
            self.state = dict(self.starting)
        while self.state["row"] < small.EXAMPLES:
            first = self.state["row"]
            self.state["row"] += SIZE
            yield pick(np.arange(first, first + SIZE))


@pytest.mark.parametrize("stopped", [3, 6, 9])
def test_a_stream_that_is_resumed_begins_later_passes_at_its_start(
    train_small: engine.Train, stopped: int
) -> None:
    """A pass has 6 batches, so runs are resumed within the first pass, after it, and later."""
    hooks = small.hooks(create_dataset=lambda: Stream())
    settings = {"ckpt_every": 3, "run_name": "parts"}
    train_small(hooks, **settings | {"steps": stopped})
    parts = train_small(hooks, **settings | {"steps": 20})
    whole = train_small(hooks, **settings | {"steps": 20, "run_name": "whole"})
    compare.assert_same(parts.train_model.weights, whole.train_model.weights)
    rows = [row for _ in range(4) for row in range(96)]  # the last 4 of 100 fill no batch
    batches = [pick(np.array(rows[first : first + 16])) for first in range(0, 320, 16)]
    expected = small.plain(20, batches=batches)
    compare.assert_close(whole.train_model.weights, expected.weights)
