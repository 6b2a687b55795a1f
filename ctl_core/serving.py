"""Turns the model of a checkpoint into a function from a request to the model's output.

``load``, ``predict`` and ``export`` use this function. A request is the argument of the hook
``serve``, as described by the ``input_signature`` of the hook. Without an ``input_signature``, or
without the hook, a request contains only those entries of a batch that the output depends on. For
example, it contains no labels.
"""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.checkpoint.run_settings import CONFIG_FILE, read_run_settings
from ctl_core.checkpoint.source import CheckpointName
from ctl_core.compat import allow_autograph, make_scratch_graph, run_layers
from ctl_core.hooks.callbacks_file import (
    SAVED,
    HooksFile,
    find_callbacks,
    find_modules,
    find_saved_callbacks,
    load_callbacks,
)
from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.recording import find_tables
from ctl_core.input.batches import count_rows, make_placeholders, set_rows
from ctl_core.model.components import TraceContext
from ctl_core.model.forward import call_made, call_model
from ctl_core.model.state import State
from ctl_core.numerics.constants import SplitOutput, is_constant, restore_constants, split_constants
from ctl_core.numerics.variables import cast_to_float32
from ctl_core.read_only import restore_run
from ctl_core.run.console import create_console
from ctl_core.run.errors import SetupError, find_users_line, format_error, quote
from ctl_core.run.files import relative_path
from ctl_core.run.layers import resolve
from ctl_core.run.settings import Config
from ctl_core.session.process import leave_run
from ctl_core.session.turns import PROCESS_TURN, refuse_in_fork
from ctl_core.types import (
    AnyTensor,
    AnyTensorSpec,
    Batch,
    BatchSpec,
    Callbacks,
    Count,
    Model,
    ModelInput,
    ModelOutput,
    Structure,
    UserObject,
)

# A function that TensorFlow has traced, or traces when it is called. TensorFlow does not declare
# the types of its attributes.
GraphFunction: TypeAlias = Any


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """The model of a checkpoint, and the hooks that compute its input from a request.

    Several threads may call it at once.

    Attributes:
        model: the result of ``create_inference_model``; without that hook, the model that
            evaluations use
        input_spec: the specification of a request; the first dimension, None, is the number of
            examples
        output_spec: the specification of the output, which is float32 even if the model computes in
            a lower precision
        step: the step of the checkpoint
        metrics: the values of the last evaluation before the checkpoint by name, or {}
        settings: the settings of the run
        function: the graph function from a request to the output
        run_batch: computes the output for a batch of ``create_eval_dataset``; a graph function
        state: the state of the run, with the variables that the functions use
        inference: computes the output in a graph that is being traced
    """

    model: UserObject
    input_spec: BatchSpec
    output_spec: BatchSpec
    step: int
    metrics: dict[str, float]
    settings: Config
    function: GraphFunction
    run_batch: GraphFunction
    state: State
    inference: "Inference"

    def __call__(self, inputs: Structure) -> ModelOutput:
        """Returns the model's output for any number of examples, as ``output_spec`` describes it.

        Args:
            inputs: the argument of ``serve``, as arrays, lists or tensors; without that hook, the
                entries of a batch that ``input_pre`` needs

        Raises:
            SetupError: the inputs do not match ``input_spec``; or this process was forked from the
                one that has loaded the model.
        """
        refuse_in_fork("ctl.load")
        spec = self.input_spec
        try:
            request = keras.tree.map_structure_up_to(spec, _convert_to_tensor, spec, inputs)
            return restore_constants(self.function(request))
        except (TypeError, ValueError) as error:
            expected = ", ".join(
                f"{name} {entry.dtype.name} {entry.shape}"
                for name, entry in list_input_names(spec).items()
            )
            raise SetupError(f"input: expected {expected}: {format_error(error, 120)}") from error


def _convert_to_tensor(spec: AnyTensorSpec, value: UserObject) -> AnyTensor:
    """Converts an array or nested lists to a tensor; returns a tensor unchanged.

    Raises:
        TypeError, ValueError: the value cannot be converted without loss.
    """
    if tf.is_tensor(value):
        same: AnyTensor = value
        return same
    tensor = tf.convert_to_tensor(value, spec.dtype)
    # TensorFlow truncates numbers that do not fit an integer type.
    if spec.dtype.is_integer and not np.array_equal(tensor, value):
        raise ValueError(f"numbers that {spec.dtype.name} cannot hold")
    return tensor


def list_input_names(spec: BatchSpec) -> dict[str, AnyTensorSpec]:
    """Returns the entries of a model's input by their names in files and in signatures.

    The name of an entry of a dict is its key, or ``key/inner`` if dicts are nested. The first entry
    of a tuple is called ``input_0``, and a single tensor is called ``inputs``.
    """
    return _name_entries(spec, "inputs", "input_")


def _name_entries(structure: Structure, alone: str, numbered: str) -> dict[str, UserObject]:
    """Returns the entries of a structure by name.

    Args:
        structure: a value, or values in nested dicts and tuples
        alone: the name of a value that is not in a dict or tuple
        numbered: the prefix of the index of an entry of a tuple
    """
    entries = {}
    for path, entry in keras.tree.flatten_with_path(structure):
        name = "/".join(map(str, path))
        if not path:
            name = alone
        elif isinstance(path[0], int):
            name = numbered + name
        entries[name] = entry
    return entries


def pack_inputs(spec: BatchSpec, values: Mapping[str, UserObject]) -> Structure:
    """Packs values into the structure of a specification.

    Args:
        spec: the specification
        values: the values by the names that ``list_input_names`` returns
    """
    return keras.tree.pack_sequence_as(spec, [values[name] for name in list_input_names(spec)])


def name_outputs(
    output: Structure, alone: str = "output", numbered: str = "output_"
) -> dict[str, tf.Tensor]:
    """Returns the entries of an output as dense tensors by name.

    A single tensor is called ``output``, and the first entry of a tuple ``output_0``. Ragged
    tensors are padded, and ``NAME.lengths`` contains the length of each example along axis 1.
    Constants of a model's output, such as None, are left out.

    Args:
        output: the output of a model after ``split_constants``, or another structure of tensors
        alone: the name of a single tensor
        numbered: the prefix of the index of an entry of a tuple
    """
    tensors = {}
    for name, entry in _name_entries(restore_constants(output), alone, numbered).items():
        if isinstance(output, SplitOutput) and is_constant(entry):
            continue
        if isinstance(entry, tf.RaggedTensor):
            tensors[f"{name}.lengths"] = entry.row_lengths()
            tensors[name] = entry.to_tensor()
        elif isinstance(entry, tf.SparseTensor):
            tensors[name] = tf.sparse.to_dense(entry)
        else:
            tensors[name] = entry
    return tensors


def create_inference(state: State) -> LoadedModel:
    """Calls ``create_inference_model``, and traces the model with the hooks that run before it.

    Call this function after a checkpoint was restored, because ``create_inference_model`` may copy
    the weights of the trained model.

    Raises:
        SetupError, HookFailed: a hook cannot work, or the model creates weights when it is called.
    """
    hooks = state.hooks
    recording = state.recording
    hook, model = state.components.choose_model(training=False)
    if hooks.create_inference_model is not None:
        hook = hooks.create_inference_model
        with state.strategy.scope(), recording.record_as("create_inference_model"):
            model = hook(model=model, train_model=state.train_model)
    inference = Inference(state, hook, model)
    known = set(recording.variables)
    with recording.record_as("create_inference_model"):
        request_spec, answer = inference.define_answer()
        function = tf.function(answer, autograph=False, input_signature=[request_spec])
        traced = function.get_concrete_function()
    for name in recording.variables:
        if name not in known:
            raise hook.reject(
                f"{name} is created when the model is first called, so no checkpoint contains "
                "it; build it in the hook."
            )
    output_spec = tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)
    return LoadedModel(
        model=model,
        input_spec=request_spec,
        output_spec=restore_constants(output_spec),
        step=state.step,
        metrics=dict(state.metrics),
        settings=state.config,
        function=traced,
        run_batch=tf.function(inference.run_batch, autograph=False, reduce_retracing=True),
        state=state,
        inference=inference,
    )


class Inference:
    """Computes the output of a model from a request, or from a batch; runs in a graph."""

    def __init__(self, state: State, hook: Hook, model: Model) -> None:
        """Prepares the functions.

        Args:
            state: the state of the run
            hook: the hook that returned the model, for messages
            model: the model
        """
        self._state = state
        self._hook = hook
        self._model = model
        self._serve = state.hooks.serve
        self._signature = getattr(self._serve and self._serve.function, "input_signature", None)
        # The step is a constant, because an exported model has no variable for it.
        step = tf.constant(state.step, tf.int64)
        self._context = TraceContext(state.components, step=step)

    def define_answer(self) -> tuple[BatchSpec, Callable[[Structure], ModelOutput]]:
        """Returns the specification of a request, and the function from a request to the output.

        Without an ``input_signature``, a request contains only those entries of a batch that the
        output depends on. For example, it contains no labels.
        """
        if self._signature:
            return tf.nest.map_structure(set_rows, self._signature[0]), self.run_request
        used = self.find_used_entries()
        return used.spec, used.function

    def find_batch_spec(self) -> BatchSpec:
        """Returns the specification of a batch for evaluation; without one, of a training batch."""
        batch_spec = self._state.data.share_spec
        if self._state.evaluation is not None and self._state.evaluation.sets:
            batch_spec = next(iter(self._state.evaluation.sets.values())).spec
        return tf.nest.map_structure(set_rows, batch_spec)

    def find_used_entries(self) -> "UsedEntries":
        """Finds the entries of a batch that the output depends on."""
        return cut_to_used_entries(self.run_batch, self.find_batch_spec())

    def run_request(self, request: Structure) -> ModelOutput:
        """Returns the output for a request; the hook ``serve`` turns it into the model's input."""
        with run_layers(training=False):
            assert self._serve is not None
            return self._run_model(self._serve.trace(inputs=request))

    def run_batch(self, batch: Batch) -> ModelOutput:
        """Returns the output for a batch of ``create_eval_dataset``."""
        with run_layers(training=False):
            return self._run_model(self.read_batch(batch))

    @property
    def serves_other_requests(self) -> bool:
        """True if ``serve`` has an ``input_signature``, so that requests differ from batches."""
        return bool(self._signature)

    @property
    def batch_hook(self) -> Hook:
        """The hook that turns a batch into the model's input: ``input_pre``, or ``serve``."""
        if self._serve is None or self._signature:
            return self._state.hooks.input_pre
        return self._serve

    def read_batch(self, batch: Batch) -> ModelInput:
        """Returns the model's input for a batch of ``create_eval_dataset``."""
        if self.batch_hook is not self._serve:
            values = self._context.hook_values()
            return self.batch_hook.trace(batch=batch, training=False, **values)
        request = batch[0] if isinstance(batch, tuple) else batch
        return self.batch_hook.trace(inputs=request)

    def run_input(self, model_input: ModelInput) -> ModelOutput:
        """Returns the output for an input of the model itself."""
        with run_layers(training=False):
            return self._run_model(model_input)

    def _run_model(self, model_input: ModelInput) -> ModelOutput:
        output = call_made(self._hook, call_model, self._model, model_input, False)
        return split_constants(cast_to_float32(output))


class UsedEntries(NamedTuple):
    """The entries of a batch that the output of a function depends on.

    Attributes:
        spec: the specification of these entries, with any number of rows. It is a part of the dict
            or tuple that a batch is; if only one entry of a tuple is used, it is that entry itself
        function: computes the output from these entries
        select: returns these entries of a batch
    """

    spec: BatchSpec
    function: Callable[[Structure], ModelOutput]
    select: Callable[[Batch], Structure]


def cut_to_used_entries(
    function: Callable[[Batch], ModelOutput], batch_spec: BatchSpec
) -> UsedEntries:
    """Finds the entries of a batch that the output of a function depends on.

    Args:
        function: computes the output from a batch
        batch_spec: the specification of a batch
    """
    with make_scratch_graph("serving").as_default():
        batch = make_placeholders(batch_spec)
        output = function(batch)
    needed = _find_needed_ops(output)
    is_used = [
        any(tensor.op.name in needed for tensor in tf.nest.flatten(entry, expand_composites=True))
        for entry in tf.nest.flatten(batch)
    ]
    used_spec = _select_used_entries(batch_spec, is_used, batch_spec)
    return UsedEntries(
        tf.nest.map_structure(set_rows, used_spec),
        functools.partial(_call_with_used_entries, function, batch_spec, is_used),
        functools.partial(_select_used_entries, batch_spec, is_used),
    )


def _select_used_entries(batch_spec: BatchSpec, is_used: Sequence[bool], batch: Batch) -> Structure:
    """Returns the used entries of a batch, or of its specification; see ``UsedEntries``."""
    entries = zip(tf.nest.flatten(batch), is_used, strict=True)
    selected = [entry if used else None for entry, used in entries]
    return _without_nones(tf.nest.pack_sequence_as(batch_spec, selected))


def _find_needed_ops(output: ModelOutput) -> set[str]:
    """Returns the names of the ops that the tensors of an output depend on."""
    needed: set[str] = set()
    waiting = [tensor.op for tensor in tf.nest.flatten(output, expand_composites=True)]
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return needed


def _call_with_used_entries(
    function: Callable[[Batch], ModelOutput],
    batch_spec: BatchSpec,
    is_used: Sequence[bool],
    request: Structure,
) -> ModelOutput:
    """Calls a function with the used entries of a batch, and with zeros for all other entries.

    Args:
        function: computes the output from a batch
        batch_spec: the specification of a batch
        is_used: says for each entry of a batch whether the request contains it
        request: the used entries
    """
    create_zeros = functools.partial(_create_zeros, count_rows(request))
    used_entries = iter(tf.nest.flatten(request))
    entries = []
    for spec, used in zip(tf.nest.flatten(batch_spec), is_used, strict=True):
        if used:
            entries.append(next(used_entries))
        else:
            entries.append(tf.nest.map_structure(create_zeros, spec, expand_composites=True))
    return function(tf.nest.pack_sequence_as(batch_spec, entries))


def _create_zeros(rows: Count, spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a tensor of zeros that has ``rows`` rows and the static shape of a specification."""
    sizes: list[Count] = []
    if spec.shape.rank:
        sizes = [rows, *(size or 1 for size in spec.shape[1:])]
    return tf.compat.v1.placeholder_with_default(tf.zeros(sizes, spec.dtype), spec.shape)


def _without_nones(structure: Structure) -> Structure:
    """Removes entries that are None from a structure.

    A tuple with only one remaining entry is replaced with that entry, and an empty structure with
    None.
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


class _Loading(threading.local):
    """The folders of the runs that a thread is loading.

    If the hooks of a run load another run, the other run comes later.
    """

    def __init__(self) -> None:
        self.folders: list[Path] = []


_loading = _Loading()


@tf.autograph.experimental.do_not_convert
def load(
    run: str | Path, checkpoint: CheckpointName = None, callbacks: Callbacks | None = None
) -> LoadedModel:
    """Loads the model of a run, on the GPU if there is one.

    The hooks are read from the project's file that the run's settings name. If this file has
    changed since the run was trained, a warning is printed. The data that
    ``create_dataset`` reads have to exist, because the model is built in the same way as for
    training. While a run trains in another thread, this function waits until training is between
    two graph calls.

    Args:
        run: the folder of the run, such as ``runs/a``
        checkpoint: the step of the checkpoint; ``best`` for the checkpoint that ``keep_best``
            keeps; or ``last``. Default: the best checkpoint if the run keeps it, otherwise the
            newest one
        callbacks: a module, a dict or any object with the hooks, instead of the project's file.
            ``"saved"`` uses the copies in the run folder: the hooks and modules with which the run
            was trained. They read their data from the project

    Raises:
        SetupError: there is no such run or checkpoint, or the model cannot be served; or this
            function is called in a hook that creates variables, or in a hook of the run that is
            being loaded.
        RuntimeError: this function is called in a hook that is being traced.
    """
    folder = _find_run(Path(run))
    refuse_here(folder)
    config = resolve([read_run_settings(folder)])
    contexts = (PROCESS_TURN.load(), leave_run(), _keep_custom_objects(), _note_loading(folder))
    with contextlib.ExitStack() as stack:
        for context in (*contexts, allow_autograph()):
            stack.enter_context(context)
        if callbacks is None or isinstance(callbacks, str):
            project = _find_project(folder, config.runs_dir, config.callbacks)
            hooks_file = _find_hooks_file(folder, config.callbacks, project, callbacks)
            if hooks_file.note:
                create_console().say(hooks_file.note)
            modules = find_modules(hooks_file, project)
            stack.enter_context(modules.activate())
            callbacks = load_callbacks(hooks_file, project, modules)
        # The folder may have been moved or renamed since the run was trained.
        config = dataclasses.replace(config, run_name=folder.name, runs_dir=str(folder.parent))
        with restore_run(callbacks, config, checkpoint, reads_data=False) as (state, _):
            return create_inference(state)


def refuse_here(folder: Path) -> None:
    """Checks that ``load`` is not called where the run's variables would join another model.

    Args:
        folder: the folder of the run

    Raises:
        SetupError: a strategy's scope is open, or the same run is being loaded already.
        RuntimeError: a graph is being traced.
    """
    line = find_users_line()
    if folder in _loading.folders:
        raise SetupError(
            f"{line}: ctl.load is called while {relative_path(folder)} itself is being loaded, "
            "which calls the same hook again; load a run of other hooks (callbacks=module), "
            "or call it in a hook that only training calls."
        )
    if not tf.executing_eagerly():  # tracing adds the name and line of the hook to the error
        raise RuntimeError(
            "ctl.load cannot be called while a graph is traced; call it in create_dataset, or at "
            "the top of the file."
        )
    if tf.distribute.has_strategy():
        raise SetupError(
            f"{line}: ctl.load cannot be called in a hook that creates variables, such as "
            "create_model, because the loaded variables are not copied to all replicas. To "
            f"start with a run's weights, use --init-from {relative_path(folder)}, for another "
            "head with --init-skip 'head/*'; load a teacher in create_dataset, or at the top "
            "of the file."
        )


@contextmanager
def _note_loading(folder: Path) -> Iterator[None]:
    """Records that a run is being loaded, because its own hooks must not load it again."""
    _loading.folders.append(folder)
    try:
        yield
    finally:
        _loading.folders.remove(folder)


def _find_hooks_file(run: Path, name: str, project: Path, callbacks: str | None) -> HooksFile:
    """Returns the file with the hooks of a run that is loaded.

    Args:
        run: the folder of the run
        name: the path of the file in the project
        project: the folder of the project
        callbacks: ``saved`` for the copy in the run folder; None for the project's file

    Raises:
        SetupError: there is no such file.
    """
    if callbacks is None:
        return find_callbacks(name, run, name, training=False, project=project, is_named=False)
    if callbacks == SAVED:
        return find_saved_callbacks(run, name, project)
    raise SetupError(
        "callbacks: expected a module, a dict or an object with the hooks, or 'saved' for the "
        f"hooks with which the run was trained, got {quote(callbacks)}."
    )


@contextmanager
def _keep_custom_objects() -> Iterator[None]:
    """Restores the objects that are registered with Keras by name.

    The modules of the loaded run may register other objects under the same names.
    """
    objects = keras.saving.get_custom_objects()
    before = dict(objects)
    try:
        yield
    finally:
        objects.clear()
        objects.update(before)


def _find_run(run: Path) -> Path:
    """Returns the absolute path of a run; searches the folders above the current one, too.

    A notebook may be in a folder of the project.
    """
    folder = Path(os.path.abspath(run))
    for parent in Path.cwd().parents:
        if folder.exists() or run.is_absolute():
            break
        if (parent / run / CONFIG_FILE).is_file():
            return parent / run
    return folder


def _find_project(run: Path, runs_dir: str, callbacks: str) -> Path:
    """Returns the folder of the project that a run belongs to.

    Args:
        run: the folder of the run
        runs_dir: the setting ``runs_dir``, which is absolute or relative to the project
        callbacks: the path of the file with the hooks in the project
    """
    relative = Path(runs_dir)
    depth = len(relative.parts)
    is_inside = run.parent.parts[-depth:] == relative.parts
    if relative.is_absolute() or not is_inside:
        above = run.parent.parent
        has_hooks = (above / callbacks).is_file() and not Path(callbacks).is_file()
        if has_hooks:
            return above
        return Path.cwd()
    return Path(*run.parent.parts[:-depth])


class NamedFunction(NamedTuple):
    """A function whose inputs and outputs have names, as in the signature of a SavedModel.

    Attributes:
        spec: the specifications of the inputs by name
        function: returns the outputs by name, given a dict of the inputs
    """

    spec: dict[str, AnyTensorSpec]
    function: Callable[[dict[str, AnyTensor]], dict[str, tf.Tensor]]


def name_entries(
    function: Callable[[Structure], ModelOutput], input_spec: BatchSpec, rows: int | None = None
) -> NamedFunction:
    """Names the inputs and outputs of a function; the outputs have the names of ``predict``.

    Args:
        function: computes the output from a request
        input_spec: the specification of a request
        rows: the number of examples in each call; None allows any number
    """
    entries = list_input_names(input_spec)
    spec_by_name = {name: set_rows(entry, rows, name) for name, entry in entries.items()}

    def compute_by_name(inputs: dict[str, AnyTensor]) -> dict[str, tf.Tensor]:
        return name_outputs(function(pack_inputs(input_spec, inputs)))

    return NamedFunction(spec_by_name, compute_by_name)


def save_model(model: LoadedModel, folder: Path) -> None:
    """Writes a SavedModel that can be served without this engine and without the hooks.

    The argument of the function ``serve`` has the structure of a request. The signature
    ``serving_default`` takes the entries of a request by name, and returns the entries of the
    output by the same names that ``predict`` writes.

    Raises:
        AssertionError: the model uses something that cannot be saved.
        OSError, tf.errors.OpError: the files cannot be written.
    """
    named = name_entries(model.function, model.input_spec)
    serve_by_name = tf.function(named.function, autograph=False, input_signature=[named.spec])

    @tf.function(autograph=False, input_signature=[model.input_spec])
    def serve(inputs: Structure) -> ModelOutput:
        return restore_constants(model.function(inputs))

    module: Any = tf.Module()
    module.variables_of_run = list(model.function.graph.variables)
    module.tables_of_run = find_tables(model.function.graph)
    module.serve = serve
    # Keras' TFSMLayer uses the signature called serve by default.
    signatures = {"serving_default": serve_by_name, "serve": serve_by_name}
    tf.saved_model.save(module, str(folder), signatures)
