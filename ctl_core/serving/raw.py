"""What clients send, made into tensors as the model takes them: in a call, or in a file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.errors import SetupError, one_line, reason
from ctl_core.files import from_here
from ctl_core.nested import described, input_names, matched, structured
from ctl_core.settings import label


def to_tensors(spec: Any, inputs: Any, what: str = "input") -> Any:
    """Returns arrays, lists or tensors as the tensors of a specification.

    Args:
        spec: of each, in the structure of the inputs
        inputs: arrays, lists or tensors
        what: what a message begins with

    Raises:
        SetupError: they do not fit it.
    """
    given = matched(spec, inputs, what)
    found = {}
    for name, part in input_names(spec).items():
        try:
            found[name] = _to_tensor(part, given[name])
        except (TypeError, ValueError) as error:
            one = "" if name == "inputs" else f"{name}: "
            got = one_line(str(error), 100)
            raise SetupError(
                f"{what}: {one}the model takes {described(part)}, got {got}"
            ) from error
    return structured(spec, found)


def _to_tensor(spec: Any, value: Any) -> Any:
    """Returns one tensor.

    Raises:
        TypeError, ValueError: the value does not fit; the message says what it is.
    """
    if isinstance(spec, tf.RaggedTensorSpec) and not tf.is_tensor(value):
        value = tf.ragged.constant(value, spec.dtype, ragged_rank=spec.ragged_rank)
        value = value.with_row_splits_dtype(spec.row_splits_dtype)
    if not tf.is_tensor(value) or (isinstance(value, tf.Tensor) and value.dtype != spec.dtype):
        try:
            array = np.asarray(value)
        except ValueError:
            raise ValueError("lists of different lengths.") from None
        value = _convert(spec.dtype, array)
    if not spec.is_compatible_with(value):
        raise ValueError(f"{described(tf.type_spec_from_value(value))}.")
    return value


def _convert(dtype: tf.DType, array: np.ndarray) -> tf.Tensor:
    """Makes texts of texts, and of numbers such as can hold them."""
    if dtype == tf.string:
        if array.dtype.kind in "SUO":
            return tf.constant(array, dtype)
    elif array.dtype == dtype.as_numpy_dtype:
        return tf.constant(array)
    elif array.dtype.kind in "iuf" and dtype != tf.bool:
        with np.errstate(invalid="ignore", over="ignore"):
            values = array.astype(dtype.as_numpy_dtype)
        if dtype.is_floating or np.array_equal(values, array):
            return tf.constant(values)
        raise ValueError("numbers that it cannot hold.")
    kind = {"U": "str", "S": "bytes"}.get(array.dtype.kind, array.dtype.name)
    raise TypeError(f"{kind} {list(array.shape)}.")


def read_file(path: Path, spec: Any) -> Any:
    """Reads what a client would send from a .npy or .npz file.

    Args:
        path: the file
        spec: of the inputs; several are in a .npz file under the names of ``input_names``

    Returns:
        All examples, as tensors in the structure of ``spec``.

    Raises:
        SetupError: the file is missing, or does not hold what the model takes.
    """
    names, what = input_names(spec), f"input: {label(from_here(path))}"
    try:
        content = np.load(path, allow_pickle=False)
        alone = isinstance(content, np.ndarray)
        arrays: dict[str, np.ndarray] = {"": content} if alone else dict(content)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = reason(error) if isinstance(error, OSError) else "it is none, or holds Python objects"
        raise SetupError(f"{what} cannot be read as a .npy or .npz file: {why}.") from error
    if len(names) == 1 and len(arrays) == 1:
        arrays = dict(zip(names, arrays.values(), strict=True))
    if arrays.keys() != names.keys():
        there = "one array without a name" if alone else one_line(", ".join(arrays), 100)
        raise SetupError(
            f"{what} must be a .npz file with the arrays {', '.join(names)}; it holds "
            f"{there or 'nothing'}."
        )
    sizes = sorted({len(array) for array in arrays.values() if array.ndim})
    if len(sizes) != 1 or sizes == [0]:
        several = " and ".join(map(str, sizes or [0]))
        raise SetupError(f"{what} holds {several} examples; all arrays need as many.")
    with tf.device("CPU:0"):  # all of it need not fit into a GPU
        return to_tensors(spec, structured(spec, arrays), what)
