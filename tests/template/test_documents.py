"""In the documents, links are valid, and every command runs or is marked with a reason.

Commands are in fenced blocks of ``sh``. A comment ``<!-- not run: REASON -->`` before a block marks
it. Commands that train or use runs are run in this process, because starting one takes seconds.
Commands that create environments or clusters are run in a real shell, which is slow.
"""

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import ctl_core
from ctl_core.__main__ import main
from ctl_core.commands.cli import parse_command
from ctl_core.hooks.table import SPECS
from scripts.stage_docs import list_documents, list_pages, read_config
from tests.helpers.project import Cli, cli  # noqa: F401
from tests.helpers.rendering import ROOT, TEMPLATE, Project, Render
from tests.helpers.samples import find_stale_lines, read_samples

PROJECTS = TEMPLATE / "README.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# All guides except the tutorial, which test_tutorial follows.
GUIDES = [*(page for page in DOCUMENTS if page.stem != "tutorial"), PROJECTS]
GUIDES += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", TEMPLATE / "SECURITY.md"]
PAGES = [*DOCUMENTS, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md"))]
PAGES.append(ROOT / "ctl_core" / "README.md")
SECTIONS = sorted((ROOT / "templates" / "examples").glob("*.md"))
MARK = re.compile(r"<!-- not run: (.+) -->")


def read_tokens(page: Path) -> Iterator[Token]:
    for token in MarkdownIt().enable("table").parse(page.read_text("utf-8")):
        yield token
        yield from token.children or ()


def find_links(page: Path) -> list[str]:
    """Returns the targets of a page's links, except those on the web."""
    targets = [str(t.attrs["href"]) for t in read_tokens(page) if t.type == "link_open"]
    return [link for link in targets if not re.match(r"https?:", link)]


@functools.cache
def find_anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    pairs = itertools.pairwise(read_tokens(page))
    headings = [text.content for before, text in pairs if before.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def find_broken(page: Path) -> list[str]:
    """Returns the links of a page whose target does not exist."""
    wrong = []
    for link in find_links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in find_anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert find_broken(page) == []


def test_every_document_is_a_page_of_the_site() -> None:
    """The navigation of mkdocs.yml lists each document once, and no other page."""
    pages = list_pages(read_config()["nav"])
    assert sorted(pages) == sorted(list_documents().values())


def test_what_a_projects_readme_names(projects: list[Project]) -> None:
    """All files, hooks and documents that are named in README.md and AGENTS.md exist."""
    for project in projects:
        readme = project.folder / "README.md"
        assert find_broken(project.folder / "SECURITY.md") == [], project.answers
        engine = project.folder / "ctl_core" / "README.md"
        assert find_broken(readme) == [] == find_broken(engine), project.answers
        agents = project.folder / "AGENTS.md"
        code, table = (
            [token.content for token in read_tokens(page) if token.type == "code_inline"]
            for page in (readme, agents)
        )
        public = {name for text in table for name in re.findall(r"\bctl\.(\w+)", text)}
        hooks = {text for text in table if re.fullmatch("[a-z]+_[a-z_]+", text)}
        assert public <= {*ctl_core.__all__}
        assert hooks - {"train_loss", "batch_size"} <= SPECS.keys(), project.answers
        pattern = r"[\w./-]+\.(md|py|toml|yaml|npz)|LICENSE"
        named = {text for text in [*code, *table] if re.fullmatch(pattern, text)}
        assert {"callbacks.py", "docs/hooks.md", "ctl_core/README.md"} < named
        places = {file: ROOT if file[:5] == "docs/" else project.folder for file in named}
        assert [file for file, place in places.items() if not (place / file).exists()] == []


class Command(NamedTuple):
    """A command in a block, and the comment after it on the same line."""

    text: str
    comment: str

    def words(self) -> list[str]:
        """Returns the arguments of a command of the engine; empty for other programs."""
        words = shlex.split(self.text)
        while words and re.match(r"CTL_\w+=", words[0]):
            words.pop(0)
        if words[:1] == ["./train.sh"]:
            return ["train", *words[1:]]
        return words[3:] if words[:3] == ["python", "-m", "ctl_core"] else []


def read_commands(page: Path, marked: bool = False) -> list[list[Command]]:
    """Returns the commands of a page, block by block: those to run, or those that are marked."""
    tokens = MarkdownIt().parse(page.read_text("utf-8"))
    commands = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        assert token.type != "code_block", f"{page}: indented; make it ```sh, or ```text"
        if token.type == "fence":
            assert token.map, (page, token)
            assert token.info in ("sh", "python", "text", "yaml"), (page, token)
            mark = MARK.fullmatch(before.content.strip()) if before else None
            assert token.info == "sh" or not mark, (page, token)
            if token.info == "sh" and bool(mark) == marked:
                halves = [(*line.split("#", 1), "")[:2] for line in token.content.splitlines()]
                commands.append([Command(text.strip(), output) for text, output in halves])
    return commands


def shell_commands(page: Path) -> list[str]:
    """Returns the commands that need a shell: whole blocks with other programs, and clusters."""
    commands = []
    for block in read_commands(page):
        whole = not all(command.words() for command in block)
        commands += [command.text for command in block if whole or "--workers" in command.text]
    return commands


def test_every_command_is_run_or_marked() -> None:
    """Commands that no test below runs are marked, and each mark belongs to a block."""
    for page in (*GUIDES, *SECTIONS):
        marks = page.read_text("utf-8").count("<!-- not run")
        assert marks == len(read_commands(page, marked=True)), page
    for page in SECTIONS:  # tests/examples trains these on small data
        assert read_commands(page) == [], f"{page}: mark it"
    wanted = {page: shell_commands(page) for page in GUIDES if page != PROJECTS}
    assert len(wanted.pop(ROOT / "README.md")) == 4  # test_commands_in_a_shell runs these commands
    assert not any(wanted.values()), f"run them in a test, or mark them: {wanted}"
    assert shell_commands(PROJECTS) == ["./train.sh --workers 2"]


def test_commands_in_sentences_and_of_marked_blocks_are_understood(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text((digits / "config.yaml").read_text())
    for run in ("a", "b", "gan", "rate", "w"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "config.yaml").write_text("steps: 300\n")
    seen = 0
    names = ("settings", "commands", "checking", "runs", "debugging")
    pages = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in names)]
    for page in (*pages, digits / "README.md"):
        texts = [t.content for t in read_tokens(page) if t.type in ("fence", "code_inline")]
        for line in "\n".join(texts).splitlines():
            text = line.split(" && ")[0].split("#")[0]
            is_command = re.match(r"(\./train\.sh|python -m ctl_core)( |$)", text)
            if not is_command or "SETTING" in text:
                continue
            words = [word for word in Command(text, "").words() if word != "--background"]
            if words[0] in ("hooks", "doctor") or "--help" in words:
                assert main([words[0], "--help"]) == 0, line
            else:
                parse_command(words)
            seen += 1
    assert seen > 9


def test_program_for_a_table_in_a_projects_readme_learns(
    digits: Path,
    cli: Cli,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It trains on a table as the text describes it: with the project's settings, and as it is."""
    programs = re.findall(
        r"^```python\n(.*?)^```$", (digits / "README.md").read_text(), re.M | re.S
    )
    (program,) = (text for text in programs if "table.csv" in text)
    (tmp_path / "callbacks.py").write_text(program)
    (tmp_path / "config.yaml").write_text((digits / "config.yaml").read_text())
    random = np.random.default_rng(0)
    numbers = random.normal([100.0, -3.0], [10.0, 0.1], size=(500, 2))
    label = (numbers[:, 0] > 100.0) * 2 + (numbers[:, 1] > -3.0)
    table = np.column_stack([numbers, label])
    np.savetxt(tmp_path / "table.csv", table, "%g", ",", header="length,width,kind", comments="")
    outcome = cli(None, command=("train", "--run-name", "a", "--steps", "200"))
    assert (outcome.code, outcome.err) == (0, ""), outcome
    (accuracy,) = re.findall(r"^step 200/200  eval: .*accuracy ([\d.]+)", outcome.out, re.M)
    assert float(accuracy) > 0.9


def test_targets_of_make_exist() -> None:
    """All make targets that are named in a block or in a sentence exist."""
    text = "\n".join(page.read_text("utf-8") for page in (*DOCUMENTS, ROOT / "CONTRIBUTING.md"))
    targets = set(re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, re.M))
    rules = " ".join(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "lint"} <= targets <= {*rules.split()}


@pytest.mark.slow
def test_commands_in_a_project(
    render: Render,
    cli: Cli,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commands run in the order of the documents, and the promises in their comments are true."""
    project = render(tmp_path)
    monkeypatch.chdir(project)
    sys.path.insert(0, str(project))
    config = (project / "config.yaml").read_text()
    # A smaller batch and fewer channels suffice for these small images.
    for setting, smaller in (("batch_size: 64", "batch_size: 16"), ("width: 32", "width: 8")):
        assert setting in config
        config = config.replace(setting, smaller)
    (project / "config.yaml").write_text(config)
    with np.load(project / "data" / "digits.npz") as digits:
        images = next(digits[name] for name in digits.files if digits[name].ndim > 1)
    np.save(project / "x.npy", images[:3].reshape(3, 8, 8, 1).astype("float32"))
    done: set[str] = set()
    printed = ""
    for command in (c for page in GUIDES for block in read_commands(page) for c in block):
        words = command.words()
        if command.text in done or not words or "--workers" in words:
            continue
        done.add(command.text)
        with monkeypatch.context() as patched:
            for name, value in re.findall(r"\b(CTL_\w+)=(\S+)", command.text):
                patched.setenv(name, value)
            outcome = cli(None, command=tuple(words))
        assert (outcome.code, outcome.err) == (0, ""), command
        printed += outcome.out
        if step := re.search(r"resumes at step (\d+)", command.comment):
            assert f"resuming at step {step[1]}" in outcome.out, command
        for path in re.findall(r"runs/[\w./-]*\w", command.comment):
            assert (project / path).exists(), f"{command} has not made {path}"
    assert len(done) > 8
    for page in ("docs/checking.md", "docs/get-started.md"):
        assert find_stale_lines(read_samples(ROOT / page)[0], printed) == [], page


@pytest.mark.slow
def test_commands_in_a_shell(tmp_path: Path, environment: dict[str, str]) -> None:
    """The commands work on a new machine, with the installed cookiecutter in place of ``uvx``."""
    (tmp_path / "uvx").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m "$@"\n')
    (tmp_path / "uvx").chmod(0o755)
    more = {"HOME": str(tmp_path), "VIRTUAL_ENV": sys.prefix}
    more["PATH"] = f"{tmp_path}:{environment['PATH']}"
    url = "gh:OWNER/cookiecutter-tensorflow-ctl"
    commands = "\n".join(shell_commands(ROOT / "README.md"))
    assert url in commands
    done = subprocess.run(
        ["bash", "-euxc", commands.replace(url, shlex.quote(str(ROOT)))],
        cwd=tmp_path,
        env=environment | more,
        input="\n" * 20,  # accepts the default answers to cookiecutter's questions
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = list((tmp_path / "my_training" / "runs").iterdir())
    assert [path for path in runs if (path / "worker-1.log").exists()]
    for run in runs:
        assert {"config.yaml", "train.log", "metrics.jsonl", "ckpt", "tb"} <= set(os.listdir(run))
