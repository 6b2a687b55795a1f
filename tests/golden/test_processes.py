"""A cluster of processes on loopback trains like one device, even if killed and resumed."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.golden import compare, engine, small, update_program
from tests.golden.catalogue import LAST_SAVED, SETTINGS, load_program
from tests.golden.lookahead import Lookahead
from tests.golden.reference import RATE

pytestmark = pytest.mark.cluster

# Programs whose replicas exchange more than gradients, or gradients of other dtypes. test_programs
# trains all programs on three devices.
NAMES = ("wgan_gp", "mixed_precision", "codebook", "simclr", "batch_norm", "every_dtype",
         "exchanges")  # fmt: skip
# Programs whose state in a cluster is special: several optimizers, a loss scale, a codebook, moving
# statistics, all dtypes. On two devices, test_programs kills and resumes every program.
KILLED_NAMES = ("wgan_gp", "mixed_precision", "codebook", "batch_norm", "every_dtype")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the runs: one uninterrupted per program, and some killed ones."""
    folder = tmp_path_factory.mktemp("two")
    runs = [f"whole-{name}" for name in NAMES] + [f"killed-{name}" for name in KILLED_NAMES]
    engine.run_cluster(folder, "tests.golden.cluster", str(folder), *runs)
    return folder


def read_values(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize("name", NAMES)
def test_weights_on_two_processes(trained: Path, name: str) -> None:
    for task in range(2):
        values = read_values(trained / f"whole-{name}-{task}.npz")
        program = load_program(name)
        weights = [values.pop(str(number)) for number, _ in enumerate(program.trained[0])]
        program.assert_plain(weights, values)


@pytest.mark.parametrize("name", KILLED_NAMES)
def test_killed_and_resumed_on_two_processes(trained: Path, name: str) -> None:
    assert f"resuming at step {LAST_SAVED}" in (trained / f"killed-{name}/train.log").read_text()
    for task in range(2):
        runs = (trained / f"{run_name}-{name}-{task}.npz" for run_name in ("whole", "killed"))
        whole, resumed = map(read_values, runs)
        assert whole.keys() == resumed.keys()
        compare.assert_same(resumed.values(), whole.values())
    compare.assert_same_checkpoint(
        trained / f"killed-{name}", trained / f"whole-{name}", SETTINGS["steps"]
    )


SHUFFLED = """

def create_dataset():
    examples = tf.data.Dataset.from_tensor_slices(small.data()).repeat(3)
    return examples.shuffle(small.EXAMPLES, seed=3).batch(7)
"""


def test_any_batch_goes_on_on_another_number_of_processes(
    tmp_path: Path, command: engine.Command
) -> None:
    """The weights are the same if a run resumes with more or fewer processes.

    Three processes with six replicas share 40 examples, and 20 in the last batch of a pass. A run
    with one worker uses this process, which has already imported TensorFlow.
    """
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + SHUFFLED)
    flags = ["--batch-size", "40", "--learning-rate", "0.05", "--last-batch", "keep"]
    starts = [("alone", 8, 1), ("fewer", 2, 3), ("fewer", 8, 1), ("more", 2, 1), ("more", 8, 3)]
    for name, steps, workers in starts:
        words = ["train", "--run-name", name, "--steps", str(steps), *flags]
        words += ["--workers", str(workers)]
        if workers == 1:
            alone = command(*words, "--virtual-devices", "1")
            assert alone.code == 0, alone.err
        else:
            together = engine.command(tmp_path, *words, "--virtual-devices", "2")
            assert together.returncode == 0, together.stderr
    expected = compare.read_checkpoint(tmp_path / "runs" / "alone", 8)
    for name in ("fewer", "more"):
        assert "reading and dropping" not in (tmp_path / "runs" / name / "train.log").read_text()
        for key, value in compare.read_checkpoint(tmp_path / "runs" / name, 8).items():
            np.testing.assert_allclose(value, expected[key], 1e-5, 1e-6, err_msg=key)


NOISY = """

def create_model():
    layers = keras.layers
    return small.model_with(layers.BatchNormalization(momentum=0.8), layers.Dropout(0.3))
"""


def test_micro_batches_of_two_processes_draw_and_normalize_as_those_of_one(
    tmp_path: Path, command: engine.Command
) -> None:
    """Both compute four leaves of a batch, of 18 rows and of 10 at the end of a pass."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + SHUFFLED + NOISY)
    flags = ["--batch-size", "18", "--learning-rate", "0.05", "--last-batch", "keep"]
    for name, steps, micro_batches, workers in [
        ("alone", 20, 4, 1),
        ("moved", 12, 2, 2),
        ("moved", 20, 4, 1),
    ]:
        words = ["train", "--run-name", name, "--steps", str(steps), *flags]
        words += ["--accumulate-steps", str(micro_batches), "--workers", str(workers)]
        if workers == 1:
            outcome = command(*words)
            assert outcome.code == 0, outcome.err
        else:
            together = engine.command(tmp_path, *words)
            assert together.returncode == 0, together.stderr
    expected = compare.read_checkpoint(tmp_path / "runs" / "alone", 20)
    for key, value in compare.read_checkpoint(tmp_path / "runs" / "moved", 20).items():
        np.testing.assert_allclose(value, expected[key], 1e-5, 1e-6, err_msg=key)


SLOW_WEIGHTS = """
from tests.golden.lookahead import Lookahead


def create_opt(lr):
    return Lookahead(lr)
"""


@pytest.mark.parametrize("is_file", [False, True])
def test_an_optimizer_that_copies_initial_weights(
    tmp_path: Path, command: engine.Command, is_file: bool
) -> None:
    """Every process loads the weights of ``init_from`` before the optimizer is created."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + SLOW_WEIGHTS)
    (tmp_path / "source.py").write_text(small.CALLBACKS)
    flags = ["--batch-size", str(small.BATCH), "--learning-rate", str(RATE)]
    model = small.plain(5)
    source = "source"
    if is_file:
        source = str(tmp_path / "source.weights.h5")
        model.save_weights(source)
    else:
        words = ["train", "--callbacks", "source.py", "--run-name", source, "--steps", "5"]
        trained = command(*words, *flags)
        assert trained.code == 0, trained.err
    words = ["train", "--run-name", "run", "--steps", "7", "--workers", "2", "--init-from", source]
    outcome = engine.command(tmp_path, *words, *flags)
    assert outcome.returncode == 0, outcome.stderr
    expected = small.plain(7, model=model, optimizer=Lookahead(RATE))
    saved = tf.train.Checkpoint(train_model=small.create_model())
    saved.read(str(tmp_path / "runs" / "run" / "ckpt" / "ckpt-7")).expect_partial()
    compare.assert_close(saved.train_model.weights, expected.weights)


def test_an_update_that_reads_and_writes_on_two_and_on_three_processes(tmp_path: Path) -> None:
    """The run begins on two processes, and continues on three."""
    (tmp_path / "callbacks.py").write_text("from tests.golden.update_program import *\n")
    flags = ["--batch-size", str(update_program.BATCH), "--learning-rate", str(RATE)]
    for steps, workers in (("4", "2"), ("7", "3")):
        words = ["train", "--run-name", "run", "--steps", steps, "--workers", workers]
        outcome = engine.command(tmp_path, *words, *flags)
        assert outcome.returncode == 0, outcome.stderr
        assert f"{workers} replicas" in outcome.stdout
    expected = update_program.train_plainly(7)
    model = update_program.create_model()
    saved = tf.train.Checkpoint(train_model=model)
    saved.read(str(tmp_path / "runs" / "run" / "ckpt" / "ckpt-7")).expect_partial()
    compare.assert_close(model.weights, expected.weights)
    for name in ("calls", "spent", "updates"):
        compare.assert_close([getattr(model, name)], [getattr(expected, name)])
