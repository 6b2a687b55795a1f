"""Tests of ``train --check``, which compares devices, runs each hook once and leaves no files."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import compat
from ctl_core.commands import compare_devices
from ctl_core.commands.check_console import CheckConsole
from ctl_core.hooks.load import load_hooks
from ctl_core.numerics.randomness import is_noise_of_replica
from ctl_core.run.files import lock_run, release_run
from tests.golden import engine, small
from tests.golden.catalogue import NAMES, SETTINGS, load_program
from tests.helpers.cases import dropout_model, make_hooks, regression_data, sliced

Check = Callable[..., ctl_core.State]
Compare = Callable[..., None]
Output = pytest.CaptureFixture[str]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Returns ``check(hooks, **settings)``, which also asserts that no temporary folder is left."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(hooks: Any, **settings: Any) -> ctl_core.State:
        defaults = {"steps": 20_000, "batch_size": 16, "run_name": "run"}
        defaults["runs_dir"] = str(tmp_path / "runs")
        try:
            return ctl_core.check(hooks, ctl_core.Config(**{**defaults, **settings}))
        finally:
            assert list(temporary.glob("ctl_core-check-*")) == []

    return run


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Returns ``compare(hooks, **settings)``, the part of ``check`` that compares devices."""

    def run(hooks: Any, **settings: Any) -> None:
        small_run = {"steps": 2, "batch_size": 16, "limit_eval": 1, "on_nan": "stop"}
        place = {"runs_dir": str(tmp_path / "runs"), "run_name": "run"}
        config = ctl_core.Config(**{**small_run, **place, **settings})
        loaded_hooks, _ = load_hooks(hooks, config)
        compare_devices.compare_devices(loaded_hooks, config, CheckConsole(), by_rows=True)

    return run


def hooks(**more: Any) -> Any:
    inputs, target = regression_data()
    evaluation = {"create_eval_dataset": sliced((inputs[:64], target[:64]))}
    return make_hooks(**{**evaluation, **more})


class Worst(keras.metrics.Mean):
    """Computes the largest error, which is not a sum over the examples."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(tf.maximum(self.total, tf.reduce_max(tf.abs(y_true - y_pred))))
        self.count.assign(1.0)


class Warm(keras.layers.Layer):
    """Scales its input by a factor that grows with the number of examples seen in training."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(
            dtype="int64", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(tf.shape(inputs, tf.int64)[0])
        return inputs * tf.minimum(1.0, tf.cast(self.seen, tf.float32) / 320.0)


class Summed(keras.layers.Layer):
    """Adds a sum over the batch to the loss. Only a mean is independent of the replicas' shares."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.01 * tf.reduce_sum(inputs**2))
        return inputs


def create_domains(global_batch_size: int) -> tf.data.Dataset:
    """Returns batches that are structured differently from the batches of the evaluation."""
    examples = sliced(regression_data())(global_batch_size)
    return examples.map(lambda x, y: {"source": x, "label": y, "target": x + 1.0})


class DomainModel(keras.Model):
    """Takes inputs of two domains in training, as in domain adaptation, and of one otherwise."""

    def __init__(self, interacts: bool = False) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.interacts = interacts

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return self.out(inputs)
        source, target = inputs
        if self.interacts:
            target -= tf.reduce_mean(target, axis=0)
        return self.out(source), self.out(target)


DOMAINS = {
    "create_dataset": create_domains,
    "create_model": DomainModel,
    "input_pre": lambda batch, training: (
        (batch["source"], batch["target"]) if training else batch[0]
    ),
    "loss_pre": lambda output, batch, training: (
        (output[0] + 0.1 * output[1], batch["label"]) if training else (output, batch[1])
    ),
}


class Shifted(keras.Model):
    """Lets a row's output depend on the other rows of the replica's share, in training only.

    The random number that it draws is the same on all replicas.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            largest = tf.reduce_max(inputs, 0, keepdims=True)
            inputs += tf.stop_gradient(largest) * tf.random.stateless_uniform([], [0, 7])
        return self.out(inputs)


class Plateau:
    """Remembers the best loss in a Python attribute, which no checkpoint contains."""

    best = 0.0

    def judge(self, metrics: Any) -> None:
        self.best = metrics["loss"]


def draw(batch: Any, training: bool) -> Any:
    noise = np.random.normal(size=5).astype("float32")
    return batch[0] + noise if training else batch[0]


# Hooks with a mistake that training does not report. The key is a pattern for the beginning of the
# message with which the check reports it.
WRONG: dict[str, dict[str, Any]] = {
    r"check: create_model .*: the variable .*/seen of the layer .* differs": {
        "create_model": lambda: keras.Sequential([keras.Input((5,)), Warm(), keras.layers.Dense(1)])
    },
    r"check: update_pre \(test_check.py:\d+\): the updates .*/kernel, .* differ": {
        "update_pre": lambda gradients, batch: ([g * len(batch[0]) for g in gradients], [])
    },
    r"check: create_model .*: the extra loss \(add_loss of the layer 'summed' \(Summed\)\) dif": {
        "create_model": lambda: small.model_with(Summed())
    },
    r"check: grad_pre \(test_check.py:\d+\): the extra loss differs": {
        "grad_pre": lambda loss, output, train_model: (
            loss,
            tf.reduce_sum(output**2),
            train_model.trainable_variables,
        )
    },
    r"check: create_model .*: the output 0 differs": {"create_model": lambda: Shifted()},
    r"check: create_model .*: the output 1 differs": {
        **DOMAINS,
        "create_model": lambda: DomainModel(interacts=True),
    },
}


def negatives(pair: Any) -> tf.Tensor:
    """Returns the loss of each example, which also depends on the other rows of the batch."""
    scores = tf.matmul(pair[0], pair[1], transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores)


WRONG |= {
    r"check: create_loss \(test_check.py:\d+\): the loss differs: ": {
        "create_loss": lambda: negatives
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("message", WRONG)
def test_mistakes_that_training_does_not_show_are_named(compare: Compare, message: str) -> None:
    with pytest.raises(ctl_core.SetupError, match=f"^{message}"):
        compare(hooks(**WRONG[message]))


@pytest.mark.slow
def test_numbers_that_python_draws_are_named(check: Check) -> None:
    """The NumPy function draws new numbers each time that the hook is traced."""
    message = r"^input_pre \(test_check.py:\d+\): draws random"
    with pytest.raises(ctl_core.SetupError, match=message):
        check(hooks(input_pre=draw))


@pytest.mark.slow
def test_a_dataset_of_one_batch_is_repeated_for_the_comparison(
    check: Check, capsys: Output
) -> None:
    """A dataset of one batch passes the check, even if the batch has fewer rows than devices.

    A graph network, for example, uses all nodes in each step.
    """
    inputs, target = regression_data()
    for rows in (20, 2):
        dataset = tf.data.Dataset.from_tensors((inputs[:rows], target[:rows]))
        check(hooks(create_dataset=lambda dataset=dataset: dataset), batch_size=rows)
    assert capsys.readouterr().out.count("check: all well") == 2


def test_devices_that_cannot_be_compared_are_an_error(check: Check) -> None:
    """The check reports an error if a hook accepts no batch size except the run's own."""

    def input_pre(batch: Any) -> Any:
        return tf.ensure_shape(batch[0], [16, 5])

    with pytest.raises(ctl_core.RunError, match=r"^check: one device cannot be compared with 3: "):
        check(hooks(input_pre=input_pre))


@pytest.mark.slow
def test_values_that_every_replica_has_alike_do_not_differ(check: Check, capsys: Output) -> None:
    """The check accepts an output that has one value per device instead of one row per example."""

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
    printed = capsys.readouterr().out
    assert "check: all well" in printed
    assert "bits" not in printed  # they are compared with logical replicas only
    assert "  XLA can compile the step as it was traced on a CPU\n" in printed


# Programs that are not checked. They resemble other programs and would double the time of the test.
ALIKE = """
    diffusion embedding experts fine_tuning gradient_surgery l2 lora multi_task neural_ode
    transformer
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALIKE.split()])
def test_check_passes_the_golden_programs(check: Check, name: str, capsys: Output) -> None:
    program = load_program(name)
    check(program.hooks(), **{**SETTINGS, **program.settings})
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert all("the loss does not depend on" in line for line in warnings), warnings


@pytest.mark.slow
def test_every_hook_runs_once_and_a_run_that_is_there_is_neither_read_nor_locked(
    check: Check, tmp_path: Path, capsys: Output
) -> None:
    """Hooks receive the arguments of a real training run."""
    engine.train(hooks(), tmp_path / "runs", steps=4)
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    capsys.readouterr()
    ran: list[Any] = []

    def note(name: str) -> Any:
        def late(step: int, batch: Any, config: Any, chief: bool, manager: Any) -> None:
            ran.append((name, step, batch[0].shape[0], config.steps, chief))
            assert manager.latest_checkpoint  # A hook can restore a checkpoint, as in training.

        return late

    def stop(step: int) -> None:
        ran.append(("stop", step))
        raise ctl_core.StopTraining("Enough.")

    counted_hooks = hooks(
        create_model=dropout_model,
        every_steps={3: note("third"), 10: [ctl_core.deferred(lambda step: ran.append(step))]},
        at_step={10_000: [stop, note("late")]},
        after_eval=[lambda metrics, step: ran.append((sorted(metrics), step)), Plateau().judge],
        at_end=lambda reason: ran.append(reason),
    )
    settings = {"virtual_devices": 2, "keep_best": "loss", "ckpt_every": "10min", "warmup": 50}
    lock = lock_run(tmp_path / "runs/run")
    assert lock is not None
    assert check(counted_hooks, **settings).step == 2
    release_run(tmp_path / "runs/run", lock)
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
    printed = capsys.readouterr().out
    assert printed.startswith("check: everything is in a temporary folder")
    assert "\ncheck: all well, " in printed
    for pattern in (
        "a step and an evaluation on one and on 3 devices were compared",
        "73 parameters to train",
        ") ran, as after step 10000\n",
        ") ran, as after step 10000; it ends training here. Enough.",
        "  evaluate, predict, export, load: loss ",
    ):
        assert pattern in printed
    (remembered,) = [line for line in printed.splitlines() if " remembers " in line]
    assert "after_eval (test_check.py:" in remembered
    assert " remembers best in Python" in remembered


# ---- Comparison of devices -------------------------------------------------------------------


def survival_hooks(scale: float, wrong: float = 1.0) -> Any:
    """Returns the hooks of a survival model with the loss of Cox, which exchanges what it needs.

    If nothing is wrong, each batch has a single event, of the patient who is observed longest. The
    loss of this patient is a difference of equal numbers, and its gradient is zero.

    Args:
        scale: a number that multiplies the loss
        wrong: a number that multiplies the loss of the second replica
    """
    inputs = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    times = np.tile(np.arange(8, dtype="float32"), 4)
    events = (times == 7.0) | (wrong != 1.0) & (times % 2.0 == 0.0)

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1, use_bias=False)]
        return keras.Sequential([keras.Input((4,)), *layers])

    def loss(pair: Any) -> tf.Tensor:
        risk, target = pair[0][:, 0], pair[1]
        risks, all_times = ctl_core.all_gather((risk, target["time"]))
        is_at_risk = all_times[None, :] >= target["time"][:, None]
        total = tf.reduce_logsumexp(tf.where(is_at_risk, risks[None, :], -1e9), 1)
        factor = scale * tf.where(tf.equal(ctl_core.replica_id(), 1), wrong, 1.0)
        return factor * target["event"] * (total - risk)

    return make_hooks(
        create_dataset=sliced((inputs, {"time": times, "event": events.astype("float32")})),
        create_model=create_model,
        create_loss=lambda: loss,
        create_opt=lambda lr: keras.optimizers.Adam(lr),
        batch_weight=lambda batch: tf.reduce_sum(batch[1]["event"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_rounding_errors_of_a_sum_that_cancels_are_no_difference(
    compare: Compare, scale: float
) -> None:
    compare(survival_hooks(scale), batch_size=8)


@pytest.mark.parametrize("scale", small.slow_but(1e-6, of=(1.0, 1e6, 1e-6)))
def test_an_error_of_one_percent_is_found_in_any_unit(compare: Compare, scale: float) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"create_loss .* differ"):
        compare(survival_hooks(scale, wrong=1.01), batch_size=8)


@pytest.mark.slow
def test_weights_of_a_batch_that_replicas_exchange_are_compared(compare: Compare) -> None:
    """The weight is the number of errors above the mean error; exchanged twice, it is wrong."""

    def count_large(output: Any, batch: Any) -> tf.Tensor:
        errors = tf.abs(output - batch[1])
        is_large = errors > ctl_core.all_reduce(tf.reduce_mean(errors), "mean")
        return tf.reduce_sum(tf.cast(is_large, tf.float32))

    compare(hooks(batch_weight=count_large))

    def count_twice(output: Any, batch: Any) -> tf.Tensor:
        return ctl_core.all_reduce(count_large(output, batch))

    with pytest.raises(ctl_core.SetupError, match=r"batch_weight .*: the weight of the batch d"):
        compare(hooks(batch_weight=count_twice))


@pytest.mark.parametrize(
    ("batch", "micro_batches", "size"),
    [(64, 1, 64), (63, 1, 62), (1, 1, 4), (3, 1, 4), (6, 1, 5), (64, 2, 61), (1, 4, 5), (8, 8, 10)],
)
def test_batches_of_the_check_have_unequal_shares(
    batch: int, micro_batches: int, size: int
) -> None:
    config = ctl_core.Config(batch_size=batch, accumulate_steps=micro_batches)
    assert compare_devices.choose_uneven_size(config) == size


@pytest.mark.slow
def test_check_fails_where_devices_cannot_be_compared(check: Check, capsys: Output) -> None:
    """If a hook works for equal shares only, the check compares equal shares, but still fails."""

    def loss_pre(output: Any, batch: Any) -> Any:
        rows = tf.shape(output)[0]
        gathered = ctl_core.all_gather(output)
        first = rows * ctl_core.replica_id()  # The offset is wrong if shares differ in size.
        rows_of_replica = gathered[first : first + rows]
        return tf.ensure_shape(rows_of_replica, output.shape), batch[1]

    def create_loss() -> Any:
        def loss(pair: Any) -> tf.Tensor:
            if pair[0].shape[0] is None:
                raise ValueError("rows of other replicas")
            return tf.reduce_sum((pair[0] - pair[1]) ** 2, axis=1)

        return loss

    with pytest.raises(ctl_core.RunError, match=r"batch of 16, which 3 .*rows of other") as error:
        check(hooks(loss_pre=loss_pre, create_loss=create_loss))
    assert error.value.exit_code == 1
    printed = capsys.readouterr().out
    assert "were compared, with batches of 15" in printed
    assert "all well" not in printed


@pytest.mark.slow
def test_all_differences_are_listed_in_the_order_of_their_causes(
    compare: Compare, capsys: Output
) -> None:
    def create_loss() -> Any:
        return lambda pair: tf.reduce_sum((pair[0] - pair[1][:, 0]) ** 2)

    wrong = hooks(create_loss=create_loss, create_metrics=lambda: {"worst": Worst()})
    with pytest.raises(
        ctl_core.SetupError, match=r"^check: create_loss .* the loss differs"
    ) as error:
        compare(wrong)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  - ")]
    for line, pattern in zip(
        lines,
        (
            r"create_loss \(test_check.py:\d+\): the loss differs: it is not a sum",
            "the gradients ",
            "the loss of an eval",
            "metric_pre .*: the metric worst differs: .* pass .*all_gather",
        ),
        strict=True,
    ):
        assert re.search(pattern, line), line
    assert all(re.search("differs?[:,]", line) for line in lines)
    assert str(error.value) == f"check: {lines[0].removeprefix('  - ')}"
    assert "may follow from the above" in lines[1]
    assert "create_loss" not in lines[1]


class WithTemperature(keras.Model):
    """Returns a constant in addition to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return {"scores": self.out(inputs), "temperature": tf.constant([0.5])}


RIGHT: dict[str, dict[str, Any]] = {
    "a constant output": {
        "create_model": WithTemperature,
        "loss_pre": lambda output, batch: (output["scores"], batch[1]),
        "create_eval_dataset": None,
    },
    "training batches of another structure": DOMAINS,
    "a mean in add_loss": {
        "create_model": lambda: small.model_with(keras.layers.ActivityRegularization(l2=0.1))
    },
    "a dataset of one batch": {
        "create_dataset": lambda global_batch_size: tf.data.Dataset.from_tensors(
            tuple(array[:1] for array in regression_data())
        )
    },
    "a dataset of one batch, whose rest is dropped": {
        "create_dataset": sliced(tuple(array[:2] for array in regression_data()))
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RIGHT)
def test_check_passes_programs_that_are_right_on_any_devices(
    check: Check, case: str, capsys: Output
) -> None:
    batch_size = {"a dataset of one batch": 1}.get(case, 2 if "rest" in case else 16)
    check(hooks(**RIGHT[case]), batch_size=batch_size)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_variable_of_the_file_is_named(compare: Compare, dtype: str) -> None:
    count = tf.Variable(0, dtype=dtype, trainable=False, name="count")

    def update_pre(gradients: Any) -> Any:
        count.assign_add(1)
        return [gradient / tf.cast(count, tf.float32) for gradient in gradients], gradients

    with pytest.raises(
        ctl_core.SetupError, match=r"a training step assigns count, .*outside the hooks"
    ):
        compare(hooks(update_pre=update_pre))


# ---- Values in Python ------------------------------------------------------------------------

SETTINGS_OF_FILE: dict[str, Any] = {"beta": 0.0, "seen": 0}
BETA = 0.0


class Annealed(keras.layers.Layer):
    beta = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.table = 0.0, {"beta": 0.0}

    def call(self, inputs: Any) -> Any:
        return inputs * (1.0 + self.beta + self.table["beta"])


def penalize(loss: Any, output: Any, train_model: Any, beta: Any) -> Any:
    return loss + beta * tf.reduce_sum(output**2, 1), 0.0, train_model.trainable_variables


def of_global() -> dict[str, Any]:
    def grad_pre(loss: Any, output: Any, train_model: Any) -> Any:
        return penalize(loss, output, train_model, BETA)

    def anneal() -> None:
        globals()["BETA"] += 0.5  # Has the effect of a ``global BETA`` statement.

    def read_it_too() -> None:
        anneal()
        assert BETA > 0

    return {"grad_pre": grad_pre, "every_steps": {1: read_it_too}}


def of_dict() -> dict[str, Any]:
    def grad_pre(loss: Any, output: Any, train_model: Any) -> Any:
        return penalize(loss, output, train_model, SETTINGS_OF_FILE["beta"])

    def anneal() -> None:
        SETTINGS_OF_FILE["beta"] += 0.5

    return {"grad_pre": grad_pre, "every_steps": {1: anneal}}


def of_closure() -> dict[str, Any]:
    beta = 0.0

    def update_pre(gradients: Any) -> Any:
        return [gradient * (1.0 + beta) for gradient in gradients], gradients

    def anneal() -> None:
        nonlocal beta
        beta += 0.5

    return {"update_pre": update_pre, "at_step": {30: anneal}}


def of_default_argument() -> dict[str, Any]:
    scale = np.zeros(1, "float32")

    def input_pre(batch: Any, scale: Any = scale) -> Any:
        return batch[0] * (1.0 + scale)

    def anneal() -> None:
        scale[:] += 0.5

    return {"input_pre": input_pre, "after_eval": anneal}


def of_layer() -> dict[str, Any]:
    def anneal(train_model: Any) -> None:
        train_model.layers[1].table["beta"] = 0.5

    return {"create_model": lambda: small.model_with(Annealed()), "every_steps": {1: anneal}}


def of_model() -> dict[str, Any]:
    def create_model() -> Any:
        model = small.create_model()
        model.beta = 0.0
        return model

    def grad_pre(loss: Any, output: Any, train_model: Any) -> Any:
        return penalize(loss, output, train_model, train_model.beta)

    def anneal(step: int, train_model: Any) -> None:
        train_model.beta = min(1.0, step / 10)

    return {"create_model": create_model, "grad_pre": grad_pre, "every_steps": {1: anneal}}


def of_hparams() -> dict[str, Any]:
    def metric_pre(output: Any, batch: Any, hparams: Any) -> Any:
        return batch[1], output + hparams["beta"]

    def anneal(hparams: Any) -> None:
        hparams["beta"] += 0.5

    return {
        "create_metrics": lambda: {"error": keras.metrics.MeanAbsoluteError()},
        "metric_pre": metric_pre,
        "every_steps": {1: anneal},
    }


FROZEN: dict[str, Callable[[], dict[str, Any]]] = {
    "BETA": of_global,
    r"SETTINGS_OF_FILE\['beta'\]": of_dict,
    "beta": of_closure,
    "scale": of_default_argument,
    r"the layer 'annealed\w*'.table\['beta'\]": of_layer,
    "train_model.beta": of_model,
    r"hparams\['beta'\]": of_hparams,
}


@pytest.mark.parametrize("name", small.slow_but("train_model.beta", of=FROZEN))
def test_a_value_that_a_graph_has_kept_is_named(
    check: Check, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS_OF_FILE, "beta", 0.0)
    monkeypatch.setitem(globals(), "BETA", 0.0)
    message = rf"^\w+(\[\d+\])? .*: changes {name} from .* was traced, so every step uses "
    with pytest.raises(ctl_core.SetupError, match=message):
        check(hooks(**FROZEN[name]()), hparams={"beta": 0.0})


@pytest.mark.slow
def test_a_value_that_no_graph_reads_is_only_remembered(check: Check, capsys: Output) -> None:
    """A changed Python value causes only a warning if no graph reads it; a variable causes none."""

    def create_model() -> Any:
        model = small.create_model()
        model.beta = model.add_weight(name="beta", initializer="zeros", trainable=False)
        return model

    def grad_pre(loss: Any, output: Any, train_model: Any) -> Any:
        return penalize(loss, output, train_model, train_model.beta)

    def anneal(train_model: Any) -> None:
        train_model.beta.assign(0.5)
        SETTINGS_OF_FILE["seen"] += 1

    check(hooks(create_model=create_model, grad_pre=grad_pre, every_steps={1: anneal}))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "remembers SETTINGS_OF_FILE['seen'] in Python" in warnings[0]


def make_generator() -> tf.random.Generator:
    with tf.init_scope():
        return tf.random.Generator.from_seed(1)


@pytest.mark.parametrize(
    ("draw", "is_noise"),
    [
        (lambda x: tf.random.stateless_uniform([], [0, 1]), False),
        (lambda x: tf.random.stateless_normal([3], [0, 1]), False),
        (lambda x: tf.random.stateless_uniform(tf.shape(x), [0, 1]), True),
        (lambda x: tf.random.normal([]), True),
        (lambda x: make_generator().normal([]), True),
        (lambda x: tf.cond(x[0] > 0, lambda: x, lambda: -x), False),
    ],
)
def test_noise_of_a_replica_is_told_from_other_draws(draw: Any, is_noise: bool) -> None:
    with compat.make_scratch_graph("test").as_default() as graph:
        draw(tf.compat.v1.placeholder(tf.float32, [None]))
    operations = compat.add_called_ops(graph.get_operations())
    assert any(is_noise_of_replica(op) for op in operations) == is_noise


def depend_on_devices(output: Any, batch: Any) -> Any:
    """Changes the last bits of the output, depending on the number of devices."""
    devices = tf.distribute.get_strategy().num_replicas_in_sync
    return output * (1.0 + 1e-5 * devices), batch[1]


@pytest.mark.slow
def test_bits_of_logical_replicas_are_compared(check: Check, capsys: Output) -> None:
    """With logical replicas, the check compares bits, and does not ignore rounding errors."""
    settings = {"logical_replicas": 2, "seed": 3}
    noisy = {"create_model": dropout_model}
    check(hooks(**noisy), **settings)
    out = capsys.readouterr().out
    assert "an evaluation on one and on 3 devices were compared" in out
    assert "2 steps and an evaluation have the same bits on one and on 2 devices" in out
    message = r"^check: create_loss \(.*\): the loss has different bits on 2 devices than on one"
    with pytest.raises(ctl_core.SetupError, match=message):
        check(hooks(loss_pre=depend_on_devices), **settings)
    assert "on one and on 3 devices were compared" in capsys.readouterr().out
