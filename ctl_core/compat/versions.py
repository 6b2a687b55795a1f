"""Reports versions of TensorFlow and Keras that are newer than the tested ones."""

from __future__ import annotations

import re

import keras
import tensorflow as tf

# The newest versions with which the tests of this engine have passed. The dependencies in
# pyproject.toml allow no newer versions.
TESTED = {"tensorflow": (2, 21), "keras": (3, 15)}


def describe_untested() -> list[str]:
    """Returns a line for each package that is newer than the newest tested version.

    A newer version may have changed a private name. The line explains how to test this version, and
    which bound in pyproject.toml allows it.
    """
    lines = []
    for package, version in (("tensorflow", tf.__version__), ("keras", keras.__version__)):
        major, minor = TESTED[package]
        match = re.match(r"(\d+)\.(\d+)", version)
        assert match is not None
        if (int(match[1]), int(match[2])) <= (major, minor):
            continue
        lines.append(
            f"{package} {version} is newer than {major}.{minor}, with which this engine was "
            "tested; training continues. To compare weights, run pytest tests/engine. To "
            f"allow this version, change the bound in pyproject.toml to {package}<{match[1]}."
            f"{int(match[2]) + 1}."
        )
    return lines
