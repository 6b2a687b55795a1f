"""Defines the classes with which the table describes hooks.

This module does not import TensorFlow, so that the command line can print the table immediately.
"""

import dataclasses
import enum


class Place(enum.Enum):
    """Where a hook runs."""

    SETUP = "setup"  # the hook runs once, before training
    GRAPH = "graph"  # the hook is traced on each replica, in a step or an evaluation
    HOST = "host"  # the hook runs between two steps, as plain Python with eager values


class Form(enum.Enum):
    """The kind of value that callbacks.py assigns to the name of a hook."""

    FUNCTION = "a function"
    SCHEDULE = "a dict {N: function or list of functions}, with numbers of steps as keys"
    FUNCTIONS = "a function or a list of functions"
    NAMES = "a list of names"


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument that a hook may name, or a field of the named tuple that a hook may return.

    Attributes:
        name: the name of the argument or field
        type: the Python type of the value
        meaning: a phrase that describes the value
        shape: the shape of a tensor, where b is the number of examples in a batch, and [] is a
            scalar; empty for other values
    """

    name: str
    type: str
    meaning: str
    shape: str = ""

    @property
    def described_type(self) -> str:
        """The type of the value, and the shape if it is a tensor: ``tf.Tensor [b]``."""
        return f"{self.type} {self.shape}".rstrip()


@dataclasses.dataclass(frozen=True)
class HookSpec:
    """A row of the table, which contains everything about one hook.

    Attributes:
        name: the name in callbacks.py
        place: where the hook runs
        purpose: the purpose of the hook, a phrase without a period
        details: further information about the hook, in whole sentences
        arguments: the values that the hook may name
        returns: a phrase that describes the result; error messages contain this phrase
        result: the name of the public named tuple that the hook may return; empty if there is none
        fields: the fields of ``result``
        default: a phrase that describes the behavior without the hook
        example: the code of an example, which may use the names keras, tf and ctl
        form: the kind of value in callbacks.py
        is_required: whether training is impossible without the hook
    """

    name: str
    place: Place
    purpose: str
    example: str
    details: str = ""
    arguments: tuple[Argument, ...] = ()
    returns: str = ""
    result: str = ""
    fields: tuple[Argument, ...] = ()
    default: str = ""
    form: Form = Form.FUNCTION
    is_required: bool = False

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the arguments, in the order of the table."""
        return tuple(argument.name for argument in self.arguments)

    @property
    def is_traced(self) -> bool:
        """True if the hook becomes part of a graph."""
        return self.place is Place.GRAPH

    @property
    def signature(self) -> str:
        """The hook with all of its arguments: ``loss_pre(output, batch, ...)``."""
        if self.form is Form.NAMES:
            return self.name
        return f"{self.name}({', '.join(self.argument_names)})"
