"""What must not change: programs and files as users have them, held from outside of the engine.

Nothing here imports anything of ``ctl_core`` but its public names (``test_outside.py``), so that
the engine's inner walls may move.

``ENGINE`` names the engine that is asked: ``old``, the default, is the one in the repository's
root; ``new`` is one that grows in the folder ``new`` beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = os.environ.get("ENGINE", "old")
FOLDER = {"old": ROOT, "new": ROOT / "new"}[NAME]

# Before anything here imports it.
sys.path.insert(0, str(FOLDER))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
