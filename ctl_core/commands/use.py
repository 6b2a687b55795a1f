"""The commands ``evaluate``, ``predict`` and ``export``, which read a run but do not change it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ctl_core import serving
from ctl_core.checkpoint.checkpoints import Checkpoints
from ctl_core.checkpoint.record import list_saved_steps
from ctl_core.checkpoint.source import CheckpointName, Source
from ctl_core.conversion.formats import SAVED_MODEL, check_packages
from ctl_core.conversion.proof import Prover
from ctl_core.conversion.write import ExportOptions, write_proven_file
from ctl_core.model.state import State
from ctl_core.read_only import open_run, restore_run
from ctl_core.run.console import Console, format_values
from ctl_core.run.errors import RunError, SetupError
from ctl_core.run.files import atomic_write, is_run_locked, prepare_output, relative_path
from ctl_core.run.listeners import MetricsFile, read_metrics
from ctl_core.run.settings import Config
from ctl_core.session.run import Run
from ctl_core.types import Batch, BatchSpec, Callbacks, ModelOutput

# The interval at which ``evaluate --watch`` looks for new checkpoints (seconds).
POLL = 1.0
# If no process has trained a watched run for this time (seconds), the run counts as ended. The time
# is long enough to restart training after it was killed.
GRACE = 30.0


class Examples(NamedTuple):
    """The examples for which to make predictions.

    Attributes:
        name: the name of the file or of the dataset; empty for a single dataset without a name
        run: computes the model's output for a batch
        batches: the batches of examples
    """

    name: str
    run: Callable[[Batch], ModelOutput]
    batches: Iterable[Batch]


def evaluate(
    callbacks: Callbacks,
    config: Config,
    checkpoint: CheckpointName = None,
    watch: bool = False,
) -> dict[str, float]:
    """Evaluates a checkpoint and prints the values.

    Args:
        callbacks: the hooks
        config: settings that name the run
        checkpoint: a step, ``best`` or ``last``; default: the best one if kept, or the newest
        watch: whether to evaluate every checkpoint that training saves, instead of a single one,
            until training has ended

    Returns:
        The values by name; with ``watch``, those of the last checkpoint.

    Raises:
        SetupError: there is no evaluation data, or no checkpoint.
        RunError: the values have no meaning, because the number of evaluated examples, or the sum
            of their weights, is 0.
    """
    if watch:
        if checkpoint is not None:
            raise SetupError(
                "watch: evaluates every checkpoint, so it cannot be combined with --checkpoint."
            )
        with open_run(callbacks, config) as (state, run, console):
            return _watch(state, run, console)
    with restore_run(callbacks, config, checkpoint) as (state, console):
        return print_evaluation(state, console)


def print_evaluation(state: State, console: Console) -> dict[str, float]:
    """Evaluates the checkpoint that was restored, prints the values and returns them.

    Raises:
        SetupError: there is no evaluation data.
        RunError: the values have no meaning, see ``evaluate``.
    """
    values = _evaluate(state)
    assert state.evaluation is not None
    if state.evaluation.problem:
        raise RunError(state.evaluation.problem)
    console.values(state.step, "eval", values)
    return values


def _evaluate(state: State) -> dict[str, float]:
    if state.evaluation is None:
        raise SetupError(
            "create_eval_dataset: callbacks.py does not define it, so there is nothing to evaluate."
        )
    values: dict[str, float] = state.evaluation.evaluate()
    return values


def _watch(state: State, run: Run, console: Console) -> dict[str, float]:
    """Evaluates the checkpoints of a run in the order of their steps, until training has ended.

    Skips checkpoints that an earlier watch has evaluated, and checkpoints that are deleted before
    they can be evaluated. Writes only watch.jsonl and tb/watch in the folder of the run.

    Returns:
        The values of the last evaluated checkpoint, or {}.
    """
    file = run.path / "watch.jsonl"
    console.say(f"{run.shown}: watching; the values go to {relative_path(file)}.")
    seen = {line["step"] for line in read_metrics(file)}
    checkpoints = Checkpoints(state, console)
    metrics = MetricsFile(file.name)
    metrics.start(run.path, {}, max(seen, default=0))
    values: dict[str, float] = {}
    evaluations = 0
    last_activity = time.monotonic()
    while True:
        if is_run_locked(run.path):
            last_activity = time.monotonic()
        # This is decided before looking for new checkpoints, so that a checkpoint that is saved in
        # between is not missed.
        has_ended = time.monotonic() - last_activity > GRACE
        new_steps = set(list_saved_steps(run.ckpt)) - seen
        if new_steps:
            step = min(new_steps)
            seen.add(step)
            try:
                checkpoints.restore(Source("checkpoint", run.path, step), with_input=False)
                values = _evaluate(state)
            except SetupError:
                if step in list_saved_steps(run.ckpt):
                    raise
                continue  # the checkpoint was deleted before it was read completely
            evaluations += 1
            # If the file system does not support locks, only new checkpoints show that the run is
            # being trained.
            last_activity = time.monotonic()
            console.say(f"step {step}  eval: {format_values(values)}")
            metrics.values(step, "watch", values)
            run.summaries.values(step, "watch", values)
        elif has_ended:
            console.say(f"{run.shown}: has ended; checkpoints evaluated: {evaluations}.")
            return values
        else:
            time.sleep(POLL)


def predict(
    callbacks: Callbacks,
    config: Config,
    checkpoint: CheckpointName = None,
    input: str | None = None,
    dataset: str | None = None,
    output: str | None = None,
    include: Sequence[str] | None = None,
) -> Path:
    """Writes the model's outputs for a file or an evaluation dataset to a .npz file.

    Args:
        callbacks: the hooks
        config: settings that name the run
        checkpoint: a step, ``best`` or ``last``; default: the best one if kept, or the newest
        input: a .npy or .npz file with the model's inputs; default: an evaluation dataset
        dataset: the name of the dataset, if ``create_eval_dataset`` returns several
        output: the file to write; default: predictions.npz or predictions-NAME.npz in the folder of
            the run
        include: the components of each batch to write as well, row by row; keys of a dict, or
            indices of a tuple

    Returns:
        The path of the written file.

    Raises:
        SetupError: the input does not match the model, or there is no data or no checkpoint.
    """
    if input and dataset:
        raise SetupError("input and dataset: pass only one of the two.")
    if output and (Path(output).suffix != ".npz" or output == input):
        raise SetupError(f"output: expected the path of a new .npz file, got {output}.")
    if output and Path(output).is_dir():
        raise SetupError(f"output: {output} is a folder; expected the path of a new .npz file.")
    if output:
        prepare_output("output", Path(output).parent)
    with restore_run(callbacks, config, checkpoint) as (state, console):
        return write_predictions(state, console, input, dataset, output, include)


def write_predictions(
    state: State,
    console: Console,
    input: str | None = None,
    dataset: str | None = None,
    output: str | None = None,
    include: Sequence[str] | None = None,
) -> Path:
    """Writes the outputs of the checkpoint that was restored; the other arguments: ``predict``."""
    if not output:
        prepare_output("runs_dir", state.run_dir)
    model = serving.create_inference(state)
    if input:
        examples = _read_examples(Path(input), model, state.config)
    else:
        examples = _find_dataset(dataset or "", model, state)
    arrays = _join(
        serving.name_outputs(examples.run(batch)) | _choose_entries(batch, include)
        for batch in examples.batches
    )
    if len({len(array) for array in arrays.values()}) > 1:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        raise SetupError(f"predict: expected a row for each example, got {shapes}.")
    suffix = f"-{examples.name}" if examples.name else ""
    path = Path(output or state.run_dir / f"predictions{suffix}.npz")
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    console.say(f"step {state.step}: wrote {_list_shapes(arrays)} to {relative_path(path)}")
    return path


def _list_shapes(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the names and shapes of arrays, for a message."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def _read_examples(path: Path, model: serving.LoadedModel, config: Config) -> Examples:
    """Returns the examples of a .npy or .npz file."""
    batch_size = config.eval_batch_size or config.batch_size
    return Examples(path.stem, model, _read_batches(path, model.input_spec, batch_size))


def _find_dataset(name: str, model: serving.LoadedModel, state: State) -> Examples:
    """Returns the examples of an evaluation dataset.

    Raises:
        SetupError: there is no dataset of this name.
    """
    datasets = state.evaluation.sets if state.evaluation is not None else {}
    if name not in datasets:
        names = ", ".join(datasets) or "none, without create_eval_dataset"
        raise SetupError(f"dataset: expected one of {names}, got {name or None!r}.")
    return Examples(name, model.run_batch, datasets[name].make())


def _read_batches(path: Path, spec: BatchSpec, batch_size: int) -> Iterator[Batch]:
    """Yields the rows of a .npy or .npz file as batches of the model's inputs.

    Args:
        path: the path of the file
        spec: the specification of the inputs
        batch_size: the number of rows in each batch except the last

    Raises:
        SetupError: the arrays of the file do not match the specification.
    """
    names = serving.list_input_names(spec)
    try:
        content = np.load(path)
        arrays = {"": content} if isinstance(content, np.ndarray) else dict(content)
    except ValueError as error:
        kinds = "numbers, strings or bytes, as np.array(LIST) creates them, but not objects"
        raise SetupError(f"input: {relative_path(path)}: expected arrays of {kinds}.") from error
    if len(names) == len(arrays) == 1:  # a single array may have any name
        arrays = dict(zip(names, arrays.values(), strict=True))
    sizes = {len(array) for array in arrays.values() if array.ndim}
    if arrays.keys() != names.keys() or len(sizes) != 1:
        raise SetupError(
            f"input: {relative_path(path)} contains {_list_shapes(arrays)}; expected arrays "
            f"with equally many examples, called {', '.join(names)}."
        )
    for start in range(0, sizes.pop(), batch_size):
        rows = slice(start, start + batch_size)
        batch = {name: array[rows] if array.ndim else array for name, array in arrays.items()}
        yield serving.pack_inputs(spec, batch)


def _choose_entries(batch: Batch, names: Sequence[str] | None) -> dict[str, tf.Tensor]:
    """Returns entries of a batch, such as ``batch/label`` of a dict or ``batch/1`` of a tuple.

    Args:
        batch: the batch
        names: the names of the entries; a name also chooses all entries nested in it

    Raises:
        SetupError: the batch has no entry with one of the names.
    """
    entries = serving.name_outputs(batch, "0", "")
    chosen: dict[str, tf.Tensor] = {}
    for name in names or ():
        nested = (f"{name}.", f"{name}/")
        matching = [entry for entry in entries if entry == name or entry.startswith(nested)]
        if not matching:
            raise SetupError(f"include: expected names from {', '.join(entries)}, got {name!r}.")
        chosen |= {f"batch/{entry}": entries[entry] for entry in matching}
    return chosen


def _join(outputs: Iterable[Mapping[str, tf.Tensor]]) -> dict[str, np.ndarray]:
    """Concatenates the outputs of all batches, by name.

    If the other dimensions of an output vary between batches, as they do for padded sequences, its
    rows are padded to the largest size. ``NAME.lengths`` then contains the length of each row along
    axis 1, unless a ragged output has its own lengths already.
    """
    collected: dict[str, list[np.ndarray]] = {}
    for output in outputs:
        for name, value in output.items():
            array = np.atleast_1d(value)
            if array.dtype == object:  # a .npz file can store strings only as bytes
                array = array.astype(bytes)
            collected.setdefault(name, []).append(array)
    joined: dict[str, np.ndarray] = {}
    for name, arrays in collected.items():
        shapes = np.array([array.shape[1:] for array in arrays])
        largest = shapes.max(axis=0)
        if f"{name}.lengths" not in collected and (shapes != largest).any():
            rows = [len(array) for array in arrays]
            joined[f"{name}.lengths"] = np.repeat(shapes[:, 0], rows)
        joined[name] = np.concatenate([_pad(array, largest) for array in arrays])
    return joined


def _pad(array: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Pads the rows of an array to a shape, at the end of each axis, with 0 or empty strings."""
    missing = shape - array.shape[1:]
    widths = [(0, 0), *((0, count) for count in missing)]
    return np.pad(array, widths, constant_values=np.zeros((), array.dtype))


def export(
    callbacks: Callbacks,
    config: Config,
    checkpoint: CheckpointName = None,
    output: str | None = None,
    format: Sequence[str] = (SAVED_MODEL,),
    quantize: str | None = None,
    tolerance: float | None = None,
    opset: int | None = None,
) -> list[Path]:
    """Writes the model of a checkpoint in one or more formats.

    Files of LiteRT and ONNX are loaded by their own runtime and compared with the checkpoint, see
    ``conversion/proof.py``.

    Args:
        callbacks: the hooks
        config: settings that name the run
        checkpoint: a step, ``best`` or ``last``; default: the best one if kept, or the newest
        output: the folder for all versions of the model; default: runs/NAME/export
        format: the formats, out of ``saved_model``, ``litert`` and ``onnx``
        quantize: see ``ExportOptions``
        tolerance: see ``ExportOptions``
        opset: see ``ExportOptions``

    Returns:
        The folders of the new versions, such as runs/NAME/export/1 for a SavedModel and
        runs/NAME/export/litert/1 for LiteRT. The name of a version is the next number, because
        TensorFlow Serving loads the version with the highest number.

    Raises:
        SetupError: there is no checkpoint, the folder cannot be written, or an option needs another
            format or a package that is not installed.
        RunError: a format cannot express the model, or its file is not proven. The other formats
            have been written.
    """
    formats = _check_formats(format, quantize, opset)
    if tolerance is not None and formats == [SAVED_MODEL]:
        raise SetupError("tolerance: a SavedModel is not compared; add --format litert or onnx.")
    options = ExportOptions(quantize, tolerance, opset)
    with restore_run(callbacks, config, checkpoint) as (state, console):
        return _write_formats(state, console, output, formats, options)


def _check_formats(formats: Sequence[str], quantize: str | None, opset: int | None) -> list[str]:
    """Returns each of the formats once.

    Raises:
        SetupError: an option belongs to another format, or a package is missing.
    """
    if quantize is not None and "litert" not in formats:
        raise SetupError("quantize: only LiteRT files are quantized; add --format litert.")
    if opset is not None and "onnx" not in formats:
        raise SetupError("opset: only ONNX files have an opset; add --format onnx.")
    for name in formats:
        check_packages(name)
    return list(dict.fromkeys(formats))


def _write_formats(
    state: State,
    console: Console,
    output: str | None,
    formats: Sequence[str],
    options: ExportOptions,
) -> list[Path]:
    """Writes the model of the checkpoint that was restored in several formats; see ``export``."""
    folder = Path(output or state.run_dir / "export")
    prepare_output("output" if output else "runs_dir", folder)
    # The step is set to a number, because a served model has no variable for the step.
    tf.summary.experimental.set_step(state.step)
    model = serving.create_inference(state)
    prover = Prover(model)
    paths: list[Path] = []
    failures: list[RunError] = []
    for name in formats:
        if name == SAVED_MODEL:
            paths.append(_save_model(model, console, folder))
            continue
        path = _find_new_version(folder / name)
        path.parent.mkdir(exist_ok=True)
        try:
            write_proven_file(prover, model, console, name, path, options)
            paths.append(path)
        except RunError as error:
            failures.append(error)
    for failure in failures[:-1]:
        console.warn(str(failure))
    if failures:
        raise failures[-1]
    return paths


def write_model(state: State, console: Console) -> Path:
    """Writes the model of the checkpoint that was restored as a SavedModel; see ``export``."""
    (path,) = _write_formats(state, console, None, [SAVED_MODEL], ExportOptions())
    return path


def _save_model(model: serving.LoadedModel, console: Console, folder: Path) -> Path:
    """Writes a new version of a SavedModel, and returns its folder."""
    path = _find_new_version(folder)
    with atomic_write(path) as temporary:
        serving.save_model(model, temporary)
    console.say(f"step {model.step}: wrote a SavedModel to {relative_path(path)}")
    return path


def _find_new_version(folder: Path) -> Path:
    """Returns the folder for the next version of a model."""
    paths = folder.iterdir() if folder.exists() else ()
    versions = [int(path.name) for path in paths if path.name.isdecimal()]
    return folder / str(1 + max(versions, default=0))
