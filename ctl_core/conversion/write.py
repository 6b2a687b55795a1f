"""Writes a file of LiteRT or ONNX with its proof: converts, compares, and names the file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ctl_core.conversion.file_function import (
    FileFunction,
    NotConvertible,
    describe_inputs,
    find_output_obstacle,
    list_file_functions,
)
from ctl_core.conversion.formats import DEFAULT_OPSET
from ctl_core.conversion.litert import convert_to_litert
from ctl_core.conversion.onnx_file import convert_to_onnx
from ctl_core.conversion.proof import (
    TOLERANCE,
    TRAINING_EXAMPLES,
    Proof,
    Prover,
    get_inputs,
    read_training_batches,
)
from ctl_core.conversion.run_file import Arrays
from ctl_core.run.console import Console
from ctl_core.run.errors import RunError
from ctl_core.run.files import atomic_write, relative_path
from ctl_core.serving import LoadedModel

_SUFFIXES = {"litert": ".tflite", "onnx": ".onnx"}
_CONVERTERS = {"litert": "tensorflow", "onnx": "tf2onnx"}


class ExportOptions(NamedTuple):
    """The options of ``export`` for files of LiteRT and ONNX.

    Attributes:
        quantize: ``float16`` or ``int8`` for a smaller LiteRT file; None for float32
        tolerance: the largest relative difference of a proven file; None for ``TOLERANCE`` or, if
            the file is quantized, for any difference
        opset: the version of ONNX's operators; None for ``DEFAULT_OPSET``
    """

    quantize: str | None = None
    tolerance: float | None = None
    opset: int | None = None

    @property
    def accepted_difference(self) -> float | None:
        """The largest relative difference of a proven file; None if any is accepted."""
        if self.tolerance is None and self.quantize is None:
            return TOLERANCE
        return self.tolerance


class Conversion(NamedTuple):
    """A function that was converted.

    Attributes:
        function: the function
        content: the content of the file
        rows: the number of examples that the file takes in each call; None if it takes any number
        notes: what callers have to know, in one line each
    """

    function: FileFunction
    content: bytes
    rows: int | None
    notes: list[str]


def write_proven_file(
    prover: Prover, model: LoadedModel, console: Console, format: str, path: Path,
    options: ExportOptions,
) -> None:  # fmt: skip
    """Writes a folder with a file of a format, and with its proof.

    Args:
        prover: compares the file with the checkpoint
        model: the model of the checkpoint
        console: prints what the proof has found, and what callers of the file have to know
        format: ``litert`` or ``onnx``
        path: the folder
        options: the options of the command

    Raises:
        RunError: the format lacks an op, so that there is no file; or the file is not proven, so
            that its name ends with ``.unproven``.
    """
    conversion = _convert(model, format, options)
    for note in conversion.notes:
        console.say(f"{format}: {note}")
    name = "model"
    if options.quantize is not None and format == "litert":
        name += f"-{options.quantize}"
    name += _SUFFIXES[format]
    tolerance = options.accepted_difference
    with atomic_write(path) as folder:
        folder.mkdir()
        file = folder / name
        file.write_bytes(conversion.content)
        proof = prover.prove(file, format, conversion.function, conversion.rows, tolerance)
        if proof.problem:
            file = file.rename(f"{file}.unproven")
        facts = _describe_file(model, format, options, conversion) | proof.to_json()
        facts["versions"][_CONVERTERS[format]] = importlib.metadata.version(
            _find_package(_CONVERTERS[format])
        )
        text = json.dumps({"file": file.name} | _make_finite(facts), indent=2)
        (folder / "proof.json").write_text(f"{text}\n", encoding="utf-8")
    shown = relative_path(path / file.name)
    if proof.problem:
        raise RunError(
            f"{format}: {shown} is not proven: {proof.problem}; {relative_path(path)}/proof.json "
            f"has the details{_find_cure(model)}."
        )
    size = len(conversion.content)
    console.say(
        f"step {model.step}: wrote {shown} ({size:,} bytes), {_describe_result(proof, tolerance)}"
    )


def _describe_result(proof: Proof, tolerance: float | None) -> str:
    """Returns the result of a proof for the console."""
    verdict = "proven"
    if tolerance is None:
        verdict = "compared"
    return f"{verdict} on {proof.data}: {proof.describe()}"


def _find_package(module: str) -> str:
    """Returns the name of the installed package that contains a module."""
    return importlib.metadata.packages_distributions()[module][0]


def _describe_file(
    model: LoadedModel, format: str, options: ExportOptions, conversion: Conversion
) -> dict[str, Any]:
    """Returns the content of proof.json about the file itself."""
    opset = None
    if format == "onnx":
        opset = options.opset or DEFAULT_OPSET
    return {
        "format": format,
        "bytes": len(conversion.content),
        "sha256": hashlib.sha256(conversion.content).hexdigest(),
        "run": model.state.run_dir.name,
        "step": model.step,
        "contents": conversion.function.contents,
        "inputs": describe_inputs(conversion.function.spec),
        "examples_per_call": conversion.rows,
        "quantize": options.quantize if format == "litert" else None,
        "opset": opset,
        "tolerance": options.accepted_difference,
        "notes": conversion.notes,
    }


def _make_finite(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON lacks, with strings."""
    if isinstance(value, dict):
        return {name: _make_finite(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _convert(model: LoadedModel, format: str, options: ExportOptions) -> Conversion:
    """Converts the function with the most hooks that a format can express.

    Raises:
        RunError: the format cannot express the model itself.
    """
    convert = {"litert": _convert_to_litert, "onnx": _convert_to_onnx}[format]
    obstacle = find_output_obstacle(model)
    if obstacle:
        raise RunError(
            f"{format}: {obstacle}, which no file can contain; return dense tensors of numbers."
        )
    notes: list[str] = []
    for function in list_file_functions(model):
        try:
            if function.obstacle:
                raise NotConvertible(function.obstacle)
            converted = convert(model, function, options)
        except NotConvertible as error:
            obstacle = str(error)
            if function.hook is None:
                break
            notes.append(f"the file does not contain {function.hook}, because {obstacle}")
            continue
        if notes:
            notes[-1] += f"; pass {describe_inputs(function.spec)}"
        return converted._replace(notes=[*notes, *converted.notes])
    raise RunError(f"{format}: the model cannot be exported: {obstacle}{_find_cure(model)}.")


def _find_cure(model: LoadedModel) -> str:
    """Returns the end of a message that says what may help, or ""."""
    if not model.state.computed_in:
        return ""
    precisions = " and ".join(model.state.computed_in)
    return f"; layers compute in {precisions}, so try --precision float32"


def _convert_to_litert(
    model: LoadedModel, function: FileFunction, options: ExportOptions
) -> Conversion:
    """Converts a function for any number of examples or, if that needs Flex ops, for one.

    Raises:
        NotConvertible: LiteRT lacks an op.
    """
    hooks = model.state.hooks
    rows: int | None = None
    notes: list[str] = []
    try:
        content = convert_to_litert(function, hooks, rows)
    except NotConvertible as reason:
        rows = 1
        content = convert_to_litert(function, hooks, rows)
        notes.append(f"the file takes one example in each call, because for any number {reason}")
    if options.quantize is not None:
        examples = _read_inputs(model, function)
        content = convert_to_litert(function, hooks, rows, options.quantize, examples)
    return Conversion(function, content, rows, notes)


def _convert_to_onnx(
    model: LoadedModel, function: FileFunction, options: ExportOptions
) -> Conversion:
    """Converts a function for any number of examples.

    Raises:
        NotConvertible: ONNX lacks an op.
    """
    content = convert_to_onnx(function, model.state.hooks, options.opset or DEFAULT_OPSET)
    return Conversion(function, content, None, [])


def _read_inputs(model: LoadedModel, function: FileFunction) -> Iterator[Arrays]:
    """Yields the inputs of a file for batches of training data."""
    for batch in read_training_batches(model.state, TRAINING_EXAMPLES):
        yield get_inputs(function, batch)
