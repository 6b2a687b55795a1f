"""Python imports this when it starts: see ``__init__.py``."""

from __future__ import annotations

import sys

for name in ("jax", "sklearn"):
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
