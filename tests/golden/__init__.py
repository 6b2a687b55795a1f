"""Regression tests that use the engine as users do, with realistic programs and files.

They import only the public names of ``ctl_core`` (see ``tests/test_layout.py``), so that the engine
can be restructured without changing them.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Must be set before TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
