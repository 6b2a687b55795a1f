"""Draws docs/pictures (make pictures): terminal.svg, run.svg, and the tutorial's shapes.

terminal.svg is a recording of two commands: the first one is interrupted, the second one resumes.
run.svg is a run next to its curve: it trains the demo's project again, kills that run, and resumes
it on four devices. The shapes are the first that the tutorial's own script draws.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from scripts import terminal

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = DOCS / "pictures"
KILLED = 350
RUN = "killed"
FIRST = f"./train.sh --run-name {RUN}"
AGAIN = f"{FIRST} --virtual-devices 4"
LETTERS = 66  # maximum length of a line of the console output
WIDTH = 980
HEIGHT = 340
LEFT, RIGHT, TOP, BOTTOM = 570, 955, 45, 290  # the ends of the axes of the curve
LOSSES = (1.0, 0.1, 0.01)


def draw_terminal(project: Path) -> str:
    """Returns the recording of a run that is interrupted and resumed, SVG."""
    command = "./train.sh --run-name a"
    if (project / "runs" / "a").exists():
        raise SystemExit(f"error: there is a run in {project}/runs/a; remove it")
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    commands = [terminal.Command(command, "step 300/600"), terminal.Command(command)]
    frames = terminal.record(commands, project, environment)
    title = "A terminal: a run is stopped by Ctrl-C at about step 300; the same command resumes it."
    return terminal.draw(terminal.shorten(frames), title)


def train_and_kill(project: Path) -> list[str]:
    """Trains, kills the run, and resumes it; returns the lines that the terminal shows."""
    run = project / "runs" / RUN
    log = run / "train.log"
    first = subprocess.Popen(FIRST.split(), cwd=project, start_new_session=True)
    while not has_reported(run, KILLED):
        if first.poll() is not None:
            raise SystemExit(f"error: the run ended before step {KILLED}; remove {log.parent}")
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = log.read_text().splitlines()
    subprocess.run(AGAIN.split(), cwd=project, check=True)
    after = log.read_text().splitlines()[len(before) :]
    return [f"$ {FIRST}", *shorten(before), "Killed", f"$ {AGAIN}", *shorten(after)]


def has_reported(run: Path, step: int) -> bool:
    """Returns True if a run has written the values of a step."""
    file = run / "metrics.jsonl"
    return file.exists() and f'"step": {step},' in file.read_text()


def shorten(lines: list[str]) -> list[str]:
    """Returns the first line of a log, its last two evaluations and its outcome, without times."""
    lines = [line.partition(" INFO ")[2] for line in lines]
    evaluations = [line for line in lines if "eval:" in line][-2:]
    outcome = [line for line in lines if line.startswith("done:")]
    return [lines[0], *evaluations, *outcome]


def read_losses(run: Path, split: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["split"] == split]


def draw(lines: list[str], whole: Path, killed: Path) -> str:
    """Returns the picture, SVG."""
    steps = max(step for step, _ in read_losses(whole, "train"))

    def place(step: int, loss: float) -> tuple[float, float]:
        height = math.log10(loss / LOSSES[-1]) / math.log10(3 / LOSSES[-1])
        return LEFT + (RIGHT - LEFT) * step / steps, BOTTOM - (BOTTOM - TOP) * height

    def write(x: float, y: float, text: str, colour: str = "#57606a", more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{more}>{html.escape(text)}</text>'

    def draw_line(points: list[tuple[int, float]], style: str) -> str:
        places = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        return f'<polyline points="{places}" fill="none" {style}/>'

    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        f'<rect x="10" y="10" width="510" height="{HEIGHT - 20}" rx="8" fill="#161b22"/>',
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" xml:space="preserve">',
    ]
    rows = [row for line in lines for row in textwrap.wrap(line, LETTERS)]
    for number, line in enumerate(rows):
        bright = line[0] == "$" or line == "Killed"
        shapes.append(write(25, 36 + 19 * number, line, "#7ee787" if bright else "#e6edf3"))
    shapes.append('</g><g font-family="system-ui, sans-serif">')
    for loss in LOSSES:
        y = place(0, loss)[1]
        shapes.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#d0d7de"/>')
        shapes.append(write(LEFT - 6, y + 4, f"{loss:g}", more=' text-anchor="end"'))
    for step in range(0, steps + 1, 100):
        shapes.append(
            write(place(step, 1)[0], BOTTOM + 18, f"{step}", more=' text-anchor="middle"')
        )
    shapes += [
        write(RIGHT, BOTTOM + 36, "step", more=' text-anchor="end"'),
        draw_line(read_losses(whole, "train"), 'stroke="#afb8c1" stroke-width="7"'),
        draw_line(read_losses(killed, "train"), 'stroke="#0969da" stroke-width="1.5"'),
        draw_line(read_losses(killed, "eval"), 'stroke="#cf222e" stroke-width="1.5"'),
    ]
    x = place(KILLED, 1)[0]
    shapes.append(f'<path d="M{x:.0f} {TOP + 26}V{BOTTOM}" stroke="#57606a" stroke-dasharray="4"/>')
    shapes.append(write(x + 6, TOP + 36, "killed; then 4 devices"))
    for row, (colour, text) in enumerate(
        [
            ("#8c959f", "loss of an uninterrupted run on one device"),
            ("#0969da", "loss of the run that was killed"),
            ("#cf222e", "its evaluations"),
        ]
    ):
        shapes.append(write(LEFT + 105, TOP - 18 + 16 * row, f"— {text}", colour))
    return "\n".join([*shapes, "</g></svg>", ""])


def draw_shapes() -> None:
    """Draws shapes.png: the first shapes of the tutorial side by side, enlarged four times."""
    import tensorflow as tf

    script = re.search(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text("utf-8"), re.S)
    assert script
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", script[1]], cwd=folder, check=True)
        files = [tf.io.read_file(f"{folder}/pictures/{number:03}.png") for number in range(8)]
    shapes = [tf.pad(tf.io.decode_png(file), [[1, 1], [1, 1], [0, 0]]) for file in files]
    sheet = tf.repeat(tf.repeat(tf.concat(shapes, axis=1), 4, axis=0), 4, axis=1)
    tf.io.write_file(str(PICTURES / "shapes.png"), tf.io.encode_png(sheet))


def main(project: Path) -> None:
    """Draws the run ``demo`` of a project, and one in two parts."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "terminal.svg").write_text(draw_terminal(project), "utf-8")
    lines = train_and_kill(project)
    drawn = draw(lines, project / "runs" / "demo", project / "runs" / RUN)
    (PICTURES / "run.svg").write_text(drawn, "utf-8")
    draw_shapes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
