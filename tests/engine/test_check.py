"""``train --check``: devices are compared, everything is tried once, and nothing stays."""

import fcntl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import engine, small
from tests.golden.catalogue import NAMES, SETTINGS, load_program
from tests.helpers.cases import dropout_model, make_hooks, regression_data, sliced

Check = Callable[..., ctl_core.State]
Output = pytest.CaptureFixture[str]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Returns ``check(hooks, **settings)``; afterwards, no temporary folder may be left."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(hooks: Any, **settings: Any) -> ctl_core.State:
        own = {"steps": 20_000, "batch_size": 16, "run_name": "run"}
        own["runs_dir"] = str(tmp_path / "runs")
        try:
            return ctl_core.check(hooks, ctl_core.Config(**{**own, **settings}))
        finally:
            assert list(temporary.glob("ctl_core-check-*")) == []

    return run


def hooks(**more: Any) -> Any:
    inputs, target = regression_data()
    own = {"create_eval_dataset": sliced((inputs[:64], target[:64]))}
    return make_hooks(**{**own, **more})


class Worst(keras.metrics.Mean):
    """The largest error: no sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(tf.maximum(self.total, tf.reduce_max(tf.abs(y_true - y_pred))))
        self.count.assign(1.0)


class Warm(keras.layers.Layer):
    """Counts the examples that it has seen."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(
            dtype="int64", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(tf.shape(inputs, tf.int64)[0])
        return inputs * tf.minimum(1.0, tf.cast(self.seen, tf.float32) / 320.0)


class Plateau:
    """Remembers the best loss where no checkpoint does."""

    best = 0.0

    def judge(self, metrics: Any) -> None:
        self.best = metrics["loss"]


def draw(batch: Any, training: bool) -> Any:
    noise = np.random.normal(size=5).astype("float32")
    return batch[0] + noise if training else batch[0]


# Mistakes that train without a word, and how the line begins that names each.
WRONG: dict[str, dict[str, Any]] = {
    r"check: metric_pre .*: the metric worst differs: .* give .*all_gather": {
        "create_metrics": lambda: {"worst": Worst()}
    },
    r"check: create_model .*: the variable .*/seen of the layer .* differs": {
        "create_model": lambda: keras.Sequential([keras.Input((5,)), Warm(), keras.layers.Dense(1)])
    },
    r"check: create_loss \(test_check.py:\d+\): the loss .*differs: it is no sum": {
        "create_loss": lambda: lambda pair: tf.reduce_sum((pair[0] - pair[1][:, 0]) ** 2)
    },
    r"check: update_pre \(test_check.py:\d+\): the update .*/kernel differs": {
        "update_pre": lambda gradients, batch: ([g * len(batch[0]) for g in gradients], [])
    },
    r"input_pre \(test_check.py:\d+\): draws random": {"input_pre": draw},  # each time it is traced
}


class Penalty(keras.layers.Layer):
    """Adds a loss that is a sum over the rows of a replica, where a mean is right."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.01 * tf.reduce_sum(inputs**2))
        return inputs


class Shift(keras.layers.Layer):
    """Shifts training inputs by a value of the replica's rows, times a stateless draw."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        drawn = tf.random.stateless_uniform([], [0, 7])
        return inputs + tf.stop_gradient(drawn * tf.reduce_max(inputs, 0, keepdims=True))


def model_with(layer: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])


def negatives(pair: Any) -> tf.Tensor:
    """A loss for each example that looks at the other rows of the batch."""
    scores = tf.matmul(pair[0], pair[1], transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores)


COUNT = tf.Variable(0, trainable=False, name="count")
ANNEALED = {"beta": 0.0}


def count_update(gradients: Any) -> Any:
    COUNT.assign_add(1)
    return gradients, gradients


def add_annealed_term(loss: Any, output: Any, train_model: Any) -> Any:
    term = ANNEALED["beta"] * tf.reduce_mean(output**2, axis=1)
    return loss + term, 0.0, train_model.trainable_variables


def anneal(step: int) -> None:
    ANNEALED["beta"] += 0.125


class WithRate(keras.Model):
    """Scales its output by an attribute in Python, which a host hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.scale = 1.0

    def call(self, inputs: Any) -> Any:
        return self.scale * self.dense(inputs)


def change_scale(train_model: Any) -> None:
    train_model.scale = 0.5


WRONG |= {
    r"check: create_model .*: the loss differs by add_loss of the layer penalty": {
        "create_model": lambda: model_with(Penalty())
    },
    r"check: create_model .*: the output 0 differs": {"create_model": lambda: model_with(Shift())},
    r"check: create_loss \(test_check.py:\d+\): the loss differs": {
        "create_loss": lambda: negatives
    },
    r"the step writes count, which was made outside of the hooks": {"update_pre": count_update},
    r"grad_pre \(test_check.py:\d+\): ANNEALED\['beta'\] is read only .* every_steps.*Variable": {
        "grad_pre": add_annealed_term, "every_steps": {5: anneal}
    },
    r"create_model \(test_check.py:\d+\): scale is read only .* every_steps": {
        "create_model": WithRate, "every_steps": {5: change_scale}
    },
}  # fmt: skip


QUICK = [
    message for message in WRONG if "worst" in message or "penalty" in message or "beta" in message
]


@pytest.mark.parametrize("message", small.slow_but(*QUICK, of=WRONG))
def test_mistakes_that_training_does_not_show_are_named(check: Check, message: str) -> None:
    with pytest.raises(ctl_core.SetupError, match=f"^{message}"):
        check(hooks(**WRONG[message]))


def test_all_differences_are_listed_with_the_most_probable_cause_first(
    check: Check, capsys: Output
) -> None:
    with pytest.raises(ctl_core.SetupError) as refused:
        check(hooks(create_loss=lambda: negatives))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  - ")]
    assert len(lines) > 2 and all("differs" in line for line in lines)
    assert str(refused.value) == f"check: {lines[0].removeprefix('  - ')}"


def test_a_dataset_of_one_batch_is_repeated_for_the_comparison(
    check: Check, capsys: Output
) -> None:
    """As of a graph network that takes all nodes in each step; with 2 rows, 3 devices need more."""
    inputs, target = regression_data()
    for rows in (20, 2):
        dataset = tf.data.Dataset.from_tensors((inputs[:rows], target[:rows]))
        check(hooks(create_dataset=lambda dataset=dataset: dataset), batch_size=rows)
    assert capsys.readouterr().out.count("check: all well") == 2


def test_devices_that_cannot_be_compared_are_an_error(check: Check) -> None:
    """A hook that insists on the run's own batch size."""

    def input_pre(batch: Any) -> Any:
        return tf.ensure_shape(batch[0], [16, 5])

    with pytest.raises(ctl_core.RunError, match=r"^check: one device cannot be compared with 3: "):
        check(hooks(input_pre=input_pre))


def test_values_that_every_replica_has_alike_do_not_differ(check: Check, capsys: Output) -> None:
    """An output that has no row for each example is there once for each device."""

    class WithTemperature(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.temperature = self.add_weight(shape=(1,), initializer="ones")

        def call(self, inputs: Any) -> Any:
            return {"logits": self.dense(inputs) * self.temperature, "scale": self.temperature * 1}

    def loss_pre(output: Any, batch: Any) -> Any:
        return output["logits"], batch[1]

    check(hooks(create_model=WithTemperature, loss_pre=loss_pre, metric_pre=lambda: {}))
    assert "check: all well" in capsys.readouterr().out


# For a check they are like others, and take half of the time.
ALIKE = """
    diffusion embedding experts fine_tuning gradient_surgery l2 lora multi_task transformer
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALIKE.split()])
def test_what_trains_rightly_is_well(check: Check, name: str, capsys: Output) -> None:
    program = load_program(name)
    check(program.hooks(), **{**SETTINGS, **program.settings})
    said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert all("the loss does not depend on" in line for line in said), said


def test_every_hook_runs_once_and_a_run_that_is_there_is_neither_read_nor_locked(
    check: Check, tmp_path: Path, capsys: Output
) -> None:
    """Each hook has what it would have."""
    engine.train(hooks(), tmp_path / "runs", steps=4)
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    capsys.readouterr()
    ran: list[Any] = []

    def note(name: str) -> Any:
        def late(step: int, batch: Any, config: Any, chief: bool, manager: Any) -> None:
            ran.append((name, step, batch[0].shape[0], config.steps, chief))
            assert manager.latest_checkpoint  # one is there to be restored, as there would be

        return late

    def stop(step: int) -> None:
        ran.append(("stop", step))
        raise ctl_core.StopTraining("Enough.")

    own = hooks(
        create_model=dropout_model,
        every_steps={3: note("third"), 10: [ctl_core.deferred(lambda step: ran.append(step))]},
        at_step={10_000: [stop, note("late")]},
        after_eval=[lambda metrics, step: ran.append((sorted(metrics), step)), Plateau().judge],
        at_end=lambda reason: ran.append(reason),
    )
    settings = {"virtual_devices": 2, "keep_best": "loss", "ckpt_every": "10min", "warmup": 50}
    with (tmp_path / "runs/run/train.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert check(own, **settings).step == 2
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before
    assert ran == [
        ("third", 3, 16, 20_000, True),
        10,
        ("stop", 10_000),
        ("late", 10_000, 16, 20_000, True),
        (["loss"], 2),
        "done",
    ]
    said = capsys.readouterr().out
    assert said.startswith("check of run: ") and "\ncheck: all well, " in said
    for part in (
        "a step and an evaluation on one and on 3 devices were compared",
        "73 parameters to train",
        ") ran, as after step 10000\n",
        ") ran, as after step 10000; it ends training there. Enough.",
        "  evaluate, predict, export, load: loss ",
    ):
        assert part in said
    (remembered,) = [line for line in said.splitlines() if " remembers " in line]
    assert "after_eval (test_check.py:" in remembered and " remembers best in Python" in remembered
