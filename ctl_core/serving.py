"""The model of a checkpoint as a function, from what a client sends to what the model returns.

``load``, ``predict`` and ``export`` run what is made here. What a client sends is what the hook
``serve`` takes; where no input_signature says what that is, and without the hook, it is the part of
a batch that the output depends on: a label is none.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.build import leave_run
from ctl_core.checkpoint.source import CheckpointName
from ctl_core.compat import make_scratch_graph, run_layers
from ctl_core.hooks.callbacks_file import find_callbacks, keep_imports, load_callbacks
from ctl_core.hooks.recording import find_tables
from ctl_core.input.batches import count_rows, make_placeholders, set_rows
from ctl_core.model.components import TraceContext
from ctl_core.model.forward import call_made, call_model
from ctl_core.model.state import State
from ctl_core.numerics.variables import cast_to_float32
from ctl_core.read_only import restore_run
from ctl_core.run.console import create_console
from ctl_core.run.errors import SetupError, find_users_line, format_error
from ctl_core.run.files import relative_path
from ctl_core.run.layers import load_config
from ctl_core.run.settings import Config
from ctl_core.types import Structure


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """The model of a checkpoint, with what comes before it; several threads may call it at once.

    Attributes:
        model: what ``create_inference_model`` returned, or the model that is evaluated
        input_spec: what it is called with, in its structure; the first dimension, None, is the
            number of examples
        output_spec: what it returns, in float32 where the model computes in less
        step: of the checkpoint
        metrics: what the evaluation before the checkpoint found, by name, or {}
        settings: of the run
        function: the graph function from what a client sends to the output
        run_batch: the graph function from a batch of ``create_eval_dataset`` to the output
        state: what the functions capture lives in it
    """

    model: Any
    input_spec: Any
    output_spec: Any
    step: int
    metrics: dict[str, float]
    settings: Config
    function: Any
    run_batch: Any
    state: State

    def __call__(self, inputs: Any) -> Any:
        """Returns the model's output, for any number of examples, as ``output_spec`` has it.

        Args:
            inputs: arrays, lists or tensors: what a client sends, before ``serve``, or without that
                hook before ``input_pre``

        Raises:
            SetupError: the inputs are not as ``input_spec`` has them.
        """
        spec = self.input_spec
        try:
            return self.function(
                keras.tree.map_structure_up_to(spec, _convert_to_tensor, spec, inputs)
            )
        except (TypeError, ValueError) as error:
            parts = list_input_names(spec).items()
            expected = ", ".join(f"{name} {part.dtype.name} {part.shape}" for name, part in parts)
            raise SetupError(f"input: expected {expected}: {format_error(error, 120)}") from error


def _convert_to_tensor(spec: Any, value: Any) -> Any:
    """Returns an array, or what is one in lists, as a tensor; raises if it cannot be one."""
    if tf.is_tensor(value):
        return value
    tensor = tf.convert_to_tensor(value, spec.dtype)
    if spec.dtype.is_integer and not np.array_equal(tensor, value):  # TensorFlow cuts them off
        raise ValueError(f"numbers that {spec.dtype.name} cannot hold")
    return tensor


def list_input_names(spec: Any) -> dict[str, Any]:
    """Returns the entries of a model's input by their names in files and in signatures.

    An entry of a dict is called by its key, a nested one ``key/inner``, the first entry of a tuple
    ``input_0``, and a single tensor ``inputs``.
    """
    return _name_entries(spec, "inputs", "input_")


def _name_entries(structure: Structure, alone: str, numbered: str) -> dict[str, Any]:
    """Returns the entries of a structure by name.

    Args:
        structure: a value, or values in nested dicts and tuples
        alone: the name of a value that is not in a structure
        numbered: goes before the index of an entry of a tuple
    """
    entries = {}
    for path, entry in keras.tree.flatten_with_path(structure):
        prefix = numbered if path and isinstance(path[0], int) else ""
        entries[prefix + "/".join(map(str, path)) or alone] = entry
    return entries


def pack_inputs(spec: Any, values: Mapping[str, Any]) -> Any:
    """Returns values by the names of ``list_input_names`` in the structure of a specification."""
    return keras.tree.pack_sequence_as(spec, [values[name] for name in list_input_names(spec)])


def name_outputs(
    output: Any, alone: str = "output", numbered: str = "output_"
) -> dict[str, tf.Tensor]:
    """Returns the entries of an output as dense tensors by name: ``output``, or ``output_0``.

    Ragged tensors are padded; ``NAME.lengths`` holds the length of each example along axis 1.

    Args:
        output: of a model; or another structure
        alone: the name of a single tensor
        numbered: goes before the index of an entry of a tuple
    """
    tensors = {}
    for name, entry in _name_entries(output, alone, numbered).items():
        if isinstance(entry, tf.RaggedTensor):
            tensors[f"{name}.lengths"] = entry.row_lengths()
            tensors[name] = entry.to_tensor()
        elif isinstance(entry, tf.SparseTensor):
            tensors[name] = tf.sparse.to_dense(entry)
        else:
            tensors[name] = entry
    return tensors


def create_inference(state: State) -> LoadedModel:
    """Calls ``create_inference_model``, and traces the model with what comes before it.

    To be called when the checkpoint is restored: a model that the hook makes of another one's
    weights gets those that were trained.

    Raises:
        SetupError, HookFailed: a hook cannot work, or the model makes weights when it is called.
    """
    hooks, recording = state.hooks, state.recording
    step = tf.constant(state.step, tf.int64)  # an export has no variable for it
    context = TraceContext(state.components, step=step)
    hook, model = state.components.choose_model(training=False)
    if hooks.create_inference_model is not None:
        hook = hooks.create_inference_model
        with state.strategy.scope(), recording.record_as("create_inference_model"):
            model = hook(model=model, train_model=state.train_model)
    signature = getattr(hooks.serve and hooks.serve.function, "input_signature", None)

    def serve(inputs: Any) -> Any:
        assert hooks.serve is not None
        return hooks.serve.trace(inputs=inputs)

    def read_batch(batch: Any) -> Any:
        if hooks.serve is None or signature:
            return hooks.input_pre.trace(batch=batch, training=False, **context.hook_values())
        return serve(batch[0] if isinstance(batch, tuple) else batch)

    def run(make_input: Callable[[Any], Any], given: Any) -> Any:
        with run_layers(training=False):
            made = make_input(given)
            return cast_to_float32(call_made(hook, call_model, model, made, False))

    run_batch, before = functools.partial(run, read_batch), set(recording.variables)
    answer: Callable[[Any], Any] = functools.partial(run, serve)
    with recording.record_as("create_inference_model"):
        if signature:
            part = signature[0]
        else:
            sets = list(state.evaluation.sets.values()) if state.evaluation is not None else []
            element = sets[0].spec if sets else state.data.share_spec
            part, answer = cut_to_used_part(run_batch, tf.nest.map_structure(set_rows, element))
        spec = tf.nest.map_structure(set_rows, part)
        function = tf.function(answer, autograph=False, input_signature=[spec])
        traced = function.get_concrete_function()
    if late := [name for name in recording.variables if name not in before]:
        raise hook.reject(
            f"{late[0]} is made when the model is first called, so that no checkpoint holds it; "
            "build it in the hook."
        )
    return LoadedModel(
        model=model,
        input_spec=spec,
        output_spec=tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs),
        step=state.step,
        metrics=dict(state.metrics),
        settings=state.config,
        function=traced,
        run_batch=tf.function(run_batch, autograph=False, reduce_retracing=True),
        state=state,
    )


def cut_to_used_part(
    function: Callable[[Any], Any], element: Any
) -> tuple[Any, Callable[[Any], Any]]:
    """Finds the part of a batch, of a specification, that the output of a function depends on.

    Of a dict these are some keys, of a tuple some parts, or the only one by itself.

    Returns:
        The specification of the part; and a function of it that gives the same output.
    """
    with make_scratch_graph("serving").as_default():
        batch = make_placeholders(element)
        outputs = tf.nest.flatten(function(batch), expand_composites=True)
    needed: set[str] = set()
    waiting = [output.op for output in outputs]
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]

    parts = (tf.nest.flatten(part, expand_composites=True) for part in tf.nest.flatten(batch))
    used = [any(tensor.op.name in needed for tensor in part) for part in parts]
    leaves = tf.nest.flatten(element)
    kept = [leaf if is_used else None for leaf, is_used in zip(leaves, used, strict=True)]

    def call(part: Any) -> Any:
        rows, sent = count_rows(part), iter(tf.nest.flatten(part))

        def stand_in(spec: Any) -> Any:
            sizes = [rows, *(size or 1 for size in spec.shape[1:])] if spec.shape.rank else []
            return tf.compat.v1.placeholder_with_default(tf.zeros(sizes, spec.dtype), spec.shape)

        filled = [
            next(sent) if is_used else tf.nest.map_structure(stand_in, leaf, expand_composites=True)
            for leaf, is_used in zip(leaves, used, strict=True)
        ]
        return function(tf.nest.pack_sequence_as(element, filled))

    return _without_nones(tf.nest.pack_sequence_as(element, kept)), call


def _without_nones(structure: Structure) -> Structure:
    """Returns a structure without entries that are None; a tuple with one entry left is the entry.

    An empty structure is None.
    """
    if isinstance(structure, Mapping):
        pruned = {key: _without_nones(entry) for key, entry in structure.items()}
        return {key: entry for key, entry in pruned.items() if entry is not None} or None
    if isinstance(structure, tuple | list):
        entries = [entry for entry in map(_without_nones, structure) if entry is not None]
        if len(entries) == 1:
            return entries[0]
        return tuple(entries) or None
    return structure


_loading: list[Path] = []  # the runs that are being loaded, outermost first


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def load(run: str | Path, checkpoint: CheckpointName = None, callbacks: Any = None) -> LoadedModel:
    """Loads the model of a run, on the GPU if there is one.

    The hooks are those of the project: the run's own settings say which file. A line says where
    that has changed since, or is gone, so that the run's copy is taken. What ``create_dataset``
    reads has to be there, since the model is built as it was for training.

    Args:
        run: the folder of the run, such as ``runs/a``
        checkpoint: its step, or ``best`` for the one of ``keep_best``; default: the newest
        callbacks: a module, a dict or any object with the hooks, instead of the project's file

    Raises:
        SetupError: there is no such run or checkpoint, or the model cannot be served; or a hook
            calls it that makes variables, is traced, or is called to load that same run.
    """
    folder = Path(os.path.abspath(run))
    refuse_here(folder)
    config = load_config(folder / "config.yaml")
    with leave_run(), keep_imports(), _note_loading(folder):
        if callbacks is None:
            name, project = config.callbacks, _find_project(folder, config.runs_dir)
            hooks_file = find_callbacks(name, folder, name, training=False, project=project)
            if hooks_file.note:
                create_console().say(hooks_file.note)
            callbacks = load_callbacks(hooks_file, project)
        own = dataclasses.replace(config, run_name=folder.name, runs_dir=str(folder.parent))
        with restore_run(callbacks, own, checkpoint) as (state, _):
            return create_inference(state)


def refuse_here(folder: Path) -> None:
    """Refuses to load a run where its variables would get into the model that is being built.

    Raises:
        SetupError: a strategy's scope is open, or the run is being loaded.
        RuntimeError: a graph is being traced.
    """
    line = find_users_line()
    if folder in _loading:
        raise SetupError(
            f"{line}: ctl.load is called while {relative_path(folder)} itself is being loaded, "
            "which calls the same hook; load a run of other hooks (callbacks=module), or call it "
            "in a hook that only training calls."
        )
    if not tf.executing_eagerly():  # the hook that is traced adds its name and line
        raise RuntimeError(
            "ctl.load cannot be called while a graph is traced; call it in create_dataset, or at "
            "the top of the file."
        )
    if tf.distribute.has_strategy():
        raise SetupError(
            f"{line}: ctl.load cannot be called in a hook that makes variables, such as "
            "create_model, because the loaded ones are not copied to all replicas; to begin with a "
            f"run's weights, use --init-from {relative_path(folder)}, for another head with "
            "--init-skip 'head/*'; load a teacher in create_dataset, or at the top of the file."
        )


@contextmanager
def _note_loading(folder: Path) -> Iterator[None]:
    """Notes that a run is being loaded, whose hooks must not load it again."""
    _loading.append(folder)
    try:
        yield
    finally:
        _loading.remove(folder)


def _find_project(run: Path, runs_dir: str) -> Path:
    """Returns the folder of the project that a run is in: what ``runs_dir`` is relative to."""
    parts = Path(runs_dir).parts
    inside = run.parent.parts[-len(parts) :] == parts and not Path(runs_dir).is_absolute()
    return Path(*run.parent.parts[: -len(parts)]) if inside else Path.cwd()


def save_model(model: LoadedModel, folder: Path) -> None:
    """Writes a SavedModel that serves without this engine or the hooks.

    The function ``serve`` takes what a client sends in its structure; the signature
    ``serving_default`` takes it by name, and returns the output by the names that ``predict``
    writes.

    Raises:
        AssertionError: the model uses something that cannot be saved.
        OSError, tf.errors.OpError: it cannot be written.
    """
    names = list_input_names(model.input_spec)
    spec = {name: set_rows(part, name=name) for name, part in names.items()}

    @tf.function(autograph=False, input_signature=[spec])
    def by_name(inputs: dict[str, Any]) -> dict[str, Any]:
        return name_outputs(model.function(pack_inputs(model.input_spec, inputs)))

    @tf.function(autograph=False, input_signature=[model.input_spec])
    def serve(inputs: Any) -> Any:
        return model.function(inputs)

    module = tf.Module()
    module.variables_of_run = list(model.function.graph.variables)
    module.tables_of_run = find_tables(model.function.graph)
    module.serve = serve
    # Keras' TFSMLayer looks for the second name.
    tf.saved_model.save(module, str(folder), {"serving_default": by_name, "serve": by_name})
