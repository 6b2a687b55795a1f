"""With --jit-compile, the same training; what XLA cannot compile is one line before any work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.errors import SetupError, not_compiled
from tests.helpers.cases import exact_hooks, make_hooks
from tests.helpers.fixtures import Train


def assert_same(train: Train, hooks: Any, **settings: Any) -> None:
    plain = train(hooks, run_name="plain", **settings)
    compiled = train(hooks, run_name="compiled", jit_compile=True, **settings)
    graph = compiled.functions.graph(None).graph
    assert "_XlaMustCompile" in str(graph.as_graph_def())
    assert compiled.functions.trace_counts() == [1]
    for weight, other in zip(
        compiled.train_model.get_weights(), plain.train_model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 1), (2, 2)])
def test_weights_are_the_same(train: Train, replicas: int, accumulate: int) -> None:
    settings = {"virtual_devices": replicas, "accumulate_steps": accumulate}
    assert_same(train, exact_hooks("sgd"), steps=12, **settings)


def test_what_xla_cannot_compile_is_named(train: Train) -> None:
    def input_pre(batch: Any) -> Any:
        return tf.strings.to_number(tf.strings.as_string(batch[0]))

    with pytest.raises(SetupError, match=r"^input_pre .*: XLA cannot compile AsString, .* leave"):
        train(make_hooks(input_pre=input_pre), steps=2, jit_compile=True)
    assert (
        not_compiled(tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible")) is None
    )
