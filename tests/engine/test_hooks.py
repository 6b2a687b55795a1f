"""Each hook: overriding it changes what it should and only that; leaving it out, the default."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import defaults as engine_defaults
from ctl_core.table import TABLE
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


def gradients_by_hand() -> tuple[keras.Model, Any, list[Any]]:
    """A ``small_model``, its loss of the first batch, and the gradients."""
    model = small_model()
    x, y = (part[:BATCH] for part in regression_data())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(squared_error((model(x), y))) / BATCH
    return model, loss, tape.gradient(loss, model.trainable_variables)


def one_step() -> keras.Model:
    """``small_model`` after one step of SGD by hand."""
    model, _, found = gradients_by_hand()
    gradients = tf.clip_by_global_norm(found, 10.0)[0]
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.01 * gradient)
    return model


@pytest.fixture(params=[1, 2])
def step(request: pytest.FixtureRequest, train: Train) -> Any:
    """Returns ``step(**hooks)``: one step of SGD with the hooks, on one and on two replicas."""

    def run(**hooks: Any) -> ctl_core.State:
        chosen = make_hooks(**{"create_opt": sgd, **hooks})
        return train(chosen, steps=1, virtual_devices=request.param)

    return run


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


def test_create_loss_as_a_sum_and_as_a_keras_loss(step: Any) -> None:
    for reduction in ("sum", "none"):
        loss = keras.losses.MeanSquaredError(reduction=reduction)  # one target each: no mean
        state = step(create_loss=lambda loss=loss: lambda pair: loss(pair[1], pair[0]))
        assert_weights(state, one_step())
    state = step(create_loss=lambda: lambda pair: tf.reduce_sum(squared_error(pair)))
    assert_weights(state, one_step())


def test_create_opt_default(train: Train) -> None:
    optimizer = train(make_hooks(), steps=1).optimizer
    assert isinstance(optimizer, keras.optimizers.Nadam) and optimizer.epsilon == 0.001
    assert float(optimizer.learning_rate) == pytest.approx(0.01)


def test_create_ckpt_default_keeps_fifty_and_all_five(train: Train) -> None:
    state = train(make_hooks(), steps=1)
    assert state.manager._max_to_keep == 50
    present = tf.train.Checkpoint(
        step=state.step_variable, lr=state.lr, optimizer=state.optimizer, model=state.train_model
    )
    shapes = tf.train.load_checkpoint(present.write(str(state.run_dir / "present")))
    saved = tf.train.load_checkpoint(state.manager.latest_checkpoint)
    sizes = [sorted(reader.get_variable_to_shape_map().values()) for reader in (saved, shapes)]
    assert sizes[0] == sorted([*sizes[1], []])  # and the manager's save_counter


def test_update_pre_sees_the_summed_gradients_and_the_summed_loss(step: Any) -> None:
    seen: list[Any] = []

    def update_pre(gradients: Any, loss: Any) -> Any:
        return [tf.sign(g) * loss for g in gradients], ["shown"]

    state = step(
        update_pre=update_pre,
        every_steps={1: lambda loss, gradients: seen.append((loss, gradients))},
    )
    model, loss, gradients = gradients_by_hand()
    for gradient, reference in zip(seen[0][1], gradients, strict=True):
        np.testing.assert_allclose(gradient, reference, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen[0][0], loss, rtol=1e-6)
    for variable, gradient in zip(model.trainable_variables, seen[0][1], strict=True):
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


def test_autograph_converts_hooks(step: Any) -> None:
    assert_weights(step(input_pre=double_if_positive), one_step())


def double_if_positive(batch: Any) -> Any:
    inputs = batch[0]
    if tf.reduce_sum(tf.abs(inputs)) < 0.0:
        inputs = inputs * 2.0
    return inputs


class MakesLayersLate(keras.Model):
    """Creates its layers, and with them random generators, in build()."""

    def build(self, shape: Any) -> None:
        self.drop, self.out = keras.layers.Dropout(0.5), keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.drop(inputs, training=training))


def test_a_generator_that_replicas_would_share_is_refused(train: Train) -> None:
    noise = keras.layers.GaussianNoise(0.1)
    hooks = make_hooks(
        create_model=lambda: MakesLayersLate(),
        input_pre=lambda batch: noise(batch[0], training=True),
    )
    train(hooks, steps=1)
    with pytest.raises(ctl_core.SetupError, match=r"seed_generator_state \[2\], which was made"):
        train(hooks, steps=1, virtual_devices=2, run_name="shared")


def test_a_generator_made_inside_the_step_is_refused_on_several_replicas(train: Train) -> None:
    hooks = make_hooks(input_pre=lambda batch: batch[0] + keras.random.normal((1,)))
    with pytest.raises(ctl_core.SetupError, match="seed_generator_state inside the step"):
        train(hooks, steps=1, virtual_devices=2)


def test_variables_without_gradient_are_pointed_out_once(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = make_hooks(
        grad_pre=lambda loss, train_model: (
            loss,
            0.0,
            [*train_model.trainable_variables, train_model.spare],
        ),
        create_model=model_with_spare,
    )
    train(hooks, steps=3, virtual_devices=2)
    output = capsys.readouterr().out
    assert output.count("warning: the loss does not depend on") == 1 and "spare" in output


def model_with_spare() -> keras.Model:
    model = small_model()
    model.spare = keras.Variable(1.0, name="spare")
    return model


def test_the_stubs_show_the_defaults() -> None:
    """Every hook that the table marks is in each stub, with exactly the engine's default."""
    folder = Path(__file__).parents[2] / "templates" / "examples"
    defaults = definitions(Path(engine_defaults.__file__))
    required = {spec.name for spec in TABLE if spec.required}
    evaluation = {"create_eval_dataset", "create_metrics"}  # the examples choose these
    undefined = {"batch_weight"}  # shown as a comment: without it, dividing costs nothing
    for stub in ("digits.py", "blank.py"):
        shown, text = definitions(folder / stub), (folder / stub).read_text()
        for spec in (spec for spec in TABLE if spec.in_stub):
            own = required | undefined
            if spec.name not in undefined and (
                stub == "digits.py" or spec.name not in required | {"create_eval_dataset"}
            ):
                assert spec.name in shown, f"{stub}: {spec.name}"
            assert spec.name in text
            own |= evaluation if stub == "digits.py" else {"create_eval_dataset"}
            if spec.name not in own:
                assert shown[spec.name] == defaults[spec.name], f"{stub}: {spec.name}"
        for name in ("print_step", "print_loss"):
            assert shown[name] == defaults[name]


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


def test_the_docs_show_the_table() -> None:
    from scripts.hooks_table import PAGE, with_table

    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python scripts/hooks_table.py"
