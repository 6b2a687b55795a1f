"""Generates a project and trains it with each version of Python that pyproject.toml allows.

    python scripts/pythons.py             all allowed versions that are installed
    python scripts/pythons.py --ends      of these, only the newest one, without the project's tests
    python scripts/pythons.py 3.12 3.13   these versions, which must be installed

Two versions are tested at a time. For each, the PATH contains no other Python. The project's own
train.sh creates the environment with pip, and also with uv if uv is installed. With the version
before the oldest allowed one, train.sh must print one line that says which versions it needs.

The script also asks the package index whether TensorFlow supports the version after the newest
allowed one. The exit code is 1 if a check failed, or if a version that was passed is not installed
(on the PATH or by pyenv).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "./train.sh --steps 4 --batch-size 16 --run-name a",
    "./train.sh --help",
    ".venv/bin/python -m ctl_core --help",
    ".venv/bin/python -m ctl_core hooks",
    ".venv/bin/python -m ctl_core evaluate",
    ".venv/bin/python -m ctl_core predict",
    ".venv/bin/python -m ctl_core export",
)
TESTS = (
    ".venv/bin/python -m pip install --quiet --disable-pip-version-check pytest",
    ".venv/bin/python -m pytest --quiet",
)


class FailedError(Exception):
    """A check failed; the message says which one."""


def allowed() -> list[str]:
    """Returns the minor versions that pyproject.toml allows, such as 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    range_ = SpecifierSet(project["requires-python"])
    return [f"3.{minor}" for minor in range(100) if f"3.{minor}" in range_]


def find(version: str) -> Path | None:
    """Returns the interpreter of a version, from the PATH or from pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [Path(folder) for folder in os.get_exec_path()]
    for folder in (*places, *sorted(pyenv.glob(f"{version}.*/bin"))):
        python = folder / f"python{version}"
        # An interpreter of pyenv on the PATH works only if its version was selected.
        asked = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
        if python.is_file() and output_of([str(python), "-c", asked]).strip() == version:
            return python
    return None


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def machine_with(python: Path, folder: Path) -> dict[str, str]:
    """Returns environment variables for which the PATH has only this ``python3``, and no uv."""
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    (folder / "python3").chmod(0o755)
    for place in os.get_exec_path():
        for program in Path(place).glob("*"):
            link = folder / program.name
            if not program.name.startswith(("python", "uv", "pip")) and not os.path.lexists(link):
                link.symlink_to(program)
    names = ("CTL_", "PYTHON", "VENV", "VIRTUAL_ENV", "PYENV_VERSION", "TF_CONFIG", "UV_PYTHON")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(names)}
    return {**kept, "PATH": str(folder), "CUDA_VISIBLE_DEVICES": "-1", "COLUMNS": "80"}


def run(
    version: str, words: list[str], folder: Path, environ: dict[str, str], code: int = 0
) -> str:
    """Runs a command in a folder, and prints how long it took; returns its output.

    Raises:
        FailedError: the exit code is not ``code``.
    """
    start = time.monotonic()
    done = subprocess.run(
        words,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    command = " ".join(words)
    print(f"{version}  {time.monotonic() - start:5.1f} s  {command}", flush=True)
    if done.returncode != code:
        raise FailedError(f"{command}: exit code {done.returncode}, expected {code}\n{done.stdout}")
    return done.stdout


def check_trains(
    version: str, project: Path, environ: dict[str, str], commands: Sequence[str]
) -> None:
    """Runs all commands; then installs with uv, and trains again.

    Raises:
        FailedError: a command failed, or ran with another version of Python.
    """
    for command in commands:
        run(version, command.split(), project, environ)
    check_made(version, project, environ)
    if uv := shutil.which("uv"):
        Path(environ["PATH"], "uv").symlink_to(uv)
        shutil.rmtree(project / ".venv")
        run(version, COMMANDS[0].replace("name a", "name uv").split(), project, environ)
        check_made(version, project, environ)
        run(version, ["uv", "lock", "--check", "--quiet"], project, environ)


def check_made(version: str, project: Path, environ: dict[str, str]) -> None:
    """Checks with which Python train.sh has created the environment.

    Raises:
        FailedError: it is not the expected one.
    """
    python = run(version, [".venv/bin/python", "-V"], project, environ)
    if not python.startswith(f"Python {version}."):
        raise FailedError(f"train.sh made an environment of {python}")


def check_refused(version: str, project: Path, environ: dict[str, str]) -> None:
    """Checks that train.sh prints one line, ends with exit code 2, and leaves no files behind.

    Raises:
        FailedError: one of these is not the case.
    """
    output = run(version, ["./train.sh", "--steps", "4"], project, environ, code=2)
    named = f"Python {version}." in output and f">={allowed()[0]}" in output
    if output.count("\n") != 1 or not named:
        raise FailedError(
            f"expected one line that names Python {version} and those needed:\n{output}"
        )
    if left := [name for name in os.listdir(project) if name in (".venv", ".venv.lock", "runs")]:
        raise FailedError(f"train.sh left {left} behind")
    print(f"{version}  {output}", end="")


def check(version: str, commands: Sequence[str]) -> bool | None:
    """Checks one version, and prints the result.

    Args:
        version: the version
        commands: the commands to run in a project if the version is allowed

    Returns:
        Whether all checks passed; None if the version is not installed.
    """
    good = version in allowed()
    print(f"{version}  {'trains' if good else 'is refused'}?", flush=True)
    python = find(version)
    if python is None:
        print(f"{version}  not tried, for it is not installed", flush=True)
        return None
    with tempfile.TemporaryDirectory() as folder:
        environ = machine_with(python, Path(folder, "bin"))
        project = Path(folder, "my_training")
        try:
            render = [sys.executable, "-m", "cookiecutter", "--no-input", "--default-config"]
            run(version, [*render, "--output-dir", folder, str(ROOT)], ROOT, dict(os.environ))
            if good:
                check_trains(version, project, environ, commands)
            else:
                check_refused(version, project, environ)
        except FailedError as error:
            print(f"{version}  FAILED: {error}", flush=True)
            return False
    return True


def beside(version: str, more: int) -> str:
    return f"3.{int(version.split('.')[1]) + more}"


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the versions that were passed, or all allowed ones; returns the exit code."""
    parser = argparse.ArgumentParser(description="train a project on each Python")
    parser.add_argument("--ends", action="store_true", help="the newest, and one too old")
    parser.add_argument("version", nargs="*")
    arguments = parser.parse_args(argv)
    named = arguments.version
    start = time.monotonic()
    oldest, *_, newest = allowed()
    versions = named or [beside(oldest, -1), *allowed()]
    commands = [*COMMANDS, *TESTS]
    if arguments.ends:
        versions, commands = [beside(oldest, -1), newest], [*COMMANDS]
    with ThreadPoolExecutor(2) as pool:  # installing uses one core, and so does starting TensorFlow
        checked = pool.map(check, versions, itertools.repeat(commands))
        results = dict(zip(versions, checked, strict=True))
    missing = [version for version, good in results.items() if good is None]
    tried = [version for version in results if version not in missing]
    failed = [version for version in tried if not results[version]] + (missing if named else [])
    after = beside(newest, 1)
    wheels = ["--pre", "--only-binary", ":all:", "--python-version", after, "tensorflow-cpu"]
    if available := output_of([sys.executable, "-m", "pip", "index", "versions", *wheels]):
        come = Version(available.partition("(")[2].partition(")")[0])
        then = "is awaited" if come.is_prerelease else "allows it in requires-python, too"
        print(f"TensorFlow {come} has wheels for Python {after}; its release {then}")
    for what in [*(f"Python {version}" for version in missing), *["uv"] * (not shutil.which("uv"))]:
        print(f"missing, and not tried: {what}")
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all as it should be"
    print(f"Pythons {', '.join(tried)}: {verdict} ({time.monotonic() - start:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
