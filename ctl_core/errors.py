"""The ways in which a run can end badly, each with its exit code.

Whatever the engine raises on purpose is one of these, with a message of one line: what, where,
what was expected, what to do. ``__main__`` prints the line; the traceback goes to train.log.
"""

from __future__ import annotations

import re

# Colours and other commands to a terminal; Keras puts them into its messages.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What TensorFlow wraps around the message of an op that failed: where it was made, its name.
_OP_STACK = re.compile(
    r"Graph execution error:\s*(?:Detected at node .*?\(most recent call last\):\s*"
    r"(?:<stack traces unavailable>|(?:\s*File \"[^\n]*\", line \d+, in [^\n]*\n)+)\s*)+"
    r"(?:\d+ root error\(s\) found\.\s*\(0\) \w+:\s*)?",
    re.DOTALL,
)
_OP_NAMES = re.compile(
    r"\n\t \[\[(?:(?:\{\{[^}]*\}\})+|[\w./-]*)\]\]"
    r"|\{\{function_node [^}]*\}\} ?|\[Op:\w+\]( name:.*)?"
    r"|Error in user-defined function passed to \S+ transformation with iterator: \S+: "
)
# An op in a message about shapes, with all its attributes and inputs; its kind is kept.
_OP_DEFINITION = re.compile(r"for '\{\{node [^}]*\}\} = (\w+)\[.*?\)' with")
# Around what a layer of a functional model raises: Keras looks for the shapes that it returns.
_OF_SHAPES = re.compile(r"Could not automatically infer .*?\bError encountered:\s*", re.DOTALL)


# What follows a message: another one, and what only helps beside the traceback.
_APPENDED = (
    "\n  (1) ",
    "Arguments received by ",
    "You can attempt the following resolutions",
    "\n\nStack trace for op definition: ",
    "\n\ttf2xla conversion failed",
    " This error may indicate that you're trying to pass a Tensor to a NumPy call",
    " A KerasTensor is a symbolic placeholder for a shape and dtype",
    " If you are looking for numpy-related methods",
)


class CtlError(Exception):
    """Base of the engine's own errors; ``exit_code`` is what the command returns."""

    exit_code = 1


class SetupError(CtlError):
    """Wrong usage, settings or hooks, found before training starts (exit code 2)."""

    exit_code = 2


class RunError(CtlError):
    """A failure while running: a hook raised, a file could not be written (exit code 1)."""


class PeerLost(RunError):
    """Another process of the cluster is gone (exit code 75: starting all again helps)."""

    exit_code = 75


class StopTraining(CtlError):
    """For hooks to raise in ``every_steps`` or ``at_step``: training ends here, as if done.

    The run is evaluated and saved, and the exit code is 0. Started again, it says so; with more
    steps than it was to take, or ``--continue``, it goes on.
    """


class HookFailed(RunError):
    """A hook raised. The message names the hook, its file and line, and the exception."""


def one_line(text: object, limit: int = 400) -> str:
    """Squeezes a message into one line of at most ``limit`` characters, without colours."""
    line = " ".join(_ESCAPES.sub("", str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def brief(error: BaseException, limit: int = 300) -> str:
    """Returns ``ValueError: its message`` in one line, without what TensorFlow and Keras add.

    That is stacks, node names, advice on AutoGraph, and the arguments of a layer's call; all of
    it is in the traceback. It is taken out by the form of the text, since the exceptions have no
    attributes for it; where the form changes, the message is longer.
    """
    kind, text = type(error).__name__, _ESCAPES.sub("", str(error))
    if "Mixing different tf.distribute.Strategy objects" in text:
        text = (
            "an optimizer or a variable was made outside of the hooks that create something, "
            "where callbacks.py begins, say; make it in create_model or create_opt"
        )
    if "hence its learning rate is not settable" in text:
        text = "the optimizer takes its rate from lr, or a schedule; change it by lr.assign(x)"
    if "EagerTensor' object has no attribute 'assign" in text:
        text += " (a learning rate is changed by lr.assign(x))"
    if "`merge_call` called while defining a new graph" in text:
        text = (
            "exchanges values with the other replicas inside of a tf.function, a branch or a loop "
            "of the graph, where they cannot meet; do so outside of it, and without jit_compile, "
            "which makes a tf.function of the step"
        )
    if text.startswith("in user code:"):  # a function of tf.data's: the message is the last part
        text = text.rpartition(f"    {kind}: ")[2]
    text = _OP_STACK.sub("", text)
    if "Traceback (most recent call last):" in text:  # Python inside an op, as py_function runs it
        text = _OP_NAMES.sub("", text.split("Traceback (most recent call last):")[0]).lstrip()
        if re.match(r"\w+: ", text):
            kind, _, text = text.partition(": ")
    for end in _APPENDED:
        text = text.split(end)[0]
    text = _OP_DEFINITION.sub(r"for \1 with", _OF_SHAPES.sub("", text))
    text = one_line(re.sub(r"\{\{node ([^}]*)\}\}", r"\1", _OP_NAMES.sub("", text)), limit)
    return f"{kind}: {text}" if text else kind


def not_compiled(error: Exception) -> str | None:
    """Says what XLA cannot compile, if that is what an error is about.

    XLA's errors are those of any op; they are told by their text.
    """
    text = str(error)
    names = unknown_to_xla(error)
    if "_Arg" in names:
        what = "texts" if "DT_STRING" in text else "values of a type that it does not know"
        return f"XLA cannot compile a batch that holds {what}; leave them out in create_dataset"
    if names:
        return f"XLA cannot compile {', '.join(names)}, which the step uses"
    if "XLA" in text or "compile-time constant" in text:
        return f"XLA cannot compile the step: {brief(error, 160)}"
    return None


def unknown_to_xla(error: Exception) -> list[str]:
    """Returns the types of ops that XLA does not know, as its error names them."""
    return sorted({*re.findall(r"No registered '(\w+)' OpKernel for XLA", str(error))})


def reason(error: Exception) -> str:
    """Says in a few words why a file could not be read or written, without where in TensorFlow.

    Its messages name the op, the file and then the operating system's words behind a semicolon.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(op_message(error, 1000).split("; ")[-1], 160)


def op_message(error: Exception, limit: int) -> str:
    """Returns the first line of what a failed op says, without where it was made and its name."""
    text = _OP_NAMES.sub("", _OP_STACK.sub("", str(getattr(error, "message", error))))
    return one_line(text.lstrip().split("\n")[0], limit)
