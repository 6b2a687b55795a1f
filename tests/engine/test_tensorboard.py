"""What TensorBoard is shown: summaries of hooks, how a run goes, a profile, the HParams page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.plugins.hparams import plugin_data_pb2

import ctl_core
from ctl_core.evaluation import summaries
from tests.golden import small
from tests.helpers.cases import assert_weights, make_hooks
from tests.helpers.fixtures import Train


def read_scalars(state: ctl_core.State) -> list[tuple[int, str, float]]:
    """Returns (step, name, value) of each scalar summary of training, sorted."""
    return sorted(
        (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
        for file in (state.run_dir / "tb/train").glob("events.out.tfevents.*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    )


# ---- tf.summary in hooks of the graph: each step once, whatever the devices ----------------------


def summarizing_hooks(**hooks: Any) -> SimpleNamespace:
    """Hooks of which two write a summary."""

    def input_pre(batch: Any) -> Any:
        tf.summary.scalar("input", tf.cast(tf.summary.experimental.get_step(), tf.float32))
        return batch[0]

    def update_pre(gradients: Any) -> Any:
        """What one replica alone used would be rounded in another way there."""
        third = [gradient * 0.3 for gradient in gradients]
        tf.summary.scalar("third", tf.linalg.global_norm(third))
        return [gradient * 0.7 for gradient in third], gradients

    return make_hooks(**{"input_pre": input_pre, "update_pre": update_pre, **hooks})


def test_micro_batches_write_one_each_and_replicas_stay_equal(train: Train) -> None:
    state = train(summarizing_hooks(), steps=30, accumulate_steps=2, virtual_devices=2)
    found = read_scalars(state)
    inputs = [(step, value) for step, name, value in found if name == "input"]
    assert inputs == [(step, step) for step in range(1, 31) for _ in range(2)]
    assert [step for step, name, _ in found if name == "third"] == [*range(1, 31)]
    for weight in state.train_model.weights:
        one, other = state.strategy.experimental_local_results(weight.value)
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_a_compiled_step_refuses_it(train: Train) -> None:
    """On several devices, the update is not compiled."""
    said = r" \(\w+.py:\d+\): .*tf.summary in a step that jit_compile compiles;"
    with pytest.raises(ctl_core.SetupError, match=f"^input_pre{said}"):
        train(summarizing_hooks(), steps=1, jit_compile=True)
    hooks = make_hooks(update_pre=summarizing_hooks().update_pre)
    with pytest.raises(ctl_core.SetupError, match=f"^update_pre{said}"):
        train(hooks, steps=2, jit_compile=True)
    state = train(hooks, steps=2, jit_compile=True, virtual_devices=2, run_name="update")
    assert [step for step, name, _ in read_scalars(state) if name == "third"] == [1, 2]


@pytest.mark.parametrize("settings", [{"virtual_devices": 2}, {"precision": "float16"}])
def test_after_the_update_each_step_once(train: Train, settings: dict[str, Any]) -> None:
    def update_post(train_model: Any, step: Any) -> None:
        tf.summary.scalar("post", tf.cast(step, tf.float32))

    hooks = make_hooks(update_post=update_post, every_steps={3: lambda loss: None})
    state = train(hooks, steps=7, **settings)
    found = [step for step, name, _ in read_scalars(state) if name == "post"]
    skipped = 7 - int(state.optimizer.iterations.numpy())
    assert len(found) == len(set(found)) == 7 - skipped


# ---- What the engine writes ----------------------------------------------------------------------


def test_the_rate_of_the_schedule_and_the_speed(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a cosine; metrics.jsonl, which is compared line by line, knows none of it."""
    monkeypatch.setattr(summaries, "PAUSE", 0.0)  # however fast the steps are
    report = {2: lambda step, loss: ctl_core.report(step, loss=loss)}
    hooks = small.hooks(every_steps=report)
    settings = {"lr_schedule": "cosine", "learning_rate": 0.2, "batch_size": 16}
    for steps in (8, 16):
        state = train(hooks, steps=steps, **settings)
    found = {(step, name): value for step, name, value in read_scalars(state)}
    rates = {step: value for (step, name), value in found.items() if name.endswith("learning_rate")}
    assert [*rates] == [2, 4, 6, 8, 10, 12, 14, 16]
    for step in range(10, 17, 2):  # the rate that the step was taken with
        assert rates[step] == pytest.approx(0.1 * (1 + np.cos(np.pi * (step - 1) / 16)), rel=1e-4)
    for (step, name), value in found.items():
        if name == "progress/examples_per_second":
            expected = 16 * found[step, "progress/steps_per_second"]
            assert value == pytest.approx(expected, rel=1e-4)
    lines = map(json.loads, Path(state.run_dir, "metrics.jsonl").read_text().splitlines())
    assert {name for line in lines for name in line} == {"step", "split", "loss"}


def test_a_profile_changes_no_bit_and_ends_with_a_failing_hook(train: Train) -> None:
    plain = train(make_hooks(), steps=8, run_name="plain")

    def fail(step: int) -> None:
        raise ValueError("mine")

    with pytest.raises(ctl_core.RunError, match="mine"):
        train(make_hooks(at_step={4: fail}), steps=8, profile="2:6", run_name="failing")
    profiled = train(make_hooks(), steps=8, profile="3:5", run_name="profiled")
    assert_weights(profiled, plain, rtol=0)
    assert list(profiled.run_dir.glob("tb/train/plugins/profile/*/*.xplane.pb"))


def test_the_hparams_page_has_the_last_settings_of_a_run(train: Train) -> None:
    """Those that are not the defaults."""
    settings = {"run_name": "a", "hparams": {"width": 8, "of": {"kinds": ["a"]}}}
    train(make_hooks(), steps=2, **settings)
    run = train(make_hooks(), steps=4, ema=0.9, **settings).run_dir
    (file,) = (run / "tb").glob("*.hparams")
    (start,) = (
        plugin_data_pb2.HParamsPluginData.FromString(
            value.metadata.plugin_data.content
        ).session_start_info
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    )
    values = start.hparams
    assert start.group_name == "a"
    assert {"steps", "ema", "hparams.width", "hparams.of.kinds"} <= {*values}
    assert not {"seed", "run_name"} & {*values}
    assert values["steps"].number_value == 4 and values["hparams.width"].number_value == 8
    assert values["hparams.of.kinds"].string_value == '["a"]'
