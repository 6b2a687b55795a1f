"""Each mistake on the page docs/errors.md ends with the message that the page shows."""

import re
from pathlib import Path

from ctl_core.run.errors import _CURES as REMEDIES
from tests.golden import ROOT, small
from tests.golden.engine import Command

FLAGS = ("--steps=8", "--batch-size=16", "--run-name=a", "--ckpt-every=4")
PAGE = (ROOT / "docs" / "errors.md").read_text("utf-8")


def hide_lines(message: str) -> str:
    """Returns a message without line numbers, which depend on the rest of the file."""
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


def test_the_remedy_for_wrong_labels_is_quoted() -> None:
    (remedy,) = (text for text in REMEDIES.values() if "labels" in text)
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
    messages = re.findall(r"^error: .*\n", rest, re.MULTILINE)
    for words, message in zip(mistakes, messages, strict=True):
        outcome = command(*words)
        assert (outcome.code, outcome.err) == (2, message)
