"""Proves that an exported file computes what the checkpoint computes, on the evaluation data.

The file is loaded by its own runtime in another process. Its outputs are compared with those of the
checkpoint, and the metrics of its outputs with the values of an evaluation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import run_layers
from ctl_core.conversion.file_function import FileFunction
from ctl_core.conversion.run_file import Arrays
from ctl_core.conversion.runtime import Runtime, RuntimeFailed, start_runtime
from ctl_core.evaluation.evaluate import name_value
from ctl_core.evaluation.sets import EvaluationSet
from ctl_core.input.batches import count_rows
from ctl_core.model.metrics import read_results, update_metrics
from ctl_core.model.state import State
from ctl_core.numerics.constants import SplitOutput, restore_constants
from ctl_core.serving import LoadedModel, list_input_names, name_outputs
from ctl_core.types import AnyTensor, Batch, GraphFunction, ModelOutput, Structure

# The largest accepted difference, relative to the largest value of an output, or to a metric.
TOLERANCE = 1e-4
# The number of training examples for which outputs are compared if there are no evaluation data.
TRAINING_EXAMPLES = 256


@dataclasses.dataclass
class OutputComparison:
    """Compares an output of the file with that of the checkpoint, batch by batch.

    Attributes:
        largest_difference: the largest difference of two numbers
        largest_value: the largest absolute value in the checkpoint's output
        changed_examples: the number of examples whose largest output is at another place; for
            outputs of integers, the number of examples that differ
        examples: the number of examples
        is_exact: whether the output consists of integers or booleans
    """

    largest_difference: float = 0.0
    largest_value: float = 0.0
    changed_examples: int = 0
    examples: int = 0
    is_exact: bool = False

    def add(self, expected: np.ndarray, actual: np.ndarray) -> None:
        """Adds a batch of outputs; NaN is equal to NaN, and differs infinitely from a number."""
        self.examples += len(expected)
        self.is_exact = not np.issubdtype(expected.dtype, np.floating)
        expected_numbers = expected.astype("float64")
        actual_numbers = actual.astype("float64")
        same = (expected_numbers == actual_numbers) | (
            np.isnan(expected_numbers) & np.isnan(actual_numbers)
        )
        with np.errstate(invalid="ignore"):
            differences = np.where(same, 0.0, np.abs(expected_numbers - actual_numbers))
        differences = np.nan_to_num(differences, nan=math.inf, posinf=math.inf)
        finite = np.abs(expected_numbers[np.isfinite(expected_numbers)])
        self.largest_difference = max(self.largest_difference, float(differences.max(initial=0)))
        self.largest_value = max(self.largest_value, float(finite.max(initial=0)))
        changed = ~same
        if not self.is_exact and expected.ndim > 1 and expected.shape[-1] > 1:
            changed = expected_numbers.argmax(-1) != actual_numbers.argmax(-1)
        elif not self.is_exact:
            changed = np.zeros(len(expected), bool)
        self.changed_examples += int(changed.reshape(len(expected), -1).any(1).sum())

    @property
    def relative_difference(self) -> float:
        """The difference that is compared with the tolerance.

        For numbers with a fraction, the largest difference relative to the largest value; for
        integers, the share of examples that differ.
        """
        if self.is_exact:
            return self.changed_examples / max(1, self.examples)
        if self.largest_difference == 0:
            return 0.0
        return self.largest_difference / (self.largest_value or 1.0)


class MetricComparison(NamedTuple):
    """A value of an evaluation, and the same value computed from the outputs of the file."""

    checkpoint: float
    file: float

    @property
    def relative_difference(self) -> float:
        """The difference relative to the value of the evaluation."""
        if self.checkpoint == self.file or (math.isnan(self.checkpoint) and math.isnan(self.file)):
            return 0.0
        difference = abs(self.checkpoint - self.file) / (abs(self.checkpoint) or 1.0)
        return math.inf if math.isnan(difference) else difference


@dataclasses.dataclass
class Proof:
    """What the comparison of a file with its checkpoint has found.

    Attributes:
        data: the data on which they were compared
        examples: the number of examples
        outputs: the comparison of each output by name
        metrics: the comparison of each metric by name
        without_metrics: the reason why no metrics were compared; "" if they were
        problem: the reason why the file is not proven; "" if it is
        milliseconds: the time of the runtime for each example
        versions: the versions of the packages by name
    """

    data: str
    examples: int = 0
    outputs: dict[str, OutputComparison] = dataclasses.field(default_factory=dict)
    metrics: dict[str, MetricComparison] = dataclasses.field(default_factory=dict)
    without_metrics: str = ""
    problem: str = ""
    milliseconds: float = math.nan
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def changed_examples(self) -> int:
        """The number of examples whose largest output changes, for the output with most of them."""
        return max((output.changed_examples for output in self.outputs.values()), default=0)

    @property
    def relative_difference(self) -> float:
        """The largest relative difference of an output."""
        return max((output.relative_difference for output in self.outputs.values()), default=0.0)

    def describe(self) -> str:
        """Returns the result in one line."""
        words = [
            f"the largest relative difference of an output is {self.relative_difference:.1e}",
            f"{self.changed_examples} of {self.examples} examples change their largest output",
        ]
        words += [
            f"{name} {metric.file:.4g} (checkpoint: {metric.checkpoint:.4g})"
            for name, metric in self.metrics.items()
        ]
        return "; ".join([*words, f"{self.milliseconds:.3g} ms per example"])

    def to_json(self) -> dict[str, Any]:
        """Returns the content of proof.json about the comparison."""
        outputs = {
            name: {
                "relative_difference": output.relative_difference,
                "largest_difference": output.largest_difference,
                "largest_value": output.largest_value,
                "changed_examples": output.changed_examples,
            }
            for name, output in self.outputs.items()
        }
        metrics = {
            name: {
                "checkpoint": metric.checkpoint,
                "file": metric.file,
                "relative_difference": metric.relative_difference,
            }
            for name, metric in self.metrics.items()
        }
        return {
            "proven": not self.problem,
            "problem": self.problem or None,
            "data": self.data,
            "examples": self.examples,
            "outputs": outputs,
            "metrics": metrics,
            "metrics_not_compared": self.without_metrics or None,
            "milliseconds_per_example": self.milliseconds,
            "versions": self.versions,
        }


class NotComparable(Exception):
    """The outputs of a file and of its checkpoint have other names or shapes."""


def read_training_batches(state: State, examples: int) -> Iterator[Batch]:
    """Yields batches of training data, with a number of examples or fewer altogether."""
    for batch in state.data.make_pass():
        rows = int(count_rows(batch))
        if rows >= examples:
            yield tf.nest.map_structure(lambda tensor, end=examples: tensor[:end], batch)
            return
        yield batch
        examples -= rows


def get_inputs(function: FileFunction, batch: Batch) -> Arrays:
    """Returns the inputs of a file for a batch, by name."""
    entries = list_input_names(function.select_argument(batch))
    return {name: np.asarray(entry) for name, entry in entries.items()}


class Prover:
    """Compares exported files with the checkpoint that was restored."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._state = model.state
        # The values of an evaluation by name; computed when the first file is compared.
        self._evaluated: dict[str, float] | None = None

    def prove(
        self,
        path: Path,
        format: str,
        function: FileFunction,
        rows: int | None,
        tolerance: float | None,
    ) -> Proof:
        """Runs a file over the evaluation data, and compares it with the checkpoint.

        Without evaluation data, training examples are used, and no metrics are compared.

        Args:
            path: the file
            format: the format of the file
            function: what the file should compute
            rows: the number of examples that the file takes in each call; None if it takes any
                number
            tolerance: the largest relative difference of a proven file; None accepts any
        """
        evaluation = self._state.evaluation
        if evaluation is None:
            proof = Proof(
                f"{TRAINING_EXAMPLES} training examples",
                without_metrics="the run has no create_eval_dataset",
            )
        else:
            proof = Proof("create_eval_dataset", without_metrics=self._explain_no_metrics(function))
        try:
            with start_runtime(format, path, rows) as runtime:
                proof.versions = runtime.versions
                if evaluation is None:
                    for batch in read_training_batches(self._state, TRAINING_EXAMPLES):
                        self._compare_batch(proof, runtime, function, batch)
                else:
                    self._compare_sets(proof, runtime, function)
                if proof.examples:
                    proof.milliseconds = 1000 * runtime.seconds / proof.examples
        except RuntimeFailed as error:
            proof.problem = f"the runtime fails: {error}"
        except NotComparable as error:
            proof.problem = str(error)
        proof.problem = proof.problem or _find_problem(proof, tolerance)
        return proof

    def _explain_no_metrics(self, function: FileFunction) -> str:
        """Returns the reason why metrics cannot be computed from the outputs of the file, or ""."""
        hooks = self._state.hooks
        if hooks.create_inference_model is not None:
            return "create_inference_model returns another output than evaluations use"
        if function.hook is not None and function.hook is not self._model.inference.batch_hook:
            return "evaluations call input_pre instead of serve"
        if not any(data.metrics for data in self._state.evaluation.sets.values()):
            return "the run has no create_metrics"
        return ""

    def _compare_sets(self, proof: Proof, runtime: Runtime, function: FileFunction) -> None:
        """Compares the outputs for all sets of evaluation data, and their metrics."""
        if not proof.without_metrics and self._evaluated is None:
            self._evaluated = self._state.evaluation.evaluate()
        for set_name, evaluation_set in self._state.evaluation.sets.items():
            for metric in evaluation_set.metrics.values():
                metric.reset_state()
            update_metrics_of_set = self._define_update(evaluation_set)
            for batch in evaluation_set.make():
                output = self._compare_batch(proof, runtime, function, batch)
                if not proof.without_metrics:
                    update_metrics_of_set(output, batch)
            if proof.without_metrics:
                continue
            assert self._evaluated is not None
            for name, value in read_results(evaluation_set.metrics).scalars.items():
                full_name = name_value(set_name, name)
                expected = self._evaluated[full_name]
                proof.metrics[full_name] = MetricComparison(expected, value)

    def _compare_batch(
        self, proof: Proof, runtime: Runtime, function: FileFunction, batch: Batch
    ) -> ModelOutput:
        """Compares the outputs for a batch, and returns those of the file as a model's output.

        Raises:
            NotComparable: the file has other outputs than the checkpoint.
        """
        inputs = get_inputs(function, batch)
        actual = runtime.compute(inputs)
        output = function.compute_expected(batch)
        expected = {name: np.asarray(value) for name, value in name_outputs(output).items()}
        if actual.keys() != expected.keys():
            raise NotComparable(
                f"the file has the outputs {', '.join(actual)} instead of {', '.join(expected)}"
            )
        for name, array in expected.items():
            if actual[name].shape != array.shape:
                raise NotComparable(
                    f"the output {name} has the shape {list(actual[name].shape)} instead of "
                    f"{list(array.shape)}"
                )
            proof.outputs.setdefault(name, OutputComparison()).add(array, actual[name])
        proof.examples += len(next(iter(inputs.values())))
        return _replace_tensors(output, actual)

    def _define_update(self, evaluation_set: EvaluationSet) -> GraphFunction:
        """Returns a graph function that adds an output and its batch to the metrics of a set."""
        hook = self._state.hooks.metric_pre

        def add(output: ModelOutput, batch: Batch) -> None:
            with run_layers(training=False):
                arguments = hook.trace(
                    output=output, batch=batch, train_model=self._state.train_model
                )
                update_metrics(evaluation_set.metrics, hook, arguments, None)

        def add_on_device(output: ModelOutput, batch: Batch) -> None:
            self._state.strategy.run(add, args=(output, batch))

        return tf.function(add_on_device, autograph=False, reduce_retracing=True)


def _replace_tensors(output: ModelOutput, arrays: Mapping[str, np.ndarray]) -> Structure:
    """Returns an output of the model with other values, given by the names of the outputs."""
    tensors: list[AnyTensor] = [tf.constant(arrays[name]) for name in name_outputs(output)]
    if isinstance(output, SplitOutput):
        return restore_constants(SplitOutput(tensors, output.form))
    return keras.tree.pack_sequence_as(output, tensors)


def _find_problem(proof: Proof, tolerance: float | None) -> str:
    """Returns the reason why a complete comparison does not prove a file; "" if it does."""
    if not proof.examples:
        return "there are no examples to compare"
    if tolerance is None:
        return ""
    differences = {
        f"output '{name}'": output.relative_difference for name, output in proof.outputs.items()
    }
    for name, metric in proof.metrics.items():
        differences[f"metric '{name}'"] = metric.relative_difference
    for what, difference in differences.items():
        if difference > tolerance:
            return (
                f"the relative difference of the {what} is {difference:.2g}, more than the "
                f"tolerance of {tolerance:g}"
            )
    return ""
