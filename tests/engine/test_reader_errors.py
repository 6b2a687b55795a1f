"""What a reader cannot do is said in one line, before training where that can be known."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from ctl_core.readers.saved import decoded, encoded
from tests.helpers.cases import assert_weights, make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.project import REGRESSION, Cli, mistakes, refused, where
from tests.helpers.readers import Endless

# What each case begins with: a reader that counts, with a state of one number.
READER = """
import numpy as np


class Reader:
    def __init__(self, size=8, number=0):
        self.size, self.number = size, number

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.batch(self.number)

    def batch(self, number):
        return np.full((self.size, 5), number, "float32"), np.ones((self.size, 1), "float32")

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


class Items(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return Reader().batch(index)

"""
REFUSED = mistakes(
    """
== a state that is not read back
class Forgetful(Reader):
    def set_state(self, state):
        pass
def create_dataset():  # here
    return Forgetful()
-> create_dataset | the reader's state cannot be read back | gives another second one
== batches of another size
def create_dataset():  # here
    return Reader(6)
-> create_dataset | batches of 6 examples, expected batches of 8 | global_batch_size in the reader
== elements of several types
class Types(Reader):
    def batch(self, number):
        return np.ones((8, 5), "float32" if number < 3 else "int32"), np.ones((8, 1), "float32")
def create_dataset():  # here
    return Types()
-> create_dataset | an element is (int32[8, 5], float32[8, 1]), expected (float32[8, 5]
-> as the first ones are
== a generator made outside
batches = (Reader().batch(0) for _ in range(9))
def create_dataset():  # here
    return batches
-> create_dataset | returns a generator made outside of it | make it inside the function
== an evaluation without an end
class Unending(Items):
    @property
    def num_batches(self):
        return None
def create_dataset():
    return Items()
def create_eval_dataset():  # here
    return Unending()
-> create_eval_dataset | returned a PyDataset without an end
"""
)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(cli: Cli, case: str) -> None:
    code, words = REFUSED[case]
    source = REGRESSION + READER + code
    refused(cli(source, "--batch-size", "8"), where(source), *words)


@pytest.mark.parametrize("damage", ["{", '{"position": 3}'])
def test_a_damaged_position_is_reached_by_reading(
    train: Train, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    hooks = make_hooks(
        create_dataset=lambda global_batch_size: Endless(global_batch_size),
        input_pre=lambda batch: batch["x"],
        loss_pre=lambda output, batch: (output, batch["y"]),
    )
    whole = train(hooks, steps=9, run_name="whole")
    state = train(hooks, steps=4)
    file = Path(state.run_dir) / "ckpt/engine/input-4-0.json"
    file.write_text(damage)
    assert_weights(train(hooks, steps=9), whole, rtol=0)
    output = capsys.readouterr().out
    assert "dropping 64 examples, since the file of the reader's state is damaged" in output


def test_states_with_a_tensor_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its module: the state of a sampler's generator is such a tensor."""

    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def detach(self) -> Tensor:
            return self

        cpu = detach

        def numpy(self) -> np.ndarray:
            return self.array

    Tensor.__module__ = "torch"
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(from_numpy=Tensor))
    found = decoded(encoded({"generator": Tensor(np.arange(5, dtype="uint8"))}))["generator"]
    assert isinstance(found, Tensor) and found.array.tolist() == [0, 1, 2, 3, 4]
