"""Prints the accuracy of the demo; fails if it is lower than the README promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMISED = 0.97


def main(run: Path) -> int:
    """Checks the last evaluation of a run; returns the exit code."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "eval"][-1]
    accuracy = last["accuracy"]
    verdict = "at least" if accuracy >= PROMISED else "BELOW"
    print(
        f"\nmake demo: {accuracy:.1%} of the held-out digits are right after {last['step']} steps "
        f"({verdict} the promised {PROMISED:.0%}). The project is in {run.parents[1]}"
    )
    return 0 if accuracy >= PROMISED else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
