"""Tests of hooks: the effect of overriding them, their defaults, and hooks in the documentation."""

import ast
import functools
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import optuna
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from ctl_core.commands.cli import parse_command
from ctl_core.hooks import defaults
from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.load import read_arguments
from ctl_core.hooks.reference import format_table, read_default_source
from ctl_core.hooks.spec import Form
from ctl_core.hooks.table import SPECS
from ctl_core.run.errors import HookFailed
from tests.golden import compare, small
from tests.helpers.cases import Followed, assert_weights, make_hooks, regression_data, sliced
from tests.helpers.project import Train

ROOT = Path(__file__).parents[2]


def test_make_batches_gets_the_repeated_dataset_and_may_batch_it(train: Train) -> None:
    sizes: set[int] = set()
    seen: list[np.ndarray] = []

    def make_batches(dataset: Any, per_replica_batch_size: int) -> Any:
        sizes.add(per_replica_batch_size)
        return dataset.batch(per_replica_batch_size)

    hooks = make_hooks(
        create_dataset=lambda: tf.data.Dataset.from_tensor_slices(regression_data()),
        make_batches=make_batches,
        every_steps={1: lambda batch: seen.append(batch[0].numpy())},
    )
    train(hooks, steps=7, virtual_devices=2)
    assert sizes == {16}  # The size does not depend on the number of devices.
    # No example is left out, because the seventh batch continues with the next pass.
    expected = np.tile(regression_data()[0], (2, 1))[: 7 * 16]
    np.testing.assert_array_equal(np.concatenate(seen), expected)
    hooks.make_batches = lambda dataset: dataset.batch(16).take(4)
    with pytest.raises(ctl_core.SetupError, match=r"^make_batches .* ends; repeat it"):
        train(hooks, run_name="ends")


def test_hook_table_survives_python_without_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python leaves them out with ``-OO``; lines fit the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-OO", "-m", "ctl_core", "hooks"]
    text = subprocess.check_output(command, cwd=ROOT, text=True)
    assert text == format_table()
    assert max(map(len, text.splitlines())) <= 80
    assert set(re.findall(r"^  ([a-z_]+)  ", text, re.M)) == SPECS.keys()


EXAMPLES = sorted((ROOT / "templates" / "examples").glob("*.py"))


def test_stub_has_every_hook_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """As code, or as an example in comments; the example blank is the stub."""
    assert main(["hooks", "--stub"]) == 0
    stub = capsys.readouterr().out
    assert stub == (ROOT / "templates" / "examples" / "blank.py").read_text(), "make generated"
    defined: dict[str, Any] = {}
    exec(stub, defined)
    in_comments = re.findall(r"^# (?:def )?(\w+)(?: = |\()", stub, re.M)
    assert sorted(in_comments) == sorted(SPECS.keys() - defined.keys())
    for name in SPECS.keys() & defined.keys():
        assert read_default_source(name).splitlines()[-1] in stub.splitlines(), name
    assert {"update_pre", "every_steps", "at_step", "create_train_metrics"} < defined.keys()


@pytest.mark.parametrize("name", SPECS)
def test_stub_of_one_hook(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", name, "--stub"]) == 0
    part = capsys.readouterr().out
    assert re.search(rf"^(# )?(def )?{name}( = |\()", part, re.M)
    main(["hooks", "--stub"])
    assert part in capsys.readouterr().out


def test_training_with_the_stub_has_the_weights_of_the_defaults(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything that the stub defines is there, with the three hooks that are required."""
    main(["hooks", "--stub"])
    stub = hooks_of(capsys.readouterr().out, tmp_path)
    required = {spec.name for spec in SPECS.values() if spec.is_required}
    assert len(stub) > 10
    assert not required & stub.keys()
    left_out = make_hooks()
    del left_out.create_opt
    plain, written = (
        train(hooks, steps=5, log_every=5, run_name=name)
        for name, hooks in (("plain", left_out), ("written", make_hooks(**stub)))
    )
    for expected, weight in zip(
        plain.train_model.weights, written.train_model.weights, strict=True
    ):
        np.testing.assert_array_equal(expected, weight)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_head_of_an_example_lists_its_hooks(example: Path) -> None:
    """Those that are required and those that it uses, in the docstring, and no other is below."""
    if example.stem in ("blank", "make_records"):
        pytest.skip("has all hooks, or none")
    tree = ast.parse(example.read_text())
    head = ast.get_docstring(tree) or ""
    lists = re.search(r"^ *required:(.*?)used here:(.*?)(?:optional:|\n\n)", head, re.M | re.S)
    assert lists is not None
    required, used = (re.findall(r"\w+", names) for names in lists.groups())
    assert required == [spec.name for spec in SPECS.values() if spec.is_required]
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    assert {*required, *used} == names & SPECS.keys()
    assert len(used) == len({*used})
    optional = set(re.findall(r"^ {4}(?:optional:| {9}) +(\w+)  ", head, re.M))
    assert optional <= SPECS.keys() - names
    assert set(re.findall(r"ctl_core hooks (\w+)", head)) <= SPECS.keys()


@pytest.mark.parametrize("name", SPECS)
def test_examples_of_the_table_name_arguments_that_exist(name: str) -> None:
    spec = SPECS[name]
    shown: dict[str, Any] = {"keras": keras, "tf": tf, "ctl": ctl_core}
    exec(spec.example, shown)
    hook = shown[name]
    functions = list(hook.values()) if spec.form is Form.SCHEDULE else [hook]
    for function in functions if spec.form is not Form.NAMES else []:
        function = getattr(function, "python_function", function)
        named = set(inspect.signature(function).parameters)
        assert named == set(read_arguments(spec, name, function, "the example"))


def test_the_command_line_explains_a_hook(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "grad_pre"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for argument in SPECS["grad_pre"].arguments:
        assert f"{argument.name} {argument.described_type}: {argument.meaning}" in text
    assert "ctl.Objective" in text
    assert "def grad_pre(loss, batch, train_model):" in text
    assert main(["hooks", "grad_per"]) == 2
    assert capsys.readouterr().err == (
        "error: there is no hook 'grad_per'; did you mean 'grad_pre'?\n"
    )


def test_named_results_are_plain_tuples_with_names(train: Train) -> None:
    """Named results train the same weights as plain tuples."""

    def grad_pre(loss: Any, train_model: Any) -> Any:
        return ctl_core.Objective(
            loss_per_batch=loss,
            extra_loss=0.0,
            variables=train_model.trainable_variables,
            logged={"error": loss},
        )

    def update_pre(gradients: Any) -> Any:
        return ctl_core.Update(update_gradients=gradients, display_gradients=gradients)

    hooks = small.hooks(grad_pre=grad_pre, update_pre=update_pre)
    state = train(hooks, steps=3, learning_rate=small.RATE, log_every=1)
    assert_weights(state, small.plain(3), rtol=1e-5)
    assert "error" in state.history[-1]


# ---- Hooks may be functions, methods, objects or partials ----------------------------------------


def doubled(batch: Any, factor: float = 2.0) -> Any:
    """An input_pre with a default argument and an ``if`` that only AutoGraph can trace."""
    inputs = batch[0]
    if tf.reduce_sum(inputs**2) > 0.0:
        inputs = inputs * factor
    return inputs


class Doubler:
    """A callable object that is used as a hook."""

    factor = 2.0

    def __call__(self, batch: Any) -> Any:
        return doubled(batch, self.factor)


@functools.wraps(defaults.input_pre)
def decorated(batch: Any) -> Any:
    """Has the metadata of a default but doubles the inputs, so the engine has to call it."""
    return doubled(batch)


KINDS: dict[str, Callable[..., Any]] = {
    "partial": functools.partial(lambda *, batch, factor: doubled(batch, factor), factor=2.0),
    "tf.function": tf.function(doubled),
    "object": Doubler(),
    "decorated": decorated,
}


def test_graph_hooks_of_any_kind(train: Train) -> None:
    inputs, target = regression_data()
    batches = sliced((2.0 * inputs, target))(small.BATCH)
    for kind, hook in KINDS.items():
        state = train(small.hooks(input_pre=hook), steps=3, learning_rate=small.RATE, run_name=kind)
        assert_weights(state, small.plain(3, batches=batches), rtol=1e-5)


def leading_dimension(batch: Any) -> Any:
    return tf.shape(batch[0])[0] // 2


def count_examples(batch: Any) -> Any:
    """Has the source code of the default, but calls another ``leading_dimension``."""
    return leading_dimension(batch)


def test_hook_that_resembles_a_default_is_called(train: Train) -> None:
    with pytest.raises(ctl_core.SetupError, match="of 8 examples"):
        train(make_hooks(count_examples=count_examples), steps=1)


class Descent:
    """A user-defined optimizer, which TensorFlow does not track."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.steps = tf.Variable(0, trainable=False)

    def apply_gradients(self, pairs: Any) -> None:
        """Takes a step of gradient descent."""
        self.steps.assign_add(1)
        for gradient, variable in pairs:
            variable.assign_sub(self.rate * gradient)


def test_users_optimizer_is_saved(train: Train) -> None:
    for steps in (2, 4):
        hooks = small.hooks(create_opt=lambda: Descent(0.1))
        state = train(hooks, steps=steps)
    assert_weights(state, small.plain(4, lambda step: 0.1))
    assert int(state.optimizer.steps) == 4


# ---- state and chief, arguments of host hooks ----------------------------------------------------


def test_hook_state_falls_back_with_the_checkpoint(
    train: Train,
) -> None:
    def count(step: int, state: dict[str, Any]) -> None:
        state.setdefault("steps", []).append(step)

    hooks = make_hooks(every_steps={1: count})
    records = train(hooks, steps=9, ckpt_every=3).run_dir / "ckpt" / "engine"
    # Checkpoints are written in the background, but contain the hook state of their own steps.
    for step in (3, 6, 9):
        kept = json.loads((records / f"ckpt-{step}.json").read_text())["progress"]["hook_state"]
        assert kept == {"steps": list(range(1, step + 1))}
    (records / "ckpt-9.json").write_text("{")
    assert train(hooks, steps=8).hook_state == {"steps": list(range(1, 9))}


def test_hook_state_that_cannot_be_saved_is_refused(train: Train) -> None:
    def keep(step: int, loss: Any, state: dict[str, Any]) -> None:
        state["loss"] = loss if step == 4 else float(loss)

    hooks = make_hooks(every_steps={1: keep, 2: lambda step: None})
    with pytest.raises(ctl_core.RunError, match=r"every_steps\[1\] .*test_hooks.py:\d+.*loss"):
        train(hooks, ckpt_every=2)
    assert train(make_hooks(), steps=2).hook_state.keys() == {"loss"}


def test_chief_is_an_argument_of_host_hooks_also_of_deferred_ones(train: Train) -> None:
    seen: list[Any] = []
    looks_on = ctl_core.deferred(lambda step, chief: seen.append((step, chief)))
    train(make_hooks(every_steps={1: looks_on}), steps=2)
    assert seen == [(1, True), (2, True)]
    with pytest.raises(
        ctl_core.SetupError, match="the available ones are dev, step, chief, config, hparams"
    ):
        train(make_hooks(every_steps={1: ctl_core.deferred(lambda state: None)}))


@pytest.mark.parametrize("returns_dict", [False, True])
def test_train_metrics_are_updated_with_the_users_metric_pre(
    train: Train, returns_dict: bool
) -> None:
    """Training metrics receive the values that the user's ``metric_pre`` returns."""

    def metric_pre(batch: Any) -> Any:
        scaled = 10.0 * batch[1]
        return {"scaled": scaled, "seen": tf.ones(tf.shape(scaled))} if returns_dict else scaled

    hooks = make_hooks(
        create_train_metrics=lambda: {"scaled": keras.metrics.Mean()}, metric_pre=metric_pre
    )
    state = train(hooks, steps=1, batch_size=16, log_every=1)
    expected = 10.0 * regression_data()[1][:16].mean()
    assert state.history[0]["scaled"] == pytest.approx(expected, rel=1e-5)


def test_a_metric_pre_without_a_train_metric_is_refused(train: Train) -> None:
    hooks = make_hooks(
        create_train_metrics=lambda: {"worst": keras.metrics.Mean()},
        metric_pre=lambda batch: {"best": batch[1]},
    )
    with pytest.raises(ctl_core.SetupError, match=r"^metric_pre .*'worst'.*write train_metric_pre"):
        train(hooks)


# ---- Training with the hooks that the documentation shows ----------------------------------------

PAGES = ROOT / "docs"


def read_blocks(name: str) -> list[str]:
    text = (PAGES / name).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


PAGES_OF_HOOKS = (
    *("hooks", "custom-losses", "optimizers", "several-objectives", "host-hooks", "metrics"),
    *("averages", "tensorboard"),
)
# The other blocks of tensorboard.md read the files of a trained run.
BLOCKS = [
    block
    for page in PAGES_OF_HOOKS
    for block in read_blocks(f"{page}.md")
    if page != "tensorboard" or "every_steps" in block
]
SMALL = {"steps": 12, "eval_every": 2, "log_every": 4}


def hooks_of(block: str, folder: Path) -> dict[str, Any]:
    """Returns the hooks that a code block defines."""
    file = folder / "shown.py"
    file.write_text(block)
    shown: dict[str, Any] = {"keras": keras, "tf": tf, "ctl": ctl_core}
    exec(compile(block, str(file), "exec"), shown)
    return {name: shown[name] for name in SPECS if name in shown}


def test_the_program_of_the_readme_learns(tmp_path: Path) -> None:
    """The program learns, both without and with the three hooks that the README adds."""
    text = (PAGES.parent / "README.md").read_text()
    program, changes = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name, source in (("plain", program), ("changed", program + changes)):
        hooks: dict[str, Any] = {}
        exec(compile(source.replace("100: report", "4: report"), "README.md", "exec"), hooks)
        config = ctl_core.Config(
            steps=60, batch_size=50, learning_rate=0.05, run_name=name, runs_dir=str(tmp_path)
        )
        state = ctl_core.train(SimpleNamespace(**hooks), config)
        weights = state.train_model.get_weights()[0]
        assert abs(weights - 1.0).max() < 0.1, "the target is the sum of the inputs"
        assert any("norm" in line for line in state.history) == (name == "changed")


def test_the_program_of_the_first_page_reads_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program learns from a table of 300 rows, which contain two inputs and their sum."""
    monkeypatch.chdir(tmp_path)
    inputs = np.random.default_rng(0).normal(size=(300, 2))
    table = np.concatenate([inputs, inputs.sum(axis=1, keepdims=True)], axis=1)
    np.savetxt("measurements.csv", table, delimiter=",", header="width,height,price")
    (source,) = read_blocks("get-started.md")
    hooks: dict[str, Any] = {"__file__": str(tmp_path / "callbacks.py")}
    exec(compile(source, "get-started.md", "exec"), hooks)
    config = ctl_core.Config(
        steps=120, batch_size=50, learning_rate=0.03, run_name="a", eval_every=0
    )
    state = ctl_core.train(hooks, config)
    assert state.metrics["error"] < 0.2


# The hooks of a GAN and of a segmentation need other data than the rest.
SHOWN = [block for block in BLOCKS if "turns" not in block and "Dice" not in block]


@pytest.mark.parametrize("block", small.slow_but(*SHOWN[::3], of=SHOWN))
def test_hooks_shown_in_documents_train(train: Train, tmp_path: Path, block: str) -> None:
    # The test trains few steps, so periods such as 500 steps are divided by 100.
    hooks = hooks_of(block.replace("00:", ":"), tmp_path)
    assert hooks
    base = {"create_model": Followed, "create_eval_dataset": sliced(regression_data())}
    state = train(make_hooks(**{**base, **hooks}), learning_rate=1e-12, **SMALL)
    if "lr.assign" in block:  # The documented hook lowers lr, because no evaluation improves.
        assert float(state.lr) < 1e-12
    names = {name for line in state.history for name in line}
    shown = {"mean_loss", "norm", "error", "size"}
    assert {name for name in shown if f'"{name}":' in block or f" {name}=" in block} <= names
    if "histogram" in block:
        events = b"".join(path.read_bytes() for path in (state.run_dir / "tb/train").iterdir())
        assert b"weights/" in events
        assert b"gradients/" in events


class Images(keras.Model):
    """A model with the two networks that the GAN of the documentation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])

    def call(self, inputs: Any) -> Any:
        return self.critic(inputs)[:, 0], self.critic(self.generator(inputs[:, :3]))[:, 0]


def test_gan_shown_in_documents_trains(train: Train, tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if "turns" in block)
    hooks = {"create_model": Images, "create_loss": lambda: lambda loss: loss}
    state = train(make_hooks(**hooks, **hooks_of(block, tmp_path)), steps=12)
    updates = {name: int(optimizer.iterations) for name, optimizer in state.optimizer.items()}
    assert updates == {"critic": 36, "generator": 12}


def test_segmentation_shown_in_documents_learns(train: Train, tmp_path: Path) -> None:
    """A model of one convolution learns which pixels are positive."""
    (block,) = (block for block in BLOCKS if "Dice" in block)
    images = np.random.default_rng(0).normal(size=(64, 4, 4, 1)).astype("float32")
    pairs = sliced((images, (images > 0).astype("float32")))
    hooks = make_hooks(
        create_dataset=pairs,
        create_eval_dataset=pairs,
        create_model=lambda: keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Conv2D(1, 1)]),
        **hooks_of(block, tmp_path),
    )
    state = train(hooks, steps=60, batch_size=16, learning_rate=0.1, virtual_devices=2)
    assert state.metrics["iou"] > 0.9


def test_listener_and_flags_shown_in_documents_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The documented listener receives a run's events, and a trial's flags become settings."""
    shown: dict[str, Any] = {}
    for page in ("experiment-trackers.md", "hyperparameter-search.md"):
        (block,) = read_blocks(page)
        exec(block, shown)
    config = ctl_core.Config(steps=2, runs_dir=str(tmp_path), run_name="a", eval_every=1)
    hooks = make_hooks(create_eval_dataset=sliced(regression_data()))
    ctl_core.train(hooks, config, listeners=[shown["Printer"]()])
    out = capsys.readouterr().out
    assert "a eval 1 {'loss': " in out
    assert "a is done" in out
    trial = optuna.trial.FixedTrial({"learning_rate": 0.01, "width": 32})
    config = parse_command(["train", *shown["flags"](trial)]).config
    assert (config.learning_rate, config.hparams) == (0.01, {"width": 32})


@pytest.mark.slow
def test_loop_shown_in_documents_has_the_weights_of_its_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented hooks, trained on two devices, reach the weights of the documented loop.

    The tolerance is large, because the high learning rate amplifies rounding errors.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page = "moving-a-loop.md"
    blocks = [block for block in read_blocks(page) if "make_train" in block]
    for name, block in zip(("task", "loop", "callbacks"), blocks, strict=True):
        Path(f"{name}.py").write_text(block)
    loop = runpy.run_path("loop.py")
    (words,) = re.findall(r"^./train.sh (--epochs .*)", (PAGES / page).read_text(), re.M)
    config = parse_command(["train", *words.split(), "--virtual-devices", "2"]).config
    state = ctl_core.train(runpy.run_path("callbacks.py"), config)
    del sys.modules["task"]
    expected = [*loop["student"].weights, *loop["slow"].weights]
    model = state.train_model
    compare.assert_close([*model.student.weights, *model.slow.weights], expected, 1e-4, 1e-4)
    assert float(state.lr) == float(loop["optimizer"].learning_rate) == 0.25


@pytest.mark.slow
def test_fit_script_shown_in_documents_has_the_weights_of_its_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the shuffle, whose order in later epochs is another one in fit."""
    monkeypatch.chdir(tmp_path)
    page = "moving-from-fit.md"
    blocks = [block for block in read_blocks(page) if ".shuffle(800)" in block]
    for name, block in zip(("fit", "callbacks"), blocks, strict=True):
        Path(f"{name}.py").write_text(block.replace(".shuffle(800)", ""))
    model = runpy.run_path("fit.py")["model"]
    (settings,) = re.findall(r"^```yaml\n(.*?)^```$", (PAGES / page).read_text(), re.M | re.DOTALL)
    Path("config.yaml").write_text(settings)
    config = ctl_core.load_config("config.yaml", virtual_devices=2)
    state = ctl_core.train(runpy.run_path("callbacks.py"), config)
    compare.assert_close(state.train_model.weights, model.weights, 1e-4, 1e-4)


def test_train_step_shown_in_documents_has_the_weights_of_its_hooks(
    train: Train, tmp_path: Path
) -> None:
    """The documented ``grad_pre`` trains the same weights as the documented ``train_step``."""
    blocks = read_blocks("moving-from-fit.md")
    (method,) = (block for block in blocks if "def train_step" in block)
    (hook,) = (block for block in blocks if "def grad_pre" in block)
    shown: dict[str, Any] = {"keras": keras, "tf": tf}
    exec(method, shown)
    random = np.random.default_rng(0)
    images = random.normal(size=(64, 4, 4, 1)).astype("float32")
    labels = random.integers(3, size=64)

    def create_model() -> keras.Model:
        output = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=0))
        return shown["Classifier"]([keras.Input((4, 4, 1)), keras.layers.Flatten(), output])

    def create_loss() -> Any:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return lambda pair: loss(pair[1], pair[0])

    model = create_model()
    mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=mean)
    model.fit(images, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)
    hooks = make_hooks(
        create_dataset=sliced((images, labels)),
        create_model=create_model,
        create_loss=create_loss,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        update_pre=lambda gradients: (gradients, gradients),
        **hooks_of(hook, tmp_path),
    )
    settings = {"learning_rate": 0.1, "log_every": 4, "virtual_devices": 2}
    state = train(hooks, steps=8, batch_size=16, **settings)
    compare.assert_close(state.train_model.weights, model.weights, 1e-5, 1e-6)
    assert "gap" in state.history[-1]


def test_plateau_shown_in_documents_is_that_of_keras() -> None:
    """The documented ``after_eval`` sets the learning rates that ``ReduceLROnPlateau`` sets."""
    (block,) = (block for block in read_blocks("moving-from-fit.md") if "after_eval" in block)
    shown: dict[str, Any] = {}
    exec(block, shown)
    callback = keras.callbacks.ReduceLROnPlateau(
        factor=0.1, patience=10, min_delta=1e-4, min_lr=1e-6
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    callback.set_model(model)
    callback.on_train_begin()
    lr = tf.Variable(0.01)
    state: dict[str, float] = {}
    random = np.random.default_rng(0)
    falling = 1 / np.arange(1, 21) + random.normal(scale=0.02, size=20)
    rates = []
    for epoch, loss in enumerate([*falling, float("nan"), *[1.0] * 50]):
        callback.on_epoch_end(epoch, {"val_loss": loss})
        shown["after_eval"]({"loss": loss}, lr, state)
        rates.append(float(lr))
        assert rates[-1] == pytest.approx(float(model.optimizer.learning_rate))
    assert len(set(rates)) > 3


@pytest.mark.parametrize("devices", small.slow_but(3, of=[1, 3]))
def test_two_towers_shown_in_documents_have_the_weights_of_a_loop(
    train: Train, devices: int
) -> None:
    """The weights equal those of a loop, even if three devices share 64 pairs unevenly."""
    (block,) = (block for block in read_blocks("exchanging-values.md") if "TwoTowers" in block)
    shown: dict[str, Any] = {}
    exec(block, shown)
    weights: dict[str, list[Any]] = {}

    def create_model() -> keras.Model:
        model = shown["create_model"]()
        model((tf.constant([0]), tf.constant([0])))
        weights["first"] = [variable.numpy() for variable in model.weights]
        return model

    hooks = {name: shown[name] for name in SPECS if name in shown}
    hooks |= {"create_model": create_model, "update_pre": lambda gradients: (gradients, gradients)}
    state = train(hooks, steps=6, batch_size=64, learning_rate=20.0, virtual_devices=devices)
    expected = train_two_towers(shown, weights["first"], steps=6, rate=20.0)
    compare.assert_close(state.train_model.weights, expected, 1e-5, 1e-6)
    assert np.abs(expected[0] - weights["first"][0]).max() > 0.05


def train_two_towers(shown: Any, weights: list[Any], steps: int, rate: float) -> list[Any]:
    """Trains a plain loop on one device and returns the weights of both towers.

    In the matrix of logits, the diagonal contains the matching pairs.
    """
    keras.utils.set_random_seed(0)  # The shuffle depends on the seed, which is that of the run.
    user_table, item_table = (tf.Variable(weight) for weight in weights)
    for user, item in shown["create_dataset"](64).take(steps):
        with tf.GradientTape() as tape:
            logits = tf.matmul(
                tf.gather(user_table, user), tf.gather(item_table, item), transpose_b=True
            )
            logits -= shown["LOG_Q"][item.numpy()]
            hits = (item.numpy()[:, None] == item.numpy()) & ~np.eye(64, dtype=bool)
            assert hits.any()
            kept = tf.where(hits, -np.inf, logits)
            loss = -tf.linalg.diag_part(tf.nn.log_softmax(kept))
            total = tf.reduce_mean(loss)
        gradients = tape.gradient(total, [user_table, item_table])
        for table, gradient in zip([user_table, item_table], gradients, strict=True):
            table.assign_sub(rate * tf.convert_to_tensor(gradient))
    return [user_table.numpy(), item_table.numpy()]


def test_a_file_next_to_the_hooks_is_named_if_it_is_not_found_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/keras-team/keras/issues/13718"""
    project = tmp_path / "project"
    project.mkdir()
    source = "def create_dataset():\n    return open('data.txt')\n"
    names: dict[str, Any] = {}
    exec(compile(source, str(project / "callbacks.py"), "exec"), names)
    hook = Hook("create_dataset", names["create_dataset"], (), {}, is_default=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HookFailed, match=r"callbacks.py:2\): FileNotFoundError.*'data.txt'$"):
        hook()
    (project / "data.txt").touch()
    cure = r"not the current folder: write Path\(__file__\).parent / 'data.txt'$"
    with pytest.raises(HookFailed, match=cure):
        hook()
