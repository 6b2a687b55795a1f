"""Prediction: a model's outputs for a file of raw inputs, or for the evaluation data."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ctl_core.cluster.strategy import distribute, local_replicas
from ctl_core.errors import SetupError, one_line, reason
from ctl_core.files import from_here
from ctl_core.nested import described, input_names, matched, output_names, structured
from ctl_core.settings import label


class Arrays(Protocol):
    """Takes the outputs of a model, batch by batch."""

    def add(self, name: str, value: Any) -> None:
        """Adds the next batch of an output: an eager tensor, dense, ragged or sparse."""


def predict(model: Callable[[Any], Any], batches: Iterable[Any], arrays: Arrays) -> int:
    """Runs a model over batches, one after the other, and keeps its outputs in their order.

    Args:
        model: from a batch to the output
        batches: each with the examples along the first dimension
        arrays: where the outputs go, by the names of ``output_names``

    Returns:
        How many batches there were.

    Raises:
        RunError: outputs do not fit into one array.
    """
    return _keep(map(model, batches), arrays)


def predict_on_replicas(
    strategy: tf.distribute.Strategy,
    model: Callable[[Any], Any],
    spec: Any,
    batches: Iterable[Any],
    arrays: Arrays,
) -> int:
    """The same on all replicas of this process, each with a batch of its own at a time.

    Batches are no other than for one, so that the outputs are not either.

    Args:
        strategy: whose replicas these are
        model: from a batch to the output, while a graph is traced, in a replica context
        spec: of a batch
        batches, arrays: as above
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

    def outputs() -> Iterator[Any]:
        remaining = iter(batches)
        while several := list(itertools.islice(remaining, replicas)):
            # A replica for which none is left takes the first again, of which nothing is kept.
            found = run(several + several[:1] * (replicas - len(several)))
            yield from found[: len(several)]

    return _keep(outputs(), arrays)


def _keep(outputs: Iterable[Any], arrays: Arrays) -> int:
    number = 0
    for number, output in enumerate(outputs, 1):  # noqa: B007
        for name, value in output_names(output).items():
            arrays.add(name, value)
    return number


def read_inputs(path: Path, spec: Any, batch_size: int) -> Iterator[Any]:
    """Reads raw inputs from a .npy or .npz file; checked at once, read as they are asked for.

    Args:
        path: the file; a .npy file of any size, since it is not read as a whole
        spec: the specification of the raw inputs; several are in a .npz file under the names of
            ``input_names``
        batch_size: examples in a batch

    Returns:
        Batches as ``spec`` has them.

    Raises:
        SetupError: the file is missing, or does not hold what the model takes.
    """
    names, shown = input_names(spec), label(from_here(path))
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        alone = not isinstance(content, np.lib.npyio.NpzFile)
        arrays: dict[str, np.ndarray] = {"": content} if alone else dict(content)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = "it is none, or it holds Python objects"
        if isinstance(error, OSError):
            why = reason(error)
        raise SetupError(f"input: {shown} cannot be read as a .npy or .npz file: {why}.") from error
    if len(names) == 1 and len(arrays) == 1:
        arrays = dict(zip(names, arrays.values(), strict=True))
    if arrays.keys() != names.keys():
        there = "one array without a name" if alone else one_line(", ".join(arrays), 100)
        raise SetupError(
            f"input: {shown} holds {there or 'nothing'}; the model takes one array."
            if len(names) == 1
            else f"input: {shown} must be a .npz file with the arrays {', '.join(names)}; it holds "
            f"{there or 'nothing'}."
        )
    fitted = {
        name: (arrays[name], converter(f"input: {shown}", name, part, arrays[name]))
        for name, part in names.items()
    }
    sizes = {len(array) for array, _ in fitted.values() if array.ndim}
    if len(sizes) > 1:
        several = " and ".join(map(str, sorted(sizes)))
        raise SetupError(f"input: {shown} holds {several} examples; all arrays need as many.")
    if not any(sizes):
        raise SetupError(f"input: {shown} holds no examples.")
    (examples,) = sizes

    def batches() -> Iterator[Any]:
        for start in range(0, examples, batch_size):
            yield structured(
                spec,
                {
                    name: convert(array[start : start + batch_size] if array.ndim else array)
                    for name, (array, convert) in fitted.items()
                },
            )

    return batches()


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
    return converter(what, name, spec, array)(array)


def converter(what: str, name: str, spec: Any, array: Any) -> Callable[[np.ndarray], tf.Tensor]:
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
