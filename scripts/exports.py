"""Exports the examples and some layers to LiteRT and ONNX, and writes a table (make exports).

Each model is trained for some steps in another process, and exported by the command of a user.
Examples that download their data are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cookiecutter.main import cookiecutter

from ctl_core.conversion.formats import PACKAGES
from scripts.exported_layers import LAYERS

ROOT = Path(__file__).parents[1]
MARKS = "<!-- make exports -->\n", "<!-- /make exports -->"
EXAMPLES = ("digits", "tfrecords", "gan", "contrastive", "diffusion", "text")
TITLES = {"litert": "LiteRT", "onnx": "ONNX"}


def run(folder: Path, *words: str) -> str:
    """Runs a command of the engine in a folder, and returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ctl_core", *words]
    process = subprocess.run(
        command, cwd=folder, env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if words[0] == "train" and process.returncode:
        raise RuntimeError(process.stdout)
    return process.stdout


def create_folders(place: Path) -> Iterator[tuple[str, Path]]:
    """Yields the name of each model and the folder of its project."""
    for name in EXAMPLES:
        context = {"example": name, "project_slug": name}
        cookiecutter(str(ROOT), no_input=True, default_config=True, output_dir=str(place),
                     extra_context=context)  # fmt: skip
        folder = place / name
        yield f"example {name}", folder
    for name in LAYERS:
        folder = place / name.replace(" ", "_")
        folder.mkdir()
        shutil.copy(ROOT / "scripts" / "exported_layers.py", folder / "callbacks.py")
        settings = {"batch_size": 16, "hparams": {"layer": name}}
        (folder / "config.yaml").write_text(json.dumps(settings))
        yield name, folder


def describe(folder: Path, format: str, printed: str) -> str:
    """Returns the cell of the table about a model in a format.

    Args:
        folder: the folder of the project
        format: the format
        printed: what the export has printed
    """
    file = folder / "runs" / "a" / "export" / format / "1" / "proof.json"
    if not file.exists():
        (line,) = re.findall(rf"^(?:error|warning): {format}: (.*)$", printed, re.M)
        return f"refused: {line}"
    proof = json.loads(file.read_text("utf-8"))
    if not proof["proven"]:
        return f"not proven: {proof['problem']}"
    difference = max(output["relative_difference"] for output in proof["outputs"].values())
    cell = f"proven, {difference:.0e}"
    if proof["examples_per_call"]:
        cell += "; one example in each call"
    return cell


def main() -> None:
    """Prints the table, and writes it into a page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.exports", description=__doc__)
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="a page for the table")
    into = parser.parse_args().into
    lines = ["model | " + " | ".join(TITLES.values()), "---|---|---"]
    with tempfile.TemporaryDirectory() as place:
        for name, folder in create_folders(Path(place)):
            run(folder, "train", "--run-name", "a", "--steps", "4")
            printed = run(folder, "export", "a", "--format", ",".join(PACKAGES))
            cells = [describe(folder, format, printed) for format in TITLES]
            lines.append(" | ".join([name, *cells]))
            print(lines[-1], flush=True)
    text = "\n".join(["", *lines, "", ""])
    if into is not None:
        before, _, rest = into.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        into.write_text(f"{before}{MARKS[0]}{text}{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
