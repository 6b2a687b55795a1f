"""Imports TensorFlow without what it and Keras would import along.

Where jax and scikit-learn are installed, they take a third of its five seconds.
``sitecustomize.py`` hides them from every process that has this folder on its path, and from the
processes that run the tests, whose ``conftest.py`` imports it.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).parent
# For the environment of a process that is to find the engine and the tests, too.
PYTHONPATH = os.pathsep.join([str(FOLDER), str(FOLDER.parents[2])])
