"""What a model is made of: a table of its parts with their numbers of parameters.

A part is a direct sub-layer, or what a direct attribute of the model holds; of a part that is a
model itself, its own parts are shown as well. The rows of the first level add up to the total.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.console import Console
from ctl_core.run_state.tracking import Found, find, plain_variable, trainable_variables

# Rows that a console is given at most; train.log has all of them.
MOST = 20
_HEAD = ("part", "class", "output shape", "parameters", "trainable")


@dataclasses.dataclass
class Part:
    """A row of the table.

    Attributes:
        name: of the layer or attribute
        kind: its class
        shape: of its output, where Keras knows it without a call, or ""
        parameters, trainable: how many numbers its variables hold, those of an earlier part left
            out; and how many of them are trained
        inner: its own parts
    """

    name: str
    kind: str
    shape: str
    parameters: int
    trainable: int
    inner: list[Part] = dataclasses.field(default_factory=list)


class Summary:
    """The parts of a model and of its loss.

    Attributes:
        parts: those of the first level
        parameters, trainable, size: of all: numbers, numbers that are trained, bytes
    """

    def __init__(self, train_model: Any, train_loss: Any = None) -> None:
        """Looks at the variables as they are now: what is frozen is not trainable."""
        self._free = {id(plain_variable(v)) for v in trainable_variables(train_model)}
        seen: set[int] = set()
        self.parts = self._parts(train_model, "train_model", seen)
        if train_loss is not None and (of_loss := _variables(find({"": train_loss}))):
            self._free |= {id(plain_variable(v)) for v in trainable_variables(train_loss)}
            self.parts.append(self._part("train_loss", train_loss, of_loss, seen))
        self.parameters = sum(part.parameters for part in self.parts)
        self.trainable = sum(part.trainable for part in self.parts)
        several = _variables(find({"train_model": train_model, "train_loss": train_loss}))
        unique = {id(v): v for v in map(plain_variable, several)}
        self.size = sum(_count(v) * tf.as_dtype(v.dtype).size for v in unique.values())

    def _parts(self, item: Any, root: str, seen: set[int]) -> list[Part]:
        parts = []
        for name, layer in _layers(item):
            parts.append(self._part(name, layer, layer.weights, seen))
        groups: dict[str, list[Any]] = {}
        found = find({root: item})
        states = set(map(id, found.generators))
        for path, variable in found.variables.items():
            plain = plain_variable(variable)
            if isinstance(plain, tf.Variable) and not {id(plain)} & (seen | states):
                names = path.removeprefix(f"{root}/").split("/")
                # Of a function, a global; its path begins with the module.
                first = names[0] if _held(item, names[0]) is not None else "/".join(names[:2])
                groups.setdefault(first, []).append(variable)
        for name in sorted(groups, key=lambda name: int(name) if name.isdecimal() else 0):
            parts.append(self._part(name, _held(item, name), groups[name], seen))
        return parts

    def _part(self, name: str, item: Any, variables: Iterable[Any], seen: set[int]) -> Part:
        within = seen.copy()
        own = {id(v): v for v in map(plain_variable, variables) if id(v) not in seen}
        seen.update(own)
        trained = [v for v in own.values() if id(v) in self._free]
        is_variable = isinstance(item, tf.Variable | keras.Variable)
        return Part(
            name,
            "Variable" if is_variable else "" if item is None else type(item).__name__,
            _output_shape(item),
            sum(map(_count, own.values())),
            sum(map(_count, trained)),
            self._parts(item, name, within) if isinstance(item, keras.Model) else [],
        )

    def total(self) -> str:
        """Returns the last line: how many parameters, trained ones, and their size."""
        trainable = f"{self.trainable:,}" if self.trainable < self.parameters else "all"
        size = f"{self.size / 1e6:,.1f} MB" if self.size >= 1e5 else f"{self.size / 1e3:.2g} kB"
        return f"{self.parameters:,} parameters, {trainable} of them trainable, {size}"

    def text(self, most: int | None = None, width: int | None = None) -> str:
        """Returns the table and the total.

        Args:
            most: rows, at most; the inner parts go first, then what comes last is summed up
            width: columns of the console, or None; columns of the table that do not fit are left
                out
        """
        rows = [
            row for part in self.parts for row in [_row(part), *(_row(p, 1) for p in part.inner)]
        ]
        if most is not None and len(rows) > most:
            rows, rest = [_row(part) for part in self.parts], self.parts[most - 1 :]
            if len(rows) > most:
                numbers = [sum(p.parameters for p in rest), sum(p.trainable for p in rest)]
                last = [f"… and {len(rest)} more", "", "", *(f"{n:,}" for n in numbers)]
                rows[most - 1 :] = [last]
        return "\n".join([*_aligned([list(_HEAD), *rows], width), self.total()])


def show(train_model: Any, train_loss: Any, console: Console) -> None:
    """Writes the whole table to train.log, and one that is not too long to the console."""
    summary = Summary(train_model, train_loss)
    if summary.parts:
        whole = summary.text()
        console.show(summary.text(MOST, console.width), f"the model:\n{whole}")


def _layers(item: Any) -> list[tuple[str, keras.Layer]]:
    """Returns the direct layers of a model, in its order, with their names."""
    if isinstance(item, keras.Model):
        several = [(layer.name, layer) for layer in item.layers]
    elif isinstance(item, Mapping):
        several = [(str(key), value) for key, value in item.items()]
    elif isinstance(item, list | tuple):
        several = [(str(index), value) for index, value in enumerate(item)]
    else:
        several = list(getattr(item, "__dict__", {}).items())
    return [
        (name, value)
        for name, value in several
        if isinstance(value, keras.Layer) and not isinstance(value, keras.layers.InputLayer)
    ]


def _held(item: Any, name: str) -> Any:
    """Returns what an object has under a name: a dict's key, a list's position, an attribute."""
    if isinstance(item, Mapping):
        return {str(key): value for key, value in item.items()}.get(name)
    if isinstance(item, list | tuple):
        return dict(zip(map(str, range(len(item))), item, strict=False)).get(name)
    return getattr(item, name, None)


def _variables(found: Found) -> list[Any]:
    """What of the variables holds parameters: no tables, and no states of generators."""
    states = set(map(id, found.generators))
    plain = map(plain_variable, found.variables.values())
    return [v for v in plain if isinstance(v, tf.Variable) and id(v) not in states]


def _count(variable: Any) -> int:
    if variable.shape.is_fully_defined():
        return int(np.prod(variable.shape.as_list(), dtype=np.int64))
    return int(tf.size(variable))


def _output_shape(item: Any) -> str:
    try:
        output = item.output if isinstance(item, keras.Layer) else None
    except (AttributeError, ValueError):  # it was never called on a keras.Input
        return ""
    shapes = [str(tuple(part.shape)) for part in tf.nest.flatten(output) if part is not None]
    return ", ".join(shapes)


def _row(part: Part, depth: int = 0) -> list[str]:
    numbers = [f"{part.parameters:,}", f"{part.trainable:,}"]
    return ["  " * depth + part.name, part.kind, part.shape, *numbers]


def _aligned(rows: list[list[str]], width: int | None) -> list[str]:
    """Pads the columns, the numbers to the right; leaves out what does not fit."""
    if not any(row[2] for row in rows[1:]):
        rows = [[*row[:2], *row[3:]] for row in rows]

    def widths() -> list[int]:
        return [max(map(len, column)) for column in zip(*rows, strict=True)]

    def too_wide() -> int:
        return sum(widths()) + 2 * (len(rows[0]) - 1) - width if width else 0

    for _ in range(len(rows[0]) - 3):  # the shapes first, then the classes
        if too_wide() > 0:
            rows = [[*row[:-3], *row[-2:]] for row in rows]
    if (over := too_wide()) > 0:
        room = max(widths()[0] - over, 4)
        rows = [[_cut(row[0], room), *row[1:]] for row in rows]
    sizes = widths()
    texts = len(sizes) - 2
    return [
        "  ".join(
            cell.ljust(size) if index < texts else cell.rjust(size)
            for index, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"
