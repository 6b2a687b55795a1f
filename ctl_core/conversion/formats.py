"""Names the formats of exported models, and checks that the packages they need are installed."""

import importlib.metadata
import sys
from typing import Literal, TypeAlias

from ctl_core.run.errors import SetupError

Format: TypeAlias = Literal["saved_model", "litert", "onnx"]
SAVED_MODEL = "saved_model"
# The packages that a format needs, by the name of the format, which is also the name of the extra
# in the project's pyproject.toml.
PACKAGES = {"litert": ("ai-edge-litert",), "onnx": ("onnx", "onnxruntime", "tf2onnx")}

# The versions of ONNX's operators that tf2onnx can write.
LOWEST_OPSET = 13
HIGHEST_OPSET = 18
DEFAULT_OPSET = 17


def check_packages(name: str) -> None:
    """Checks that the packages are installed that convert and run files of a format.

    Raises:
        SetupError: a package is missing.
    """
    for package in PACKAGES.get(name, ()):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise SetupError(
                f"format: {name} needs the package {package}, which is not installed; in the "
                f"project's folder, run: {sys.executable} -m pip install --editable '.[{name}]'"
            ) from None
