"""``evaluate``, ``predict`` and ``export``: using checkpoints of a run, which is only read."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core import serving
from ctl_core.checkpoint.checkpoints import Checkpoints
from ctl_core.checkpoint.folder import Run
from ctl_core.checkpoint.record import list_saved_steps
from ctl_core.checkpoint.source import CheckpointName, Source
from ctl_core.model.state import State
from ctl_core.run.console import Console, format_values
from ctl_core.run.errors import SetupError
from ctl_core.run.files import atomic_write, is_locked, relative_path
from ctl_core.run.listeners import MetricsFile, read_metrics
from ctl_core.run.settings import Config

POLL = 1.0  # seconds between two looks at a run that is watched
# After so many seconds in which nobody trains a run, it has ended: one that was killed is started
# again meanwhile.
GRACE = 30.0


def evaluate(
    callbacks: Any,
    config: Config,
    checkpoint: CheckpointName = None,
    watch: bool = False,
) -> dict[str, float]:
    """Evaluates a checkpoint and prints the values; with ``watch``, each that a run makes.

    Raises:
        SetupError: there is no evaluation data, or no checkpoint.
    """
    if watch and checkpoint is not None:
        raise SetupError("watch: evaluates every checkpoint; leave out --checkpoint.")
    if watch:
        with serving.open_run(callbacks, config) as (state, run, console):
            return _watch(state, run, console)
    with serving.restore_run(callbacks, config, checkpoint) as (state, console):
        values = _evaluate(state)
        console.values(state.step, "eval", values)
    return values


def _evaluate(state: State) -> dict[str, float]:
    if state.evaluation is None:
        raise SetupError("create_eval_dataset: there is none, so there is nothing to evaluate.")
    return state.evaluation.evaluate()  # type: ignore[no-any-return]


def _watch(state: State, run: Run, console: Console) -> dict[str, float]:
    """Evaluates each checkpoint as it comes, in the order of their steps, until nobody trains.

    Those that an earlier watch has evaluated are left out, and one that is deleted before its turn.
    The run is only read, but for watch.jsonl and tb/watch. Returns the values of the last one.
    """
    file, values, number = run.path / "watch.jsonl", dict[str, float](), 0
    console.say(f"{run.shown}: watching; the values go to {relative_path(file)}.")
    seen = {line["step"] for line in read_metrics(file)}
    checkpoints, metrics = Checkpoints(state, console), MetricsFile(file.name)
    metrics.start(run.path, {}, max(seen, default=0))
    held_at = time.monotonic()
    while True:
        if is_locked(run.path / "train.log"):
            held_at = time.monotonic()
        over = time.monotonic() - held_at > GRACE  # before looking: what is there then is all
        if new := set(list_saved_steps(run.ckpt)) - seen:
            seen.add(step := min(new))
            try:
                checkpoints.restore(Source("checkpoint", run.path, step), with_input=False)
                values = _evaluate(state)
            except SetupError:
                if step in list_saved_steps(run.ckpt):
                    raise
                continue  # deleted while it was read
            number, held_at = number + 1, time.monotonic()  # also where there are no locks
            console.say(f"step {step}  eval: {format_values(values)}")
            for listener in (metrics, run.summaries):
                listener.values(step, "watch", values)
        elif over:
            console.say(f"{run.shown}: has ended; checkpoints evaluated: {number}.")
            return values
        else:
            time.sleep(POLL)


def predict(
    callbacks: Any,
    config: Config,
    checkpoint: CheckpointName = None,
    input: str | None = None,
    dataset: str | None = None,
    output: str | None = None,
    include: Sequence[str] | None = None,
) -> Path:
    """Writes the model's outputs for a file, or for a set of evaluation data, as a .npz file.

    ``include`` names parts of the batches that are written beside them, row by row.

    Raises:
        SetupError: the file does not fit the model, or there is no data or no checkpoint.
    """
    if input and dataset:
        raise SetupError("input and dataset: give one of the two.")
    if output and (Path(output).suffix != ".npz" or output == input):
        raise SetupError(f"output: expected the name of another .npz file, got {output}.")
    with serving.restore_run(callbacks, config, checkpoint) as (state, console):
        model = serving.create_inference(state)
        if input:
            name, size = Path(input).stem, config.eval_batch_size or config.batch_size
            run, batches = model, _read_batches(Path(input), model.input_spec, size)
        else:
            sets = state.evaluation.sets if state.evaluation is not None else {}
            name = dataset or ""
            if name not in sets:
                there = ", ".join(sets) or "none, without create_eval_dataset"
                raise SetupError(f"dataset: expected one of {there}, got {dataset!r}.")
            run, batches = model.run_batch, sets[name].make()
        arrays = _join(
            {**serving.name_outputs(run(one)), **_choose_parts(one, include)} for one in batches
        )
        if len({len(array) for array in arrays.values()}) > 1:
            got = {name: list(array.shape) for name, array in arrays.items()}
            raise SetupError(f"predict: expected a row for each example, got {got}.")
        path = Path(output or state.run_dir / f"predictions{f'-{name}' * bool(name)}.npz")
        with atomic_write(path) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        console.say(f"step {state.step}: wrote {shapes} to {relative_path(path)}")
    return path


def _read_batches(path: Path, spec: Any, size: int) -> Iterator[Any]:
    """Yields batches of what a client would send: of a .npy or .npz file."""
    names = serving.list_input_names(spec)
    try:
        content = np.load(path)
        arrays = {"": content} if isinstance(content, np.ndarray) else dict(content)
    except ValueError as error:
        kinds = "numbers, texts or bytes, as np.array(LIST) makes them, not of objects"
        raise SetupError(f"input: {relative_path(path)}: expected arrays of {kinds}.") from error
    if len(names) == len(arrays) == 1:
        arrays = dict(zip(names, arrays.values(), strict=True))
    numbers = {len(array) for array in arrays.values() if array.ndim}
    if arrays.keys() != names.keys() or len(numbers) != 1:
        held = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise SetupError(
            f"input: {relative_path(path)} holds {held}; expected arrays of as many examples each, "
            f"called {', '.join(names)}."
        )
    for start in range(0, numbers.pop(), size):
        rows = slice(start, start + size)
        batch = {name: array[rows] if array.ndim else array for name, array in arrays.items()}
        yield serving.pack_inputs(spec, batch)


def _choose_parts(batch: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns parts of a batch: as ``batch/label`` the one of a dict, ``batch/1`` of a tuple."""
    parts = serving.name_outputs(batch, "0", "")
    chosen: dict[str, Any] = {}
    for name in names or ():
        found = [
            part for part in parts if part.startswith((f"{name}.", f"{name}/")) or part == name
        ]
        if not found:
            raise SetupError(f"include: expected some of {', '.join(parts)}, got {name!r}.")
        chosen |= {f"batch/{part}": parts[part] for part in found}
    return chosen


def _join(outputs: Iterable[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Joins what batches have by name; parts of other sizes are padded, as ragged ones are."""
    found: dict[str, list[np.ndarray]] = {}
    for output in outputs:
        for name, value in output.items():
            array = np.atleast_1d(value)
            is_text = array.dtype == object
            found.setdefault(name, []).append(array.astype(bytes) if is_text else array)
    arrays = {}
    for name, parts in found.items():
        sizes = np.array([part.shape[1:] for part in parts])
        widest = sizes.max(axis=0)
        if f"{name}.lengths" not in found and (sizes != widest).any():
            arrays[f"{name}.lengths"] = np.repeat(sizes[:, 0], [len(part) for part in parts])
        nothing = np.zeros((), parts[0].dtype)
        arrays[name] = np.concatenate(
            [
                np.pad(
                    part, [(0, 0), *((0, more) for more in widest - size)], constant_values=nothing
                )
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
    return arrays


def export(
    callbacks: Any,
    config: Config,
    checkpoint: CheckpointName = None,
    output: str | None = None,
) -> Path:
    """Writes the model of a checkpoint as a SavedModel; returns where, runs/NAME/export/1 say.

    It is the next version in the folder, as TensorFlow Serving counts them.

    Raises:
        SetupError: there is no checkpoint.
        OSError: the place cannot be written.
    """
    with serving.restore_run(callbacks, config, checkpoint) as (state, console):
        base = Path(output or state.run_dir / "export")
        base.mkdir(exist_ok=True)
        versions = [int(path.name) for path in base.iterdir() if path.name.isdecimal()]
        path = base / str(1 + max(versions, default=0))
        tf.summary.experimental.set_step(state.step)  # no variable that serving would lack
        inference = serving.create_inference(state)
        with atomic_write(path) as beside:
            serving.save_model(inference, beside)
        console.say(f"step {state.step}: wrote a SavedModel to {relative_path(path)}")
    return path
