"""Property-based tests of pure functions. Nothing is trained."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctl_core import schedule
from ctl_core.data import fold_of, index_shuffle, split_of
from ctl_core.hooks.defaults import explain_different_rows
from ctl_core.input.batches import BatchShape, find_start, take_share
from ctl_core.model.shards import choose_owners
from ctl_core.run.errors import SetupError
from ctl_core.run.layers import load_config, merge_hparams, write_config
from ctl_core.run.settings import Config
from ctl_core.schedule import Schedule, StepsPerCall

# The tests have no deadline, because the machine may be busy.
few = settings(max_examples=25, deadline=None, derandomize=True)
many = settings(max_examples=200, deadline=None, derandomize=True)
counts = st.integers(1, 9)


# ---- Shares ------------------------------------------------------------------------------------


def list_shares(examples: int, replicas: int, accumulate: int, is_fixed: bool) -> list[Any]:
    batch = tf.range(examples)
    number = examples if is_fixed else tf.constant(examples)
    shares = replicas * accumulate
    return [take_share(batch, number, index, shares) for index in range(shares)]


def read_rows(share: Any) -> list[int]:
    """Returns the rows of a share. A placeholder has no rows that count."""
    is_placeholder = share.present is not None and not share.present
    return [] if is_placeholder else share.batch.numpy().tolist()


@few
@given(st.integers(1, 40), counts, st.integers(1, 4), st.booleans())
def test_shares_are_disjoint_and_cover_the_batch(
    examples: int, replicas: int, accumulate: int, is_fixed: bool
) -> None:
    shares = list_shares(examples, replicas, accumulate, is_fixed)
    rows = [read_rows(share) for share in shares]
    assert [row for own_rows in rows for row in own_rows] == list(range(examples))
    sizes = [len(own_rows) for own_rows in rows]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for index, share in enumerate(shares):
        assert len(share.batch) >= 1  # Even a placeholder contains one row.
        if share.rows is not None:
            assert int(share.rows) == sizes[index]
            assert int(share.together) == examples
    shape = BatchShape(examples, replicas, accumulate)
    for micro_batch in range(accumulate):
        leaves = [shape.find_leaf(replica, micro_batch) for replica in range(replicas)]
        together = sum(sizes[leaf] for leaf in leaves)
        assert int(shape.count_rows_of_round(micro_batch, examples)) == together


@few
@given(st.integers(1, 40), counts, st.integers(1, 4))
def test_rows_of_replicas_add_up_to_the_batch(
    examples: int, replicas: int, accumulate: int
) -> None:
    shape = BatchShape(examples, replicas, accumulate)
    shares = [read_rows(share) for share in list_shares(examples, replicas, accumulate, True)]
    before = 0
    for replica in range(replicas):
        leaves = [shape.find_leaf(replica, micro_batch) for micro_batch in range(accumulate)]
        expected = sum(len(shares[leaf]) for leaf in leaves)
        rows, present = shape.count_rows_of(replica, examples)
        if rows is None:
            assert expected * replicas == examples
        else:
            assert (int(rows), bool(present)) == (expected, expected > 0)
        assert int(shape.count_rows_before(replica, examples)) == before
        before += expected


@few
@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_starts_of_shares_end_with_the_batch(examples: int, shares: int) -> None:
    assert int(find_start(0, examples, shares)) == 0
    assert int(find_start(shares, examples, shares)) == examples


def test_suggested_count_reads_the_tensor_with_a_row_for_each_example() -> None:
    nodes, target = tf.zeros([7, 2]), tf.zeros([4])
    batches = {
        "batch[0]": (target, (target, nodes)),
        "batch[1][0]": (nodes, (target, target)),
        "batch['graph']['y']": {"nodes": nodes, "graph": {"y": target}},
    }
    for path, batch in batches.items():
        explanation = explain_different_rows(batch, 4)
        assert f"def count_examples(batch): return tf.shape({path})[0]" in explanation
        assert int(tf.shape(eval(path))[0]) == 4
    assert "def " not in explain_different_rows((nodes, nodes), 4)


# ---- Shards -------------------------------------------------------------------------------------


@many
@given(st.lists(st.integers(0, 10**9), max_size=30), counts)
def test_shards_are_as_even_as_whole_variables_allow(sizes: list[int], devices: int) -> None:
    """Two devices differ by no more than the largest variable."""
    owners = choose_owners(sizes, devices)
    loads = [0] * devices
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert choose_owners(sizes, devices) == owners


# ---- Shuffles and splits -----------------------------------------------------------------------


@few
@given(st.data(), st.integers(1, 30), st.integers(0, 2**31))
def test_index_shuffle_has_each_index_once_a_pass(data: Any, examples: int, seed: int) -> None:
    batch_size = data.draw(st.integers(1, examples))
    batches = -(-2 * examples // batch_size)
    read = index_shuffle(examples, batch_size, seed).take(batches)
    indices = np.concatenate([batch.numpy() for batch in read])
    for number in (0, 1):
        one_pass = indices[number * examples : (number + 1) * examples]
        assert sorted(one_pass) == list(range(examples))


keys_of_examples = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20)


@few
@given(keys_of_examples, st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.5))
def test_growing_fraction_takes_from_train_only(
    keys: list[str], validation: float, test: float, more: float
) -> None:
    before = split_of(keys, {"validation": validation, "test": test}).numpy()
    larger = {"validation": validation + (0.5 - validation) * more, "test": test}
    after = split_of(keys, larger).numpy()
    assert all(new == old or (old, new) == (b"train", b"validation")
               for old, new in zip(before, after, strict=True))  # fmt: skip
    single = [split_of([key], {"validation": validation, "test": test}).numpy()[0] for key in keys]
    assert single == before.tolist()


@few
@given(keys_of_examples, st.integers(1, 10))
def test_fold_depends_on_the_key_alone(keys: list[str], folds: int) -> None:
    actual = fold_of(keys, folds).numpy()
    assert ((actual >= 0) & (actual < folds)).all()
    assert [int(fold_of(key, folds)) for key in keys] == actual.tolist()


# ---- Schedule ----------------------------------------------------------------------------------


def make_schedule(every: list[int], at: list[int], ckpt: int, evaluate: int) -> Schedule:
    hook = SimpleNamespace(deferred=False, arguments=())
    state: Any = SimpleNamespace(
        hooks=SimpleNamespace(
            every_steps={period: (hook,) for period in every},
            at_step={step: (hook,) for step in at},
        ),
        config=Config(ckpt_every=ckpt, eval_every=evaluate, log_every=7),
        components=SimpleNamespace(list_logged_metrics=lambda: {}),
    )
    return Schedule(state, ())


periods = st.lists(st.integers(1, 30), max_size=4)


@many
@given(periods, periods, st.integers(0, 30), st.integers(0, 30), st.integers(1, 100))
def test_schedule_skips_no_due_step(
    every: list[int], at: list[int], ckpt: int, evaluate: int, last: int
) -> None:
    plan = make_schedule(every, at, ckpt, evaluate)
    plan.last = last
    step, stops = 0, []
    while step < last:
        following = plan.find_next_stop(step)
        assert step < following <= last
        stops.append(following)
        step = following
    due = [
        number
        for number in range(1, last + 1)
        if plan.find_due(number) or plan.is_save_due(number) or plan.is_evaluation_due(number)
    ]
    assert stops == due


@many
@given(st.integers(1, 1000), st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20))
def test_steps_per_call_stays_between_one_and_the_most(most: int, seconds: list[float]) -> None:
    clock = iter([0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        steps_per_call = StepsPerCall(most)
        for duration in seconds:
            before = steps_per_call.limit
            clock = iter([0.0, duration])
            with steps_per_call.measure(before) as steps:
                assert steps == before
            assert 1 <= steps_per_call.limit <= min(most, 4 * before)
            # A call has no more steps than fit into a second, unless a single step takes longer.
            assert steps_per_call.limit * duration / before <= 1.0 + 1e-6 or (
                steps_per_call.limit == 1
            )


# ---- Settings ----------------------------------------------------------------------------------

names = st.text("abcxyz_", min_size=1, max_size=5)
plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
)
hparams = st.dictionaries(
    names, st.one_of(plain_values, st.dictionaries(names, plain_values, max_size=3)), max_size=4
)


@many
@given(hparams, hparams)
def test_merged_hparams_have_the_later_values(below: dict[str, Any], over: dict[str, Any]) -> None:
    merged = merge_hparams(below, over)
    assert merged.keys() == below.keys() | over.keys()
    for name, value in merged.items():
        if name not in over:
            assert value == below[name]
        elif isinstance(over[name], dict):
            inner = below.get(name)
            assert value == {**(inner if isinstance(inner, dict) else {}), **over[name]}
        else:
            assert value == over[name]
    assert merge_hparams(merged, over) == merged
    assert merge_hparams(below, {}) == below


@many
@given(hparams, names)
def test_unknown_hparam_is_refused(known: dict[str, Any], name: str) -> None:
    if name in known or not known:
        return
    with pytest.raises(SetupError, match=name):
        merge_hparams(known, {name: 1}, known=known)


@settings(few, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hparams,
    st.one_of(st.none(), st.integers(0, 2**40)),
    st.floats(1e-30, 1e29),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["10min", "1epoch", 0, 7]),
    st.text("abc xyz:#'\"-ü", min_size=1, max_size=12).filter(str.strip),
)
def test_settings_written_back_read_back_equal(
    tmp_path: Path, free: dict[str, Any], steps: int | None, rate: float, seed: int,
    ckpt_every: Any, runs_dir: str,
) -> None:  # fmt: skip
    config = Config(
        steps=steps, learning_rate=rate, seed=seed, ckpt_every=ckpt_every, runs_dir=runs_dir,
        hparams=free,
    )  # fmt: skip
    write_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
