"""The table of hooks: each one's name, the arguments it may name, what it returns.

Its text is the source of what hooks are called with, of the check of what they return, of messages
about them, of ``ctl_core hooks`` and of the documentation. Behind a hook's name and arguments
stands whether it is required, traced into the graph, a dict of functions by step, one function or
several, or a list of names. What one does that callbacks.py leaves out is in defaults.py.
"""

import dataclasses
import re
from collections.abc import Iterator

TEXT = """\
create_dataset(global_batch_size, per_replica_batch_size, input_context) required
    The training data, one pass; the engine repeats it. Each process of a cluster reads all of it,
    and takes its rows of each batch. per_replica_batch_size is the same number, so that what is
    done with a batch does not depend on devices; but a replica's share where count_examples counts.
    returns: tf.data.Dataset of batches of any size; or a reader in Python of such

make_batches(dataset, global_batch_size, per_replica_batch_size, input_context)
    Last change to the repeated dataset, before it is dealt out to the replicas.
    returns: tf.data.Dataset of batches of any size
    default: the dataset unchanged

count_examples(batch) in the graph
    Which dimension counts, where not all tensors have one row per example, as in graphs.
    returns: a whole number, how many examples a batch holds
    default: the first dimension, which all tensors have to share

create_model(per_replica_batch_size) required
    The model; built under the strategy's scope.
    returns: train_model, callable: output = train_model(inputs)

create_eval_model(train_model)
    What evaluation, prediction and export run in place of train_model: it may share its weights, or
    have its own, which update_post keeps up; train_model is built by then.
    returns: eval_model, callable: output = eval_model(inputs)
    default: train_model itself

create_inference_model(model, train_model)
    What load, predict and export run: a part of the model, such as an encoder, or something around
    it, such as a softmax; model is what is evaluated, with the weights of the checkpoint.
    returns: inference model, callable: output = inference_model(inputs)
    default: model itself

serve(inputs) in the graph
    The model's input, made from what a client sends: the inputs of a batch, of any number of
    examples, or what the input_signature says where serve is a tf.function with one.
    returns: model input
    default: as input_pre makes it, from the part of a batch that it uses

create_loss() required
    The loss: one number per example, or their sum.
    returns: train_loss of one argument, loss_input; of Keras, lambda pair: loss(pair[1], pair[0])
        with reduction="sum" or "none"

create_opt(lr, train_model)
    The optimizer; with pairs, each variable has that of its group.
    returns: optimizer, a list of pairs (optimizer, variables), or a dict of optimizers by
        objective; no LossScaleOptimizer
    default: Nadam(learning_rate=lr, epsilon=0.001)

create_ckpt(ckpt_path, step, lr, optimizer, train_model, train_loss)
    What a checkpoint holds and how many are kept.
    returns: 2 values: ckpt, manager, which keeps 2 or more
    default: all five, the newest 50

input_pre(batch, lr, step, training, objective, turn) in the graph
    The model's input, made from a batch.
    returns: model input
    default: first element of an (inputs, targets) or (inputs, targets, weights) batch

loss_pre(output, batch, train_model, lr, step, training, objective, turn) in the graph
    What train_loss is called with.
    returns: loss_input, one argument
    default: (output, second element of the batch)

batch_weight(batch, output, objective, turn) in the graph
    What the summed loss is divided by, in training and evaluation: the weights of all replicas and
    micro-batches added up, such as the number of tokens that are not padding.
    returns: how much a batch weighs, one number from 0 up
    default: the number of examples

grad_pre(loss, output, batch, train_model, train_loss, lr, step, objective, turn) in the graph
    What is differentiated, and by which variables. The loss of the batch is summed; extra_loss are
    terms that do not depend on it.
    returns: 3 values: loss_per_batch, extra_loss (a number), trainable_vars (a list); 4 with a dict
        to log; or a dict by objective
    default: weighted(loss, batch), regularization(train_model), trainable_variables(train_model)

update_pre(gradients, variables, loss, output, batch, train_model, train_loss, lr, optimizer, step,
    objective, turn, all_gradients) in the graph
    What the optimizer applies, made from the gradients summed over the replicas; both are in the
    order of variables. It is called once for each objective, with its name; all_gradients are those
    of all, a dict by objective.
    returns: 2 values: update_gradients (a list), display_gradients; or 3 with skip, a bool tensor
    default: NaN becomes 0, then clip_by_global_norm at 10; unclipped ones for display

update_post(train_model, train_loss, eval_model, optimizer, lr, step, objective, turn) in the graph
    What is done after each update, on each replica with its own variables: averages and target
    networks, weights clipped or projected.
    default: nothing is done

turns() names
    Objectives in turns: a step makes an update for each, in this order and on one batch, with a
    forward pass of its own that sees what the turn before has changed. The hooks of the graph may
    name objective, whose turn it is (a text; None in evaluation), and turn, which one of the list
    (a number from 0 up).
    returns: list of objectives, such as 3 * ['critic'] + ['generator']
    default: one forward pass, then all objectives at once

create_train_metrics()
    What is measured while training: over all examples since the last line, which comes every
    log_every steps.
    returns: dict of Keras metrics by name, none of them loss
    default: {}

train_metric_pre(loss, output, batch, train_model, step, objective, turn) in the graph
    What the train metrics are updated with; loss is what train_loss returned.
    returns: arguments of update_state, or a dict of such by metric
    default: metric_pre; if it returns a dict, the values for the train metrics

every_steps(dev, step, update_gradients, loss, output, batch, train_model, train_loss, eval_model,
    lr, optimizer, display_gradients, gradients, variables, ckpt, manager, chief, state) by step
    {N: function or list of functions}, run after every N-th step; in every process of a
    cluster: what writes a file or calls a service asks chief first, a bool. gradients are what
    update_pre was given, of the variables in that order, update_gradients and display_gradients
    what it returned. state is a dict that checkpoints keep.
    default: {1: print_step, 10: print_loss}

at_step(dev, step, update_gradients, loss, output, batch, train_model, train_loss, eval_model, lr,
    optimizer, display_gradients, gradients, variables, ckpt, manager, chief, state) by step
    {N: function or list of functions}, run once after step N, never again.
    default: {}

create_eval_dataset(global_batch_size, per_replica_batch_size)
    The evaluation data, one pass; each example is used exactly once. With several sets by name,
    values are called NAME/loss and so on.
    returns: tf.data.Dataset or reader in Python of batches, the last one may be smaller; or a dict
        of such by name
    default: none: no evaluation

create_metrics()
    What the evaluation measures beside the loss.
    returns: dict of Keras metrics by name, none of them loss
    default: {}

metric_pre(output, batch, train_model) in the graph
    What the metrics are updated with.
    returns: arguments of update_state, or a dict of such by metric
    default: (second element of the batch, output), and the third if there are sample weights

eval_pre(loss, output, batch, train_model, train_loss, lr, step) in the graph
    The loss that the evaluation reports.
    returns: 2 values: loss_per_batch, extra_loss (a number)
    default: weighted(loss, batch), regularization(train_model)

after_eval(metrics, dev, step, train_model, train_loss, eval_model, lr, optimizer, ckpt, manager,
    chief, state) one or several
    Function or list of functions, run on the host after each evaluation: metrics has its values
    by name. It may do what every_steps may, such as lr.assign, manager.save or raise StopTraining;
    a checkpoint of the step holds what it has done.
    default: nothing is done

at_end(reason, metrics, dev, step, train_model, train_loss, eval_model, lr, optimizer, ckpt,
    manager, chief, state) one or several
    Function or list of functions, run on the host once training has ended and everything is
    saved: reason is done, ended (by StopTraining or early_stop), stopped (by a signal) or failed.
    default: nothing is done

A hook names only the arguments that it uses, in any order, and may also name config and hparams.
One that callbacks.py leaves out is the default.
"""


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row of the table: a hook's name, the arguments it may name, what it returns."""

    name: str
    arguments: tuple[str, ...]
    kind: str
    returns: str


def _read_table() -> Iterator[Spec]:
    for row in TEXT.split("\n\n")[:-1]:
        name, arguments, kind = re.findall(r"^(\w+)\(([^)]*)\) ?(.*)", row)[0]
        returns = re.findall(r"\n    returns: (.*(?:\n {8}.*)*)", row)
        words = [" ".join(part.split()) for part in (arguments, kind, *returns, "")]
        yield Spec(name, tuple(words[0].split(", ")) if arguments else (), words[1], words[2])


TABLE = tuple(_read_table())
SPECS = {spec.name: spec for spec in TABLE}
COMMON = ("config", "hparams")
# What a host hook can name only at the price of an observed step: these come out of the graph.
OBSERVED = (
    "update_gradients", "loss", "output", "batch", "display_gradients", "gradients", "variables",
)  # fmt: skip
# What a hook that the graph is not left for may name.
DEFERRED = ("dev", "step", "chief")
