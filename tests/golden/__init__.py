"""Regression tests that see the engine from outside, with programs and files as users have them.

They import only the public names of ``ctl_core`` (see ``tests/test_layout.py``), so that the engine
can be restructured without changing them.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Must be set before TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
