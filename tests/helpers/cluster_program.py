"""Runs test cases in one process of a cluster, and writes their results for the test.

``python -m tests.helpers.cluster_program FOLDER CASE...`` runs each case, which is a function
below. Starting a process takes seconds, so a cluster runs several cases one after the other.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.helpers import cases
from tests.helpers.cases import make_hooks

TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0


def run(folder: Path, name: str, hooks: Any, **settings: Any) -> ctl_core.State:
    settings = {"batch_size": 24, "learning_rate": 0.01, "runs_dir": folder / "runs", **settings}
    settings |= {"run_name": name, "runs_dir": str(settings["runs_dir"])}
    return ctl_core.train(hooks, ctl_core.Config(**settings))


def keep(folder: Path, name: str, **arrays: Any) -> None:
    """Writes the result of this process."""
    np.savez(folder / f"{name}-{TASK}.npz", **arrays)


def keep_message(folder: Path, name: str, hooks: Any, **settings: Any) -> None:
    """Writes the message with which a run is refused or fails."""
    message = "nothing found"
    try:
        run(folder, name, hooks, **settings)
    except (ctl_core.SetupError, ctl_core.RunError) as error:
        message = str(error)
    keep(folder, name, message=message)


def terminated_while_joining(folder: Path) -> None:
    """Sends SIGTERM to one process while TensorFlow's handler is installed.

    This must be the first case of its cluster, because a process joins a cluster only once.
    """
    join = tf.distribute.MultiWorkerMirroredStrategy.__init__

    def join_and_signal(strategy: Any, *args: Any) -> None:
        join(strategy, *args)
        if TASK == 1:
            signal.raise_signal(signal.SIGTERM)

    with patch.object(tf.distribute.MultiWorkerMirroredStrategy, "__init__", join_and_signal):
        stopped = run(folder, "joining", make_hooks(), steps=4)
    resumed = run(folder, "joining", make_hooks(), steps=4)
    keep(folder, "joining", steps=[stopped.step, resumed.step], stopped_by=stopped.stopped_by)


def random_numbers(folder: Path) -> None:
    """Writes the outputs of three steps of Dropout on ones, uninterrupted and resumed."""

    def create_model() -> keras.Model:
        inputs = keras.Input((cases.FEATURES,))
        dropped = keras.layers.Dropout(0.5)(inputs)
        return keras.Model(inputs, [dropped, keras.layers.Dense(1)(dropped)])

    seen: list[Any] = []
    hooks = make_hooks(
        create_model=create_model,
        input_pre=lambda batch: tf.ones_like(batch[0]),
        loss_pre=lambda output, batch: (output[1], batch[1]),
        every_steps={1: lambda output: seen.append(output[0].numpy())},
    )
    for name, cuts in (("whole", [3]), ("parts", [1, 3])):
        seen.clear()
        for steps in cuts:
            run(folder, f"dropout-{name}", hooks, steps=steps)
        keep(folder, f"dropout-{name}", seen=np.stack(seen))


def drift(folder: Path) -> None:
    """Adds the mean of its own share of the batch to a weight, which then differs by process."""

    def own_opinion(train_model: Any, batch: Any) -> None:
        layer = train_model.get_layer("out")
        layer.bias.assign_add([float(tf.reduce_mean(batch[0]))])

    keep_message(folder, "drift", make_hooks(every_steps={2: own_opinion}), steps=6, ckpt_every=3)


def decisions(folder: Path) -> None:
    """Requests a checkpoint and later a stop in one process; both must happen in all processes."""

    def ask(step: int, manager: Any) -> None:
        if TASK == 1 and step == 3:
            manager.save()
        if TASK == 1 and step == 7:
            raise ctl_core.StopTraining("enough")

    state = run(folder, "decisions", make_hooks(every_steps={1: ask}), steps=20)
    again = run(folder, "decisions", make_hooks(every_steps={1: ask}), steps=20)
    keep(folder, "decisions", step=state.step, again=again.step)


def not_finite(folder: Path) -> None:
    """Trains with a NaN loss for one example in step 3 and one in step 4, both in one process."""
    inputs, target = cases.regression_data()
    target = target.copy()
    target[[3 * 24 - 1, 4 * 24 - 1]] = np.nan
    hooks = make_hooks(create_dataset=cases.sliced((inputs, target)))
    state = run(folder, "warned", hooks, steps=4)
    noted = state.progress.noted
    keep(folder, "warned", noted=[noted.first, noted.latest, noted.steps, int(state.diverged)])
    keep_message(folder, "stopped", hooks, steps=8, on_nan="stop", ckpt_every=2)


def threads_differ(folder: Path) -> None:
    """Uses more threads in one process, as on a machine with more cores.

    This must be the only case of its cluster, because TensorFlow sets the number of threads only
    once.
    """
    settings = {"logical_replicas": 2, "intra_op_threads": 1 + TASK}
    keep_message(folder, "threads", make_hooks(), steps=1, **settings)


def kernels_differ(folder: Path) -> None:
    """Sets an environment variable that chooses other kernels in one process."""
    name = "TF_ENABLE_ONEDNN_OPTS"
    before = os.environ.pop(name, None)
    if TASK == 1:
        os.environ[name] = "0"
    keep_message(folder, "kernels", make_hooks(), steps=1, logical_replicas=2)
    os.environ.pop(name, None)
    if before is not None:
        os.environ[name] = before


def settings_differ(folder: Path) -> None:
    """Uses a different learning rate in one process."""
    keep_message(folder, "settings", make_hooks(), steps=1, learning_rate=0.1 * (1 + TASK))


def data_differs(folder: Path) -> None:
    """Omits the first example, later ones, or some of the evaluation in one process."""
    data = cases.regression_data()

    def cut(first: int, last: int | None) -> Any:
        return cases.sliced(tuple(np.concatenate([p[:first], p[last:]]) for p in data))

    def exchange(output: Any, batch: Any) -> Any:
        return batch[1], output + 0 * tf.reduce_mean(ctl_core.all_gather(output))

    metrics = {"create_metrics": lambda: {"mse": keras.metrics.MeanSquaredError()}}
    shorter = make_hooks(
        create_eval_dataset=cut(48, 48 + 24 * TASK), metric_pre=exchange, **metrics
    )
    for name, hooks, how_long in (
        ("data", make_hooks(create_dataset=cut(0, TASK)), {"steps": 1}),
        ("later", make_hooks(create_dataset=cut(50, 50 + TASK)), {"steps": 4}),
        ("fewer", make_hooks(create_dataset=cut(72, 72 + 24 * TASK)), {"epochs": 2}),
        ("evaluated", make_hooks(create_eval_dataset=cut(48, 48 + TASK)), {"steps": 1}),
        ("exchanged", shorter, {"steps": 1}),
    ):
        keep_message(folder, name, hooks, **how_long)


def rows_differ(folder: Path) -> None:
    """Uses different targets in one process, except for the first row of each batch."""
    inputs, target = cases.regression_data()
    if TASK == 1:
        target = target + 10.0 * (np.arange(len(target)) % 24 > 0)[:, None].astype("float32")
    keep_message(folder, "rows", make_hooks(create_dataset=cases.sliced((inputs, target))), steps=4)


def programs_differ(folder: Path) -> None:
    """Uses a different activation, loss, optimizer, callbacks.py or module in one process."""

    def create_model() -> keras.Model:
        activation = "relu" if TASK == 1 else "tanh"
        return keras.Sequential([keras.Input((cases.FEATURES,)), keras.layers.Dense(1, activation)])

    def create_loss() -> Any:
        error = keras.losses.MeanSquaredError(reduction="none")
        return lambda pair: (1.0 + TASK) * error(pair[1], pair[0])

    def create_opt(lr: Any) -> keras.Optimizer:
        return keras.optimizers.SGD(lr, momentum=0.5 + 0.1 * TASK)

    for name, hooks in (
        ("activation", make_hooks(create_model=create_model)),
        ("loss", make_hooks(create_loss=create_loss)),
        ("optimizer", make_hooks(create_opt=create_opt)),
        ("hooks", make_hooks(__file_content__=b"loss *= 2" * TASK)),
    ):
        keep_message(folder, name, hooks, steps=1)
    project = folder / f"project-{TASK}"
    project.mkdir()
    (project / "helper_of_a_project.py").write_text(f"FACTOR = {1 + TASK}\n")
    sys.path.insert(0, str(project))
    before = Path.cwd()
    os.chdir(project)
    importlib.import_module("helper_of_a_project")
    keep_message(folder, "module", make_hooks(), steps=1)
    os.chdir(before)


def folders_differ(folder: Path) -> None:
    """Gives each process its own folder of runs, in which only the chief finds its checkpoint."""
    settings = {"runs_dir": folder / f"runs-{TASK}"}
    run(folder, "apart", make_hooks(), steps=2, **settings)
    keep_message(folder, "apart", make_hooks(), steps=4, **settings)


def layers_frozen_unalike(folder: Path) -> None:
    """Freezes a layer in one process only."""

    def freeze(train_model: Any) -> None:
        if TASK == 1:
            train_model.get_layer("hidden").trainable = False

    keep_message(folder, "frozen", make_hooks(at_step={2: freeze}), steps=4)


def variables_differ(folder: Path) -> None:
    """Assigns a value that differs between the processes, each of which has one logical replica."""

    class Total(keras.Layer):
        def build(self, shape: Any) -> None:
            self.total = self.add_weight(shape=(), trainable=False, name="total")

        def call(self, values: tf.Tensor) -> tf.Tensor:
            self.total.assign(tf.reduce_sum(values))
            return values

    hooks = make_hooks(create_model=lambda: small.model_with(Total()))
    keep_message(folder, "written", hooks, steps=2, logical_replicas=2)


def hook_state(folder: Path) -> None:
    """Writes the state of host hooks, which differs between processes until the run resumes.

    It then comes from the checkpoint, which has the chief's state.
    """
    seen: list[Any] = []

    def remember(step: int, chief: bool, state: dict[str, Any]) -> None:  # noqa: ARG001  (hooks take values by name)
        seen.append((chief, state.get("of", -1)))
        state.setdefault("of", TASK)

    for steps in (2, 3):
        run(folder, "state", make_hooks(every_steps={1: remember}), steps=steps)
    keep(folder, "state", seen=seen)


if __name__ == "__main__":
    for case in sys.argv[2:]:
        globals()[case](Path(sys.argv[1]))
