"""docs/errors.md: each mistake that it shows ends with the message that it shows."""

import re
from pathlib import Path

from tests.golden import ROOT, small
from tests.golden.engine import Command

FLAGS = ("--steps=8", "--batch-size=16", "--run-name=a", "--ckpt-every=4")
PAGE = (ROOT / "docs" / "errors.md").read_text("utf-8")

LABELS_OUT_OF_RANGE = """
def create_dataset(global_batch_size):
    x = np.zeros([64, 5], "float32")
    y = np.full([64], 9)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch_size)


def create_model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])


def create_loss():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda pair: loss(pair[1], pair[0])
"""


def hide_lines(message: str) -> str:
    """Returns a message without the numbers of lines, which depend on the rest of the file."""
    return re.sub(r"callbacks\.py:\d+", "callbacks.py", message).strip()


def read_block(language: str, section: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return block


def test_mistakes_in_hooks_have_the_messages_that_are_shown(
    tmp_path: Path, command: Command
) -> None:
    hooks, _, _ = PAGE.partition("\n## Settings and commands\n")
    sections = hooks.split("\n### ")[1:]
    assert len(sections) > 8
    for section in sections:
        source = f"{small.CALLBACKS}\n\n{read_block('python', section)}"
        (tmp_path / "callbacks.py").write_text(source)
        outcome = command("train", *FLAGS)
        assert outcome.code == 2, section
        assert hide_lines(outcome.err) == hide_lines(read_block("text", section))


def test_the_first_message_is_that_of_a_misspelt_argument(tmp_path: Path, command: Command) -> None:
    misspelt = "def input_pre(bacth):\n    return bacth[0]\n"
    (tmp_path / "callbacks.py").write_text(f"{small.CALLBACKS}\n\n{misspelt}")
    outcome = command("train", *FLAGS)
    introduction, _, _ = PAGE.partition("\n## Hooks\n")
    assert hide_lines(outcome.err) == hide_lines(read_block("text", introduction))


def test_the_remedy_for_wrong_labels_is_quoted(tmp_path: Path, command: Command) -> None:
    """The page quotes the end of the message about labels that the model has no output for."""
    (tmp_path / "callbacks.py").write_text(f"{small.CALLBACKS}\n\n{LABELS_OUT_OF_RANGE}")
    outcome = command("train", *FLAGS)
    assert outcome.code == 1
    (remedy,) = re.findall(r"; (the model needs .*? 0), after step", outcome.err)
    assert f"*{remedy}*" in " ".join(PAGE.split())


def test_mistakes_in_settings_have_the_messages_that_are_shown(
    tmp_path: Path, command: Command
) -> None:
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    mistakes = (
        ("train", "--bacth-size=8"),
        ("train", "--batch-size=16"),
        ("train", "--steps=5", "--epochs=2"),
        ("train", "--steps=5", "--run-name=a/b"),
        ("evaluate", "a"),
    )
    _, _, rest = PAGE.partition("\n## Settings and commands\n")
    rows = re.findall(r"^`(.+?)` \| ", rest, re.MULTILINE)
    assert len(rows) == len(mistakes)
    for words, row in zip(mistakes, rows, strict=True):
        outcome = command(*words)
        assert (outcome.code, outcome.err.strip()) == (2, f"error: {row}")
