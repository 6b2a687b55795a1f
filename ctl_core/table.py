"""The table of hooks: each one's name, the arguments it may name, what it returns.

It is the source of the validation, of ``ctl_core hooks`` and of the documentation. What a hook does
that callbacks.py leaves out is in defaults.py; what the values of the arguments are is decided
where a hook is called: step.py, trainer.py, evaluate.py, build.py.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row of the table: a hook's name, the arguments it may name, what it returns.

    ``scheduled``: a dict of functions by step; ``several``: a function or a list of them;
    ``listed``: no function but a list of names; ``optional``: None means that the engine does
    without; ``in_stub``: callbacks.py shows it.
    """

    name: str
    arguments: tuple[str, ...]
    returns: str
    doc: str
    default: str = "–"
    required: bool = False
    in_graph: bool = False
    scheduled: bool = False
    several: bool = False
    listed: bool = False
    optional: bool = False
    in_stub: bool = True


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


# What a host hook can name only at the price of an observed step: these come out of the graph.
OBSERVED = _names("update_gradients loss output batch display_gradients gradients")
_HOST = _names(
    "dev step update_gradients loss output batch train_model train_loss eval_model lr optimizer "
    "display_gradients gradients ckpt manager chief state"
)
# A host hook that belongs to no step of its own may name the rest.
_AROUND = tuple(name for name in _HOST if name not in OBSERVED)
# What a hook that the graph is not left for may name.
DEFERRED = _names("dev step chief")

TABLE: tuple[Spec, ...] = (
    Spec(
        "create_dataset",
        _names("per_replica_batch_size global_batch_size input_context"),
        "tf.data.Dataset of batches of either size; or a reader in Python of such",
        "The training data, one pass; the engine repeats it, and shares it out over the processes "
        "of a cluster unless the hook names input_context and shards for itself.",
        required=True,
    ),
    Spec(
        "make_batches",
        _names("dataset per_replica_batch_size global_batch_size input_context"),
        "dataset, one element = one replica's batch, or the global one",
        "Last change to the repeated dataset, before it is dealt out to the replicas.",
        "the dataset unchanged",
    ),
    Spec(
        "count_examples",
        _names("batch"),
        "how many examples a batch holds",
        "Which dimension counts, where not all tensors have one row per example, as in graphs.",
        "the first dimension, which all tensors have to share",
        in_graph=True,
    ),
    Spec(
        "create_model",
        _names("per_replica_batch_size"),
        "train_model, callable: output = train_model(inputs)",
        "The model; built under the strategy's scope.",
        required=True,
    ),
    Spec(
        "create_eval_model",
        _names("train_model"),
        "eval_model, callable: output = eval_model(inputs)",
        "What evaluation, prediction and export run in place of train_model: it may share its "
        "weights, or have its own, which update_post keeps up; train_model is built by then.",
        "train_model itself",
        optional=True,
        in_stub=False,
    ),
    Spec(
        "create_inference_model",
        _names("model train_model"),
        "inference model, callable: output = inference_model(inputs)",
        "What load, predict and export run: a part of the model, such as an encoder, or something "
        "around it, such as a softmax; model is what is evaluated, with the weights of the "
        "checkpoint.",
        "model itself",
        optional=True,
        in_stub=False,
    ),
    Spec(
        "serve",
        _names("inputs"),
        "model input",
        "The model's input, made from what a client sends: the inputs of a batch, of any number of "
        "examples, or what the input_signature says where serve is a tf.function with one.",
        "as input_pre makes it, from the part of a batch that it uses",
        in_graph=True,
        optional=True,
        in_stub=False,
    ),
    Spec(
        "create_loss",
        (),
        "train_loss, callable: loss = train_loss(loss_input)",
        "The loss: one number per example, or their sum.",
        required=True,
    ),
    Spec(
        "create_opt",
        _names("lr train_model"),
        "optimizer, a list of pairs (optimizer, variables), or a dict of optimizers by objective",
        "The optimizer; with pairs, each variable has that of its group.",
        "Nadam(learning_rate=lr, epsilon=0.001)",
    ),
    Spec(
        "create_ckpt",
        _names("ckpt_path step lr optimizer train_model train_loss"),
        "ckpt, manager",
        "What a checkpoint holds and how many are kept.",
        "all five, the newest 50",
    ),
    Spec(
        "input_pre",
        _names("batch lr step training objective turn"),
        "model input",
        "The model's input, made from a batch.",
        "first element of an (inputs, targets) or (inputs, targets, weights) batch",
        in_graph=True,
    ),
    Spec(
        "loss_pre",
        _names("output batch train_model lr step training objective turn"),
        "loss_input, one argument",
        "What train_loss is called with.",
        "(output, second element of the batch)",
        in_graph=True,
    ),
    Spec(
        "batch_weight",
        _names("batch output objective turn"),
        "how much a batch weighs, one number from 0 up",
        "What the summed loss is divided by, in training and evaluation: the weights of all "
        "replicas and micro-batches added up, such as the number of tokens that are not padding.",
        "the number of examples",
        in_graph=True,
        optional=True,
    ),
    Spec(
        "grad_pre",
        _names("loss output batch train_model train_loss lr step objective turn"),
        "loss_per_batch, extra_loss, trainable_vars, and, if any, a dict of its parts to log; or "
        "a dict of such by objective",
        "What is differentiated (the loss summed over the batch, plus terms that do not depend "
        "on the batch), and by which variables.",
        "weighted(loss, batch), regularization(train_model), trainable_variables(train_model)",
        in_graph=True,
    ),
    Spec(
        "update_pre",
        _names(
            "gradients loss output batch train_model train_loss lr optimizer step objective turn"
        ),
        "update_gradients, display_gradients",
        "From the gradients, summed over the replicas, to those that the optimizer applies.",
        "NaN becomes 0, then clip_by_global_norm at 10; unclipped ones for display",
        in_graph=True,
    ),
    Spec(
        "update_post",
        _names("train_model train_loss eval_model optimizer lr step objective turn"),
        "–",
        "What is done after each update, in the graph, on each replica with its own variables: "
        "averages and target networks, weights clipped or projected.",
        in_graph=True,
        optional=True,
        in_stub=False,
    ),
    Spec(
        "turns",
        (),
        "list of objectives, such as 3 * ['critic'] + ['generator']",
        "Objectives in turns: a step makes an update for each, in this order and on one batch, "
        "with a forward pass of its own that sees what the turn before has changed. The hooks of "
        "the graph may name objective, whose turn it is (a text; None in evaluation), and turn, "
        "which one of the list (a number from 0 up).",
        "one forward pass, then all objectives at once",
        listed=True,
        in_stub=False,
    ),
    Spec(
        "create_train_metrics",
        (),
        "dict of Keras metrics by name",
        "What is measured while training, without leaving the graph for it: over all examples "
        "since the last line, which comes every log_every steps.",
        "{}",
        in_stub=False,
    ),
    Spec(
        "train_metric_pre",
        _names("loss output batch train_model step objective turn"),
        "arguments of update_state, or a dict of such by metric",
        "What the train metrics are updated with; loss is what train_loss returned.",
        "as metric_pre's",
        in_graph=True,
        in_stub=False,
    ),
    Spec(
        "every_steps",
        _HOST,
        "–",
        "{N: function or list of functions}, run on the host after every N-th step, in every "
        "process of a cluster: what writes a file or calls a service asks chief first, a bool. "
        "state is a dict that checkpoints keep.",
        "{1: print_step, 10: print_loss}",
        scheduled=True,
    ),
    Spec(
        "at_step",
        _HOST,
        "–",
        "{N: function or list of functions}, run once after step N, never again.",
        "{}",
        scheduled=True,
    ),
    Spec(
        "create_eval_dataset",
        _names("per_replica_batch_size"),
        "tf.data.Dataset or reader in Python of batches, the last one may be smaller; or a dict of "
        "such by name",
        "The evaluation data, one pass; each example is used exactly once. With several sets by "
        "name, values are called NAME/loss and so on.",
        "none: no evaluation",
        optional=True,
    ),
    Spec(
        "create_metrics",
        (),
        "dict of Keras metrics by name",
        "What the evaluation measures beside the loss.",
        "{}",
    ),
    Spec(
        "metric_pre",
        _names("output batch train_model"),
        "arguments of update_state, or a dict of such by metric",
        "What the metrics are updated with.",
        "(second element of the batch, output), and the third if there are sample weights",
        in_graph=True,
    ),
    Spec(
        "eval_pre",
        _names("loss output batch train_model train_loss lr step"),
        "loss_per_batch, extra_loss",
        "The loss that the evaluation reports.",
        "weighted(loss, batch), regularization(train_model)",
        in_graph=True,
    ),
    Spec(
        "after_eval",
        ("metrics", *_AROUND),
        "–",
        "A function or a list of functions, run on the host after each evaluation: metrics has its "
        "values by name. It may do what every_steps may, such as lr.assign, manager.save or raise "
        "StopTraining; a checkpoint of the step holds what it has done.",
        several=True,
        in_stub=False,
    ),
    Spec(
        "at_end",
        ("reason", "metrics", *_AROUND),
        "–",
        "A function or a list of functions, run on the host once training has ended and everything "
        "is saved: reason is done, ended (by StopTraining or early_stop), stopped (by a signal) or "
        "failed.",
        several=True,
        in_stub=False,
    ),
)
SPECS = {spec.name: spec for spec in TABLE}
COMMON = ("config", "hparams")
