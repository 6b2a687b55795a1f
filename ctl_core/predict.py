"""Prediction: a model's outputs for a file of raw inputs, or for the evaluation data."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.strategy import distribute, local_replicas
from ctl_core.errors import RunError, SetupError, one_line, reason
from ctl_core.files import from_here
from ctl_core.nested import described, input_names, matched, output_names, structured
from ctl_core.numerics.joining import on_host, varying_axes
from ctl_core.settings import label


def predict_on_replicas(
    strategy: tf.distribute.Strategy,
    model: Callable[[Any], Any],
    spec: Any,
    batches: Iterable[Any],
) -> Iterator[Any]:
    """Runs a model on all replicas of this process, each with a batch of its own at a time.

    Batches are no other than for one, so that the outputs are not either.

    Args:
        strategy: whose replicas these are
        model: from a batch to the output, while a graph is traced, in a replica context
        spec: of a batch
        batches: each with the examples along the first dimension

    Yields:
        The output of each batch, in their order.
    """
    replicas = local_replicas(strategy)

    @tf.function(autograph=False, input_signature=[[spec] * replicas])
    def run(several: list[Any]) -> list[Any]:
        output = strategy.run(model, args=(distribute(strategy, several),))

        def of(replica: int) -> Any:
            return tf.nest.map_structure(
                lambda part: strategy.experimental_local_results(part)[replica], output
            )

        return list(map(of, range(replicas)))

    remaining = iter(batches)
    while several := list(itertools.islice(remaining, replicas)):
        # A replica for which none is left takes the first again, of which nothing is kept.
        found = run(several + several[:1] * (replicas - len(several)))
        yield from found[: len(several)]


def gather_outputs(outputs: Iterable[Any]) -> dict[str, np.ndarray]:
    """Joins the outputs of batches, by the names of ``output_names``.

    Outputs of different sizes along an axis are padded with zeros to the largest, and
    ``NAME.lengths`` (of axis 1; ``NAME.lengths_2`` of axis 2) says how much of each example is its
    own.

    Raises:
        RunError: outputs do not fit into one array.
    """
    found: dict[str, list[tuple[np.ndarray, Mapping[int, np.ndarray]]]] = {}
    for output in outputs:
        for name, value in output_names(output).items():
            found.setdefault(name, []).append(on_host(value))
    arrays = {}
    for name, batches in found.items():
        parts = [array for array, _ in batches]
        shapes = [part.shape for part in parts]
        if len(set(map(len, shapes))) > 1:
            several = " and ".join(str(list(shape)) for shape in sorted(set(shapes))[:3])
            raise RunError(
                f"predict: the output '{name}' has shapes {several}; one file needs one rank."
            )
        if not shapes[0]:  # a number for each batch
            arrays[name] = np.array(parts)
            continue
        arrays[name] = _joined(parts)
        lengths = {axis: [sizes[axis] for _, sizes in batches] for axis in batches[0][1]}
        for axis in varying_axes(shapes):
            lengths.setdefault(axis, [np.full(shape[0], shape[axis]) for shape in shapes])
        for axis, each in lengths.items():
            arrays[f"{name}.lengths" + (f"_{axis}" if axis > 1 else "")] = _joined(each)
    return arrays


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Joins arrays along the first axis, padded along the others to the largest."""
    largest = (max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    whole = np.zeros((sum(map(len, parts)), *largest), np.result_type(*parts))
    start = 0
    for part in parts:
        whole[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
        start += len(part)
    return whole


def read_inputs(path: Path, spec: Any, batch_size: int) -> Iterator[Any]:
    """Reads raw inputs from a .npy or .npz file.

    Args:
        path: the file
        spec: the specification of the raw inputs; several are in a .npz file under the names of
            ``input_names``
        batch_size: examples in a batch

    Yields:
        Batches as ``spec`` has them.

    Raises:
        SetupError: the file is missing, or does not hold what the model takes.
    """
    names, what = input_names(spec), f"input: {label(from_here(path))}"
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        alone = not isinstance(content, np.lib.npyio.NpzFile)
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
    convert = {name: _converter(what, name, part, arrays[name]) for name, part in names.items()}
    sizes = sorted({len(array) for array in arrays.values() if array.ndim})
    if len(sizes) != 1 or sizes == [0]:
        several = " and ".join(map(str, sizes or [0]))
        raise SetupError(f"{what} holds {several} examples; all arrays need as many.")
    for start in range(0, sizes[0], batch_size):
        rows = slice(start, start + batch_size)
        parts = {name: array[rows] if array.ndim else array for name, array in arrays.items()}
        yield structured(spec, {name: convert[name](part) for name, part in parts.items()})


def converted(spec: Any, inputs: Any, what: str = "input") -> Any:
    """Returns arrays, lists or tensors as the tensors of a specification.

    Raises:
        SetupError: they do not fit it.
    """
    names, given = input_names(spec), matched(spec, inputs, what)
    return structured(spec, {name: _tensor(what, name, names[name], given[name]) for name in names})


def _tensor(what: str, name: str, spec: Any, value: Any) -> Any:
    if isinstance(value, dict):
        raise _unfit(what, name, spec, "a dict")
    if tf.is_tensor(value) and not isinstance(value, tf.Tensor):
        if not spec.is_compatible_with(value):
            raise _unfit(what, name, spec, f"{value.dtype.name} {value.shape.as_list()}")
        return value
    if isinstance(spec, tf.RaggedTensorSpec):
        try:
            value = tf.ragged.constant(value, spec.dtype, ragged_rank=spec.ragged_rank)
        except (TypeError, ValueError) as error:
            raise _unfit(what, name, spec, one_line(error, 100)) from error
        return value.with_row_splits_dtype(spec.row_splits_dtype)
    if isinstance(value, tf.Tensor):
        if value.dtype == spec.dtype and spec.shape.is_compatible_with(value.shape):
            return value
        value = value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise _unfit(what, name, spec, "lists of different lengths") from error
    return _converter(what, name, spec, array)(array)


def _converter(what: str, name: str, spec: Any, array: Any) -> Callable[[np.ndarray], tf.Tensor]:
    """Returns what makes tensors of an array, or of a slice of it, if it fits.

    Raises:
        SetupError: shape or dtype are others.
    """
    if not isinstance(spec, tf.TensorSpec):
        raise _unfit(what, name, spec, f"an array {list(array.shape)}")
    kind = array.dtype.kind
    text = kind in "SUO" and spec.dtype == tf.string
    target = None if spec.dtype == tf.string else spec.dtype.as_numpy_dtype
    number = target is not None and kind in "iuf" and spec.dtype != tf.bool
    same = target is not None and array.dtype == target
    if not (text or number or same) or not _fits(spec, array.shape):
        kind = {"U": "str", "S": "bytes"}.get(kind, array.dtype.name)  # without a length
        raise _unfit(what, name, spec, f"{kind} {list(array.shape)}")

    def convert(part: np.ndarray) -> tf.Tensor:
        if target is None:
            return tf.constant(part.astype(object) if kind == "U" else part, tf.string)
        with np.errstate(invalid="ignore", over="ignore"):
            values = np.asarray(part).astype(target)
        if not spec.dtype.is_floating and not np.array_equal(values, part):
            raise _unfit(what, name, spec, "numbers that it cannot hold")
        return tf.constant(values)

    return convert


def _fits(spec: Any, shape: tuple[int, ...]) -> bool:
    return spec.shape.rank is None or (
        len(shape) == spec.shape.rank and spec.shape.is_compatible_with(shape)
    )


def _unfit(what: str, name: str, spec: Any, got: str) -> SetupError:
    one = "" if name == "inputs" else f"{name}: "
    return SetupError(f"{what}: {one}the model takes {described(spec)}, got {got}.")
