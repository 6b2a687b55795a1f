"""Formats the messages about the start and end of training, and about steps that are not finite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import keras

from ctl_core.checkpoint.record import Record, find_best_step
from ctl_core.cluster.strategy import read_peak_memory
from ctl_core.input.own_rows import find_expensive_op
from ctl_core.model.averages import has_own_statistics
from ctl_core.model.components import Combination
from ctl_core.model.shards import count_bytes
from ctl_core.model.state import State
from ctl_core.numerics.variables import count_elements, name_variable, unwrap
from ctl_core.run.console import format_evaluation
from ctl_core.run.files import relative_path
from ctl_core.run.live_objects import list_objects


def describe_start(state: State, start: int, last: int) -> str:
    """Returns a line with the first and last step of training, and the devices that are used.

    Args:
        state: the state of the run
        start: the step at which this process starts
        last: the last step of the run
    """
    run = relative_path(state.run_dir)
    if state.ended:
        return (
            f"{run}: ended early, at step {start} of {last}, so there is nothing left to "
            "train; to continue, raise --steps or pass --continue."
        )
    if start >= last:
        return (
            f"{run}: already at step {start} of {last}, so there is nothing left to train; "
            "to continue, raise --steps."
        )
    beginning = f"resuming at step {start}" if start else "training"
    nature = ""
    shape = state.components.shape
    if shape.replicas > 1 and shape.logical_replicas is None:
        nature = describe_nature(state)
    return (
        f"{run}: {beginning}, to step {last}, {_describe_batch(state)}, {_describe_devices(state)}."
        f"{nature}"
    )


def _describe_batch(state: State) -> str:
    """Returns a phrase such as ``batch size 64`` or ``batch size 64 in 4 micro-batches``."""
    text = f"batch size {state.config.batch_size}"
    logical_replicas = state.config.logical_replicas
    if logical_replicas is not None:
        text += f" in {logical_replicas} logical replicas"
    micro_batches = state.config.accumulate_steps
    if micro_batches > 1:
        text += f" in {micro_batches} micro-batches"
    return text


def _describe_devices(state: State) -> str:
    """Returns a phrase such as ``1 replica on GPU, in bfloat16, compiled by XLA``."""
    replicas = state.components.shape.replicas
    devices = state.strategy.extended.worker_devices
    kinds = sorted({_shorten_device(device).split(":")[0] for device in devices})
    text = f"{replicas} {'replica' if replicas == 1 else 'replicas'} on {', '.join(kinds)}"
    if state.computed_in:
        text += f", in {' and '.join(state.computed_in)}"
    # On a CPU, steps are usually not compiled, so this is mentioned only if they are.
    if "GPU" in kinds or state.compilation.is_compiled:
        text += f", {state.compilation}"
    return text


def describe_resources(state: State) -> Iterator[str]:
    """Yields the lines about memory and data before the first step of this process."""
    config = state.config
    if config.shard_optimizer or config.debug:
        yield describe_memory(state)
    if config.shard_optimizer and state.components.shards is None:
        yield "shard_optimizer has no effect with a single device."
    shared = describe_shared_preparation(state)
    if shared is not None:
        yield shared


def describe_memory(state: State) -> str:
    """Returns a line with the memory that variables take on each device of this process.

    With ``shard_optimizer``, devices have different parts of the state of the optimizer. Then the
    line says how much the device with the least has, and the device with the most.
    """
    kinds = {"create_model": "weights", "create_opt": "optimizer", "ema": "averages"}
    devices = [*map(_shorten_device, state.strategy.extended.worker_devices)]
    sizes = {hook: dict.fromkeys(devices, 0) for hook in kinds}
    for name, variable in state.recording.variables.items():
        hook = name.split("/")[0]
        if hook in kinds:
            for component in state.strategy.experimental_local_results(variable):
                sizes[hook][_shorten_device(component.device)] += count_bytes(component)
    phrases = [
        f"{kind} {_describe_sizes(list(sizes[hook].values()))}"
        for hook, kind in kinds.items()
        if any(sizes[hook].values())
    ]
    return f"variables on each device: {', '.join(phrases)}."


def _shorten_device(device: str) -> str:
    """Returns the kind and the number of a device, such as ``GPU:0``, from its full name."""
    return device.split("device:")[-1]


def _describe_sizes(sizes: list[int]) -> str:
    """Returns a phrase such as ``76.3 MiB``, or ``19.1 to 19.4 MiB`` if the sizes differ.

    Args:
        sizes: numbers of bytes
    """
    unit, divisor = ("MiB", 2**20) if max(sizes) >= 2**20 else ("KiB", 2**10)
    least, most = (f"{size / divisor:,.1f}" for size in (min(sizes), max(sizes)))
    return f"{most} {unit}" if least == most else f"{least} to {most} {unit}"


def describe_free_order(state: State) -> str:
    """Returns the warning for a pipeline whose order may differ from run to run."""
    return (
        f"{state.data.hook}: with deterministic=False, the examples have another order in each "
        "run, so weights are not reproduced exactly, even after a resume; leave it out, or pass "
        "--deterministic."
    )


def describe_shared_preparation(state: State) -> str | None:
    """Returns a line if each process of a cluster prepares every example, which takes long.

    Returns None if there is a single process, if each process prepares only its rows, or if the
    pipeline contains no stage that is known to take long.
    """
    processes = state.cluster.task.processes
    if processes == 1 or state.data.mark is not None:
        return None
    op = find_expensive_op(state.data.dataset)
    if op is None:
        return None
    return (
        f"{state.data.hook}: each of the {processes} processes prepares every example ({op}); to "
        "let each process prepare only its rows, call ctl.data.own_rows before this map."
    )


def describe_compilation_change(state: State) -> str:
    """Returns the message for a resumed run that switches between compiled and uncompiled steps."""
    now = "compiled" if state.compilation.is_compiled else "not compiled"
    return f"jit_compile: steps are {now} from now on, and draw other random numbers, if any."


def describe_new_leaves(state: State, record: Record | None) -> str | None:
    """Returns a line on what changes in a run of engine 2.0; None if nothing changes.

    Args:
        state: the state of the run
        record: the record of the checkpoint from which the run resumes; None if it is new
    """
    shape = state.components.shape
    if record is None or record.leaves is not None or shape.logical_replicas is not None:
        return None
    changes = []
    if shape.leaves > 1 and state.components.generators.drawn:
        changes.append("random numbers depend on the step and the leaf, so they differ")
    if shape.accumulate_steps > 1 and any(map(has_own_statistics, state.recording.layers)):
        changes.append(
            "the momentum of moving statistics applies once in a step instead of once in each "
            "micro-batch"
        )
    if shape.accumulate_steps > 1 and shape.replicas > 1:
        changes.append("the micro-batches of a replica are neighboring rows of the batch")
    if not changes:
        return None
    return f"the run was trained by ctl_core {record.engine}; from now on, {'; '.join(changes)}."


def describe_nature(state: State) -> str:
    """Returns sentences that explain why weights depend on the number of replicas.

    Returns "" if no layer and no variable is known to cause such a dependence.
    """
    layers = state.recording.layers
    drawing_layers = state.components.drawing_layers
    reasons = []
    if drawing_layers:
        reasons.append(f"random numbers ({', '.join(drawing_layers)})")
    if any(map(has_own_statistics, layers)):
        reasons.append("batch statistics (BatchNormalization that is not synchronized)")
    sentences = ""
    if reasons:
        causes = " and ".join(reasons)
        sentences += f" Weights depend on the number of replicas: each has its own {causes}."
    combined = _list_combined(state)
    if combined:
        sentences += (
            f" What replicas write to {_list_some(combined)} is combined at the end of a step; "
            "if a step reads it after writing it, --check finds the difference."
        )
    return sentences


def _list_combined(state: State) -> list[str]:
    """Returns the names of the variables whose changes are combined after each step.

    Within a step, a replica that reads such a variable after it has written it sees only its own
    change. Layers of Keras, including metrics, are known not to do this.
    """
    combined = [
        entry.variable
        for entry in state.components.written
        if entry.combination in (Combination.MEAN, Combination.SUM)
    ]
    if not combined:  # the search for all metrics takes a while
        return []
    of_keras = {
        id(unwrap(variable))
        for layer in state.recording.layers
        if type(layer).__module__.startswith("keras.")
        for variable in layer.non_trainable_variables
    }
    for metric in list_objects(keras.Metric):
        of_keras.update(id(unwrap(variable)) for variable in metric.variables)
    return [name_variable(variable) for variable in combined if id(variable) not in of_keras]


def count_parameters(state: State) -> str:
    """Returns a phrase such as ``97 parameters to train``.

    The number includes all parameters that the first step trains.
    """
    sizes = map(count_elements, state.trained)
    return f"{sum(sizes):,} parameters to train"


def describe_weighting(state: State) -> str | None:
    """Returns a line if the loss is multiplied by the sample weights of a batch, otherwise None."""
    evaluation_sets = state.evaluation.sets.values() if state.evaluation is not None else ()
    losses = []
    if state.is_weighted:
        losses.append("training")
    if any(evaluation_set.is_weighted for evaluation_set in evaluation_sets):
        losses.append("evaluations")
    if not losses:
        return None
    return (
        "the third element of each batch multiplies the losses of its examples, as sample weights, "
        f"in {' and '.join(losses)}."
    )


def describe_left_out(state: State) -> list[str]:
    """Returns warnings about trainable variables that are not trained."""
    warnings = []
    if state.left_out:
        warnings.append(
            f"{state.hooks.create_loss}: grad_pre does not train the loss's variables "
            f"{_list_some(state.left_out)}; return ctl_core.trainable_variables(train_loss) from "
            "it, too, or set trainable = False."
        )
    if state.untracked:
        warnings.append(
            f"{state.hooks.grad_pre}: does not train {_list_some(state.untracked)}, because Keras "
            "does not track a plain tf.Variable of a layer, model or loss; create it with "
            "add_weight, return it from grad_pre, or create it with trainable=False."
        )
    return warnings


def _list_some(names: list[str]) -> str:
    """Returns the first three names, and the number of the others."""
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} others"
    return shown


def describe_end(state: State, start: int, saved_step: int) -> list[str]:
    """Returns lines about the outcome of training.

    They contain the reason for the end, the duration, the last evaluation, and commands to run
    next.

    Args:
        state: the state of the run
        start: the step at which this process started
        saved_step: the step of the newest checkpoint, or -1
    """
    run_name = Path(state.run_dir).name
    if state.stopped_by is not None:
        name = signal.Signals(state.stopped_by).name
        ending = f"stopped by {name}, {_describe_saved(state, saved_step)}"
    elif state.ended:
        ending = "ended early"
    else:
        ending = "done"
    all_seconds = state.clock.measure_all()
    duration = f"{state.step - start} steps in {all_seconds:.1f} s"
    other_seconds = all_seconds - state.clock.measure_training()
    if other_seconds > 0.1 and state.stopped_by is None:
        duration += f" ({other_seconds:.1f} s evaluating and saving)"
    facts = [f"step {state.step}", duration]
    peak = read_peak_memory(state.strategy.extended.worker_devices)
    if peak is not None:
        facts.append(f"peak GPU memory {peak / 2**20:.0f} MiB")
    lines = [f"{ending}: {'; '.join(facts)}."]
    if state.metrics:
        result = format_evaluation(state.metrics, state.progress.evaluated, state.step)
        best_step = find_best_step(state.progress.best)
        if best_step >= 0:
            result += f"; the best checkpoint is the one of step {best_step}"
        lines.append(f"{result}.")
    run = relative_path(state.run_dir)
    lines.append(f"Everything is in {run}. Next, for example:")
    if state.stopped_by is not None:
        lines.append(f"  ./train.sh --run-name {run_name}  # resumes it")
    lines.append(f"  tensorboard --logdir {Path(run).parent}")
    if state.evaluation is not None:
        lines.append(f"  python -m ctl_core evaluate {run_name}")
    return lines


def _describe_saved(state: State, saved_step: int) -> str:
    """Returns a phrase that says which checkpoint a run has that was stopped by a signal."""
    if saved_step == state.step:
        return "saved"
    if saved_step < 0:
        return "not saved, because its weights are not finite"
    return f"not saved after step {saved_step}, because its weights are not finite"


def describe_nonfinite(state: State) -> list[str]:
    """Returns warnings about steps with a loss that was not finite, or with NaN in a gradient."""
    noted = state.progress.noted
    warnings = []
    if noted.steps:
        # The processes of a cluster may see non-finite losses in different steps. The number is the
        # highest number that a single process has counted.
        at_least = "at least " if state.cluster.task.processes > 1 else ""
        last_one = ", the last one" if noted.latest == state.step else ""
        warnings.append(
            f"the loss was not finite in {at_least}{noted.steps} of {state.step} steps, first "
            f"in step {noted.first}, last in step {noted.latest}{last_one}."
        )
    if noted.nan_gradients:
        warnings.append(
            f"update_pre received NaN in gradients in {noted.nan_gradients} of {state.step} steps "
            "with a finite loss; its default replaces NaN by 0."
        )
    return warnings
