"""Converts a function to a file of LiteRT, the runtime that was called TensorFlow Lite."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.compat import FunctionGraph
from ctl_core.conversion import convert_saved_model
from ctl_core.conversion.file_function import FileFunction, NotConvertible
from ctl_core.conversion.ops import describe_ops
from ctl_core.conversion.run_file import Arrays, pack
from ctl_core.hooks.hooks import Hooks
from ctl_core.hooks.recording import find_tables
from ctl_core.run.errors import make_line
from ctl_core.run.output import silence_stderr
from ctl_core.serving import name_entries

# Where the messages of the converter name the ops that LiteRT lacks, the clearest one first.
_OPS = (
    re.compile(r"TF Select ops: ([\w, ]+)"),
    re.compile(r"Custom ops: ([\w, ]+)"),
    re.compile(r"'tf\.(\w+)' op"),
    re.compile(r'fused\["(\w+):"'),
)


def convert_to_litert(
    function: FileFunction,
    hooks: Hooks,
    rows: int | None,
    quantize: str | None = None,
    examples: Iterable[Arrays] = (),
) -> bytes:
    """Returns the content of a LiteRT file that needs no Flex ops.

    Flex ops are ops of TensorFlow. Only a runtime that was built with them can run such a file, and
    others refuse it when they load it, for example on a phone.

    Args:
        function: what the file computes
        hooks: the hooks of the run, for messages
        rows: the number of examples in each call; None allows any number
        quantize: see ``convert_saved_model.convert``
        examples: inputs by name from which ``int8`` finds the ranges of the values

    Raises:
        NotConvertible: LiteRT lacks an op, or the converter fails.
    """
    named = name_entries(function.function, function.spec, rows)
    traced = tf.function(named.function, autograph=False, input_signature=[named.spec])
    graph = traced.get_concrete_function().graph
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with silence_stderr():
            _save(traced, graph, folder)
        if quantize == "int8":
            return _convert_in_process(folder, quantize, examples, graph, hooks)
        try:
            with silence_stderr():
                return convert_saved_model.convert(folder, quantize)
        except Exception as error:  # the class of most errors is private
            text = f"{type(error).__name__}: {error}"
            raise NotConvertible(_explain(text, graph, hooks)) from error


def _save(function: Any, graph: FunctionGraph, folder: Path) -> None:
    """Writes a SavedModel from which the converter reads a function."""
    module: Any = tf.Module()
    module.variables_of_function = list(graph.variables)
    module.tables_of_function = find_tables(graph)
    tf.saved_model.save(module, str(folder), {convert_saved_model.SIGNATURE: function})


def _convert_in_process(
    folder: Path, quantize: str, examples: Iterable[Arrays], graph: FunctionGraph, hooks: Hooks
) -> bytes:
    """Converts a SavedModel in another process, which the converter may end.

    Raises:
        NotConvertible: LiteRT lacks an op, or the converter fails.
    """
    batches = list(examples)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    (folder / convert_saved_model.EXAMPLES).write_bytes(pack(joined))
    # -P: the folder of the program is not searched for modules.
    command = [sys.executable, "-P", convert_saved_model.__file__, str(folder), quantize]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode == 0:
        return (folder / convert_saved_model.RESULT).read_bytes()
    if process.returncode == 1:
        raise NotConvertible(_explain(process.stderr, graph, hooks))
    raise NotConvertible(
        f"the converter of LiteRT crashes when it quantizes the model to {quantize}; try "
        "--quantize float16"
    )


def _explain(text: str, graph: FunctionGraph, hooks: Hooks) -> str:
    """Returns a phrase that names the ops that LiteRT lacks, with their lines.

    Args:
        text: the message of the converter
        graph: the graph that it cannot convert
        hooks: the hooks of the run
    """
    for pattern in _OPS:
        found = pattern.findall(text)
        if found:
            kinds = dict.fromkeys(kind.strip() for kinds in found for kind in kinds.split(","))
            if pattern is _OPS[-1]:
                kinds = dict.fromkeys([next(iter(kinds))])  # the others are calls of functions
            return f"LiteRT cannot express {describe_ops(kinds, graph, hooks)} without Flex ops"
    return f"the converter of LiteRT fails: {make_line(text, 200)}"
