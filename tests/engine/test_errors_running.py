"""What fails while it runs: the run ends with one line, and goes on once the mistake is mended."""

from __future__ import annotations

import pytest

import ctl_core
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.project import (
    Cli,
    failed,
    line_of,
    source_of,
)


def test_a_failing_op_of_the_evaluation(cli: Cli) -> None:
    pieces = {
        "own": "def check(a, b):\n"
        '    tf.debugging.assert_less(a, 0.5, message="too bright")\n'
        "    return a, b\n\n"
        "def create_eval_dataset():\n"
        "    return data.batch(8).map(check)\n"
    }
    source = source_of(**pieces)
    where = f"create_eval_dataset (callbacks.py:{line_of(source, 'def create_eval_dataset')})"
    failed(cli(source), where, "too bright")


EVAL = "create_eval_dataset = create_dataset\n"


def test_a_metric_that_is_no_number(cli: Cli) -> None:
    own = EVAL + (
        "def create_metrics():\n    return {'f1': keras.metrics.F1Score()}\n\n"
        "def metric_pre(batch):\n    return tf.one_hot([0, 1], 3), tf.one_hot([0, 1], 3)\n"
    )
    failed(cli(source_of(own=own)), "create_metrics", "'f1'", "shape [3]")


def test_from_python_the_same_errors_are_exceptions(train: Train) -> None:
    with pytest.raises(
        ctl_core.SetupError, match=r"grad_pre \(test_errors_running.py:\d+\): returned 2"
    ):
        train(make_hooks(grad_pre=lambda loss: (loss, 0.0)))

    def fail(step: int) -> None:
        raise LookupError(step)

    with pytest.raises(ctl_core.RunError, match=r"at_step\[2\] .*: LookupError: 2") as caught:
        train(make_hooks(at_step={2: fail}), run_name="other")
    assert isinstance(caught.value.__cause__, LookupError)
