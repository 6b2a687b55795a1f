"""Fixtures for tests of the template, which render projects in a clean environment."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text())
EXAMPLES = QUESTIONS["example"]
CHOICES = {
    name: answers
    for name, answers in QUESTIONS.items()
    if isinstance(answers, list) and not name.startswith("_")
}


Render = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns an environment without the user's settings of git and cookiecutter.

    In this environment, Ada is the author of commits.
    """
    home = tmp_path_factory.mktemp("home")
    (home / ".gitconfig").write_text("[user]\n\tname = Ada\n\temail = ada@example.com\n")
    config = home / "cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {home}/templates\nreplay_dir: {home}/replay\n")
    names = [name for name in os.environ if name.startswith(("GIT_", "CTL_"))]
    kept = {name: value for name, value in os.environ.items() if name not in names}
    kept.pop("VENV", None)
    return {
        **kept,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "GIT_CONFIG_NOSYSTEM": "1",
        "COOKIECUTTER_CONFIG": str(config),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


def set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def render(environment: dict[str, str]) -> Iterator[Render]:
    """Returns a function that renders a project into a folder.

    ``template`` may be another copy of the template. Projects are rendered in a separate process,
    because this requires a clean environment. Changing the environment of this process could crash
    it while a thread of TensorFlow reads it.
    """
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, start, set_environment, (environment,)) as renderer:
        # Starts the rendering process now; otherwise, its output would be that of the first test
        # that renders.
        renderer.submit(os.getpid).result()

        def function(folder: Path, template: str | Path = ROOT, **answers: Any) -> Path:
            how = {"no_input": True, "extra_context": answers, "output_dir": str(folder)}
            return Path(renderer.submit(cookiecutter, str(template), **how).result())

        yield function


@pytest.fixture(scope="session")
def run(environment: dict[str, str]) -> Run:
    """Returns a function that runs a command in the clean environment.

    With ``check=False``, the command may fail.
    """

    def function(
        *command: str | Path, cwd: Path, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(argument) for argument in command],
            cwd=cwd,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    return function


class Project(NamedTuple):
    """A rendered project: its answers, its folder, its files, and its pyproject.toml."""

    answers: dict[str, str]
    folder: Path
    files: dict[str, bytes]
    settings: dict[str, Any]

    def text(self, name: str) -> str:
        return self.files[name].decode()


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory, render: Render) -> list[Project]:
    """Returns one project per example.

    Together, the projects have every answer to the other questions. Tests do not write into them.
    """
    rendered = []
    place = tmp_path_factory.mktemp("projects")
    # The projects are in a repository, so that no first commit is made for them.
    (place / ".git").mkdir()
    for number in range(len(EXAMPLES)):
        answers = {name: choices[number % len(choices)] for name, choices in CHOICES.items()}
        folder = render(place, project_slug=f"project_{number}", **answers)
        settings = tomllib.loads((folder / "pyproject.toml").read_text())
        rendered.append(Project(answers, folder, files(folder), settings))
    return rendered


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory, render: Render) -> Path:
    """Returns the project with the default answers; tests do not write into it."""
    return render(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def template_repository(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Returns a git repository with the working tree as its only commit; tests clone it."""
    repository = tmp_path_factory.mktemp("source") / "template"
    ignored = [".git", ".venv*", "build", "demo", "dist", "runs", "__pycache__"]
    ignored += ["*.egg-info", ".*_cache"]
    shutil.copytree(ROOT, repository, symlinks=True, ignore=shutil.ignore_patterns(*ignored))
    run("git", "init", "--quiet", cwd=repository)
    commit(run, repository, "Template")
    return repository


def commit(run: Run, repository: Path, message: str) -> None:
    """Commits everything in the working tree."""
    run("git", "add", "--all", cwd=repository)
    run("git", "commit", "--quiet", "--message", message, cwd=repository)


def files(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of every file below a folder by its path.

    Files of git and compiled files are left out.
    """
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {".git", "__pycache__"} & set(path.relative_to(folder).parts)
    }
