"""What a trained run is used with, on the command line."""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[3] / "ctl_core" / "tools"))
