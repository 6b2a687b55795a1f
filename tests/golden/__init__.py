"""What must not change: programs and files as users have them, held from outside of the engine.

Nothing here imports anything of ``ctl_core`` but its public names (``tests/test_layout.py``), so
that the engine's inner walls may move.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Before anything here imports it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
