"""The table of hooks: the purpose, arguments, result and default of each hook, and an example.

The table is the single source for the arguments of hooks, for the messages about wrong hooks, for
``python -m ctl_core hooks`` and for the pages about hooks in the documentation. The code of the
defaults is in defaults.py, and the checks of returned values are in load.py.
"""

from ctl_core.hooks.spec import Argument, Form, HookSpec, Place

# ---- Arguments that every hook may name ----------------------------------------------------------

COMMON_ARGUMENTS = (
    Argument("config", "ctl.Config", "the settings of the run"),
    Argument("hparams", "dict", "your own hyperparameters: the section hparams of config.yaml"),
)
COMMON = tuple(argument.name for argument in COMMON_ARGUMENTS)

# ---- Arguments of the hooks that are called before training --------------------------------------

GLOBAL_BATCH_SIZE = Argument(
    "global_batch_size",
    "int",
    "the setting batch_size: the number of examples per step over all devices",
)
PER_REPLICA_BATCH_SIZE = Argument(
    "per_replica_batch_size",
    "int",
    "also the setting batch_size, so that the data do not depend on the number of devices; "
    "the share of one replica if count_examples counts something other than rows",
)
INPUT_CONTEXT = Argument(
    "input_context",
    "tf.distribute.InputContext",
    "always a single input pipeline, because each process reads all of the data",
)
LR = Argument(
    "lr",
    "learning rate object",
    "optimizers accept it directly, and lr * 0.1 follows its changes; host hooks call "
    "lr.assign(0.01)",
)
TRAIN_MODEL = Argument("train_model", "callable", "the value that create_model returned")
TRAIN_LOSS = Argument("train_loss", "callable", "the value that create_loss returned")
EVAL_MODEL = Argument(
    "eval_model",
    "callable",
    "the value that create_eval_model returned; without that hook, train_model",
)
OPTIMIZER = Argument("optimizer", "optimizer or dict", "the value that create_opt returned")

# ---- Arguments of the hooks in the graph ---------------------------------------------------------

BATCH = Argument(
    "batch", "tensors", "this replica's share of a batch, structured as in the dataset", "[b, ...]"
)
OUTPUT = Argument(
    "output",
    "tensors",
    "the model's output for this share, float32 whatever the precision",
    "[b, ...]",
)
LOSS = Argument("loss", "tf.Tensor", "the value that train_loss returned", "[b] or []")
STEP = Argument(
    "step",
    "tf.Tensor",
    "the number of the step, an int64; in an evaluation, the number of the last step",
    "[]",
)
TRAINING = Argument("training", "bool", "True in a training step, False everywhere else")
OBJECTIVE = Argument(
    "objective", "str or None", "the objective whose turn it is; None without turns"
)
TURN = Argument("turn", "int or None", "the index of the turn in turns; None without turns")

# ---- Arguments of the hooks on the host ----------------------------------------------------------

DEV = Argument("dev", "tuple of str", "the devices of this process's replicas")
HOST_STEP = Argument("step", "int", "the number of the step that has just been taken")
CKPT = Argument("ckpt", "tf.train.Checkpoint", "the first value that create_ckpt returned")
MANAGER = Argument(
    "manager", "tf.train.CheckpointManager", "manager.save() saves after all due hooks have run"
)
CHIEF = Argument(
    "chief", "bool", "True in exactly one process: the one that writes files and calls services"
)
STATE = Argument(
    "state",
    "dict",
    "numbers, strings, lists and dicts that hooks remember; saved in checkpoints",
)
METRICS = Argument("metrics", "dict", "the values of the last evaluation, floats by name")

STEP_HOOK_ARGUMENTS = (
    DEV,
    HOST_STEP,
    Argument(
        "update_gradients", "list of tensors", "the gradients that update_pre returned to apply"
    ),
    Argument("loss", "tf.Tensor", "the loss of the whole batch, over all replicas", "[]"),
    Argument(
        "output", "tensors", "the outputs of this process, or of all logical replicas", "[b, ...]"
    ),
    Argument(
        "batch", "tensors", "the batches of this process, or of all logical replicas", "[b, ...]"
    ),
    TRAIN_MODEL,
    TRAIN_LOSS,
    EVAL_MODEL,
    LR,
    OPTIMIZER,
    Argument(
        "display_gradients", "list of tensors", "the gradients that update_pre returned to show"
    ),
    Argument("gradients", "list of tensors", "the gradients that update_pre received"),
    Argument("variables", "list of variables", "the variables, in the order of the gradients"),
    CKPT,
    MANAGER,
    CHIEF,
    STATE,
)
# The arguments whose values a graph call has to return. If a hook that is due at a step names one
# of these arguments, the step is a separate graph call.
OBSERVED = (
    "update_gradients",
    "loss",
    "output",
    "batch",
    "display_gradients",
    "gradients",
    "variables",
)
# The arguments that a function marked with ``deferred`` may name.
DEFERRED = ("dev", "step", "chief")

AFTER_EVAL_ARGUMENTS = (
    METRICS,
    DEV,
    HOST_STEP,
    TRAIN_MODEL,
    TRAIN_LOSS,
    EVAL_MODEL,
    LR,
    OPTIMIZER,
    CKPT,
    MANAGER,
    CHIEF,
    STATE,
)

# ---- Fields of the named results -----------------------------------------------------------------

LOSS_PER_BATCH = Argument(
    "loss_per_batch", "tf.Tensor", "one number per example, or their sum; never a mean", "[b] or []"
)
EXTRA_LOSS = Argument(
    "extra_loss", "number or tf.Tensor", "terms that do not depend on the batch, such as L2", "[]"
)

# ---- The hooks, in the order in which they are called --------------------------------------------

CREATE_DATASET = HookSpec(
    name="create_dataset",
    place=Place.SETUP,
    is_required=True,
    purpose="The training data, one pass, which the engine repeats",
    details="Each process of a cluster reads all of the data and takes its rows of each batch.",
    arguments=(GLOBAL_BATCH_SIZE, PER_REPLICA_BATCH_SIZE, INPUT_CONTEXT),
    returns="tf.data.Dataset of batches of any size, or a Python reader of such batches",
    example="""\
def create_dataset(global_batch_size, config):
    examples = tf.data.Dataset.from_tensor_slices((inputs, targets))
    return examples.shuffle(1000, seed=config.seed).batch(global_batch_size)
""",
)
MAKE_BATCHES = HookSpec(
    name="make_batches",
    place=Place.SETUP,
    purpose="The last change to the repeated dataset, before replicas get their shares",
    arguments=(
        Argument("dataset", "tf.data.Dataset", "the value of create_dataset, repeated endlessly"),
        GLOBAL_BATCH_SIZE,
        PER_REPLICA_BATCH_SIZE,
        INPUT_CONTEXT,
    ),
    returns="tf.data.Dataset of batches of any size",
    default="the dataset unchanged",
    example="""\
def make_batches(dataset, global_batch_size):
    return dataset.unbatch().batch(global_batch_size)  # across the ends of passes
""",
)
COUNT_EXAMPLES = HookSpec(
    name="count_examples",
    place=Place.GRAPH,
    purpose="The number of examples in a batch whose tensors do not all have one row per example",
    details="Write it for batches of graphs or point sets, for example.",
    arguments=(Argument("batch", "tensors", "a batch, structured as in the dataset"),),
    returns="an integer, the number of examples in the batch",
    default="the first dimension, which must be the same for all tensors",
    example="""\
def count_examples(batch):
    return tf.shape(batch["label"])[0]  # of graphs; the other tensors have a row for each node
""",
)
CREATE_MODEL = HookSpec(
    name="create_model",
    place=Place.SETUP,
    is_required=True,
    purpose="The model, built under the strategy's scope",
    arguments=(
        Argument("per_replica_batch_size", "int", "the share of one replica in a micro-batch"),
    ),
    returns="train_model, callable: output = train_model(inputs)",
    example="""\
def create_model(hparams):
    hidden = keras.layers.Dense(hparams["width"], activation="relu")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
""",
)
CREATE_EVAL_MODEL = HookSpec(
    name="create_eval_model",
    place=Place.SETUP,
    purpose="The model that evaluation, prediction and export use in place of train_model",
    details=(
        "The model may share the weights of train_model, which is already built, or have its "
        "own weights, which update_post updates."
    ),
    arguments=(TRAIN_MODEL,),
    returns="eval_model, callable: output = eval_model(inputs)",
    default="the value of create_model",
    example="""\
def create_eval_model(train_model):
    average = keras.models.clone_model(train_model)
    average.set_weights(train_model.get_weights())
    return average
""",
)
CREATE_INFERENCE_MODEL = HookSpec(
    name="create_inference_model",
    place=Place.SETUP,
    purpose="The model that load, predict and export use",
    details="Return a part of the model, such as an encoder, or a function around it.",
    arguments=(
        Argument("model", "callable", "the model that is evaluated, with the checkpoint's weights"),
        TRAIN_MODEL,
    ),
    returns="inference model, callable: output = inference_model(inputs)",
    default="the model that is evaluated",
    example="""\
def create_inference_model(model):
    return lambda inputs: tf.nn.softmax(model(inputs))
""",
)
SERVE = HookSpec(
    name="serve",
    place=Place.GRAPH,
    purpose="Turns a client's request into the model's input",
    details="A request can have any number of examples.",
    arguments=(
        Argument(
            "inputs",
            "tensors",
            "the inputs of a batch; or, where serve is a tf.function with an input_signature, "
            "the values that the signature describes",
            "[b, ...]",
        ),
    ),
    returns="model input",
    default="input_pre, applied to the part of a batch that it uses",
    example="""\
@tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
def serve(inputs):
    return tf.io.decode_raw(inputs, tf.uint8, fixed_length=128)
""",
)
CREATE_LOSS = HookSpec(
    name="create_loss",
    place=Place.SETUP,
    is_required=True,
    purpose="The loss, one number per example or their sum",
    details=(
        "The engine divides the sum by the global batch size, so never return a mean. train_loss "
        "may also take training, a bool."
    ),
    returns=(
        "train_loss, a function of one argument, loss_input; for a Keras loss with "
        'reduction="sum" or "none": lambda pair: loss(pair[1], pair[0])'
    ),
    example="""\
def create_loss():
    loss = keras.losses.MeanSquaredError(reduction="none")
    return lambda pair: loss(pair[1], pair[0])  # pair: output and target
""",
)
CREATE_OPT = HookSpec(
    name="create_opt",
    place=Place.SETUP,
    purpose="The optimizer",
    details="In a list of pairs, each trainable variable belongs to exactly one optimizer.",
    arguments=(LR, TRAIN_MODEL, TRAIN_LOSS),
    returns=(
        "optimizer, a list of pairs (optimizer, variables), or a dict of optimizers by "
        "objective; not a LossScaleOptimizer"
    ),
    default="Nadam(learning_rate=lr, epsilon=0.001)",
    example="""\
def create_opt(lr):
    return keras.optimizers.AdamW(lr, weight_decay=0.01)
""",
)
CREATE_CKPT = HookSpec(
    name="create_ckpt",
    place=Place.SETUP,
    purpose="The objects that checkpoints contain, and the number of checkpoints to keep",
    details="The engine also saves every other variable that a hook creates.",
    arguments=(
        Argument("ckpt_path", "str", "the folder of the run's checkpoints"),
        Argument("step", "tf.Variable", "the number of steps taken, an int64", "[]"),
        LR,
        OPTIMIZER,
        TRAIN_MODEL,
        TRAIN_LOSS,
    ),
    returns="2 values: ckpt, and manager, which keeps at least 2 checkpoints",
    result="Checkpointing",
    fields=(
        Argument("ckpt", "tf.train.Checkpoint", "the objects to save"),
        Argument("manager", "tf.train.CheckpointManager", "keeps at least 2 checkpoints"),
    ),
    default="all arguments except ckpt_path; keeps the newest 50 checkpoints",
    example="""\
def create_ckpt(ckpt_path, step, lr, optimizer, train_model):
    ckpt = tf.train.Checkpoint(step=step, lr=lr, optimizer=optimizer, train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)
""",
)
INPUT_PRE = HookSpec(
    name="input_pre",
    place=Place.GRAPH,
    purpose="The model's input, built from a batch",
    details=(
        "Prediction and export call it, too: if you scale inputs here, clients send unscaled ones. "
        "If you write serve, serve replaces it for requests."
    ),
    arguments=(BATCH, LR, STEP, TRAINING, OBJECTIVE, TURN),
    returns="model input",
    default="first element of an (inputs, targets) or (inputs, targets, weights) batch",
    example="""\
def input_pre(batch):
    return tf.cast(batch[0], tf.float32) / 255.0
""",
)
LOSS_PRE = HookSpec(
    name="loss_pre",
    place=Place.GRAPH,
    purpose="The argument of train_loss, built from the output and the batch",
    arguments=(OUTPUT, BATCH, TRAIN_MODEL, LR, STEP, TRAINING, OBJECTIVE, TURN),
    returns="loss_input, one argument",
    default="(output, second element of the batch)",
    example="""\
def loss_pre(output, batch):
    return output, tf.one_hot(batch[1], 10)
""",
)
BATCH_WEIGHT = HookSpec(
    name="batch_weight",
    place=Place.GRAPH,
    purpose="The number that the summed loss is divided by, in training and evaluation",
    details=(
        "The weights of all replicas and micro-batches are added up, so return a sum, not a mean."
    ),
    arguments=(BATCH, OUTPUT, OBJECTIVE, TURN),
    returns="the weight of the batch, a number of at least 0",
    default="the number of examples",
    example="""\
def batch_weight(batch):
    return tf.reduce_sum(tf.cast(batch[0] != 0, tf.float32))  # tokens that are not padding
""",
)
GRAD_PRE = HookSpec(
    name="grad_pre",
    place=Place.GRAPH,
    purpose="The objective to differentiate, and the variables to update",
    details=(
        "The objective is sum(loss_per_batch) / B + extra_loss for a global batch of B examples. "
        "With several objectives, return a dict of such results by name."
    ),
    arguments=(LOSS, OUTPUT, BATCH, TRAIN_MODEL, TRAIN_LOSS, LR, STEP, OBJECTIVE, TURN),
    returns=(
        "3 values: loss_per_batch, extra_loss (a number), trainable_vars (a list); 4 with a dict "
        "to log; or a dict by objective"
    ),
    result="Objective",
    fields=(
        LOSS_PER_BATCH,
        EXTRA_LOSS,
        Argument("variables", "list of variables", "the variables to train"),
        Argument(
            "logged",
            "dict of tensors",
            "values to log every log_every steps, by name; may be left out",
            "[b] or []",
        ),
    ),
    default=(
        "weighted(loss, batch), regularization(train_model), trainable_variables(train_model)"
    ),
    example="""\
def grad_pre(loss, output, train_model):
    size = 0.01 * tf.reduce_mean(output**2, axis=1)
    return ctl.Objective(
        loss_per_batch=loss + size,
        extra_loss=ctl.regularization(train_model),
        variables=ctl.trainable_variables(train_model),
        logged={"error": loss, "size": size},
    )
""",
)
UPDATE_PRE = HookSpec(
    name="update_pre",
    place=Place.GRAPH,
    purpose=(
        "The gradients that the optimizer applies, computed from the gradients summed "
        "over all replicas"
    ),
    details="It is called once for each objective.",
    arguments=(
        Argument("gradients", "list of tensors", "the summed gradients, in the order of variables"),
        Argument("variables", "list of variables", "the variables of the gradients"),
        Argument("loss", "tf.Tensor", "the objective of the global batch, over all replicas", "[]"),
        OUTPUT,
        BATCH,
        TRAIN_MODEL,
        TRAIN_LOSS,
        LR,
        Argument("optimizer", "optimizer", "the optimizer of this objective"),
        STEP,
        Argument("objective", "str or None", "the name of the objective, if it has one"),
        TURN,
        Argument("all_gradients", "dict", "the gradients of all objectives by name"),
    ),
    returns="2 values: update_gradients (a list), display_gradients; or 3 with skip, a bool tensor",
    result="Update",
    fields=(
        Argument("update_gradients", "list of tensors", "the gradients to apply, one for each"),
        Argument("display_gradients", "any tensors", "the gradients that host hooks are given"),
        Argument("skip", "tf.Tensor or None", "whether to leave out this update; optional", "[]"),
    ),
    default=(
        "replaces NaN by 0, then clips to a global norm of 10; display_gradients are unclipped"
    ),
    example="""\
def update_pre(gradients):
    clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
    return ctl.Update(update_gradients=clipped, display_gradients=gradients)
""",
)
UPDATE_POST = HookSpec(
    name="update_post",
    place=Place.GRAPH,
    purpose="Runs after each update, on each replica and its own variables",
    details="Use it for averages, target networks, and weights that are clipped or projected.",
    arguments=(TRAIN_MODEL, TRAIN_LOSS, EVAL_MODEL, OPTIMIZER, LR, STEP, OBJECTIVE, TURN),
    default="nothing is done",
    example="""\
def update_post(train_model, eval_model):
    for average, weight in zip(eval_model.variables, train_model.variables, strict=True):
        average.assign(0.999 * average + 0.001 * weight)
""",
)
TURNS = HookSpec(
    name="turns",
    place=Place.SETUP,
    form=Form.NAMES,
    purpose="Objectives that are trained in turns",
    details=(
        "A step makes one update for each name, in this order and on one batch. Each turn has "
        "its own forward pass, which sees the updates of earlier turns. Graph hooks can take "
        "objective and turn."
    ),
    returns="list of objectives, such as 3 * ['critic'] + ['generator']",
    default="one forward pass, then all objectives at once",
    example="""\
turns = 3 * ["critic"] + ["generator"]
""",
)
CREATE_TRAIN_METRICS = HookSpec(
    name="create_train_metrics",
    place=Place.SETUP,
    purpose="The metrics of training, over all examples since they were last written",
    details="They are written and reset every log_every steps.",
    returns="dict of Keras metrics by name, none of them loss",
    default="{}",
    example="""\
def create_train_metrics():
    return {"mean_loss": keras.metrics.Mean()}
""",
)
TRAIN_METRIC_PRE = HookSpec(
    name="train_metric_pre",
    place=Place.GRAPH,
    purpose="The arguments of the train metrics' update_state",
    arguments=(LOSS, OUTPUT, BATCH, TRAIN_MODEL, STEP, OBJECTIVE, TURN),
    returns="arguments of update_state, or a dict of such by metric",
    default="metric_pre; of a dict that it returns, the values for the train metrics",
    example="""\
def train_metric_pre(loss):
    return {"mean_loss": loss}
""",
)
EVERY_STEPS = HookSpec(
    name="every_steps",
    place=Place.HOST,
    form=Form.SCHEDULE,
    purpose="{N: function or list of functions}, run after every N-th step",
    details=(
        "The functions run in every process of a cluster. With several objectives, loss, "
        "gradients and variables are dicts by name. A function that takes only dev, step and "
        "chief can be marked @ctl.deferred, so that it does not interrupt the graph call."
    ),
    arguments=STEP_HOOK_ARGUMENTS,
    default="{1: print_step, 10: print_loss}",
    example="""\
def print_norm(step, gradients):
    ctl.report(step, norm=tf.linalg.global_norm(gradients))


every_steps = {10: print_norm}
""",
)
AT_STEP = HookSpec(
    name="at_step",
    place=Place.HOST,
    form=Form.SCHEDULE,
    purpose="{N: function or list of functions}, run once after step N",
    details="A function does not run again after a resume.",
    arguments=STEP_HOOK_ARGUMENTS,
    default="{}",
    example="""\
def unfreeze(train_model):
    train_model.layers[0].trainable = True


at_step = {500: unfreeze}
""",
)
CREATE_EVAL_DATASET = HookSpec(
    name="create_eval_dataset",
    place=Place.SETUP,
    purpose="The evaluation data, one pass",
    details=(
        "Each example counts exactly once. With a dict of datasets, the names of values are "
        "NAME/loss and so on."
    ),
    arguments=(
        Argument("global_batch_size", "int", "the setting eval_batch_size, or else batch_size"),
        Argument("per_replica_batch_size", "int", "the same number"),
    ),
    returns=(
        "tf.data.Dataset or Python reader of batches, of which the last may be smaller; or a "
        "dict of these by name"
    ),
    default="no evaluation",
    example="""\
def create_eval_dataset(global_batch_size):
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(global_batch_size)
""",
)
CREATE_METRICS = HookSpec(
    name="create_metrics",
    place=Place.SETUP,
    purpose="The metrics of an evaluation, in addition to the loss",
    returns="dict of Keras metrics by name, none of them loss",
    default="{}",
    example="""\
def create_metrics():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
""",
)
METRIC_PRE = HookSpec(
    name="metric_pre",
    place=Place.GRAPH,
    purpose="The arguments of the metrics' update_state",
    arguments=(OUTPUT, BATCH, TRAIN_MODEL),
    returns="arguments of update_state, or a dict of such by metric",
    default="(second element of the batch, output), and the third if there are sample weights",
    example="""\
def metric_pre(output, batch):
    return {"accuracy": (batch[1], output)}
""",
)
EVAL_PRE = HookSpec(
    name="eval_pre",
    place=Place.GRAPH,
    purpose="The loss that an evaluation reports",
    arguments=(LOSS, OUTPUT, BATCH, TRAIN_MODEL, TRAIN_LOSS, LR, STEP),
    returns="2 values: loss_per_batch, extra_loss (a number)",
    result="EvalLoss",
    fields=(LOSS_PER_BATCH, EXTRA_LOSS),
    default="weighted(loss, batch), regularization(train_model)",
    example="""\
def eval_pre(loss):
    return ctl.EvalLoss(loss_per_batch=loss, extra_loss=0.0)  # without the regularization
""",
)
AFTER_EVAL = HookSpec(
    name="after_eval",
    place=Place.HOST,
    form=Form.FUNCTIONS,
    purpose="A function or a list of functions, run after each evaluation",
    details=(
        "It can do the same as functions of every_steps, such as lr.assign, manager.save and "
        "raise ctl.StopTraining. A checkpoint of the same step includes the changes."
    ),
    arguments=AFTER_EVAL_ARGUMENTS,
    default="nothing is done",
    example="""\
def after_eval(metrics, lr):
    if metrics["loss"] > 1.0:
        lr.assign(lr * 0.5)
""",
)
AT_END = HookSpec(
    name="at_end",
    place=Place.HOST,
    form=Form.FUNCTIONS,
    purpose=(
        "A function or a list of functions, run once after training has ended and "
        "everything is saved"
    ),
    arguments=(
        Argument(
            "reason",
            "str",
            "why training has ended: done, ended (by StopTraining or early_stop), stopped (by a "
            "signal) or failed",
        ),
        *AFTER_EVAL_ARGUMENTS,
    ),
    default="nothing is done",
    example="""\
def at_end(reason, metrics, chief):
    if chief:
        print(f"{reason}: {metrics}")
""",
)

TABLE = (
    CREATE_DATASET,
    MAKE_BATCHES,
    COUNT_EXAMPLES,
    CREATE_MODEL,
    CREATE_EVAL_MODEL,
    CREATE_INFERENCE_MODEL,
    SERVE,
    CREATE_LOSS,
    CREATE_OPT,
    CREATE_CKPT,
    INPUT_PRE,
    LOSS_PRE,
    BATCH_WEIGHT,
    GRAD_PRE,
    UPDATE_PRE,
    UPDATE_POST,
    TURNS,
    CREATE_TRAIN_METRICS,
    TRAIN_METRIC_PRE,
    EVERY_STEPS,
    AT_STEP,
    CREATE_EVAL_DATASET,
    CREATE_METRICS,
    METRIC_PRE,
    EVAL_PRE,
    AFTER_EVAL,
    AT_END,
)
SPECS = {spec.name: spec for spec in TABLE}
