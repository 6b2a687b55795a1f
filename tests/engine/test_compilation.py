"""Tests of ``jit_compile: auto``: which runs are compiled, and how they are resumed.

The tests need no GPU. They pretend that the CPU is a GPU, and XLA then compiles for the CPU.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from ctl_core import SetupError, compilation
from ctl_core.model.components import Compilation
from ctl_core.run.errors import CompilationFailed, RunError
from tests.golden import small
from tests.helpers.cases import assert_weights, dropout_model, make_hooks
from tests.helpers.project import Train

BATCH = 16


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "is_on_gpu", lambda strategy: True)


def convolutional_model() -> keras.Model:
    return small.model_with(
        keras.layers.Reshape((4, 2, 1)),
        keras.layers.Conv2D(3, 2, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
    )


def describe_environment(state: Any) -> str:
    """Returns the entry about compilation in the env.json of a run."""
    return str(json.loads((state.run_dir / "env.json").read_text())["compilation"])


# ---- Which runs are compiled ---------------------------------------------------------------------


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "create_model",
    [small.create_model, pytest.param(convolutional_model, marks=pytest.mark.slow)],
)
def test_a_run_on_a_gpu_is_compiled_and_says_so(
    train: Train, capfd: pytest.CaptureFixture[str], create_model: Callable[[], keras.Model]
) -> None:
    """A run that ``auto`` compiles has the weights of ``jit_compile: true``, bit for bit."""
    hooks = small.hooks(create_model=create_model, every_steps={3: lambda loss, output: None})
    state = train(hooks, steps=6)
    assert state.compilation.parts is Compilation.STEP
    first_line = capfd.readouterr().out.splitlines()[0]
    assert ", compiled by XLA (checked in " in first_line
    assert describe_environment(state).startswith("compiled by XLA (checked in ")
    assert_weights(state, train(hooks, steps=6, run_name="told", jit_compile=True), rtol=0)


def test_a_run_on_a_cpu_is_not_compiled_and_does_not_mention_it(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    state = train(small.hooks(), steps=2)
    assert state.compilation.parts is Compilation.NOTHING
    assert "compiled" not in capfd.readouterr().out
    assert describe_environment(state) == "not compiled: training runs on a CPU"


def write_as_text(loss: Any, train_model: Any) -> Any:
    text = tf.strings.as_string(loss)
    return tf.strings.to_number(text) * 0.0 + loss, 0.0, train_model.trainable_variables


def look_at_middle(batch: Any) -> Any:
    rows = tf.shape(batch[0])[0]
    picture = tf.reshape(batch[0], [1, rows, small.FEATURES, 1])
    glimpse = tf.image.extract_glimpse(picture, [2, 2], tf.zeros([1, 2]))
    return batch[0] + 0.0 * tf.reduce_sum(glimpse)


def write_summary(gradients: Any) -> Any:
    tf.summary.scalar("norm", tf.linalg.global_norm(gradients))
    return gradients, gradients


def different_widths(per_replica_batch_size: int) -> tf.data.Dataset:  # noqa: ARG001  (hooks take values by name)
    """Returns batches of different widths, like sentences that are padded to the longest one."""

    def make_batch(width: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ones([BATCH, width]), tf.ones([BATCH, 1])

    return tf.data.Dataset.from_tensor_slices([3, 5, 4]).map(make_batch)


def average_width(batch: Any) -> Any:
    return tf.reduce_mean(batch[0], axis=1, keepdims=True) * tf.ones([1, small.FEATURES])


def count_up(batch: Any) -> Any:
    count = tf.cast(tf.reduce_sum(batch[0] ** 2), tf.int32)
    return batch[0] + 0.0 * tf.cast(tf.reduce_sum(tf.range(count)), tf.float32)


FILE = Path(__file__)
LINE_OF_TEXT = write_as_text.__code__.co_firstlineno + 1
OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "text": (
        {"grad_pre": write_as_text},
        rf"AsString in grad_pre \({FILE.name}:{LINE_OF_TEXT}\) cannot be compiled",
    ),
    "unknown to XLA": (
        {"input_pre": look_at_middle},
        rf"ExtractGlimpseV2 in input_pre \({FILE.name}:\d+\) cannot be compiled",
    ),
    "size that depends on values": (
        {"input_pre": count_up},
        rf"Range in input_pre \({FILE.name}:\d+\) cannot be compiled \(Input 1 to node .* must "
        "be a compile-time constant.*",
    ),
    "summary": (
        {"update_pre": write_summary},
        rf"update_pre \({FILE.name}:\d+\) writes a tf.summary",
    ),
    "widths": (
        {"create_dataset": different_widths, "input_pre": average_width},
        "the width of batches varies",
    ),
    "last batch": (
        {"create_dataset": small.slices(small.data())},
        "the last batch of a pass may be smaller",
    ),
}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", OBSTACLES)
def test_a_run_that_cannot_be_compiled_trains_without_and_says_why(train: Train, name: str) -> None:
    """The attempt to compile a run changes no weight and draws no random number."""
    replaced, reason = OBSTACLES[name]
    settings = {"steps": 4, "last_batch": "keep" if name == "last batch" else "drop"}
    asked = train(small.hooks(**replaced), **settings)
    assert asked.compilation.parts is Compilation.NOTHING
    assert re.fullmatch(f"not compiled: {reason}", describe_environment(asked))
    plain = train(small.hooks(**replaced), **settings, jit_compile=False, run_name="plain")
    assert_weights(asked, plain, rtol=0)


SETTINGS_AGAINST: dict[str, dict[str, Any]] = {
    "deterministic is set": {"deterministic": True},
    "detect_anomaly is set": {"detect_anomaly": True},
    "layers compute in float16": {"precision": "float16"},
    "there are several replicas": {"virtual_devices": 2},
    "micro-batches differ in size": {"accumulate_steps": 3},
}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("reason", SETTINGS_AGAINST)
def test_settings_with_which_auto_means_no(train: Train, reason: str) -> None:
    state = train(small.hooks(), steps=1, **SETTINGS_AGAINST[reason])
    assert describe_environment(state) == f"not compiled: {reason}"


# ---- Resumed runs --------------------------------------------------------------------------------

NOISY = {"create_model": dropout_model}


@pytest.mark.slow
def test_a_compiled_run_is_compiled_wherever_it_is_resumed(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled run stays compiled on a CPU, and has the bits of an uninterrupted run."""
    for steps, is_on_gpu in ((5, True), (9, False)):
        monkeypatch.setattr(compilation, "is_on_gpu", lambda _, value=is_on_gpu: value)
        state = train(make_hooks(**NOISY), steps=steps)
        assert state.compilation.is_compiled
    whole = train(make_hooks(**NOISY), steps=9, run_name="whole", jit_compile=True)
    assert_weights(state, whole, rtol=0)
    forked = train(make_hooks(**NOISY), steps=11, run_name="fork", fork="run")
    assert not forked.compilation.is_compiled


def test_a_run_that_was_begun_on_a_cpu_stays_as_it_is_on_a_gpu(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps, is_on_gpu in ((5, False), (9, True)):
        monkeypatch.setattr(compilation, "is_on_gpu", lambda _, value=is_on_gpu: value)
        state = train(make_hooks(**NOISY), steps=steps)
    assert describe_environment(state).startswith("not compiled: the run was started without it")
    whole = train(make_hooks(**NOISY), steps=9, run_name="whole", jit_compile=False)
    assert_weights(state, whole, rtol=0)


@pytest.mark.parametrize("setting", [False, True])
def test_a_run_whose_record_does_not_say_is_as_its_setting_says(
    train: Train, monkeypatch: pytest.MonkeyPatch, setting: bool
) -> None:
    """A record of engine 1.0, which had no ``auto``, does not say whether the run is compiled."""
    monkeypatch.setattr(compilation, "is_on_gpu", lambda _: not setting)
    state = train(make_hooks(), steps=2, jit_compile=setting)
    record = state.run_dir / "ckpt" / "engine" / "ckpt-2.json"
    content = json.loads(record.read_text())
    del content["checksum"]  # Records of engine 1.0 have no checksum either.
    assert content.pop("compiled") is setting
    record.write_text(json.dumps(content))
    assert train(make_hooks(), steps=3).compilation.is_compiled is setting


def test_a_compiled_run_that_cannot_be_compiled_here_is_refused(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    """A compiled run that can no longer be compiled is refused unless ``jit_compile`` is false."""
    train(make_hooks(), steps=2, jit_compile=True)
    message = (
        r"^jit_compile: .*run is compiled by XLA, .* here: {}\. Start another .*: --fork .*run;"
    )
    for settings, hooks, reason in (
        ({"detect_anomaly": True}, {}, "detect_anomaly is set"),
        ({}, {"grad_pre": write_as_text}, r"AsString in grad_pre \(.*\) cannot be compiled"),
    ):
        with pytest.raises(SetupError, match=message.format(reason)):
            train(make_hooks(**hooks), steps=4, **settings)
    capfd.readouterr()
    train(make_hooks(), steps=4, jit_compile=False)
    assert "steps are not compiled from now on" in capfd.readouterr().out


class Growing(keras.Model):
    """Uses an op that XLA cannot compile once the second layer is unfrozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = small.create_model()
        self.second = keras.layers.Dense(1)
        self.second.trainable = False

    def call(self, inputs: Any) -> Any:
        output = self.second(self.first(inputs))
        if self.second.trainable:
            output += 0.0 * tf.strings.to_number(tf.strings.as_string(output))
        return output


@pytest.mark.usefixtures("on_gpu")
def test_later_graphs_are_asked_about_before_they_are_used(train: Train) -> None:
    """If an unfrozen layer cannot be compiled, training ends, and earlier checkpoints are kept."""

    def unfreeze(train_model: Any) -> None:
        train_model.second.trainable = True

    hooks = small.hooks(create_model=Growing, at_step={3: unfreeze})
    message = r"AsString in .*cannot be compiled, which the next step needs; .* --no-jit-compile"
    with pytest.raises(CompilationFailed, match=message):
        train(hooks, steps=6, ckpt_every=1)
    forked = train(hooks, steps=6, fork="run", run_name="fork", jit_compile=False)
    assert forked.step == 6


# ---- Messages of --check -------------------------------------------------------------------------


def test_check_says_why_a_run_on_a_gpu_would_not_be_compiled(train: Train) -> None:
    state = train(small.hooks(grad_pre=write_as_text), steps=1)
    reason = f"AsString in grad_pre ({FILE.name}:{LINE_OF_TEXT}) cannot be compiled"
    assert compilation.explain_for_gpu(state) == f"not compiled on a GPU: {reason}"
    told = train(small.hooks(), steps=1, run_name="told", jit_compile=False)
    assert compilation.explain_for_gpu(told) == "not compiled on a GPU: jit_compile is false"


def test_check_names_layers_that_keras_builds_with_cudnn(train: Train) -> None:
    def create_model() -> keras.Model:
        return small.model_with(
            keras.layers.Reshape((4, 2)),
            keras.layers.GRU(3, use_cudnn=False, return_sequences=True),
            keras.layers.LSTM(3, name="free"),
        )

    state = train(small.hooks(create_model=create_model), steps=1)
    expected = (
        "XLA can compile the step as it was traced on a CPU; on a GPU, however, Keras builds free "
    )
    assert compilation.explain_for_gpu(state).startswith(expected)


# ---- Random numbers of compiled steps on several replicas ----------------------------------------

WAYS: list[dict[str, Any]] = [
    {"jit_compile": False},
    {"jit_compile": True},
    {"jit_compile": True, "virtual_devices": 3},  # The replicas' shares differ in size.
]


class Drawing(keras.Model):
    """Stores the random numbers that hooks have drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = small.create_model()
        self.drawn = {
            name: tf.Variable(0.0, trainable=False, name=name)
            for name in ("grad_pre", "update_pre", "update_post")
        }

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def draw(self, name: str, step: Any) -> Any:
        """Returns the random number of a step, which must be the same in each hook."""
        number = tf.random.stateless_normal([], [tf.cast(step, tf.int32), 7])
        self.drawn[name].assign(number)
        return number


def drawing_hooks() -> Any:
    """Returns hooks that draw the same noise.

    One hook adds the noise to the gradients, and another one subtracts 90 % of the noise.
    """

    def grad_pre(loss: Any, train_model: Any, step: Any) -> Any:
        noise = train_model.draw("grad_pre", step)
        parameters = train_model.dense.trainable_variables
        return loss, noise * sum(map(tf.reduce_sum, parameters)), parameters

    def update_pre(gradients: Any, train_model: Any, step: Any) -> Any:
        noise = train_model.draw("update_pre", step)
        return [gradient - 0.9 * noise for gradient in gradients], gradients

    def update_post(train_model: Any, step: Any) -> None:
        noise = train_model.draw("update_post", step)
        for weight in train_model.dense.trainable_variables:
            weight.assign_add(0.01 * noise * tf.ones_like(weight))

    return small.hooks(
        create_dataset=small.slices(small.data()),
        create_model=Drawing,
        grad_pre=grad_pre,
        update_pre=update_pre,
        update_post=update_post,
    )


def test_a_seed_gives_one_number_in_all_hooks_and_on_any_number_of_devices(train: Train) -> None:
    """All hooks draw the same number in a step, on one device and on three.

    Compiled runs draw other numbers than runs that are not compiled.
    """
    plain, on_one, on_three = (
        train(drawing_hooks(), steps=6, run_name=f"way-{number}", **settings)
        for number, settings in enumerate(WAYS)
    )
    drawn = [
        [float(variable.numpy()) for variable in state.train_model.drawn.values()]
        for state in (plain, on_one, on_three)
    ]
    assert drawn == [[numbers[0]] * 3 for numbers in drawn], "one number in all hooks"
    assert drawn[1] == drawn[2] != drawn[0]
    assert_weights(on_three, on_one, rtol=2e-5)


def test_an_update_that_draws_and_cannot_be_compiled_is_refused(train: Train) -> None:
    """On several devices, an update must be compilable only if it draws random numbers."""

    def update_pre(gradients: Any, step: Any) -> Any:
        noise = tf.random.stateless_normal([], [tf.cast(step, tf.int32), 7])
        tf.summary.scalar("noise", noise)
        return [gradient + noise for gradient in gradients], gradients

    settings = {"jit_compile": True, "virtual_devices": 2, "steps": 2}
    message = (
        rf"^update_pre \({FILE.name}:\d+\): draws random numbers, and the update cannot be "
        r"compiled, .*; "
        r"train with --no-jit-compile. \(update_pre .* cannot compile tf.summary"
    )
    with pytest.raises(SetupError, match=message):
        train(small.hooks(update_pre=update_pre), **settings)

    def as_text(gradients: Any) -> Any:
        return [gradient + 0.0 * read_as_text(gradient) for gradient in gradients], gradients

    state = train(small.hooks(update_pre=as_text), **settings, learning_rate=0.1)
    assert_weights(state, small.plain(2, lambda _: 0.1), rtol=2e-5)


def read_as_text(tensor: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_number(tf.strings.as_string(tensor))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("--steps=2500",), ("--trainings=6", "--steps=50", "--devices=1")]
)
def test_compiled_trainings_leak_neither_threads_nor_memory(words: tuple[str, ...]) -> None:
    """Neither a long training on two devices nor six trainings in one process leak."""
    script = [sys.executable, "-m", "scripts.compiled_soak", *words]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "does not leak"), ended.stdout


def test_a_step_that_fails_to_compile_names_the_setting(train: Train) -> None:
    """The loss of a conditional random field often has a loop whose length is a value."""

    def add_up(loss: Any, batch: Any, train_model: Any) -> Any:
        length = tf.cast(tf.reduce_max(batch[0]), tf.int32) + 3
        _, total = tf.while_loop(
            lambda index, _: index < length,
            lambda index, total: (index + 1, tf.math.log1p(total)),
            (0, loss),
        )
        return total, 0.0, train_model.trainable_variables

    message = "XLA .*after step 0; train with --no-jit-compile"
    with pytest.raises(RunError, match=message):
        train(make_hooks(grad_pre=add_up), steps=1, jit_compile=True)

    def sum_segments(loss: Any, train_model: Any) -> Any:
        segments = tf.range(tf.shape(loss)[0])
        return tf.math.segment_sum(loss, segments), 0.0, train_model.trainable_variables

    message = r"^grad_pre \(test_comp.*py:\d+\): .*SegmentSum, after step 0; .* --no-jit-compile"
    with pytest.raises(RunError, match=message):
        train(make_hooks(grad_pre=sum_segments), steps=1, jit_compile=True)

    @tf.function(jit_compile=True, autograph=False)
    def compute(loss: Any, batch: Any, train_model: Any) -> Any:
        return add_up(loss, batch, train_model)[0]

    def add_up_compiled(loss: Any, batch: Any, train_model: Any) -> Any:
        return compute(loss, batch, train_model), 0.0, train_model.trainable_variables

    with pytest.raises(RunError, match=r"XLA .*after step 0\.$"):  # the setting has no effect on it
        train(make_hooks(grad_pre=add_up_compiled), steps=1, jit_compile=False)
