"""Tests of programs and settings that ``logical_replicas`` refuses, and of resuming such runs.

A refusal is a one-line error before the first step. Each case is code that is added to the
callbacks.py of a project with logical replicas. The comment ``# here`` marks the line that the
error must name. The header of a case has a name, an arrow, and words that the error must contain.
"""

from pathlib import Path

import pytest
import yaml

import ctl_core
from ctl_core.checkpoint.logical_replicas import read_kernel_variables
from ctl_core.checkpoint.record import read_record, write_record
from ctl_core.cluster.task import count_cores
from tests.golden import compare, engine, small

engine.start_devices()

FLAGS = ("--steps=4", "--batch-size=16", "--run-name=a", "--ckpt-every=2", "--seed=7")
WITH = (*FLAGS, "--logical-replicas=4")


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> engine.Command:
    """Returns ``command(*words)``, which runs ``python -m ctl_core WORDS`` in the test's folder."""
    return engine.commands_here(tmp_path, monkeypatch, capfd)


def assert_refused(outcome: engine.Outcome, *words: str) -> None:
    """Asserts that a command failed with a one-line error that contains all given words."""
    (line,) = outcome.err.splitlines()
    assert outcome.code == 2
    assert line.startswith("error: ")
    assert "Error: " not in line.removeprefix("error: ")
    for word in words:
        assert word in line


def edit_saved_settings(run: Path, **settings: int | None) -> None:
    """Changes the config.yaml that a run has saved."""
    saved = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(saved | settings))


HOOKS = engine.read_table(
    """
== input_pre exchanges -> input_pre | all_reduce | logical replicas one after another
def input_pre(batch):
    return ctl.all_reduce(batch[0])  # here
== loss_pre gathers -> loss_pre | all_gather | leave out the call
def loss_pre(output, batch):
    return ctl.all_gather(output)[:4], batch[1]  # here
== a loss exchanges -> create_loss | all_reduce | logical_replicas
def create_loss():
    def loss(pair):
        return ctl.all_reduce(small.squared_error(pair))  # here
    return loss
== a hook asks TensorFlow for the context -> loss_pre | all_reduce | logical_replicas
def loss_pre(output, batch):
    return tf.distribute.get_replica_context().all_reduce("SUM", output), batch[1]  # here
== a layer exchanges in training on several replicas only -> create_model | all_reduce
class Centered(keras.layers.Layer):
    def call(self, inputs, training=False):
        if training and ctl.num_replicas() > 1:
            inputs = inputs - ctl.all_reduce(tf.reduce_mean(inputs), "mean")  # here
        return inputs
def create_model():
    return small.model_with(Centered())
== grad_pre exchanges -> grad_pre | all_reduce | logical_replicas
def grad_pre(loss, train_model):
    return ctl.all_reduce(loss), 0.0, train_model.trainable_variables  # here
== grad_pre applies an optimizer -> grad_pre | all_reduce | logical_replicas
def create_model():
    model = small.create_model()
    model.discriminator = keras.optimizers.SGD()
    model.discriminator.build(model.trainable_variables)
    return model
def grad_pre(loss, train_model):
    variables = train_model.trainable_variables
    pairs = [(tf.zeros(variable.shape), variable) for variable in variables]
    train_model.discriminator.apply_gradients(pairs)  # here
    return loss, 0.0, variables
== update_pre exchanges -> update_pre | all_reduce | logical_replicas
def update_pre(gradients):
    return [ctl.all_reduce(gradient) for gradient in gradients], gradients  # here
== update_post exchanges -> update_post | all_reduce | logical_replicas
def update_post(train_model):
    ctl.all_reduce(train_model.trainable_variables[0].value)  # here
== an optimizer exchanges -> create_opt | all_reduce | logical_replicas
class Summing(keras.optimizers.SGD):
    def apply_gradients(self, pairs):
        return super().apply_gradients([(ctl.all_reduce(g), v) for g, v in pairs])  # here
def create_opt(lr):
    return Summing(lr)
== metric_pre gathers -> metric_pre | all_gather | logical_replicas
def metric_pre(output, batch):
    return ctl.all_gather(output), ctl.all_gather(batch[1])  # here
== eval_pre exchanges -> eval_pre | all_reduce | logical_replicas
def eval_pre(loss):
    return ctl.all_reduce(loss), 0.0  # here
== batch normalization is synchronized -> create_model | 'normalized' is synchronized
def create_model():  # here
    normalized = keras.layers.BatchNormalization(synchronized=True, name="normalized")
    return small.model_with(normalized)
== a layer is stateful -> create_model | GRU | stateful=True
def create_model():  # here
    inputs = keras.Input(batch_shape=(4, 5))
    states = keras.layers.GRU(3, stateful=True)(keras.layers.Reshape((5, 1))(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(states))
== input_pre draws from a state of its own -> input_pre | RandomStandardNormal | SeedGenerator
def input_pre(batch):
    return batch[0] + tf.random.normal([])  # here
== a layer does -> create_model | RandomUniform | SeedGenerator
class Shifted(keras.layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.uniform([])  # here
def create_model():
    return small.model_with(Shifted())
== a loss draws negatives -> create_loss | LogUniformCandidateSampler | SeedGenerator
def create_loss():
    def loss(pair):
        classes = tf.zeros(tf.shape(pair[1]), tf.int64)
        weights = tf.ones([30, 1])
        return tf.nn.sampled_softmax_loss(weights, weights[:, 0], classes, pair[0], 5, 30)  # here
    return loss
== update_pre does -> update_pre | RandomStandardNormal | SeedGenerator
def update_pre(gradients):
    return [g + tf.random.normal([]) for g in gradients], gradients  # here
== metric_pre does -> metric_pre | RandomStandardNormal | SeedGenerator
def metric_pre(output, batch):
    return batch[1], output + tf.random.normal([])  # here
== update_pre depends on output and batch -> update_pre | output and batch
def update_pre(gradients, output, batch):  # here
    return gradients, gradients
== the state of a metric does not start at 0 -> create_metrics | 'error' | start at 0
class Best(keras.metrics.MeanAbsoluteError):
    def reset_state(self):
        self.total.assign(100.0)
def create_metrics():  # here
    return {"error": Best()}
== the state of a metric is no number -> create_metrics | 'error' | bool | add up
class Seen(keras.metrics.MeanAbsoluteError):
    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), dtype="bool", initializer="zeros")
def create_metrics():  # here
    return {"error": Seen()}
== the state of a metric of training does not -> create_train_metrics | 'best' | start at 0
class Best(keras.metrics.Mean):
    def reset_state(self):
        self.total.assign(100.0)
def create_train_metrics():  # here
    return {"best": Best()}
def train_metric_pre(output):
    return output
"""
)
COMPILED_HOOKS = engine.read_table(
    """
== a maximum is pooled -> /pooling_1/ | MaxPoolGrad | deterministic | --no-jit-compile
def create_model():
    inputs = keras.Input((small.FEATURES,))
    hidden = keras.layers.Reshape((-1, 1))(keras.layers.Dense(8)(inputs))
    pooled = keras.layers.MaxPooling1D(name="pooling")(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(pooled)))
== a hook makes text -> input_pre | AsString | --no-jit-compile
def input_pre(batch):
    return tf.strings.to_number(tf.strings.as_string(batch[0]))  # here
== a hook writes a summary -> input_pre | tf.summary | --no-jit-compile
def input_pre(batch):
    tf.summary.scalar("mean", tf.reduce_mean(batch[0]))  # here
    return batch[0]
== update_pre draws random numbers -> update_pre | the update cannot be compiled | --no-jit-compile
def update_pre(gradients):
    noise = tf.random.stateless_normal([], [1, 2])  # here
    return [noise * gradient for gradient in gradients], gradients
"""
)
EVALUATION = """
import ctl_core as ctl
create_eval_dataset = small.create_eval_dataset
def create_metrics():
    return {"error": keras.metrics.MeanAbsoluteError()}
"""


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", HOOKS)
def test_hooks_are_refused(
    tmp_path: Path, command: engine.Command, case: str, devices: int
) -> None:
    code, words = HOOKS[case]
    # AutoGraph converts equal functions on equal lines only once and names the first file for both.
    # Therefore, blank lines shift the code, differently for each number of devices.
    source = "\n" * devices + small.CALLBACKS + EVALUATION + code + "\n"
    (tmp_path / "callbacks.py").write_text(source)
    outcome = command("train", *WITH, f"--virtual-devices={devices}")
    assert_refused(outcome, *engine.locate(source), *words)
    assert not list(tmp_path.glob("runs/*/ckpt/engine/*.json"))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", COMPILED_HOOKS)
def test_hooks_that_xla_cannot_compile_are_refused(
    tmp_path: Path, command: engine.Command, case: str, devices: int
) -> None:
    code, words = COMPILED_HOOKS[case]
    source = "\n" * devices + small.CALLBACKS + EVALUATION + code + "\n"
    (tmp_path / "callbacks.py").write_text(source)
    outcome = command("train", *WITH, f"--virtual-devices={devices}", "--jit-compile")
    assert_refused(outcome, *engine.locate(source), *words)


def test_the_program_trains(tmp_path: Path, command: engine.Command) -> None:
    """The program of the other tests trains if it has none of the refused hooks."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + EVALUATION)
    outcome = command("train", *WITH, "--virtual-devices=3")
    assert (outcome.code, outcome.err) == (0, "")
    assert "batch size 16 in 4 logical replicas, 3 replicas on CPU" in outcome.out


SETTINGS = {
    "micro-batches": (("--accumulate-steps=2",), ("accumulate_steps", "one after another")),
    "more replicas than rows": (("--logical-replicas=17",), ("17", "batch of 16", "at most")),
    "more devices than replicas": (
        ("--virtual-devices=5",), ("5 devices", "4 logical replicas", "fewer devices"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_refused(tmp_path: Path, command: engine.Command, case: str) -> None:
    flags, words = SETTINGS[case]
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    assert_refused(command("train", *WITH, *flags), "logical_replicas: ", *words)
    assert not list(tmp_path.glob("runs/*/config.yaml"))


@pytest.mark.slow
def test_a_resume_takes_the_setting_from_the_record(
    tmp_path: Path, command: engine.Command
) -> None:
    """A flag that contradicts the record is refused, unless the command forks a new run."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + EVALUATION)
    resume = ("train", "--run-name=a", "--steps=6")
    assert command("train", *WITH).code == 0
    outcome = command(*resume, "--logical-replicas=3")
    message = "logical_replicas: runs/a was started with 4, not with 3"
    assert_refused(outcome, message, "--fork runs/a")
    outcome = command(*resume, f"--intra-op-threads={count_cores() + 1}")
    assert_refused(outcome, "intra_op_threads: runs/a was started with", "--fork runs/a")

    assert command("train", *WITH, "--run-name=whole", "--steps=6").code == 0
    # The record of a checkpoint is enough, even if config.yaml lacks the settings.
    edit_saved_settings(tmp_path / "runs/a", logical_replicas=None, intra_op_threads=None)
    outcome = command(*resume, "--virtual-devices=3")
    assert outcome.code == 0
    assert "resuming at step 4" in outcome.out
    compare.assert_same_checkpoint(tmp_path / "runs/a", tmp_path / "runs/whole", 6)

    fork = ("train", "--fork=a@4", "--run-name=b", "--steps=6", "--logical-replicas=3")
    outcome = command(*fork)
    assert outcome.code == 0
    assert "in 3 logical replicas" in outcome.out
    record = read_record(tmp_path / "runs/b/ckpt", 6)
    assert record.logical_replicas == 3
    assert record.intra_op_threads == count_cores()


def test_a_run_without_the_setting_does_not_get_it(tmp_path: Path, command: engine.Command) -> None:
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    assert command("train", *FLAGS).code == 0
    outcome = command("train", "--run-name=a", "--steps=6", "--logical-replicas=4")
    message = "logical_replicas: runs/a was started without, not with 4"
    assert_refused(outcome, message, "--fork runs/a")
    record = read_record(tmp_path / "runs/a/ckpt", 4)
    assert (record.logical_replicas, record.intra_op_threads) == (None, None)


def test_another_number_of_threads_is_refused_where_tensorflow_has_started(
    tmp_path: Path, command: engine.Command
) -> None:
    """Training needs the recorded number of threads, which is fixed once TensorFlow has started.

    Commands that only read a run work with any number of threads.
    """
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + EVALUATION)
    threads = count_cores() + 1
    outcome = command("train", *WITH, f"--intra-op-threads={threads}")
    assert_refused(outcome, "intra_op_threads: ", f"needs {threads}", "restart Python")
    assert command("train", *WITH).code == 0
    edit_saved_settings(tmp_path / "runs/a", intra_op_threads=threads)
    model = ctl_core.load(tmp_path / "runs/a")
    assert model.step == 4


DROPOUT = """

def create_model():
    return small.model_with(keras.layers.Dropout(0.5, seed=1))
"""


@pytest.mark.parametrize("generators", [[], [[1], [2]]])
def test_a_record_without_the_random_states_is_damaged(
    tmp_path: Path, command: engine.Command, generators: list[list[int]]
) -> None:
    """Without the initial states of the generators, training would draw other numbers."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + DROPOUT)
    assert command("train", *WITH).code == 0
    folder = tmp_path / "runs/a/ckpt"
    record = read_record(folder, 4)
    assert len(record.generators) == 1
    record.generators = generators
    write_record(folder, record)
    outcome = command("train", "--run-name=a", "--steps=6")
    assert "step 4 is damaged (the states of its random generators" in outcome.out
    assert outcome.code == 0
    assert "resuming at step 2" in outcome.out


def test_changed_initial_states_of_generators_are_reported(
    tmp_path: Path, command: engine.Command
) -> None:
    """The initial states in a record fit the states in its variables, even with another seed."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + DROPOUT.replace(", seed=1", ""))
    assert command("train", *WITH).code == 0
    resume = ("train", "--run-name=a")
    reported = "the random generators in its record do not fit"
    assert reported not in command(*resume, "--steps=6", "--seed=8").out
    folder = tmp_path / "runs/a/ckpt"
    record = read_record(folder, 6)
    record.generators[0][1] += 1
    write_record(folder, record)
    outcome = command(*resume, "--steps=8", "--seed=7")
    assert f"the checkpoint of step 6: {reported}" in outcome.out
    assert outcome.code == 0


@pytest.mark.parametrize(
    ("name", "value"), [("TF_ENABLE_ONEDNN_OPTS", "0"), ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")]
)
def test_a_variable_that_chooses_other_kernels_is_refused(
    tmp_path: Path, command: engine.Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    resume = ("train", "--run-name=a", "--steps=4")
    assert command("train", *WITH).code == 0
    outcome = command(*resume, **{name: value})
    assert_refused(outcome, f"{name}: runs/a was trained with no value, not with '{value}'")
    assert command(*resume, TF_ENABLE_ONEDNN_OPTS="").code == 0


def test_default_values_of_such_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert read_kernel_variables({"TF_ENABLE_ONEDNN_OPTS": "1", "XLA_FLAGS": " "}) == {}
    assert read_kernel_variables({"TF_ENABLE_ONEDNN_OPTS": "0"}) == {"TF_ENABLE_ONEDNN_OPTS": "0"}
