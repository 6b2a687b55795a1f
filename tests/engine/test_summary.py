"""The table of a model's parts: what counts, what is folded, and where it is shown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from rich.console import Console as Terminal

from ctl_core import summary
from ctl_core.console import Console
from ctl_core.summary import Summary
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train


def nested() -> keras.Model:
    """5 to 8, a model of its own with 4 statistics that are not trained, 4 to 1."""
    inner = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4), keras.layers.BatchNormalization()], name="inner"
    )
    first, last = keras.layers.Dense(8, name="first"), keras.layers.Dense(1, name="last")
    return keras.Sequential([keras.Input((5,)), first, keras.layers.Dropout(0.1), inner, last])


class Tied(tf.Module):
    """A variable under two names, a layer, and an integer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.zeros([3, 4]))
        self.tied = self.weight
        self.layer = keras.layers.Dense(2)
        self.layer.build((None, 4))
        self.index = tf.Variable([1, 2], trainable=False)


def numbers(made: Summary) -> dict[str, tuple[int, int]]:
    return {part.name: (part.parameters, part.trainable) for part in made.parts}


def test_sub_models_are_shown_one_level_deep() -> None:
    made = Summary(model := nested())
    assert (made.parameters, made.trainable) == (105, 97) == (model.count_params(), 97)
    assert made.size == 4 * 105
    assert [line.split() for line in made.text().splitlines()] == [
        ["part", "class", "output", "shape", "parameters", "trainable"],
        ["first", "Dense", "(None,", "8)", "48", "48"],
        ["dropout", "Dropout", "(None,", "8)", "0", "0"]
        if model.layers[1].name == "dropout"
        else [model.layers[1].name, "Dropout", "(None,", "8)", "0", "0"],
        ["inner", "Sequential", "(None,", "4)", "52", "44"],
        [model.layers[2].layers[0].name, "Dense", "(None,", "4)", "36", "36"],
        [model.layers[2].layers[1].name, "BatchNormalization", "(None,", "4)", "16", "8"],
        ["last", "Dense", "(None,", "1)", "5", "5"],
        ["105", "parameters,", "97", "of", "them", "trainable,", "0.42", "kB"],
    ]
    model.layers[2].trainable = False
    assert numbers(Summary(model))["inner"] == (52, 0)


def test_shared_weights_count_once_whatever_the_model_is() -> None:
    assert numbers(Summary(Tied())) == {"layer": (10, 10), "weight": (12, 12), "index": (2, 0)}
    model = nested()
    both = Summary({"generator": model, "critic": model.layers[2]})
    assert numbers(both) == {"generator": (105, 97), "critic": (0, 0)} and both.parameters == 105
    assert [part.parameters for part in both.parts[0].inner] == [48, 0, 52, 5]
    scale = tf.Variable([1.0, 2.0])
    alone = Summary(lambda x: x * scale)
    assert (alone.parameters, alone.trainable) == (2, 2)
    several = Summary([Tied(), nested()])
    assert numbers(several) == {"0": (24, 22), "1": (105, 97)}
    with_loss = Summary(nested(), Tied())
    assert numbers(with_loss)["train_loss"] == (24, 22) and with_loss.parameters == 129


def test_a_long_model_is_folded_and_a_narrow_terminal_gets_fewer_columns() -> None:
    model = keras.Sequential(
        [keras.Input((2,)), *(keras.layers.Dense(2, name=f"layer_{i}") for i in range(50))]
    )
    made = Summary(model)
    assert len(made.text().splitlines()) == 52
    short = made.text(20).splitlines()
    assert len(short) == 22 and short[-2].split() == ["…", "and", "31", "more", "186", "186"]
    assert sum(int(line.split()[-1]) for line in short[1:-1]) == made.trainable == 300
    for width in (60, 45, 30, 27):
        lines = made.text(20, width).splitlines()[:-1]
        assert max(map(len, lines)) <= width
        assert lines[1].split()[-2:] == ["6", "6"]
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=30)
    summary.show(model, None, Console(terminal))
    assert "\x1b" not in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_a_new_run_shows_it_and_a_resumed_one_does_not(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks: Any = make_hooks()
    train(hooks, steps=2, virtual_devices=2)
    table = "\nhidden  Dense  (None, 8)             48         48\n"
    assert table in capsys.readouterr().out
    train(hooks, steps=4, virtual_devices=2)
    train(hooks, steps=4, virtual_devices=2)
    assert table not in capsys.readouterr().out
    assert (tmp_path / "runs/run/train.log").read_text().count(table) == 1
