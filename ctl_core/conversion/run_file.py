"""Runs an exported file in its own runtime, without TensorFlow, the engine or a checkpoint.

``runtime.py`` starts this program as ``python run_file.py FORMAT PATH ROWS``. It reads the inputs
of one batch after another from its standard input, and writes the outputs to its standard output. A
message is its number of bytes, in eight bytes, and then these bytes.
"""

import importlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import numpy as np

Arrays = dict[str, np.ndarray]
# The packages whose versions the proof records, by format; the first one is the runtime.
PACKAGES = {"litert": ("ai-edge-litert", "numpy"), "onnx": ("onnxruntime", "numpy")}


def load_litert(path: str) -> Callable[[Arrays], Arrays]:
    """Returns a function that computes the outputs of a LiteRT file by name."""
    module: Any = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = module.Interpreter(model_path=path)
    runner = interpreter.get_signature_runner("serving_default")

    def run(inputs: Arrays) -> Arrays:
        return {name: np.array(value) for name, value in runner(**inputs).items()}

    return run


def load_onnx(path: str) -> Callable[[Arrays], Arrays]:
    """Returns a function that computes the outputs of an ONNX file by name."""
    module: Any = importlib.import_module("onnxruntime")
    session = module.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, inputs), strict=True))

    return run


def split_rows(run: Callable[[Arrays], Arrays], rows: int) -> Callable[[Arrays], Arrays]:
    """Returns a function that computes a batch in calls of ``rows`` examples each."""

    def run_all(inputs: Arrays) -> Arrays:
        count = len(next(iter(inputs.values())))
        calls = [
            run({name: array[first : first + rows] for name, array in inputs.items()})
            for first in range(0, count, rows)
        ]
        return {name: np.concatenate([call[name] for call in calls]) for name in calls[0]}

    return run_all


def pack(arrays: Arrays) -> bytes:
    """Returns arrays as the bytes of a .npz file; a prefix allows any name, even ``file``."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"_{name}": array for name, array in arrays.items()})  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes) -> Arrays:
    """Returns the arrays that ``pack`` has packed."""
    return {name[1:]: array for name, array in np.load(io.BytesIO(data)).items()}


def write_message(stream: IO[bytes], data: bytes) -> None:
    """Writes a message to a stream."""
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """Reads a message from a stream; returns None at the end of the stream."""
    size = stream.read(8)
    if len(size) < 8:
        return None
    count = int.from_bytes(size, "little")
    data = stream.read(count)
    return data if len(data) == count else None


def main(format: str, path: str, rows: int) -> None:
    """Answers batches until the standard input ends.

    Args:
        format: ``litert`` or ``onnx``
        path: the file
        rows: the number of examples that the file takes in each call; 0 if it takes any number
    """
    # The runtimes print to the standard output, too.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    run = {"litert": load_litert, "onnx": load_onnx}[format](path)
    if rows:
        run = split_rows(run, rows)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES[format]}
    versions["python"] = platform.python_version()
    write_message(answers, json.dumps(versions).encode())
    while (request := read_message(sys.stdin.buffer)) is not None:
        inputs = unpack(request)
        start = time.perf_counter()
        outputs = run(inputs)
        seconds = time.perf_counter() - start
        write_message(answers, json.dumps(seconds).encode())
        write_message(answers, pack(outputs))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
