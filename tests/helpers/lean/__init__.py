"""Speeds up the import of TensorFlow and Keras by hiding optional packages from them.

If jax and scikit-learn are installed, they take a third of the five seconds of the import.
``sitecustomize.py`` hides them from every process that has this folder in its PYTHONPATH. The test
processes import it in ``conftest.py``.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).parent
# The PYTHONPATH for processes that must also find the engine and the tests.
PYTHONPATH = os.pathsep.join([str(FOLDER), str(FOLDER.parents[2])])
