"""Every combination of the choices renders to a clean project."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.helpers.rendering import (
    CHOICES,
    COMBINATIONS,
    EXAMPLES,
    QUESTIONS,
    ROOT,
    TEMPLATE,
    Render,
    Run,
    files,
)

Projects = dict[tuple[str, ...], Path]
JINJA = re.compile(r"\{\{|\{%|\{#")
LAUNCH = {
    "ray": ["ray_job.py"],
    "slurm": ["slurm.sh"],
    "kubernetes": ["kubernetes.yaml", "Dockerfile", "Dockerfile.dockerignore"],
    "skypilot": ["skypilot.yaml"],
    "vertex": ["vertex.yaml", "Dockerfile", "Dockerfile.dockerignore"],
}
COOKIECUTTER = re.compile(r"cookiecutter\.[a-z_]")
every_combination = pytest.mark.parametrize(
    "choices", COMBINATIONS, ids=["-".join(choices.values()) for choices in COMBINATIONS]
)


@every_combination
def test_files(projects: Projects, choices: dict[str, str]) -> None:
    """A project holds what its choices need, and the engine byte by byte."""
    project = projects[tuple(choices.values())]
    found = files(project)
    expected = {
        "callbacks.py",
        "config.yaml",
        "train.sh",
        "tests/test_callbacks.py",
        "pyproject.toml",
        "README.md",
        ".gitignore",
        ".pre-commit-config.yaml",
        ".github/workflows/ci.yml",
    }
    if choices["license"] != "none":
        expected.add("LICENSE")
    for place, names in LAUNCH.items():
        if choices["launch"] in (place, "all"):
            expected |= {f"launch/{name}" for name in names}
    uses_digits = b"digits.npz" in found["callbacks.py"]
    assert uses_digits or choices["example"] not in ("digits", "tfrecords")
    if uses_digits:
        expected |= {"data/digits.npz", "data/README.md"}
    if choices["example"] == "tfrecords":
        expected.add("make_records.py")
    own = TEMPLATE / "pictures" / choices["example"]
    expected |= {f"pictures/{choices['example']}/{path.name}" for path in own.glob("*")}
    engine = {f"ctl_core/{name}": content for name, content in files(ROOT / "ctl_core").items()}
    assert set(found) == expected | set(engine)
    assert {name: found[name] for name in engine} == engine
    assert not (project / "ctl_core").is_symlink()
    assert not list(project.rglob("__pycache__"))
    assert (project / "data").exists() == uses_digits
    assert (project / "pictures").exists() == own.exists()
    assert os.access(project / "train.sh", os.X_OK)


@every_combination
def test_no_template_marks_left(projects: Projects, choices: dict[str, str]) -> None:
    """No Jinja mark and no variable of cookiecutter's is left in any text."""
    for name, content in files(projects[tuple(choices.values())]).items():
        if name.startswith("ctl_core/") or name.endswith((".npz", ".png")):
            continue
        text = content.decode()
        assert not JINJA.search(text.replace("${{", "")), name
        assert not COOKIECUTTER.search(text), name
        assert text.endswith("\n") and not text.endswith("\n\n"), name
        assert not text.startswith("\n") or name == "LICENSE", name


def test_git_leaves_out_what_commands_write(digits: Path, tmp_path: Path, run: Run) -> None:
    """And nothing that is a user's own to commit, also where it has such a name further down."""
    project = tmp_path / "project"
    shutil.copytree(digits, project, ignore=shutil.ignore_patterns(".git", "ctl_core"))
    run("git", "init", "--quiet", cwd=project)
    written = ".venv/x .venv.lock runs/sweep.journal records/x-0 build/lib/x"
    own = "sweep.py training_log.md x.npz experiments/gan.py data/records/x-0"
    own += " experiments/build/x.py data/x.npz ctl_core/tools/runs.py space.py"
    for name in (*written.split(), "experiments/runs/a/train.log", "training_log.md.tmp"):
        run("git", "check-ignore", "--quiet", name, cwd=project)
    for name in (*own.split(), *files(project)):
        assert run("git", "check-ignore", name, cwd=project, check=False).returncode == 1, name
    (tmp_path / "disk").mkdir()
    (project / "runs").symlink_to(tmp_path / "disk")
    run("git", "check-ignore", "--quiet", "runs", cwd=project)


@every_combination
def test_pyproject(projects: Projects, choices: dict[str, str]) -> None:
    """pyproject.toml names the right TensorFlow for every machine, and the licence."""
    project = tomllib.loads((projects[tuple(choices.values())] / "pyproject.toml").read_text())
    metadata = project["project"]
    license = choices["license"]
    assert metadata.get("license", "none") == license
    assert metadata["authors"] == [{"name": "Your Name"}]
    requirements = [Requirement(text) for text in metadata["dependencies"]]

    def tensorflow(machine: str, platform: str) -> list[str]:
        environment = {"platform_machine": machine, "sys_platform": platform}
        return [
            requirement.name + "".join(f"[{extra}]" for extra in sorted(requirement.extras))
            for requirement in requirements
            if requirement.name.startswith("tensorflow")
            and (requirement.marker is None or requirement.marker.evaluate(environment))
        ]

    small = "tensorflow-cpu" if choices["accelerator"] == "cpu" else None
    linux = small or "tensorflow[and-cuda]"
    assert tensorflow("x86_64", "linux") == [linux]
    assert tensorflow("AMD64", "win32") == [small or "tensorflow"]
    assert tensorflow("arm64", "darwin") == ["tensorflow"]
    assert tensorflow("aarch64", "linux") == ["tensorflow" if small else linux]


@every_combination
def test_yaml_files_parse(projects: Projects, choices: dict[str, str]) -> None:
    """config.yaml, the workflow and the pre-commit file are YAML and name the tools there are."""
    project = projects[tuple(choices.values())]
    config = yaml.safe_load((project / "config.yaml").read_text())
    common = ["batch_size", "steps", "learning_rate", "seed", "ckpt_every", "eval_every", "hparams"]
    own = ROOT / "templates" / "examples" / f"{choices['example']}.yaml"
    changed = yaml.safe_load(own.read_text()) if own.exists() else {}
    assert list(config)[: len(common)] == common
    assert changed.items() <= config.items() and set(config) == {*common, *changed}
    assert config["batch_size"] == changed.get("batch_size", 64)
    assert isinstance(config["hparams"], dict)
    workflow = yaml.safe_load((project / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    hooks = yaml.safe_load((project / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {"ruff", "mypy", "shellcheck"}
    dev = tomllib.loads((project / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["dev"]
    names = {Requirement(text).name.removesuffix("-py") for text in dev}
    assert {command.split()[0] for command in commands[1:]} <= names
    for hook in hooks:
        assert set(hook["additional_dependencies"]) <= set(dev)


def test_same_tool_settings_as_this_repository(digits: Path) -> None:
    """callbacks.py is checked there as the examples are here, and the engine needs the same."""
    here = tomllib.loads((ROOT / "pyproject.toml").read_text())
    there = tomllib.loads((digits / "pyproject.toml").read_text())
    assert here["project"]["dependencies"] == there["project"]["dependencies"]
    assert here["project"]["requires-python"] == there["project"]["requires-python"]
    for table in ("line-length", "lint"):
        assert here["tool"]["ruff"][table] == there["tool"]["ruff"][table]
    tools = [
        {
            requirement.name: str(requirement.specifier)
            for requirement in map(Requirement, project["project"]["optional-dependencies"][extra])
            if requirement.name in ("mypy", "ruff")
        }
        for project, extra in ((here, "test"), (there, "dev"))
    ]
    assert tools[0] == tools[1] and len(tools[0]) == 2
    for name, versions in tools[0].items():  # a newer minor version may find more
        now = Version(version(name))
        assert SpecifierSet(versions).contains(now)
        assert not SpecifierSet(versions).contains(f"{now.major}.{now.minor + 1}")


# As CI, a person, an editor and pre-commit call them.
LINTERS = (
    ("ruff", "check", "--no-cache", "."),
    ("ruff", "format", "--check", "--no-cache", "."),
    ("mypy",),
    ("mypy", "."),
    ("ruff", "check", "--no-cache", "callbacks.py", "ctl_core/planted.py"),
    ("ruff", "format", "--check", "--no-cache", "callbacks.py", "ctl_core/planted.py"),
    ("mypy", "callbacks.py", "ctl_core/planted.py"),
)

USE = """

def use():
    from ctl_core import planted

    return planted.planted(1)
"""


def test_linters_leave_the_engine_alone(digits: Path, run: Run, tmp_path: Path) -> None:
    """A copy of the engine that was changed, or is of another style, is not theirs to judge."""
    project = tmp_path / "project"
    shutil.copytree(digits, project)
    planted = "import sys, os\ndef planted( a:int )->str :\n  return a+undefined\n"
    (project / "ctl_core" / "planted.py").write_text(planted)
    callbacks = project / "callbacks.py"
    callbacks.write_text(callbacks.read_text() + USE)
    cache = {"MYPY_CACHE_DIR": str(tmp_path / "cache")}
    for command in LINTERS:
        run(*command, cwd=project, **cache)
    callbacks.write_text(callbacks.read_text() + planted)
    for command in LINTERS:
        done = run(*command, cwd=project, check=False, **cache)
        assert done.returncode == 1 and "planted.py" not in done.stdout, command


def test_ruff(projects: Projects, run: Run) -> None:
    """ruff finds nothing in any project, with the project's own settings."""
    folder = next(iter(projects.values())).parent
    for command in (["check"], ["format", "--check"]):
        run("ruff", *command, "--no-cache", *projects.values(), cwd=folder)


@pytest.mark.slow
def test_mypy(projects: Projects, run: Run, tmp_path: Path) -> None:
    """mypy finds nothing; what it reads differs only between the examples."""
    for example in EXAMPLES:
        chosen = [
            {name: text for name, text in files(project).items() if name.endswith(".py")}
            for choices, project in projects.items()
            if choices[0] == example and choices[2] == "nowhere"
        ]
        assert all(other == chosen[0] for other in chosen)
    # One after the other, in one place and with one cache: most of it is the packages'.
    project = shutil.copytree(projects["digits", "cpu", "nowhere", "MIT"], tmp_path / "project")
    for example in EXAMPLES:
        for file in projects[example, "cpu", "nowhere", "MIT"].glob("*.py"):
            shutil.copy(file, project)
        run("mypy", "--cache-dir", tmp_path / "cache", cwd=project)


def test_shellcheck(projects: Projects, digits: Path, run: Run) -> None:
    """shellcheck finds nothing in train.sh, which is the same in every project."""
    assert len({(project / "train.sh").read_bytes() for project in projects.values()}) == 1
    run("shellcheck", "train.sh", cwd=digits)


def test_prompts_are_sentences() -> None:
    """Every question and every choice has words of its own."""
    context = json.loads((ROOT / "cookiecutter.json").read_text())
    prompts = context["__prompts__"]
    for name, value in context.items():
        if name.startswith("_"):
            continue
        if isinstance(value, list):
            assert set(prompts[name]) == {"__prompt__", *value}
            assert all(prompts[name][choice].startswith(f"{choice}: ") for choice in value)
        else:
            assert prompts[name]
    assert {name: context[name] for name in CHOICES} == {**CHOICES, "example": context["example"]}
    assert all(len(line) < 140 for line in prompts["example"].values())


def test_examples_are_whole() -> None:
    """Each has settings and says what to expect, most are short; the hook knows all of them."""
    hook = (ROOT / "hooks" / "post_gen_project.py").read_text()
    known = re.search(r"EXAMPLES = \((.*?)\)", hook, re.S)
    assert known
    assert [*re.findall(r'"(\w+)"', known[1]), "blank"] == QUESTIONS["example"]
    folder = ROOT / "templates" / "examples"
    assert {path.suffix for path in folder.iterdir()} <= {".py", ".yaml", ".md"}
    for name in set(EXAMPLES) - {"digits", "blank"}:
        assert (folder / f"{name}.yaml").exists() and (folder / f"{name}.md").exists(), name
        assert len((folder / f"{name}.py").read_text().splitlines()) <= 150, name
    pictures = [*TEMPLATE.glob("pictures/*/*")]
    assert {path.parent.name for path in pictures} <= set(EXAMPLES)
    assert all(path.suffix == ".png" and path.stat().st_size < 60_000 for path in pictures)


def test_first_commit(digits: Path, run: Run) -> None:
    """Without an identity configured, there is a commit on main of everything, and no more."""
    assert run("git", "branch", "--show-current", cwd=digits).stdout == "main\n"
    assert run("git", "rev-list", "--count", "HEAD", cwd=digits).stdout == "1\n"
    assert run("git", "status", "--porcelain", cwd=digits).stdout == ""
    assert "100755" in run("git", "ls-files", "--stage", "train.sh", cwd=digits).stdout


def test_prints_the_next_three_commands(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    done = run(*["cookiecutter", ROOT, "--no-input", "-o", folder], cwd=tmp_path, PWD=str(tmp_path))
    assert done.stdout.splitlines()[-4:] == [
        "Next:",
        "  cd 'a folder/my_training'",
        "  ${EDITOR:-vi} callbacks.py",
        "  ./train.sh",
    ]


def test_generating_over_a_project_keeps_its_data(render: Render, run: Run, tmp_path: Path) -> None:
    """cookiecutter -f with the blank example leaves files that the template did not bring."""
    project = render(tmp_path, example="blank")
    (project / "data").mkdir()
    (project / "data" / "mine.csv").write_text("1\n")
    (project / "make_records.py").write_text("of my own\n")
    run(*["cookiecutter", ROOT, "--no-input", "-f", "example=blank"], cwd=tmp_path)
    assert [path.name for path in (project / "data").iterdir()] == ["mine.csv"]
    assert (project / "make_records.py").read_text() == "of my own\n"
    assert run("git", "rev-list", "--count", "HEAD", cwd=project).stdout == "1\n"
