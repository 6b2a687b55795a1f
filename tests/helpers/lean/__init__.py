"""Processes that tests start import TensorFlow without what it and Keras would import along.

Where jax and scikit-learn are installed, they take a third of its five seconds.
``sitecustomize.py`` hides them from every process that has this folder on its path.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent
# For the environment of a process that is to find the engine and the tests, too.
PYTHONPATH = os.pathsep.join([str(FOLDER), str(FOLDER.parents[2])])


def hide() -> None:
    """Hides them from each process that inherits this one's environment."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(FOLDER) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), *paths]))
