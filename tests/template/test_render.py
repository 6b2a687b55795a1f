"""Each answer to the prompts gives a project with the right files and settings, and no lint."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.helpers.rendering import EXAMPLES, ROOT, TEMPLATE, Project, Render, Run, files

SOURCES = ROOT / "templates"
LAUNCH = {
    "ray": ["ray_job.py"],
    "slurm": ["slurm.sh"],
    "kubernetes": ["kubernetes.yaml", "Dockerfile", "Dockerfile.dockerignore"],
    "skypilot": ["skypilot.yaml"],
    "vertex": ["vertex.yaml", "Dockerfile", "Dockerfile.dockerignore"],
}
# The package that each tracker requires, under the name with which it is imported.
TRACKERS = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml", "trackio": "trackio"}
METRICS = {"tfrecords": "validation/loss", "gan": "frechet"}
MARKS = re.compile(r"\{\{|\{%|\{#|cookiecutter\.[a-z_]")


ALWAYS = """
    callbacks.py config.yaml train.sh tests/test_callbacks.py pyproject.toml README.md
    AGENTS.md SECURITY.md .gitignore .gitattributes .pre-commit-config.yaml .github/workflows/ci.yml
    .github/workflows/scheduled.yml .github/dependabot.yml
"""


def expect_files(answers: dict[str, str], uses_digits: bool) -> set[str]:
    """Returns the files that a project with these answers has, without the engine and its tests."""
    example = answers["example"]
    expected = set(ALWAYS.split())
    for answer, name in (
        ("license", "LICENSE"),
        ("tracker", "tracker.py"),
        ("sweep", "sweep.py"),
    ):
        if answers[answer] != "none":
            expected.add(name)
    for launcher, names in LAUNCH.items():
        if answers["launch"] in (launcher, "all"):
            expected |= {f"launch/{name}" for name in names}
    pictures = (TEMPLATE / "pictures" / example).glob("*")
    expected |= {f"pictures/{example}/{path.name}" for path in pictures}
    if uses_digits:
        expected |= {"data/digits.npz", "data/README.md"}
    if example == "tfrecords":
        expected.add("make_records.py")
    return expected


def test_project_holds_the_files_of_its_answers(projects: list[Project]) -> None:
    """A project has the files of its answers, no template syntax, and a copy of the engine."""
    engine = {f"ctl_core/{name}": content for name, content in files(ROOT / "ctl_core").items()}
    net = files(ROOT / "tests" / "engine_net")
    engine |= {f"tests/engine/{name}": content for name, content in net.items()}
    for project in projects:
        answers = project.answers
        uses_digits = b"digits.npz" in project.files["callbacks.py"]
        assert uses_digits or answers["example"] not in ("digits", "tfrecords")
        expected = expect_files(answers, uses_digits) | engine.keys()
        assert set(project.files) == expected, answers
        assert {name: project.files[name] for name in engine} == engine
        assert not (project.folder / "ctl_core").is_symlink()
        assert not (project.folder / "tests" / "engine").is_symlink()
        assert os.access(project.folder / "train.sh", os.X_OK)
        for folder in ("data", "pictures", "launch"):
            assert (project.folder / folder).exists() == any(
                name.startswith(f"{folder}/") for name in expected
            )
        for name in expected - engine.keys():
            if not name.endswith((".npz", ".png")):
                text = project.text(name)
                assert not MARKS.search(text.replace("${{", "")), (answers, name)
                assert text.endswith("\n"), (answers, name)
                assert not text.endswith("\n\n"), (answers, name)
                assert not text.startswith("\n") or name == "LICENSE", (answers, name)


def find_tensorflow(requirements: list[Requirement], machine: str, platform: str) -> list[str]:
    """Returns the TensorFlow packages that are installed on a machine, with their extras."""
    environment = {"platform_machine": machine, "sys_platform": platform}
    return [
        requirement.name + "".join(f"[{extra}]" for extra in sorted(requirement.extras))
        for requirement in requirements
        if requirement.name.startswith("tensorflow")
        and (requirement.marker is None or requirement.marker.evaluate(environment))
    ]


def check_tensorflow(requirements: list[Requirement], is_small: bool) -> None:
    """Asserts which TensorFlow each machine gets.

    Args:
        requirements: the requirements of a project or of an extra
        is_small: whether they ask for the build without GPU support, where it exists
    """
    small = "tensorflow-cpu" if is_small else None
    linux = small or "tensorflow[and-cuda]"
    assert find_tensorflow(requirements, "x86_64", "linux") == [linux]
    assert find_tensorflow(requirements, "AMD64", "win32") == [small or "tensorflow"]
    assert find_tensorflow(requirements, "arm64", "darwin") == ["tensorflow"]
    assert find_tensorflow(requirements, "aarch64", "linux") == ["tensorflow" if small else linux]


def test_pyproject_of_each_project(projects: list[Project]) -> None:
    """pyproject.toml names the license, each machine's TensorFlow, and packages of own files."""
    for answers, _, _, settings in projects:
        metadata = settings["project"]
        extras = dict(metadata["optional-dependencies"])
        assert metadata.get("license", "none") == answers["license"]
        assert metadata["authors"] == [{"name": "Your Name"}]
        needed = [Requirement(text) for text in metadata["dependencies"]]
        builds = {answers["accelerator"]: needed}
        if answers["accelerator"] == "auto":
            assert not [requirement for requirement in needed if "tensorflow" in requirement.name]
            builds = {name: list(map(Requirement, extras.pop(name))) for name in ("cpu", "gpu")}
            pair = [{"extra": "cpu"}, {"extra": "gpu"}]
            assert settings["tool"]["uv"]["conflicts"] == [pair]
        for name, requirements in builds.items():
            check_tensorflow(requirements, is_small=name == "cpu")
        names = {requirement.name.removesuffix("-skinny") for requirement in needed}
        expected = {TRACKERS[answers["tracker"]]} if answers["tracker"] != "none" else set()
        assert names & {*TRACKERS.values()} == expected
        # uv reads dependency groups, and pip reads optional dependencies.
        assert settings["dependency-groups"] == extras
        assert ("ray" in settings["dependency-groups"]) == (answers["launch"] in ("ray", "all"))
        tool = settings["tool"]
        project_files = {"callbacks.py", "config.yaml"}
        if answers["tracker"] != "none":
            project_files.add("tracker.py")
            assert "tracker" in tool["setuptools"]["py-modules"]
        if answers["sweep"] != "none":
            project_files.add("sweep.py")
        assert ("optuna" in names) == ("sweep.py" in project_files)
        assert set(tool["cruft"]["skip"]) == project_files
        assert project_files - {"config.yaml"} <= set(tool["mypy"]["files"])


def test_own_files_are_those_of_the_answers(projects: list[Project]) -> None:
    """tracker.py, sweep.py and text about them exist only if the answers ask for them."""
    words = {"tracker": r"\btracker|wandb|mlflow|comet|trackio", "sweep": r"sweep\.py|optuna"}
    for project in projects:
        answers = project.answers
        for name, pattern in words.items():
            there = {file for file in ("README.md", "pyproject.toml", "config.yaml")
                     if re.search(pattern, project.text(file), re.I)}  # fmt: skip
            assert ("pyproject.toml" in there) == (answers[name] != "none"), answers
            assert answers[name] != "none" or not there, answers
        if answers["tracker"] != "none":
            text = project.text("tracker.py")
            assert text == (SOURCES / "trackers" / f"{answers['tracker']}.py").read_text()
            package = TRACKERS[answers["tracker"]]
            assert re.search(rf"^(import|from) {package}\b", text, re.M)
            assert text.count("\n") <= 60
        if answers["sweep"] != "none":
            metric = METRICS.get(answers["example"], "loss")
            text = (SOURCES / "sweeps" / "optuna.py").read_text()
            assert project.text("sweep.py") == text.replace('"loss", False', f'"{metric}", False')
            assert "python sweep.py" in project.text("README.md")


def test_yaml_files_of_each_project(projects: list[Project]) -> None:
    """config.yaml has the example's settings; CI and pre-commit use tools that are installed."""
    common = ["batch_size", "steps", "learning_rate", "seed", "ckpt_every", "eval_every", "hparams"]
    for project in projects:
        config = yaml.safe_load(project.text("config.yaml"))
        example = SOURCES / "examples" / f"{project.answers['example']}.yaml"
        changed: dict[str, Any] = {"batch_size": 64}
        if example.exists():
            changed |= yaml.safe_load(example.read_text())
        if project.answers["tracker"] != "none":
            changed["listener"] = "tracker.Tracker"
        assert list(config)[: len(common)] == common
        assert changed.items() <= config.items()
        assert set(config) == {*common, *changed}
        assert isinstance(config["hparams"], dict)
        workflow = yaml.safe_load(project.text(".github/workflows/ci.yml"))
        commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
        (repository,) = yaml.safe_load(project.text(".pre-commit-config.yaml"))["repos"]
        entries = {hook["entry"].split()[0] for hook in repository["hooks"]}
        assert entries == {"ruff", "mypy", "shellcheck"}
        dev = project.settings["project"]["optional-dependencies"]["dev"]
        names = {Requirement(text).name.removesuffix("-py") for text in dev}
        assert {command.split()[0] for command in commands[1:]} <= names
        extra = "cpu," if project.answers["accelerator"] == "auto" else ""
        assert commands[0] == f'python -m pip install -e ".[{extra}dev]"'
        for hook in repository["hooks"]:
            assert set(hook["additional_dependencies"]) <= set(dev)


def test_projects_pass_ruff_and_shellcheck(projects: list[Project], run: Run) -> None:
    """With the settings of the project, ruff and shellcheck find nothing in any project."""
    folders, place = [project.folder for project in projects], projects[0].folder
    for command in (["check"], ["format", "--check"]):
        run("ruff", *command, "--no-cache", *folders, cwd=place.parent)
    assert len({project.files["train.sh"] for project in projects}) == 1
    run("shellcheck", "train.sh", cwd=place)


@pytest.mark.slow
def test_projects_pass_mypy(projects: list[Project], run: Run, tmp_path: Path) -> None:
    """mypy finds nothing in any project. Projects without new Python files are skipped."""
    read: set[bytes] = set()
    place = tmp_path / "project"
    for project in projects:
        new = {text for name, text in project.files.items() if name.endswith(".py")} - read
        if new:
            # All projects are checked in the same folder, because they then share a cache for
            # installed packages.
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(project.folder, place)
            run("mypy", "--cache-dir", tmp_path / "cache", cwd=place)
            read |= new


@pytest.mark.slow
def test_ci_checks_the_engine_of_a_project(digits: Path, run: Run, tmp_path: Path) -> None:
    """The commands of the project's workflow pass, and fail if the engine contains a mistake."""
    project = tmp_path / "project"
    shutil.copytree(digits, project)
    workflow = yaml.safe_load((project / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    engine_commands = [command.split() for command in commands if "ctl_core" in command]
    assert len(engine_commands) == 3
    cache = {"MYPY_CACHE_DIR": str(tmp_path / "cache"), "RUFF_NO_CACHE": "true"}
    for command in engine_commands:
        run(*command, cwd=project, **cache)
    (project / "ctl_core" / "planted.py").write_text(PLANTED)
    for command in engine_commands:
        done = run(*command, cwd=project, check=False, **cache)
        assert done.returncode == 1, command
        assert "planted.py" in done.stdout + done.stderr, command


def test_same_tool_settings_as_this_repository(digits: Path) -> None:
    """A project checks its files and the engine with the settings of this repository.

    Limits on the length of lines and functions and on their complexity are left to its owner, and
    so are arguments and the style of tests.
    """
    here = tomllib.loads((ROOT / "pyproject.toml").read_text())
    there = tomllib.loads((digits / "pyproject.toml").read_text())
    cpu_build = there["project"]["optional-dependencies"]["cpu"]
    assert here["project"]["dependencies"] == cpu_build + there["project"]["dependencies"]
    assert here["tool"]["ruff"]["line-length"] == there["tool"]["ruff"]["line-length"]
    lint = here["tool"]["ruff"]["lint"]
    del lint["mccabe"], lint["pylint"], lint["per-file-ignores"]
    own = {"ARG", "C901", "D417", "PLR0913", "PLR0915", "PT"}
    lint["select"] = [rule for rule in lint["select"] if rule not in own]
    lint["ignore"].insert(0, "E501")
    assert lint == there["tool"]["ruff"]["lint"]
    for tool in ("ruff", "mypy"):
        (ours,), (theirs,) = (
            [text for text in project["project"]["optional-dependencies"][extra] if tool in text]
            for project, extra in ((here, "test"), (there, "dev"))
        )
        assert ours == theirs
        now, allowed = Version(version(tool)), Requirement(ours).specifier
        assert allowed.contains(now)
        # A newer minor version may report more, so the allowed range must exclude it.
        assert not SpecifierSet(str(allowed)).contains(f"{now.major}.{now.minor + 1}")


# The linters as they are called by CI, by users, by editors and by pre-commit.
LINTERS = (
    ("ruff", "check", "--no-cache", "."),
    ("mypy",),
    ("ruff", "check", "--no-cache", "callbacks.py", "ctl_core/planted.py"),
    ("ruff", "format", "--check", "--no-cache", "callbacks.py", "ctl_core/planted.py"),
    ("mypy", "callbacks.py", "ctl_core/planted.py"),
)
PLANTED = "import sys, os\ndef planted( a:int )->str :\n  return a+undefined\n"
USE = "\n\ndef use():\n    from ctl_core import planted\n\n    return planted.planted(1)\n"


@pytest.mark.slow
def test_linters_leave_the_engine_alone(digits: Path, run: Run, tmp_path: Path) -> None:
    """Linters ignore a user's copy of the engine, even if it was changed or has another style."""
    project = tmp_path / "project"
    shutil.copytree(digits, project)
    (project / "ctl_core" / "planted.py").write_text(PLANTED)
    callbacks = project / "callbacks.py"
    callbacks.write_text(callbacks.read_text() + USE)
    cache = {"MYPY_CACHE_DIR": str(tmp_path / "cache")}
    for command in LINTERS:
        run(*command, cwd=project, **cache)
    callbacks.write_text(callbacks.read_text() + PLANTED)
    for command in LINTERS[:2]:
        done = run(*command, cwd=project, check=False, **cache)
        assert done.returncode == 1, command
        assert "planted.py" not in done.stdout, command


def test_git_leaves_out_what_commands_write(digits: Path, tmp_path: Path, run: Run) -> None:
    """Git ignores the files that commands write, but no files of the user with similar names."""
    project = tmp_path / "project"
    shutil.copytree(digits, project, ignore=shutil.ignore_patterns(".git", "ctl_core"))
    run("git", "init", "--quiet", cwd=project)
    written = ".venv/x .venv.lock runs/sweep.journal records/x-0 build/lib/x training_log.md.tmp"
    written += " experiments/runs/a/train.log .env .env.local"
    run("git", "check-ignore", *written.split(), cwd=project)
    kept = "sweep.py training_log.md x.npz experiments/gan.py data/records/x-0"
    kept += " experiments/build/x.py data/x.npz ctl_core/tools/runs.py space.py"
    done = run("git", "check-ignore", *kept.split(), *files(project), cwd=project, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (tmp_path / "disk").mkdir()
    (project / "runs").symlink_to(tmp_path / "disk")
    run("git", "check-ignore", "--quiet", "runs", cwd=project)


def test_every_launch_file_warns_of_the_open_ports(projects: list[Project]) -> None:
    """The ports of a cluster have no password, and each file that starts one warns of this."""
    warned = set()
    for project in projects:
        assert "no password" in project.text("SECURITY.md")
        for name in project.files:
            if name.startswith("launch/") and "Dockerfile" not in name:
                comments = re.sub(r"\s+#?\s*", " ", project.text(name))
                assert "no password and no encryption" in comments, name
                warned.add(name.removeprefix("launch/"))
    assert warned == {name for names in LAUNCH.values() for name in names if "Docker" not in name}


def test_only_runs_belongs_to_the_user_of_an_image(projects: list[Project]) -> None:
    (text,) = {p.text("launch/Dockerfile") for p in projects if p.answers["launch"] == "vertex"}
    assert re.findall(r"-o train (.+)$", text, re.M) == ["/project/runs"]
    assert "--chown" not in text
    assert re.search(r"^USER train$", text, re.M)


def test_examples_are_whole() -> None:
    """Each has settings and five parts for the project's README; the hook knows all of them."""
    hook = (ROOT / "hooks" / "post_gen_project.py").read_text()
    known = re.search(r"EXAMPLES = \((.*?)\)", hook, re.S)
    assert known
    assert [*re.findall(r'"(\w+)"', known[1]), "blank"] == EXAMPLES
    folder = SOURCES / "examples"
    for name in EXAMPLES:
        assert (folder / f"{name}.yaml").exists() or name == "blank"
        parts = [
            part.strip() for part in (folder / f"{name}.md").read_text().split("<!-- part -->\n")
        ]
        introduction, output, experiment, usage, _ = parts
        assert introduction, name
        assert "ctl_core.load(" in usage, name
        assert bool(experiment) == (name != "blank"), name
        # Nobody has trained cifar10_vgg to its end here.
        assert ("\ndone: step " in output) == (name not in ("blank", "cifar10_vgg")), name
    pictures = [*TEMPLATE.glob("pictures/*/*")]
    assert {path.parent.name for path in pictures} <= set(EXAMPLES)
    assert all(path.suffix == ".png" and path.stat().st_size < 60_000 for path in pictures)


def test_project_has_a_first_commit_of_everything(digits: Path, run: Run) -> None:
    assert run("git", "branch", "--show-current", cwd=digits).stdout == "main\n"
    assert run("git", "rev-list", "--count", "HEAD", cwd=digits).stdout == "1\n"
    assert run("git", "status", "--porcelain", cwd=digits).stdout == ""
    assert "100755" in run("git", "ls-files", "--stage", "train.sh", cwd=digits).stdout


def test_prints_the_next_three_commands(run: Run, tmp_path: Path) -> None:
    """If git does not know the user, no commit is made, and the output says so."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    where = {"PWD": str(tmp_path), "HOME": str(tmp_path)}
    done = run(*["cookiecutter", ROOT, "--no-input", "-o", folder], cwd=tmp_path, **where)
    *_, created, title, first, second, third = done.stdout.splitlines()
    assert created.startswith("git: no first commit made (")
    assert (title, first) == ("Next:", "  cd 'a folder/my_training'")
    assert (second, third) == ("  ${EDITOR:-vi} callbacks.py", "  ./train.sh")


def test_generating_over_a_project_keeps_its_data(render: Render, run: Run, tmp_path: Path) -> None:
    """``cookiecutter -f`` keeps files that are not from the template."""
    project = render(tmp_path, example="blank")
    (project / "data").mkdir()
    (project / "data" / "mine.csv").write_text("1\n")
    (project / "make_records.py").write_text("of my own\n")
    run(*["cookiecutter", ROOT, "--no-input", "-f", "example=blank"], cwd=tmp_path)
    assert [path.name for path in (project / "data").iterdir()] == ["mine.csv"]
    assert (project / "make_records.py").read_text() == "of my own\n"
    assert run("git", "rev-list", "--count", "HEAD", cwd=project).stdout == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize(("example", "code"), [("digits", 0), ("blank", 1)])
def test_tests_of_a_project(
    render: Render, run: Run, tmp_path: Path, example: str, code: int
) -> None:
    """A new project passes its tests.

    A blank project fails that of its hooks, and the message has one line, which names the first
    missing hook.
    """
    project = render(tmp_path, example=example)
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"]
    tests = ["tests/test_callbacks.py"] if code else []
    done = run(*command, *tests, cwd=project, check=False)
    assert done.returncode == code, done.stdout
    result = "1 failed in" if code else r"\d\d passed"
    assert re.search(f"^{result}", done.stdout, re.M), done.stdout
    if code:
        assert "Traceback" not in done.stdout
        assert "During handling" not in done.stdout
        first = next(line for line in done.stdout.splitlines() if line.startswith("callbacks.py"))
        assert "create_dataset" in first


def test_scripts_keep_their_line_ends_in_a_checkout_of_windows(tmp_path: Path) -> None:
    """Git on Windows converts other files, and Bash does not run scripts with its line ends."""
    original, clone = tmp_path / "original", tmp_path / "clone"
    scripts = ("train.sh", "launch/slurm.sh", "launch/Dockerfile")
    for name in (".gitattributes", "config.yaml", *scripts):
        (original / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TEMPLATE / name, original / name)

    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, *words], cwd=original, check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")
    git("-c", "core.autocrlf=true", "clone", "-q", ".", str(clone))
    assert b"\r\n" in (clone / "config.yaml").read_bytes()
    for name in scripts:
        assert (clone / name).read_bytes() == (original / name).read_bytes()
