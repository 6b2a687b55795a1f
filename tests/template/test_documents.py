"""Every command of the documents is run as it stands, or is marked with why it is not.

Commands stand in fenced blocks of ``sh``. A comment ``<!-- not run: why -->`` before one marks it.
Training and using runs is done in this process, for a start costs seconds; what makes environments
and clusters is run by a real shell, which is slow.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from markdown_it import MarkdownIt

from scripts.gallery import page
from tests.helpers import fixtures  # noqa: F401  its devices, before TensorFlow starts
from tests.helpers.project import Cli, cli  # noqa: F401
from tests.helpers.rendering import ROOT, Render

TEMPLATES_README = "{{cookiecutter.project_slug}}/README.md"
DOCUMENTS = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))]
EXAMPLES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("templates/examples/*.md"))
MARK = re.compile(r"<!-- not run: (.+) -->")


class Block(NamedTuple):
    """A fenced block: where it stands, in which language, why it is not run, and its lines."""

    where: str
    language: str
    mark: str
    lines: list[str]


class Command(NamedTuple):
    """A line of a block: where that stands, the command, and the comment behind it."""

    where: str
    text: str
    comment: str


def blocks(name: str) -> list[Block]:
    """The blocks of a document."""
    tokens = MarkdownIt().parse((ROOT / name).read_text("utf-8"))
    found = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        assert token.map is not None or token.type != "code_block"
        where = f"{name}:{token.map[0] + 1}" if token.map else name
        assert token.type != "code_block", f"{where}: indented; make it ```sh, or ```text"
        if token.type == "fence":
            mark = MARK.fullmatch(before.content.strip()) if before else None
            found.append(
                Block(where, token.info, mark[1] if mark else "", token.content.splitlines())
            )
    return found


def commands(name: str) -> list[list[Command]]:
    """The commands that are to be run, block by block."""
    found = []
    for block in blocks(name):
        if block.language == "sh" and not block.mark:
            halves = [(*line.split("#", 1), "")[:2] for line in block.lines]
            found.append([Command(block.where, text.strip(), said) for text, said in halves])
    return found


def of_engine(command: str) -> bool:
    """Whether it trains, or uses a run."""
    words = [word for word in command.split() if not word.startswith("CTL_")]
    return words[0] == "./train.sh" or words[:3] == ["python", "-m", "ctl_core"]


def shell_commands(name: str) -> list[str]:
    """What a document wants in a shell: whole blocks with other programs in them, and clusters."""
    found = []
    for block in commands(name):
        whole = not all(of_engine(command.text) for command in block)
        found += [command.text for command in block if whole or "--workers" in command.text]
    return found


def test_blocks_have_a_language_and_marks_belong_to_blocks() -> None:
    for name in (*DOCUMENTS, *EXAMPLES, TEMPLATES_README, "CONTRIBUTING.md"):
        for block in blocks(name):
            assert block.language in ("sh", "python", "text", "yaml"), block
            assert block.language == "sh" or not block.mark, block
        marks = [block.mark for block in blocks(name) if block.mark]
        assert (ROOT / name).read_text("utf-8").count("<!-- not run") == len(marks), name


def test_every_command_is_run_or_marked() -> None:
    """Those that no test below runs need a mark."""
    for name in (*DOCUMENTS, TEMPLATES_README, "CONTRIBUTING.md"):
        if name in ("README.md", TEMPLATES_README):  # test_commands_in_a_shell
            continue
        assert shell_commands(name) == [], f"{name}: run it in a test, or mark it"
    for name in EXAMPLES:  # tests/examples trains them on little
        assert commands(name) == [], f"{name}: mark it"
    assert len(shell_commands("README.md")) == 6
    assert shell_commands(TEMPLATES_README) == ["./train.sh --workers 2"]


def test_the_gallery_is_what_the_examples_say() -> None:
    """Made anew by python -m scripts.gallery."""
    assert (ROOT / "docs" / "gallery.md").read_text("utf-8") == page()


def test_targets_of_make_exist() -> None:
    """Marked blocks name some, and the text between."""
    text = "\n".join((ROOT / name).read_text("utf-8") for name in (*DOCUMENTS, "CONTRIBUTING.md"))
    targets = set(re.findall(r"(?:^|`|; |&& )make ([a-z-]+)", text, re.M))
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "lint"} <= targets <= rules


@pytest.mark.slow
def test_commands_in_a_project(
    render: Render,
    cli: Cli,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of the documents; what their comments promise is there."""
    project = render(tmp_path)
    monkeypatch.chdir(project)
    sys.path.insert(0, str(project))
    config = (project / "config.yaml").read_text()
    assert "batch_size: 64" in config  # of little pictures, of which fewer do
    (project / "config.yaml").write_text(config.replace("batch_size: 64", "batch_size: 16"))
    with np.load(project / "data" / "digits.npz") as digits:
        images = next(digits[name] for name in digits.files if digits[name].ndim > 1)
    np.save(project / "x.npy", images[:3].reshape(3, 8, 8, 1).astype("float32"))
    done: set[str] = set()
    for where, command, comment in [
        c for name in (*DOCUMENTS, TEMPLATES_README) for block in commands(name) for c in block
    ]:
        if command in done or not of_engine(command) or "--workers" in command:
            continue
        done.add(command)
        words = shlex.split(command)
        with monkeypatch.context() as patched:
            while "=" in words[0]:
                patched.setenv(*words.pop(0).split("=", 1))
            words = ["train", *words[1:]] if words[0] == "./train.sh" else words[3:]
            outcome = cli(None, command=tuple(words))
        assert (outcome.code, outcome.err) == (0, ""), f"{where}: {command}"
        if step := re.search(r"goes on at step (\d+)", comment):
            assert f"resuming at step {step[1]}" in outcome.out, f"{where}: {command}"
        for path in re.findall(r"runs/[\w./-]*\w", comment):
            assert (project / path).exists(), f"{where}: {command} has not made {path}"
    assert len(done) > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", TEMPLATES_README])
def test_commands_in_a_shell(name: str, render: Render, tmp_path: Path) -> None:
    """As on a new machine, but that pip only looks whether it could install."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "pip").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@" --dry-run\n')
    (tools / "pip").chmod(0o755)
    folder = ROOT if name == "README.md" else render(tmp_path)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CTL_", "GIT_", "VENV"))}
    environ |= {"HOME": str(tmp_path), "EDITOR": "true", "VIRTUAL_ENV": sys.prefix}
    environ["PATH"] = os.pathsep.join([str(tools), f"{sys.prefix}/bin", os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euxc", "\n".join(shell_commands(name))],
        cwd=folder,
        env=environ,
        input="\n" * 20,  # cookiecutter's questions get their defaults
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = (tmp_path / "projects" if name == "README.md" else tmp_path) / "my_training" / "runs"
    assert [path for path in runs.iterdir() if (path / "worker-1.log").exists()]
    for run in runs.iterdir():
        assert {"config.yaml", "train.log", "metrics.jsonl", "ckpt", "tb"} <= set(os.listdir(run))
    assert "train.sh:" not in done.stderr.replace("./train.sh", ""), "nothing was installed"
    git = ["git", "status", "--porcelain"]
    assert subprocess.check_output(git, cwd=runs.parent) == b"", ".gitignore covers what runs write"
