"""train.sh selects an environment, installs packages if necessary, and starts the training.

Most tests do not need TensorFlow. Their environments contain a replacement of Python that records
how it was called. The last tests train in the environment that runs the tests.
"""

import functools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rendering import Render, Run
from tests.helpers.waiting import wait_until

# All programs that train.sh calls. PATH contains only these, so that uv can be missing and python3
# can be replaced.
TOOLS = "bash sh cat cksum date dirname flock mkdir nohup readlink rmdir sed sleep uname"
# Each call is recorded as a JSON list on one line, with the folder first.
STAND_IN = """#!{python}
import json, os, pathlib, shutil, sys, time
here = pathlib.Path({here!r})
arguments = sys.argv[1:]
def answer(name):
    file = here / name
    return float(file.read_text()) if file.exists() else 0
if arguments[0] == "-c":
    sys.exit(int(answer("too_old")))
if arguments == ["-V"]:
    sys.exit(print("Python 3.8.1"))
with open(here / "calls", "a") as file:
    file.write(json.dumps([os.getcwd(), *arguments]) + "\\n")
if "venv" in arguments:
    python = pathlib.Path(arguments[-1], "bin", "python")
    python.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(here / "stand-in", python)
elif "pip" in arguments or "sync" in arguments:
    if "sync" in arguments and not os.path.exists("uv.lock"):
        pathlib.Path("uv.lock").write_text("rich 14")
    time.sleep(answer("slow"))
    sys.exit("pip: no network" if answer("install_fails") else 0)
else:
    print("pid", os.getpid(), flush=True)
    time.sleep(answer("train"))
    sys.exit(int(answer("code")))
"""


class Place:
    """A project in a folder with a space in its name, and replacements of the required programs."""

    def __init__(self, folder: Path, source: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.project = folder / "my project"
        self.project.mkdir()
        # The devices of this machine are replaced by files in a folder.
        text = (source / "train.sh").read_text()
        for name in ("/dev/nvidia", "/usr/lib/wsl/"):
            assert name in text
            text = text.replace(name, f"{folder}{name}")
        (self.project / "train.sh").write_text(text)
        (self.project / "train.sh").chmod(0o755)
        shutil.copy(source / "pyproject.toml", self.project)
        self.tools = folder / "tools"
        self.tools.mkdir()
        for name in TOOLS.split():
            if path := shutil.which(name):
                (self.tools / name).symlink_to(path)
        self.stand_in = folder / "stand-in"
        self.stand_in.write_text(STAND_IN.format(python=sys.executable, here=str(folder)))
        self.stand_in.chmod(0o755)
        (self.tools / "python3").symlink_to(self.stand_in)
        names = ("ACCELERATOR", "VENV", "VIRTUAL_ENV", "PWD", "CDPATH")
        kept = {name: value for name, value in environment.items() if name not in names}
        self.environment = kept | {"PATH": str(self.tools)}

    def set(self, name: str, value: str) -> None:
        """Sets a value that controls how the replacements behave."""
        (self.folder / name).write_text(value)

    def make_environment(self, name: str) -> Path:
        """Creates an environment, as if someone else had done it, and returns its folder."""
        python = self.folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(self.stand_in)
        (self.folder / name / "pyvenv.cfg").touch()
        return python.parent.parent

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        command = [str(self.project / "train.sh"), *arguments]
        pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        pipes |= {"stdin": subprocess.DEVNULL, "text": True}
        environ = self.environment | more
        return subprocess.Popen(command, cwd=self.folder, env=environ, **pipes)

    def train(self, *arguments: str, **more: str) -> tuple[int, list[str]]:
        """Runs train.sh, and returns its exit code and the lines of its stderr."""
        process = self.start(*arguments, **more)
        errors = process.communicate(timeout=600)[1]
        return process.returncode, errors.splitlines()

    def calls(self) -> list[list[str]]:
        """Returns the arguments of each call of the replacements since the previous query.

        All calls must be in the project's folder.
        """
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        calls = [json.loads(line) for line in lines]
        assert {folder for folder, *_ in calls} <= {str(self.project)}
        return [words for _, *words in calls]


MAKING = ["-m", "venv", "--clear", ".venv"]
PIP = ["-m", "pip", "install", "--disable-pip-version-check", "--editable"]
INSTALLATION = [*PIP, ".[cpu]", "--quiet"]


def training(*arguments: str) -> list[str]:
    return ["-m", "ctl_core", "train", *arguments]


@pytest.fixture
def place(tmp_path: Path, digits: Path, environment: dict[str, str]) -> Place:
    return Place(tmp_path, digits, environment)


def test_train_sh_passes_arguments_signals_and_exit_code(place: Place) -> None:
    """Arguments arrive unchanged, the exit code is returned, and signals reach the training."""
    env = place.make_environment("env")
    place.set("code", "7")
    arguments = ["--run-name", "two words", "", "a'b\"c", "$HOME", "*", "--x=1\n2", "-"]
    assert place.train(*arguments, VENV=str(env)) == (7, [])
    assert place.calls() == [training(*arguments)]
    place.set("train", "900")
    with place.start(VENV=str(env)) as process:
        assert process.stdout
        assert process.stdout.readline() == f"pid {process.pid}\n"
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


def is_running(pid: int) -> bool:
    """Returns True if a process exists and is not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_order_of_environments(place: Place) -> None:
    """VENV takes precedence over the active environment, and the active one over .venv.

    VENV is relative to the folder of the caller.
    """
    for name in ("named", "active"):
        python = place.make_environment(name) / "bin" / "python"
        python.unlink()
        python.write_text(f"#!{place.tools}/sh\n[ $# = 1 ] || echo {name} >&2\n")
        python.chmod(0o755)
    active = str(place.folder / "active")
    assert place.train(VENV="named", VIRTUAL_ENV=active) == (0, ["named"])
    assert place.train(VENV="", VIRTUAL_ENV=active) == (0, ["active"])
    assert place.train()[0] == 0
    assert (place.project / ".venv").is_dir()


def installing(place: Place, extra: str = "cpu") -> str:
    packages = f"the packages of pyproject.toml and its extra {extra}"
    return f"train.sh: installing {packages} into {place.project}/.venv"


def test_train_sh_installs_when_it_has_to(place: Place) -> None:
    """train.sh installs packages on first use, or if pyproject.toml or the folder has changed."""
    assert place.train("--steps", "1") == (0, [installing(place)])
    assert place.calls() == [MAKING, INSTALLATION, training("--steps", "1")]
    assert place.train() == (0, [])
    assert place.calls() == [training()]
    assert not (place.project / ".venv.lock").exists()
    pyproject = place.project / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "\n# changed\n")
    assert place.train()[0] == 0
    assert place.calls() == [INSTALLATION, training()]
    place.project = place.project.rename(place.folder / "moved")
    assert place.train()[0] == 0
    assert place.calls() == [INSTALLATION, training()]
    assert place.train() == (0, [])


def test_uv_is_used_when_there(place: Place) -> None:
    """uv installs again if uv.lock has changed, for example through a colleague's commit."""
    (place.tools / "uv").symlink_to(place.stand_in)
    making = ["venv", "--quiet", "--seed", "--clear", ".venv"]
    installation = ["sync", "--inexact", "--no-dev", "--extra", "cpu", "--quiet"]
    for expected in ([making, installation], [], [installation], []):
        assert place.train()[0] == 0
        assert place.calls() == [*expected, training()]
        if not expected:
            (place.project / "uv.lock").write_text("rich 15")
    # an update of the system's Python may remove it
    (place.project / ".venv" / "bin" / "python").unlink()
    assert place.train()[0] == 0
    assert place.calls() == [making, installation, training()]


def add_device(place: Place) -> None:
    (place.folder / "dev").mkdir()
    (place.folder / "dev" / "nvidia0").touch()


def add_windows_driver(place: Place) -> None:
    library = place.folder / "usr" / "lib" / "wsl" / "lib" / "libcuda.so.1"
    library.parent.mkdir(parents=True)
    library.touch()


def add_nvidia_smi(place: Place) -> None:
    """Adds a driver that creates its device files only when it is used."""
    program = place.tools / "nvidia-smi"
    program.write_text(f"#!{place.tools}/sh\necho 'GPU 0: NVIDIA T (UUID: GPU-1)'\n")
    program.chmod(0o755)


ON_LINUX = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="TensorFlow supports GPUs only in Linux on x86-64",
)


@ON_LINUX
@pytest.mark.parametrize("add_gpu", [add_device, add_windows_driver, add_nvidia_smi])
def test_a_gpu_chooses_tensorflow_for_gpus(place: Place, add_gpu: Callable[[Place], None]) -> None:
    add_gpu(place)
    assert place.train() == (0, [installing(place, "gpu")])
    assert place.calls() == [MAKING, [*PIP, ".[gpu]", "--quiet"], training()]
    assert place.train() == (0, [])
    assert place.calls() == [training()]


def test_an_nvidia_smi_without_a_gpu_is_no_gpu(place: Place) -> None:
    """As on a login node: the program is installed, and finds no driver."""
    program = place.tools / "nvidia-smi"
    program.write_text(f"#!{place.tools}/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    assert place.train() == (0, [installing(place)])


@ON_LINUX
def test_the_choice_is_made_once(place: Place) -> None:
    """Nodes that share a folder share its environment. No start on another node changes it."""
    assert place.train() == (0, [installing(place)])
    place.calls()
    add_device(place)
    assert place.train() == (0, [])  # the training says why it uses no GPU
    assert place.calls() == [training()]
    # The packages of both builds have the same files, so a new environment is created.
    assert place.train(ACCELERATOR="gpu") == (0, [installing(place, "gpu")])
    assert place.calls() == [MAKING, [*PIP, ".[gpu]", "--quiet"], training()]
    shutil.rmtree(place.folder / "dev")
    code, (line,) = place.train()
    assert code == 0
    assert line.startswith("train.sh: this machine has no NVIDIA GPU")
    assert place.calls() == [training()]


@ON_LINUX
def test_a_node_that_starts_during_an_installation_keeps_its_choice(place: Place) -> None:
    place.set("slow", "1")
    with place.start() as first:
        choice = place.project / ".venv" / ".accelerator"
        wait_until(choice.exists, explain=lambda: "no choice")
        add_device(place)
        assert place.train()[0] == 0
        assert first.wait() == 0
    calls = place.calls()
    assert [words[-2] for words in calls if "pip" in words] == [".[cpu]"]
    assert choice.read_text() == "cpu\n"


def test_accelerator_is_checked(place: Place) -> None:
    expected = "train.sh: ACCELERATOR is 'tpu': expected cpu or gpu"
    assert place.train(ACCELERATOR="tpu") == (2, [expected])
    env = place.make_environment("env")
    code, (line,) = place.train(ACCELERATOR="gpu", VENV=str(env))
    assert code == 0
    assert "ACCELERATOR has no effect" in line


def test_a_project_with_one_tensorflow_installs_it(
    place: Place, render: Render, tmp_path: Path
) -> None:
    """Its pyproject.toml has no extras to choose from."""
    project = render(tmp_path / "of one", accelerator="gpu", example="blank")
    shutil.copy(project / "pyproject.toml", place.project)
    code, (line,) = place.train(ACCELERATOR="cpu")
    assert code == 2
    assert "pyproject.toml has no extras" in line
    printed = f"train.sh: installing the packages of pyproject.toml into {place.project}/.venv"
    assert place.train() == (0, [printed])
    assert place.calls() == [MAKING, [*PIP, ".", "--quiet"], training()]


def test_failed_installation(place: Place) -> None:
    """If the installation fails, train.sh prints pip's error and one line, and exits with 2.

    The next run installs again.
    """
    place.set("install_fails", "1")
    failed = "train.sh: the installation failed, see above; the next run tries it again"
    assert place.train() == (2, [installing(place), "pip: no network", failed])
    assert place.calls() == [MAKING, INSTALLATION]
    place.set("install_fails", "0")
    assert place.train()[0] == 0
    assert place.calls() == [INSTALLATION, training()]
    assert not (place.project / ".venv.lock").exists()


def test_two_train_sh_at_once_install_once(place: Place) -> None:
    place.set("slow", "0.5")
    processes = [place.start("--run-name", name) for name in "ab"]
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    calls = place.calls()
    assert sum("pip" in call for call in calls) == sum("venv" in call for call in calls) == 1
    assert sum("ctl_core" in call for call in calls) == 2
    assert sum("waiting for another train.sh" in text for text in errors) == 1
    assert f"remove {place.project}/.venv.lock" in "".join(errors)


def test_no_usable_python(place: Place) -> None:
    place.set("too_old", "1")
    for python in ("Python 3.8.1", "absent"):
        code, (line,) = place.train()
        assert code == 2
        assert place.calls() == []
        assert line.startswith("train.sh: ")
        assert f"(python3 is {python})" in line
        assert "needs Python >=3.11,<3.14 (pyproject.toml)" in line
        (place.tools / "python3").unlink(missing_ok=True)
    assert not (place.project / ".venv").exists()
    assert not (place.project / ".venv.lock").exists()


def test_an_environment_without_the_packages(digits: Path, tmp_path: Path, run: Run) -> None:
    env = tmp_path / "cookiecutter"
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=tmp_path)
    train, install = digits / "train.sh", f"{env}/bin/python -m pip install --editable"
    named = {"VIRTUAL_ENV": str(env), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run(train, cwd=digits, check=False, **named)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f" is not installed in {env}; " in done.stderr
    assert re.search(re.escape(install) + r' "\.\[[cg]pu\]"\n$', done.stderr)


@pytest.mark.slow
def test_run_in_the_background_is_killed(digits: Path, tmp_path: Path, run: Run) -> None:
    """The run does not need the terminal, logs each line once, and is saved when it is killed."""
    project = tmp_path / "project"
    shutil.copytree(digits, project)
    words = ["--run-name=a", "--steps=100000", "--ckpt-every=100000", "--background"]
    started = run(project / "train.sh", *words, cwd=project, VENV=sys.prefix)
    folder = project / "runs" / "a"
    pid = int((folder / "pid").read_text())
    log = folder / "train.log"
    assert started.stdout == (
        f"process {pid} trains runs/a. To follow it: tail -f runs/a/train.log. "
        f"To save and end it: kill {pid}\n"
    )
    assert os.getpgid(pid) == pid != os.getpgid(0)
    again = run(project / "train.sh", *words, cwd=project, check=False, VENV=sys.prefix)
    assert again.returncode == 2
    assert "another process is training this run" in again.stderr
    assert int((folder / "pid").read_text()) == pid
    wait_until(
        lambda: log.read_text().count("INFO step ") >= 3 or not is_running(pid),
        explain=log.read_text,
    )
    assert is_running(pid), log.read_text()
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_running(pid), explain=log.read_text)
    assert log.read_text().count("stopped by SIGTERM, saved: step ") == 1
    # On a slow machine, a step may have a line without values before its line with values.
    steps = re.findall(r"INFO (step .*)", log.read_text())
    assert len(steps) == len(set(steps))
    assert "\nstep " not in log.read_text()
    assert not (folder / "pid").exists()


@pytest.mark.slow
def test_run_that_cannot_start_in_the_background_says_so(
    digits: Path, tmp_path: Path, run: Run
) -> None:
    """Mistakes that only training can find are printed, too.

    A run that is complete has nothing left to train.
    """
    project = tmp_path / "project"
    shutil.copytree(digits, project)
    train = functools.partial(
        run, project / "train.sh", "--background", cwd=project, check=False, VENV=sys.prefix
    )
    failed = train("--run-name", "b", "--hparams.width", "-1", CTL_STEPS="2")
    assert failed.returncode == 2
    assert failed.stdout == "settings from the environment: CTL_STEPS\n"
    assert failed.stderr.startswith("error: create_model (callbacks.py:")
    named = {"CTL_RUN_NAME": "c", "CTL_RUNS_DIR": "others"}
    assert train("--steps", "2", "--note", "as with --run-name x", **named).returncode == 0
    folder = project / "others" / "c"
    wait_until(lambda: not (folder / "pid").exists(), explain=(folder / "train.log").read_text)
    done = train(**named)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "settings from the environment: CTL_RUNS_DIR, CTL_RUN_NAME",
        "others/c: there was nothing left to train; see others/c/train.log",
    ]


@pytest.mark.slow
def test_cluster_in_the_background_is_left_at_its_first_step(
    digits: Path, tmp_path: Path, run: Run
) -> None:
    """The supervisor runs as long as the training, but the command must not wait for it."""
    project = tmp_path / "project"
    shutil.copytree(digits, project)
    words = ["--run-name=w", "--workers=2", "--steps=100000", "--background"]
    run(project / "train.sh", *words, cwd=project, VENV=sys.prefix)
    folder = project / "runs" / "w"
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
    wait_until(lambda: not (folder / "pid").exists(), explain=(folder / "train.log").read_text)
    log = (folder / "train.log").read_text()
    assert log.count("stopped by SIGTERM, saved: step ") == 1
