"""Each hook: overriding it changes what it should and only that; leaving it out, the default."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import defaults as engine_defaults
from ctl_core.stretches import count_stacked_steps
from ctl_core.table import SPECS, TEXT
from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    small_model,
    squared_error,
)
from tests.helpers.fixtures import Train

BATCH = 16
ROOT = Path(__file__).parents[2]


def test_make_batches_gets_the_repeated_dataset_and_may_batch_it(train: Train) -> None:
    sizes: list[int] = []
    seen: list[np.ndarray] = []

    def make_batches(dataset: Any, per_replica_batch_size: int) -> Any:
        sizes.append(per_replica_batch_size)
        return dataset.batch(per_replica_batch_size)

    hooks = make_hooks(
        create_dataset=lambda: tf.data.Dataset.from_tensor_slices(regression_data()),
        make_batches=make_batches,
        every_steps={1: lambda batch: seen.append(batch[0].numpy())},
    )
    train(hooks, steps=7, virtual_devices=2)
    assert set(sizes) == {BATCH // 2}
    # No example is left out: the seventh batch runs over the end of the pass.
    inputs = regression_data()[0]
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate([inputs, inputs])[: 7 * 16])


@pytest.mark.parametrize("devices", [1, 2])
def test_update_pre_sees_the_summed_gradients_and_the_summed_loss(
    train: Train, devices: int
) -> None:
    """So do host hooks."""
    seen: list[Any] = []

    def update_pre(gradients: Any, loss: Any) -> Any:
        return [tf.sign(g) * loss for g in gradients], ["shown"]

    def see(loss: Any, gradients: Any, display_gradients: Any) -> None:
        seen.extend([loss, *gradients, display_gradients])

    hooks = make_hooks(create_opt=sgd, update_pre=update_pre, every_steps={1: see})
    state = train(hooks, steps=1, virtual_devices=devices)
    model = small_model()
    x, y = (part[:BATCH] for part in regression_data())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(squared_error((model(x), y))) / BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    for found, expected in zip(seen[:-1], [loss, *gradients], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [part.numpy() for part in seen[-1]] == [b"shown"]
    for variable, gradient in zip(model.trainable_variables, seen[1:-1], strict=True):
        variable.assign_sub(0.01 * np.sign(gradient) * float(loss))
    assert_weights(state, model, rtol=1e-5)


def test_every_hook_may_name_config_and_hparams(train: Train) -> None:
    seen: list[float] = []
    hooks = make_hooks(
        create_opt=lambda lr, hparams: keras.optimizers.SGD(hparams["rate"]),
        update_pre=lambda gradients, config: (
            [g * 0.0 + config.seed for g in gradients],
            gradients,
        ),
        every_steps={1: lambda config, hparams: seen.append(hparams["rate"] * config.seed)},
    )
    state = train(hooks, steps=1, seed=3, hparams={"rate": 0.5})
    assert_weights(state, [w - 1.5 for w in small_model().get_weights()])
    assert seen == [1.5]


def test_variables_without_gradient_are_pointed_out_once(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    spare: list[keras.Variable] = []

    def grad_pre(loss: Any, train_model: Any) -> Any:
        return loss, 0.0, [*train_model.trainable_variables, *spare]

    def create_model() -> keras.Model:
        spare.append(keras.Variable(1.0, name="spare"))
        return small_model()

    train(make_hooks(grad_pre=grad_pre, create_model=create_model), steps=3, virtual_devices=2)
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "not depend on" in line)
    assert said.startswith("warning: ") and "spare" in said


def test_the_stubs_show_the_defaults() -> None:
    """Every hook with a default is in each stub, as the engine's, or in neither."""
    names = {*SPECS, "print_step", "print_loss"}
    found = definitions(Path(engine_defaults.__file__))
    defaults = {name: found[name] for name in names & found.keys()}
    left_out = {"turns", "create_train_metrics", "train_metric_pre"}
    for stub in ("digits.py", "blank.py"):
        shown = definitions(ROOT / "templates" / "examples" / stub)
        own = {"create_metrics"} if stub == "digits.py" else set()
        for name in defaults.keys() - left_out - own:
            assert shown[name] == defaults[name], f"{stub}: {name}"
        text = (ROOT / "templates" / "examples" / stub).read_text()
        for name in ("create_dataset", "create_model", "create_loss", "create_eval_dataset"):
            assert name in text
        assert "batch_weight" in text


def definitions(path: Path) -> dict[str, str]:
    """Returns the syntax tree of each top-level function, and of each value that is assigned."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.dump(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = ast.dump(node.value)
    return found


def annotated_defaults(folder: Path, more: str = "") -> dict[str, Any]:
    """Returns copies of the default hooks, each with a docstring and type hints; ``more`` below."""
    tree = ast.parse(Path(engine_defaults.__file__).read_text())
    hooks = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in SPECS]
    tree.body = [*ast.parse("from ctl_core.defaults import *").body, *hooks]
    for node in hooks:
        node.body.insert(0, ast.Expr(ast.Constant("What it does.")))
        node.returns = ast.Name("Any")
        for argument in node.args.args:
            argument.annotation = ast.Name("Any")
    file = folder / "callbacks.py"
    file.write_text(ast.unparse(ast.fix_missing_locations(tree)) + more)
    copies: dict[str, Any] = {"__name__": "callbacks"}
    exec(compile(file.read_text(), str(file), "exec"), copies)
    return {hook.name: copies[hook.name] for hook in hooks}


def test_docstrings_and_type_hints_in_the_defaults_change_nothing(
    train: Train, tmp_path: Path
) -> None:
    """The compiled step takes as many batches at once, and gives the same bits."""
    hooks = {**annotated_defaults(tmp_path), "every_steps": {}}
    plain, annotated = (
        train(make_hooks(**own), jit_compile=True, run_name=name)
        for name, own in (("plain", {}), ("annotated", hooks))
    )
    stacks = [count_stacked_steps(state.parts, state.data) for state in (plain, annotated)]
    assert stacks[0] == stacks[1] > 1
    assert plain.functions.trace_counts() == annotated.functions.trace_counts()
    assert_weights(plain, annotated, rtol=0)


def test_what_only_looks_like_a_default_is_called(train: Train, tmp_path: Path) -> None:
    """A default that is decorated; one whose helper is another function."""
    sizes: list[int] = []

    @functools.wraps(engine_defaults.make_batches)
    def make_batches(dataset: Any) -> Any:
        sizes.append(1)
        return dataset

    train(make_hooks(make_batches=make_batches), steps=1)
    assert sizes
    own = "\n\ndef leading_dimension(batch):\n    return tf.shape(batch[0])[0] // 2\n"
    count_examples = annotated_defaults(tmp_path, own)["count_examples"]
    with pytest.raises(ctl_core.SetupError, match="of 8 examples"):
        train(make_hooks(count_examples=count_examples), steps=1, run_name="own")


def test_the_docs_show_the_table() -> None:
    assert f"```text\n{TEXT}```\n" in (ROOT / "docs" / "hooks.md").read_text()
