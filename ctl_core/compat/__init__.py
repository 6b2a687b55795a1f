"""Contains all uses of private names of TensorFlow and Keras.

Other packages import these functions from here. Each module below covers one subject. If a release
of TensorFlow or Keras changes a private name, a test in tests/engine/test_compat.py fails. The
function that uses the name must then be corrected.

    patches.py       replaces attributes temporarily; uses no private names itself
    layers.py        keras.Layer: _flatten_layers, _losses, _get_call_context, __new__;
                     scale_loss_for_distribution of losses; make_function_context of tf.function
    optimizers.py    keras.Optimizer: _learning_rate, _all_reduce_sum_gradients,
                     _distribution_strategy; MultiOptimizer: _var_key, _var_to_optimizer_idx;
                     maybe_merge_call
    randomness.py    the global state of Keras: the default seed generator and the names of objects;
                     the eager context: _seed, _rng; whether ops are deterministic; the names of the
                     variables of random generators
    graphs.py        FuncGraph: _watched_variables, _get_function, _variable_creator_stack; the
                     resources that an op writes; the stack and status of AutoGraph, and how it
                     reads sources; the results of new ops; the eager context: _config
    gradients.py     the registry of gradients; the closures of tf.custom_gradient and
                     tf.recompute_grad; Operation: _original_op
    distribution.py  which replica writes summaries; the context of an update; the resource of a
                     writer; float and int of a DistributedVariable; how a process joins a cluster
                     and creates its devices; the strings that processes publish; how the replicas
                     of all processes gather a tensor, and get the initial value of a variable; how
                     collectives are numbered; the eager context: _initialized
    checkpoints.py   Trackable and the object graph of a checkpoint; Checkpoint: _write;
                     CheckpointManager: _max_to_keep, _checkpoint
    datasets.py      Dataset: _inputs, _functions, _filename, _num_parallel_calls, _deterministic,
                     interleave_op._ParallelInterleaveDataset,
                     _stop_on_empty_dataset, the names of the classes of stages; the tensors and the
                     format of the position of an iterator; the resource of an iterator
    versions.py      the newest versions that were tested; uses no private names
    xla.py           the ops that XLA compiles for a GPU; experimental_get_compiler_ir
"""

from ctl_core.compat.checkpoints import (
    GraphCheckpoint,
    Node,
    SavedObject,
    hold_objects,
    read_max_to_keep,
    read_object_graph,
    read_variables,
    saves_itself,
)
from ctl_core.compat.datasets import (
    call_function,
    count_saved_draws,
    draws_random_numbers,
    drops_remainder,
    find_captured_iterators,
    find_graphs,
    find_inputs,
    groups_by_window,
    has_free_order,
    has_function,
    is_batch,
    is_map,
    is_padded_batch,
    is_shuffle,
    is_snapshot,
    is_tuned,
    keeps_rows,
    list_stages,
    name_stage,
    note_interleave_order,
    read_cache_file,
    read_position,
    read_snapshot_folder,
    restore_position,
    stops_on_empty_dataset,
)
from ctl_core.compat.distribution import (
    GraphWriter,
    broadcast_any_dtype,
    convert_variables,
    cut_join,
    enter_replica_context,
    enter_update,
    gather_from_replicas,
    has_started,
    let_sizes_vary,
    list_cpu_devices,
    mute_other_summaries,
    publish,
    read_preemption,
    read_published,
)
from ctl_core.compat.gradients import (
    GradientKind,
    classify_gradient,
    find_forward_op,
    forget_custom_gradients,
    release_custom_gradients,
)
from ctl_core.compat.graphs import (
    FunctionGraph,
    add_called_ops,
    allow_autograph,
    call_with_captures,
    change_results,
    check_float8,
    find_called_graphs,
    find_captured_variables,
    find_distributed_variable,
    find_written_resources,
    is_inaccessible,
    keep_large_sums_whole,
    leave_constants_unchecked,
    leave_creator_scopes,
    list_captured_inputs,
    make_scratch_graph,
    read_sources_once,
    read_translated_stack,
)
from ctl_core.compat.layers import (
    flatten_layers,
    hide_new_layers,
    read_added_losses,
    run_layers,
    run_replica,
    separate_losses,
    watch_new_layers,
)
from ctl_core.compat.optimizers import (
    place_slots,
    read_rate,
    refuse_optimizers,
    skip_reduction,
    update_device,
)
from ctl_core.compat.randomness import (
    draw_from,
    get_seed_generator,
    is_keras_generator,
    is_op_determinism_enabled,
    is_tf_generator,
    keep_op_determinism,
    keep_op_seed,
    name_anew,
)
from ctl_core.compat.versions import describe_untested
from ctl_core.compat.xla import enter_xla, list_gpu_ops, lower

__all__ = [
    "FunctionGraph",
    "GradientKind",
    "GraphCheckpoint",
    "GraphWriter",
    "Node",
    "SavedObject",
    "add_called_ops",
    "allow_autograph",
    "broadcast_any_dtype",
    "call_function",
    "call_with_captures",
    "change_results",
    "check_float8",
    "classify_gradient",
    "convert_variables",
    "count_saved_draws",
    "cut_join",
    "describe_untested",
    "draw_from",
    "draws_random_numbers",
    "drops_remainder",
    "enter_replica_context",
    "enter_update",
    "enter_xla",
    "find_called_graphs",
    "find_captured_iterators",
    "find_captured_variables",
    "find_distributed_variable",
    "find_forward_op",
    "find_graphs",
    "find_inputs",
    "find_written_resources",
    "flatten_layers",
    "forget_custom_gradients",
    "gather_from_replicas",
    "get_seed_generator",
    "groups_by_window",
    "has_free_order",
    "has_function",
    "has_started",
    "hide_new_layers",
    "hold_objects",
    "is_batch",
    "is_inaccessible",
    "is_keras_generator",
    "is_map",
    "is_op_determinism_enabled",
    "is_padded_batch",
    "is_shuffle",
    "is_snapshot",
    "is_tf_generator",
    "is_tuned",
    "keep_large_sums_whole",
    "keep_op_determinism",
    "keep_op_seed",
    "keeps_rows",
    "leave_constants_unchecked",
    "leave_creator_scopes",
    "let_sizes_vary",
    "list_captured_inputs",
    "list_cpu_devices",
    "list_gpu_ops",
    "list_stages",
    "lower",
    "make_scratch_graph",
    "mute_other_summaries",
    "name_anew",
    "name_stage",
    "note_interleave_order",
    "place_slots",
    "publish",
    "read_added_losses",
    "read_cache_file",
    "read_max_to_keep",
    "read_object_graph",
    "read_position",
    "read_preemption",
    "read_published",
    "read_rate",
    "read_snapshot_folder",
    "read_sources_once",
    "read_translated_stack",
    "read_variables",
    "refuse_optimizers",
    "release_custom_gradients",
    "restore_position",
    "run_layers",
    "run_replica",
    "saves_itself",
    "separate_losses",
    "skip_reduction",
    "stops_on_empty_dataset",
    "update_device",
    "watch_new_layers",
]
