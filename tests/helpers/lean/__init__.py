"""Lets processes import TensorFlow without some packages that TensorFlow and Keras import.

If jax and scikit-learn are installed, importing them takes a third of the five seconds that
TensorFlow's import takes. ``sitecustomize.py`` hides them from every process with this folder in
its PYTHONPATH. The test processes import it in ``conftest.py``.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).parent
# The PYTHONPATH for processes that must also find the engine and the tests.
PYTHONPATH = os.pathsep.join([str(FOLDER), str(FOLDER.parents[2])])
