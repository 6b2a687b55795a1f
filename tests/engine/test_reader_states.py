"""States of readers as texts: what is in them comes back as it was."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ctl_core.readers.saved import read_literal, write_literal


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
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=Tensor))
    text = write_literal({"generator": Tensor(np.arange(5, dtype="uint8"))})
    found = read_literal(text)["generator"]
    assert isinstance(found, Tensor) and found.array.tolist() == [0, 1, 2, 3, 4]
