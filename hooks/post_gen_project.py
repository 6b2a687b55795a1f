"""Finishes the generated project: drops what the choices do not need, makes a git repository.

cookiecutter renders this file and runs it inside the new project. cruft runs it too, and for
``cruft update``, ``check`` and ``diff`` in scratch copies whose contents it compares: there must
be no repository there, and there is nobody to talk to.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# tojson leaves no newline and never three double quotes in a row, so the literal stays whole.
CONTEXT: dict[str, Any] = json.loads(
    r"""{{ {
        "example": cookiecutter.example,
        "launch": cookiecutter.launch,
        "license": cookiecutter.license,
        "sweep": cookiecutter.sweep,
        "tracker": cookiecutter.tracker,
        "repo_dir": cookiecutter._repo_dir | default("") | string,
        "under_cruft": cookiecutter._repo_dir is not defined,
    } | tojson }}"""
)
PROJECT = Path.cwd()
# Those whose pictures the template has in folders of their names.
EXAMPLES = (
    "digits",
    "fashion_mnist",
    "cifar10_vgg",
    "tfrecords",
    "gan",
    "contrastive",
    "diffusion",
    "text",
)
# What launch/ has for each place; "all" keeps everything.
LAUNCH = {
    "nowhere": (),
    "ray": ("ray_job.py",),
    "slurm": ("slurm.sh",),
    "kubernetes": ("kubernetes.yaml", "Dockerfile", "Dockerfile.dockerignore"),
    "skypilot": ("skypilot.yaml",),
    "vertex": ("vertex.yaml", "Dockerfile", "Dockerfile.dockerignore"),
}


# Folders of a project that are symlinks in the template, by the folder they lead to.
LINKED = {"ctl_core": "ctl_core", "tests/engine": "tests/engine_net"}


def restore_engine() -> None:
    """Copies the engine and its tests into the project if their symlinks were lost.

    A zip archive, and git on a system without symlinks, turn a symlink of the template into a text
    file that holds the link's target.
    """
    # A relative folder is relative to the folder where cookiecutter was started.
    template = Path(os.environ.get("PWD", "."), CONTEXT["repo_dir"])
    for name, source_name in LINKED.items():
        folder = PROJECT / name
        if folder.is_dir():
            continue
        source = template / source_name
        if not CONTEXT["repo_dir"] or not source.is_dir():
            sys.exit(
                f"{name}: the template's symlink to the engine was lost; "
                "get the template with git, with symlinks enabled (git config core.symlinks true)."
            )
        folder.unlink(missing_ok=True)
        shutil.copytree(source, folder)


def remove_unneeded() -> None:
    """Removes the files that the choices do not need, and compiled files of the template.

    Only files of the template are removed: generating over an existing project (cookiecutter -f)
    must not cost it its data.
    """
    for folder in ("ctl_core", "tests"):
        for cache in list((PROJECT / folder).rglob("__pycache__")):
            shutil.rmtree(cache)
    for path in list_unneeded():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for folder in ("data", "pictures", "launch"):
        path = PROJECT / folder
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def list_unneeded() -> list[Path]:
    """Returns the files and folders of the template that the choices do not need."""
    unneeded = []
    if CONTEXT["launch"] != "all":
        of_any_launcher = {name for names in LAUNCH.values() for name in names}
        of_the_choice = LAUNCH[CONTEXT["launch"]]
        unneeded += [f"launch/{name}" for name in of_any_launcher.difference(of_the_choice)]
    for answer, name in (
        ("license", "LICENSE"),
        ("sweep", "sweep.py"),
        ("tracker", "tracker.py"),
    ):
        if CONTEXT[answer] == "none":
            unneeded.append(name)
    if "digits.npz" not in (PROJECT / "callbacks.py").read_text(encoding="utf-8"):
        unneeded += ["data/digits.npz", "data/README.md"]
    unneeded += [f"pictures/{name}" for name in EXAMPLES if name != CONTEXT["example"]]
    return [PROJECT / name for name in unneeded]


def in_scratch_folder() -> bool:
    """Tells whether the project lies in a folder that Python's tempfile made."""
    root = Path(tempfile.gettempdir()).resolve()
    return any(
        parent.parent == root and re.fullmatch(r"tmp[a-z0-9_]{8}", parent.name)
        for parent in PROJECT.resolve().parents
    )


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs git in the project, without the variables by which a git hook names its repository."""
    local = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    return subprocess.run(
        ["git", *arguments],
        cwd=PROJECT,
        env={name: value for name, value in os.environ.items() if name not in local},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )


def make_repository() -> str:
    """Makes a git repository with a first commit; returns one line that says what came of it.

    No failure of git is a failure of the project: a missing git, a hook of the user's own that
    rejects the commit, a signature that cannot be made.
    """
    for folder in (PROJECT, *PROJECT.parents):
        if (folder / ".git").exists():
            return f"git: part of the repository in {folder}; nothing committed."
    if not shutil.which("git"):
        return "git: not installed; no repository made."
    try:
        for arguments in (
            ["init", "--quiet"],
            # git init --initial-branch needs git 2.28.
            ["symbolic-ref", "HEAD", "refs/heads/main"],
            ["add", "--all"],
            # Under the user's own name, or not at all.
            ["-c", "user.useConfigOnly=true", "commit", "-qm", "Project from the template"],
        ):
            done = git(*arguments)
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
                return f"git: no first commit made ({lines[-1].strip()}); make it yourself."
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"git: no first commit made ({error}); make it yourself."
    if CONTEXT["under_cruft"]:
        return "git: repository with a first commit made; add .cruft.json to it, cruft's own file."
    return "git: repository with a first commit made."


def next_commands() -> str:
    """Returns the three commands that come next, relative to the shell's folder."""
    folder = str(PROJECT)
    if shell := os.environ.get("PWD"):
        relative = os.path.relpath(PROJECT, shell)
        folder = folder if relative.startswith(os.pardir) else relative
    return "\n".join(
        [
            "Next:",
            f"  cd {shlex.quote(folder)}",
            "  ${EDITOR:-vi} callbacks.py",
            "  ./train.sh",
        ]
    )


def main() -> None:
    """Runs the steps in order."""
    restore_engine()
    remove_unneeded()
    # A zip archive does not keep the mode.
    for script in ("train.sh", "launch/slurm.sh"):
        if (PROJECT / script).exists():
            (PROJECT / script).chmod(0o755)
    if CONTEXT["under_cruft"] and in_scratch_folder():
        return
    print(make_repository())
    print(next_commands())


if __name__ == "__main__":
    main()
