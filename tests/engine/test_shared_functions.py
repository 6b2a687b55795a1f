"""Tests of functions that are traced once, and called on all devices."""

from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from ctl_core import graph
from tests.golden import small
from tests.helpers.project import Train


def read_functions(metadata: Any) -> set[str]:
    """Returns the names of the functions of graphs, after TensorFlow has optimized the graphs."""
    return {
        function.signature.name
        for graphs in metadata.function_graphs
        for definition in (graphs.post_optimization_graph, *graphs.partition_graphs)
        for function in definition.library.function
    }


@pytest.mark.parametrize("logical_replicas", [None, 4])
def test_tensorflow_has_one_version_of_each_function(
    train: Train, monkeypatch: pytest.MonkeyPatch, logical_replicas: int | None
) -> None:
    """A version for one device, or for one call, could round in another way than the others.

    A batch of 22 rows has leaves of two sizes. Some hooks take only the loss, others the output.
    """
    functions: set[str] = set()
    call = graph.StepFunctions._call

    def note(self: graph.StepFunctions, *arguments: Any) -> graph.CallResult:
        context.context().enable_run_metadata()
        result = call(self, *arguments)
        functions.update(read_functions(context.context().export_run_metadata()))
        context.context().disable_run_metadata()
        return result

    monkeypatch.setattr(graph.StepFunctions, "_call", note)

    def create_model() -> keras.Model:
        return small.model_with(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))

    hooks = small.hooks(create_model=create_model)
    hooks.update_pre = lambda gradients: (tf.clip_by_global_norm(gradients, 1.0)[0], gradients)
    hooks.every_steps = {3: [lambda loss: None], 4: [lambda output, gradients: None]}
    settings = {"steps": 9, "batch_size": 22, "virtual_devices": 3}
    train(hooks, logical_replicas=logical_replicas, **settings)
    assert any("traced" in name for name in functions)
    assert [name for name in functions if "_specialized_for_" in name] == []
