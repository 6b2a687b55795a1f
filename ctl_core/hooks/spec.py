"""The words in which the table describes a hook: its arguments, its result, where it runs.

Nothing here imports TensorFlow, so that the command line can print the table at once.
"""

import dataclasses
import enum


class Place(enum.Enum):
    """Where a hook runs."""

    SETUP = "setup"  # once, before training
    GRAPH = "graph"  # traced into the graph of a step or an evaluation, on each replica
    HOST = "host"  # plain Python between two steps, with eager values


class Form(enum.Enum):
    """The form of the value that callbacks.py has under the name of a hook."""

    FUNCTION = "a function"
    SCHEDULE = "a dict {N: function or list of functions}, with numbers of steps as keys"
    FUNCTIONS = "a function or a list of functions"
    NAMES = "a list of names"


@dataclasses.dataclass(frozen=True)
class Argument:
    """A value that a hook may name, or a field of the named tuple that it may return.

    Attributes:
        name: the name of the argument or field
        type: its Python type
        meaning: a phrase that says which value it is
        shape: of tensors; b is the number of examples in a batch, and [] a scalar
    """

    name: str
    type: str
    meaning: str
    shape: str = ""

    @property
    def described_type(self) -> str:
        """The type and, of tensors, their shape: ``tf.Tensor [b]``."""
        return f"{self.type} {self.shape}".rstrip()


@dataclasses.dataclass(frozen=True)
class HookSpec:
    """A row of the table: everything that is said about one hook.

    Attributes:
        name: the name in callbacks.py
        place: where the hook runs
        purpose: the use of the hook, one phrase without a period
        details: everything else about the hook, whole sentences
        arguments: the values that the hook may name
        returns: the result, a phrase that error messages show
        result: the named tuple of the public names that the hook may return; empty if it has none
        fields: the fields of ``result``
        default: the behavior without the hook, a phrase
        example: the hook as a user writes it; names keras, tf and ctl stand for the libraries
        form: the form of the value in callbacks.py
        is_required: whether there is no training without the hook
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
        """Whether the hook becomes part of a graph."""
        return self.place is Place.GRAPH

    @property
    def signature(self) -> str:
        """The hook with all of its arguments: ``loss_pre(output, batch, ...)``."""
        if self.form is Form.NAMES:
            return self.name
        return f"{self.name}({', '.join(self.argument_names)})"
