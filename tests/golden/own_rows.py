"""Programs whose processes prepare only their own rows, and how a process of a cluster trains them.

``python -m tests.golden.own_rows RUNS RUN...`` trains each run in the folder RUNS, and writes
``RUNS/RUN-TASK.json``: the number of examples that the process has prepared, and the weights. The
name of a run is ``whole-CASE`` or ``killed-CASE``. The runs share a cluster, because starting one
takes longer than training.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import engine, small

BATCH = 30
STEPS = 8
LAST_SAVED = 3
KILLED = 4
LOGICAL_REPLICAS = 4
# Batches of an evaluation have 12, 12 and one example.
EVAL_BATCH = 12
EVALUATED = 25
SEED = 3
# The size of the batches that the hook returns.
PREPARED_TOGETHER = 7


class Case(NamedTuple):
    """A case: how a run reads its data.

    Attributes:
        examples: the number of examples
        last_batch: the setting of this name
        kind: the part of the pipeline before ``own_rows``
        is_logical: whether the run has logical replicas, and noise
        processes: the number of processes that train it from its start; None for a single one
        has_evaluation: whether the run has an evaluation
    """

    examples: int
    last_batch: str
    kind: str = "shuffle"
    is_logical: bool = False
    processes: int | None = None
    has_evaluation: bool = False


# The last batch of a pass has 10 examples, or only one, which is fewer than there are processes.
CASES = {
    "keep_1": Case(91, "keep", processes=3, has_evaluation=True),
    "keep_10": Case(100, "keep", is_logical=True, processes=3, has_evaluation=True),
    "drop_1": Case(91, "drop", processes=2),
    "index": Case(100, "drop", "index_shuffle"),
}
# This case is killed, and resumed on two processes and on one.
RESUMED = "keep_1"


def read_cheap(case: Case) -> tf.data.Dataset:
    """Returns the part of the pipeline before ``own_rows``: pairs of an index and a seed."""
    if case.kind == "index_shuffle":
        return ctl_core.data.index_shuffle_with_seeds(case.examples, 7, SEED)
    indices = tf.data.Dataset.range(case.examples).shuffle(case.examples, seed=SEED)
    return indices.map(lambda index: (index, tf.stack([index, SEED])))


class Preparation:
    """Prepares examples, and counts them."""

    def __init__(self) -> None:
        self.number = 0

    def prepare(self, index: tf.Tensor, seed: tf.Tensor) -> Any:
        """Returns an example with noise that depends on its seed."""
        inputs, target = small.data()

        def read(row: np.ndarray) -> np.ndarray:
            self.number += 1
            return inputs[row]

        row = tf.ensure_shape(tf.numpy_function(read, [index], tf.float32), [small.FEATURES])
        noise = tf.random.stateless_normal([small.FEATURES], seed, stddev=0.1)
        return row + noise, tf.gather(target, index)


def make_hooks(case: Case, preparation: Preparation, is_marked: bool = True) -> SimpleNamespace:
    """Returns the hooks of a case; without the mark, each process prepares all examples."""

    def create_dataset() -> tf.data.Dataset:
        examples = read_cheap(case)
        if is_marked:
            examples = ctl_core.data.own_rows(examples)
        elif case.kind == "index_shuffle":
            examples = examples.unbatch()
        return examples.map(preparation.prepare).batch(PREPARED_TOGETHER)

    def create_model() -> keras.Model:
        if case.is_logical:
            return small.model_with(keras.layers.Dropout(0.3))
        return small.create_model()

    def create_eval_dataset() -> tf.data.Dataset:
        indices = tf.data.Dataset.range(EVALUATED)
        if is_marked:
            indices = ctl_core.data.own_rows(indices)
        return indices.map(lambda index: evaluated.prepare(index, tf.stack([index, SEED]))).batch(5)

    hooks = small.hooks(create_dataset=create_dataset, create_model=create_model)
    if not case.has_evaluation:
        return hooks
    evaluated = Preparation()
    return SimpleNamespace(
        **vars(hooks),
        create_eval_dataset=create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        metric_pre=lambda output, batch: (batch[1], output),
    )


def train_case(runs: Path, run: str, is_marked: bool = True) -> tuple[ctl_core.State, int]:
    """Trains a case, and returns its state and the number of examples that were prepared.

    In a run ``whole-CASE``, the chief copies its folder to ``killed-CASE`` and ``alone-CASE``, as a
    kill at step ``KILLED`` would leave it.
    """
    kind, _, name = run.partition("-")
    case = CASES[name]
    preparation = Preparation()
    hooks = make_hooks(case, preparation, is_marked)

    def kill(chief: bool) -> None:
        if chief and kind == "whole":
            for copy in ("killed", "alone"):
                engine.leave_as_killed(runs / run, runs / f"{copy}-{name}")

    hooks.at_step = {KILLED: kill}
    settings: dict[str, Any] = {}
    if case.is_logical:
        settings["logical_replicas"] = LOGICAL_REPLICAS
    state = engine.train(
        hooks,
        runs,
        run_name=run,
        steps=STEPS,
        ckpt_every=LAST_SAVED,
        batch_size=BATCH,
        eval_batch_size=EVAL_BATCH,
        last_batch=case.last_batch,
        seed=SEED,
        **settings,
    )
    return state, preparation.number


def describe(state: ctl_core.State) -> dict[str, Any]:
    """Returns the weights and the values of the last evaluation."""
    weights = [weight.numpy().tolist() for weight in state.train_model.weights]
    return {"weights": weights, "metrics": state.metrics}


def main(folder: Path, *runs: str) -> None:
    """Trains runs in one process of a cluster, one after the other."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    for run in runs:
        state, prepared = train_case(folder, run)
        saved = {"prepared": prepared, **describe(state)}
        (folder / f"{run}-{task}.json").write_text(json.dumps(saved))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
