"""Hides slow packages. Python imports this module when it starts, see ``__init__.py``."""

import sys

for name in ("jax", "sklearn"):
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
