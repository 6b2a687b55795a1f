"""Common mistakes end in one line of at most 30 words that names the place of the mistake.

The place is a hook, a source line or a setting. Mistakes in hooks, settings, files and commands are
found before anything is trained, and the exit code is 2. An exception while training gives the exit
code 1.

The cases of hooks are code that a user adds to the callbacks.py of a working project. After the
name and the arrow of a case come words that the message must contain. The message must also name
the line marked with ``# here``. The cases of settings are flags, a config.yaml or environment
variables.
"""

import re
from pathlib import Path

import pytest

from tests.golden import small
from tests.golden.engine import Command, Outcome, locate, read_table

FLAGS = ("--steps=8", "--batch-size=16", "--run-name=a", "--ckpt-every=4")


HOOKS = read_table(
    """
== a required hook is missing -> callbacks.py | create_loss
del create_loss
== a required hook is misspelt -> callbacks.py | create_model | create_modell
create_modell = create_model
del create_model
== a hook is no function -> create_opt | 3
create_opt = 3
== a hook asks for an unknown argument -> input_pre | 'bacth' | 'batch'
def input_pre(bacth):  # here
    return bacth[0]
== a hook asks for what another one gets -> input_pre | 'optimizer' | batch, lr
def input_pre(optimizer):  # here
    pass
== create_dataset returns an array -> create_dataset | ndarray | Dataset
def create_dataset():  # here
    return np.zeros([40, 5])
== create_dataset returns nothing -> create_dataset | nothing | Dataset
def create_dataset():  # here
    pass
== create_dataset returns single examples -> create_dataset | batch(
def create_dataset():  # here
    return tf.data.Dataset.range(99)
== create_dataset returns single examples with a scalar label -> create_dataset | batch(
def create_dataset():  # here
    return tf.data.Dataset.from_tensor_slices((np.zeros([40, 5]), np.zeros([40])))
== create_dataset returns an extension type -> create_dataset | Spec | tensors
class Masked(tf.experimental.BatchableExtensionType):
    values: tf.Tensor
def create_dataset():  # here
    return tf.data.Dataset.from_tensors(Masked(np.zeros([40, 5]))).unbatch().batch(16)
== labeled and unlabeled batches differ in size -> create_dataset | zip() | count_examples | [0][0]
def create_dataset():  # here
    inputs = tf.data.Dataset.from_tensor_slices(small.data()[0]).repeat()
    labeled = tf.data.Dataset.from_tensor_slices(small.data()).repeat().batch(16, True)
    return tf.data.Dataset.zip(labeled, inputs.batch(48, True))
== a batch is a labeled and an unlabeled batch -> create_model | default input_pre | float32[16, 1]
def create_dataset():
    labeled = tf.data.Dataset.from_tensor_slices(small.data()).repeat().batch(16)
    return tf.data.Dataset.zip(labeled, labeled)
def create_model():  # here
    inputs = keras.Input((5,))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))
== a target is a labeled batch -> create_loss | default loss_pre | float32[16, 5]
def create_dataset():
    labeled = tf.data.Dataset.from_tensor_slices(small.data()).repeat().batch(16)
    return labeled.map(lambda inputs, target: (inputs, (inputs, target)))
def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)  # here
== there is no example -> create_dataset | empty
def create_dataset():  # here
    return tf.data.Dataset.from_tensor_slices(small.data()).take(0).batch(16)
== there are fewer examples than a batch has -> create_dataset | 7 | 16 | --batch-size
def create_dataset():  # here
    return tf.data.Dataset.from_tensor_slices(small.data()).take(7).batch(16)
== no full batch is left -> create_dataset | fewer | batch
def create_dataset():  # here
    return tf.data.Dataset.from_tensor_slices(small.data()).take(7).batch(16, True)
== a reader is empty -> create_dataset | has no element
def create_dataset():  # here
    return iter([])
== a reader has fewer examples than a batch -> create_dataset | 7 examples | --batch-size
def create_dataset():  # here
    return iter([[part[:7] for part in small.data()]])
== a reader for an evaluation has no end -> create_eval_dataset | endless
class Unending(keras.utils.PyDataset):
    num_batches = None
    def __getitem__(self, index):
        return small.data()
def create_eval_dataset():  # here
    return Unending()
== an evaluation has no end -> create_eval_dataset | endless
def create_eval_dataset():  # here
    return small.create_eval_dataset(16).repeat()
== the model takes another shape -> create_model | 3
def create_model():  # here
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
== create_model returns nothing -> create_model | nothing
def create_model():  # here
    keras.Sequential()
== a Keras model's weights are tf.Variables -> grad_pre | nothing to train | add_weight
class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones([5, 1]))
    def call(self, x):
        return tf.matmul(x, self.weight)
create_model = Net
== variables are overwritten with their gradients -> grad_pre | inputs_scale | overwrites
def create_model():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.layers[0].quantize("float8")
    return model
== create_loss returns a name -> create_loss | a str
def create_loss():  # here
    return "mse"
== create_loss returns a class -> create_loss | class MeanSquaredError
def create_loss():  # here
    return keras.losses.MeanSquaredError
== a Keras loss averages -> create_loss | reduction="sum"
def create_loss():  # here
    return keras.losses.MeanSquaredError()
== a loss takes two arguments -> create_loss | y_true | one argument
def create_loss():  # here
    return lambda y_true, y_pred: tf.reduce_sum((y_true - y_pred) ** 2)
== outputs of [b, 1] meet targets of [b] -> create_loss | [16, 1] | [16]
def loss_pre(output, batch):
    return output, batch[1][:, 0]
def create_loss():
    return lambda pair: (pair[0] - pair[1]) ** 2  # here
== a loss is a dict -> create_loss | a dict | sum
def create_loss():  # here
    return lambda pair: {"error": tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)}
== the mean of a loss whose training batches are structured differently -> create_loss | mean
def create_dataset(global_batch_size):
    return small.create_dataset(global_batch_size).map(lambda x, y: {"source": (x, y)})
def input_pre(batch, training):
    return batch["source"][0] if training else batch["x"]
def loss_pre(output, batch):
    return output, batch["source"][1]
def create_loss():  # here
    return lambda pair: tf.reduce_mean((pair[0] - pair[1]) ** 2)
== a loss is a mean in a turn that comes twice -> create_loss | mean
turns = ["fit", "fit"]
def create_opt(lr):
    return {"fit": keras.optimizers.SGD(lr)}
def create_loss():  # here
    return lambda pair: tf.reduce_mean((pair[0] - pair[1]) ** 2)
== a loss is averaged as in TensorFlow's tutorial -> create_loss | compute_average_loss | twice
from tensorflow.nn import compute_average_loss as average
def create_loss():
    def loss(pair):
        return average(small.squared_error(pair), global_batch_size=16)  # here
    return loss
== the same in a function of the graph, under a condition -> loss_pre | compute_average_loss
@tf.function
def average(values):
    if tf.reduce_sum(values) > 0:
        return tf.nn.compute_average_loss(values, global_batch_size=16)  # here
    return tf.constant(0.0)
def loss_pre(output, batch):
    return average((output - batch[1]) ** 2)
def create_loss():
    return lambda loss: loss
== a regularization is scaled -> grad_pre | scale_regularization_loss | twice
def grad_pre(loss, train_model):
    extra = tf.nn.scale_regularization_loss(tf.nn.l2_loss(train_model.weights[0]))  # here
    return loss, extra, train_model.trainable_variables
== a layer scales its regularization -> create_model | scale_regularization_loss
class Regularized(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.nn.scale_regularization_loss(tf.nn.l2_loss(inputs)))  # here
        return inputs
def create_model():
    return small.model_with(Regularized())
== a loss of an evaluation is averaged -> eval_pre | compute_average_loss
create_eval_dataset = small.create_eval_dataset
def eval_pre(loss):
    return tf.nn.compute_average_loss(loss, global_batch_size=16), 0.0  # here
== a weight is no sum -> batch_weight | sum | 0.12
def batch_weight(batch):  # here
    return tf.maximum(1.0, tf.reduce_sum(0.1 * tf.ones_like(batch[1])))
== create_opt returns a name -> create_opt | a str | optimizer
def create_opt():  # here
    return "adam"
== an optimizer divides by a scale of the loss -> create_opt | SGD | loss_scale_factor=16
def create_opt(lr):  # here
    return keras.optimizers.SGD(lr, loss_scale_factor=16)
== an optimizer scales losses -> create_opt | LossScaleOptimizer | inner_optimizer
def create_opt(lr):  # here
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(lr))
== an optimizer of a dict scales losses -> create_opt | LossScaleOptimizer
def create_opt(lr):  # here
    return {"": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(lr))}
== an optimizer of a group divides by a scale -> create_opt | loss_scale_factor=16
def create_opt(lr, train_model):  # here
    variables = train_model.trainable_variables
    optimizers = [keras.optimizers.SGD(lr, loss_scale_factor=scale) for scale in (None, 16.0)]
    return [(optimizers[0], variables[:2]), (optimizers[1], variables[2:])]
== an optimizer of several divides by a scale -> create_opt | loss_scale_factor=16
def create_opt(lr):  # here
    by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(lr))
    return keras.optimizers.MultiOptimizer(by_path, loss_scale_factor=16)
== a wrapped optimizer divides by a scale -> create_opt | Adam | loss_scale_factor=16
class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer
    def build(self, variables):
        self.optimizer.build(variables)
    def apply_gradients(self, pairs):
        self.optimizer.apply_gradients(pairs)
def create_opt(lr):  # here
    return Wrapper(keras.optimizers.Adam(lr, loss_scale_factor=16))
== create_opt returns a class -> create_opt | class Adam | optimizer
def create_opt():  # here
    return keras.optimizers.Adam
== an optimizer is created outside of the hook -> create_opt | created before
made = keras.optimizers.SGD(0.1)
def create_opt():  # here
    return made
== create_opt raises -> create_opt | ValueError | momentum
def create_opt(lr):
    return keras.optimizers.SGD(lr, momentum=3)  # here
== grad_pre returns two of three -> grad_pre | 2 | 3 | trainable_vars
def grad_pre(loss):  # here
    return loss, 0.0
== grad_pre returns nothing -> grad_pre | 3
def grad_pre(loss):  # here
    pass
== extra_loss is a vector -> grad_pre | extra_loss
def grad_pre(loss):  # here
    return loss, [1.0, 2.0], []
== update_pre leaves a gradient out -> update_pre | 3 update_gradients | 4 gradients
def update_pre(gradients):  # here
    return gradients[:3], gradients
== update_pre returns gradients of another shape -> update_pre | shape
def update_pre(gradients):  # here
    return [gradients[0][0]] * 4, gradients
== update_pre returns the bare gradients -> update_pre | update_gradients
def update_pre(gradients):  # here
    return gradients
== a Keras loss as it is -> create_loss | a MeanSquaredError | lambda
def create_loss():  # here
    return keras.losses.MeanSquaredError(reduction="none")
== a loss has two dimensions -> create_loss | [16, 1] | [16]
def create_loss():  # here
    return lambda pair: (pair[0] - pair[1]) ** 2
== objectives have other names -> create_opt | 'a' | grad_pre
def create_opt():  # here
    return {"a": keras.optimizers.SGD()}
== a variable is in no group -> create_opt | hidden/bias | no group
def create_opt(lr, train_model):  # here
    return [(keras.optimizers.SGD(lr), train_model.trainable_variables[:1])]
== a variable is in two groups -> create_opt | hidden/bias | 2 groups
def create_opt(lr, train_model):  # here
    variables = train_model.trainable_variables
    return [(keras.optimizers.SGD(lr), group) for group in (variables, variables[1:])]
== create_metrics returns a list -> create_metrics | a list | dict
create_eval_dataset = small.create_eval_dataset
def create_metrics():  # here
    return ["accuracy"]
== create_ckpt returns no manager -> create_ckpt | 2 | manager
def create_ckpt(step):  # here
    return tf.train.Checkpoint(step=step)
== a single checkpoint, which a kill at the next would cost -> create_ckpt | at least 2
def create_ckpt(ckpt_path, train_model):  # here
    ckpt = tf.train.Checkpoint(train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=1)
== a manager has another folder -> create_ckpt | does not use
def create_ckpt(train_model):  # here
    ckpt = tf.train.Checkpoint(train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, "elsewhere", max_to_keep=3)
== every_steps has a wrong key -> every_steps | 0
every_steps = {0: lambda: None}
== a host hook asks for an unknown argument -> every_steps[7] | 'los' | 'loss'
def show(los):  # here
    pass
every_steps = {7: [show]}
== a hook of the graph asks for numbers -> input_pre | numpy
def input_pre(batch):
    print(batch[0].numpy())  # here
    return batch[0]
== a hyperparameter is missing -> create_model | 'widht' | hparams in config.yaml
def create_model(hparams):
    return keras.layers.Dense(hparams["widht"])  # here
== a hook of the graph raises -> input_pre | KeyError | 'scale' | hparams in config.yaml
def input_pre(batch, hparams):
    return batch[0] * hparams["scale"]  # here
== Dataset.map raises -> create_dataset | AttributeError | 'nothing'
def wrong(a, b):
    return a.nothing, b  # here
def create_dataset():
    return tf.data.Dataset.from_tensor_slices(small.data()).map(wrong).batch(16)
"""
)


def assert_one_line(outcome: Outcome, code: int, *words: str) -> None:
    assert outcome.code == code, outcome
    assert re.fullmatch("error: [^\n]+\n", outcome.err), outcome
    assert "Traceback" not in outcome.out
    assert len(outcome.err.removeprefix("error: ").split()) <= 30, outcome.err
    for word in words:
        assert word in outcome.err


def assert_nothing_trained(folder: Path) -> None:
    assert not list(folder.glob("runs/*/ckpt/ckpt-*"))
    assert not list(folder.glob("runs/*/tb/*"))
    assert not list(folder.glob("runs/*/config.yaml"))


def test_the_project_trains(tmp_path: Path, command: Command) -> None:
    """The project trains without a mistake; otherwise, the tests below would prove nothing."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    outcome = command("train", *FLAGS)
    assert (outcome.code, outcome.err) == (0, "")
    with pytest.raises(AssertionError):
        assert_nothing_trained(tmp_path)


@pytest.mark.parametrize("case", HOOKS)
def test_mistakes_in_hooks(tmp_path: Path, command: Command, case: str) -> None:
    code, words = HOOKS[case]
    source = small.CALLBACKS + code + "\n"
    (tmp_path / "callbacks.py").write_text(source)
    assert_one_line(command("train", *FLAGS), 2, *locate(source), *words)
    assert_nothing_trained(tmp_path)


# Command-line flags, config.yaml, environment variables, and words of the expected message.
Setting = tuple[tuple[str, ...], str, dict[str, str], tuple[str, ...]]
SETTINGS: dict[str, Setting] = {
    "a misspelt flag": (("--bacth-size=8",), "", {}, ("--bacth-size", "'--batch-size'")),
    "an underscore": (("--batch_size=8",), "", {}, ("--batch_size", "'--batch-size'")),
    "a misspelt line": ((), "bacth_size: 8", {}, ("config.yaml", "'bacth_size'", "'batch_size'")),
    "a flag without a value": (("--seed",), "", {}, ("--seed", "value")),
    "a flag of another type": (("--seed=many",), "", {}, ("seed", "whole number", "'many'")),
    "a line of another type": (
        (), "seed: many", {}, ("config.yaml", "seed", "whole number", "'many'"),
    ),
    "a variable of another type": (
        (), "", {"CTL_SEED": "many"}, ("CTL_SEED", "whole number", "'many'"),
    ),
    "a fraction": (("--steps=3.5",), "", {}, ("steps", "whole number", "3.5")),
    "out of range": (("--batch-size=0",), "", {}, ("batch_size", "at least 1", "0")),
    "a rate of zero": (("--learning-rate=0",), "", {}, ("learning_rate", "above 0", "0")),
    "none of the words": (
        ("--precision=half",), "", {}, ("precision", "float32", "bfloat16", "'half'"),
    ),
    "a name that leads elsewhere": (("--run-name=../a",), "", {}, ("run_name", "'../a'")),
    "steps and epochs": (("--steps=5", "--epochs=2"), "", {}, ("steps", "epochs", "5", "2")),
    "no YAML": ((), "steps: [", {}, ("config.yaml", "line 1", "YAML")),
    "no such file": (("--config=missing.yaml",), "", {}, ("missing.yaml",)),
    "an unexpected word": (("words",), "", {}, ("'words'",)),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_mistakes_in_settings(tmp_path: Path, command: Command, case: str) -> None:
    flags, config, environ, words = SETTINGS[case]
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    (tmp_path / "config.yaml").write_text(config)
    assert_one_line(command("train", *FLAGS, *flags, **environ), 2, *words)
    assert_nothing_trained(tmp_path)


def test_a_misspelt_variable_is_a_warning(tmp_path: Path, command: Command) -> None:
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    outcome = command("train", *FLAGS, CTL_BATCHSIZE="8")
    (warning,) = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    assert outcome.code == 0
    assert "CTL_BATCHSIZE" in warning
    assert "'CTL_BATCH_SIZE'" in warning


# The contents of callbacks.py, and words of the expected message.
FILES = {
    "x = 1\ndef f(:\n": ("callbacks.py:2", "SyntaxError"),
    "def f():\npass\n": ("callbacks.py:2", "IndentationError"),
    "import os\nimport not_there\n": ("callbacks.py:2", "not_there"),
    "\n\nassert False\n": ("callbacks.py:3", "AssertionError"),
    "": ("callbacks.py", "create_dataset, create_model, create_loss"),
}


@pytest.mark.parametrize("source", FILES)
def test_a_callbacks_file_that_cannot_be_used(
    tmp_path: Path, command: Command, source: str
) -> None:
    (tmp_path / "callbacks.py").write_text(source)
    assert_one_line(command("train", *FLAGS), 2, *FILES[source])
    assert_nothing_trained(tmp_path)


def test_mistakes_in_commands(tmp_path: Path, command: Command) -> None:
    """The mistakes are: no callbacks.py, an unknown command, no number of steps, an unknown run."""
    assert_one_line(command("train", *FLAGS), 2, "callbacks.py")
    assert_one_line(command("trian"), 2, "'trian'", "'train'")
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    assert_one_line(command("train"), 2, "steps")
    assert_nothing_trained(tmp_path)
    assert command("train", *FLAGS, "--run-name=first").code == 0
    for name in ("evaluate", "predict", "export"):
        assert_one_line(command(name, "--run-name=frist"), 2, "'first'")
    assert not (tmp_path / "runs" / "frist").exists()


def test_a_model_that_is_made_outside_of_the_hooks(tmp_path: Path, command: Command) -> None:
    """On one device, the model works. On two, it is refused, because no strategy created it."""
    lines = "model = small.create_model()\ncreate_model = lambda: model\n"
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + lines)
    outcome = command("train", *FLAGS, "--virtual-devices=2")
    assert_one_line(outcome, 2, "hidden/kernel", "created outside the hooks")
    assert_nothing_trained(tmp_path)
    assert command("train", *FLAGS).code == 0


def test_a_slip_in_the_name_of_an_optional_hook_is_a_warning(
    tmp_path: Path, command: Command
) -> None:
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + "def grad_prep(loss): pass\n")
    outcome = command("train", *FLAGS)
    (warning,) = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    assert outcome.code == 0
    assert "grad_prep" in warning
    assert "grad_pre?" in warning


RUNNING = read_table(
    """
== a hook of the host -> every_steps[1] | ValueError: seven is too much
def watch(step, loss):
    if step == 7:
        raise ValueError("seven\\nis too much")  # here
every_steps = {1: watch}
== an op of a hook of the graph -> input_pre | too fast
def input_pre(batch, lr):
    tf.debugging.assert_less(lr.value, 1.0, message="too fast")  # here
    return batch[0]
at_step = {7: lambda lr: lr.assign(2.0)}
== a damaged record -> create_dataset | corrupted record at 1501
def create_dataset():  # here
    with tf.io.TFRecordWriter("records") as file:
        for number in range(100):
            file.write(b"%03d" % number)
    with open("records", "r+b") as file:
        file.seek(1510)
        file.write(b"xxx")
    numbers = tf.data.TFRecordDataset("records").map(tf.strings.to_number)
    return numbers.map(lambda number: (tf.fill([5], number), [number])).batch(16)
== Python in the pipeline -> create_dataset | OSError: no such image
def check(number):
    if number == 6:
        raise OSError("no such image")  # here
    return number
def read(number, pair):
    with tf.control_dependencies([tf.numpy_function(check, [number], tf.int64)]):
        return tf.nest.map_structure(tf.identity, pair)
def create_dataset():
    return small.create_dataset(16).repeat(3).enumerate().map(read)
== a reader -> create_dataset | OSError: block 7 is corrupt
def read():
    yield small.data()
    raise OSError("block 7 is corrupt")  # here
def create_dataset():
    return read()
== a reader whose elements change -> create_dataset | int32 | float32
def read():
    yield small.data()
    yield tuple(part.astype("int32") for part in small.data())
def create_dataset():  # here
    return read()
== a reader that can be read once -> create_dataset | created outside
batches = iter([small.data()])
def create_dataset():  # here
    return batches
"""
)


# One exception in a host hook, one in the graph and one in the data.
QUICK = ("a hook of the host", "an op of a hook of the graph", "a reader")


@pytest.mark.parametrize("case", small.slow_but(*QUICK, of=RUNNING))
def test_an_exception_while_training(tmp_path: Path, command: Command, case: str) -> None:
    """The exit code is 1, the log has the traceback, and the corrected project resumes the run."""
    code, words = RUNNING[case]
    source = small.CALLBACKS + code + "\n"
    (tmp_path / "callbacks.py").write_text(source)
    assert_one_line(command("train", *FLAGS), 1, *locate(source), *words)
    log = (tmp_path / "runs" / "a" / "train.log").read_text()
    assert "ERROR" in log
    assert "Traceback (most recent call last)" in log
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    outcome = command("train", *FLAGS)
    assert outcome.code == 0
    assert "step 4" in outcome.out
