"""Names the command that installs the packages of a project."""

import platform
import re
import sys
from pathlib import Path

from ctl_core.machine.facts import read_hardware

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def describe_missing_package(package: str, project: Path = _PROJECT) -> str:
    """Returns the line for a package that is not installed in this environment.

    Args:
        package: the name of the package
        project: the pyproject.toml of the project
    """
    return (
        f"{package} is not installed in {sys.prefix}; in the project's folder, run: "
        f"{sys.executable} -m pip install --editable {_name_project(project)}"
    )


def _name_project(project: Path) -> str:
    """Returns the project in the current folder as pip wants it, such as ``".[cpu]"``.

    A project with the extras ``cpu`` and ``gpu`` has no TensorFlow without one of them. The extra
    is the one that train.sh would choose.
    """
    if not project.is_file():
        return "."
    text = project.read_text("utf-8")
    if re.search(r"^gpu = \[", text, re.MULTILINE) is None:
        return "."
    is_supported = sys.platform == "linux" and platform.machine() == "x86_64"
    hardware = read_hardware()
    has_gpu = bool(hardware.device_files) or hardware.has_wsl_driver
    extra = "gpu" if is_supported and has_gpu else "cpu"
    return f'".[{extra}]"'
