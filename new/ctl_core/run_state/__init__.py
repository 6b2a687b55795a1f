"""What of a run is on the disk, beside its checkpoints."""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[3] / "ctl_core" / "run_state"))
