"""Records commands in a terminal, and draws the recording as an animated SVG (make pictures).

The terminal understands what the engine's console writes: text, carriage returns, and the erasing
of a line. The animation plays once and ends with the last screen, which is also what programs show
that do not animate.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

COLUMNS = 80
ROWS = 20
PROMPT = "$ "
CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\r|\n")
# The recording is played at twice its speed, and pauses are shortened to this many seconds.
SPEED = 2.0
LONGEST_PAUSE = 1.5
PAUSE_AT_PROMPT = 1.5
# A line overwritten within this time is left out, because SVG shows a duration of 0 for ever.
SHORTEST = 0.02

# The sizes in the picture, in pixels.
FONT_SIZE = 13
CHARACTER = 7.8
LINE = 18
MARGIN = 16


class Command(NamedTuple):
    """A line that is typed at the prompt.

    Attributes:
        text: the command
        interrupt_at: a text of its output at which Ctrl-C is pressed; None: it ends by itself
    """

    text: str
    interrupt_at: str | None = None


class Frame(NamedTuple):
    """The screen from a moment on.

    Attributes:
        time: in seconds from the start
        lines: the lines of the screen
    """

    time: float
    lines: tuple[str, ...]


@dataclasses.dataclass
class Screen:
    """The lines of a terminal, of which the last one is written to."""

    lines: list[str] = dataclasses.field(default_factory=lambda: [""])
    column: int = 0

    def write(self, text: str) -> None:
        """Writes text at the cursor, and obeys the control characters in it."""
        position = 0
        for control in CONTROL.finditer(text):
            self._write_plain(text[position : control.start()])
            self._obey(control)
            position = control.end()
        self._write_plain(text[position:])

    def _write_plain(self, text: str) -> None:
        for character in text:
            if self.column == COLUMNS:
                self._begin_line()
            line = self.lines[-1].ljust(self.column)
            self.lines[-1] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _begin_line(self) -> None:
        self.lines.append("")
        self.column = 0

    def _obey(self, control: re.Match[str]) -> None:
        if control[0] == "\n":
            self._begin_line()
        elif control[0] == "\r":
            self.column = 0
        elif control[2] == "K":
            self.lines[-1] = ""


def record(
    commands: Sequence[Command], folder: Path, environment: Mapping[str, str]
) -> list[Frame]:
    """Runs commands one after another in a terminal of their own.

    Args:
        commands: the commands
        folder: where they run
        environment: their environment

    Returns:
        The screens, from an empty prompt to the last line of output.
    """
    screen = Screen()
    frames: list[Frame] = []
    start = time.monotonic()
    for command in commands:
        if screen.column > 0:
            screen.write("\n")
        screen.write(f"{PROMPT}{command.text}\n")
        frames.append(Frame(time.monotonic() - start, tuple(screen.lines)))
        for text in read_output(command, folder, environment):
            screen.write(text)
            frames.append(Frame(time.monotonic() - start, tuple(screen.lines)))
    return frames


def read_output(command: Command, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yields the output of a command in a new terminal, as it comes."""
    process, terminal = pty.fork()
    if process == 0:  # in the child
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", command.text], {**environment, "TERM": "xterm-256color"})
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    waits_for = command.interrupt_at
    seen = ""
    while True:
        select.select([terminal], [], [])
        try:
            content = os.read(terminal, 65536)
        except OSError:  # Linux reports an error once the command has ended
            break
        if not content:
            break
        text = content.decode(errors="replace")
        seen += text
        if waits_for is not None and waits_for in seen:
            os.write(terminal, b"\x03")
            waits_for = None
        yield text
    os.close(terminal)
    os.waitpid(process, 0)


def shorten(frames: Sequence[Frame]) -> list[Frame]:
    """Returns frames without long pauses, and faster; each prompt is shown for a moment."""
    shortened = [Frame(0.0, frames[0].lines)]
    moment = 0.0
    for before, frame in itertools.pairwise(frames):
        pause = (frame.time - before.time) / SPEED
        if before.lines[-2].startswith(PROMPT):
            pause = PAUSE_AT_PROMPT
        moment += min(pause, LONGEST_PAUSE)
        shortened.append(Frame(moment, frame.lines))
    return shortened


class Text(NamedTuple):
    """A text in a row of the picture, and when it is there.

    Attributes:
        row: from 0
        start: in seconds
        end: in seconds; None: it stays
        text: the line
    """

    row: int
    start: float
    end: float | None
    text: str


def list_texts(frames: Sequence[Frame]) -> Iterator[Text]:
    """Yields each line of the frames once, with the time for which it stays as it is."""
    rows = max(len(frame.lines) for frame in frames)
    for row in range(rows):
        shown = ""
        start = 0.0
        for frame in frames:
            line = frame.lines[row].rstrip() if row < len(frame.lines) else ""
            if line != shown:
                if shown and frame.time - start >= SHORTEST:
                    yield Text(row, start, frame.time, shown)
                shown = line
                start = frame.time
        if shown:
            yield Text(row, start, None, shown)


def draw(frames: Sequence[Frame], title: str) -> str:
    """Returns the picture of a recording, SVG.

    Args:
        frames: the recording
        title: what it shows, for those who do not see it
    """
    rows = min(ROWS, max(map(count_rows, frames)))
    width = round(COLUMNS * CHARACTER + 2 * MARGIN)
    height = rows * LINE + 2 * MARGIN
    title = html.escape(title)
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>",
        # A dark terminal with a border is legible on a light page and on a dark one.
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#161b22" '
        'stroke="#484f58"/>',
        f'<svg y="{MARGIN}" width="{width}" height="{rows * LINE}">',
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
        f'font-size="{FONT_SIZE}" fill="#e6edf3" '
        f'transform="translate(0, {-LINE * count_hidden(frames[-1], rows)})">',
        draw_scrolling(frames, rows),
    ]
    elements += [draw_text(text) for text in list_texts(frames)]
    return "\n".join([*elements, "</g></svg></svg>", ""])


def count_rows(frame: Frame) -> int:
    """Returns the number of rows, without the empty one that waits for output."""
    return len(frame.lines) - (not frame.lines[-1])


def count_hidden(frame: Frame, rows: int) -> int:
    """Returns the number of rows that have moved out of the picture, at its top."""
    return max(0, count_rows(frame) - rows)


def draw_scrolling(frames: Sequence[Frame], rows: int) -> str:
    """Returns the animation that moves the lines up when the picture is full."""
    end = frames[-1].time or 1.0
    times = [f"{frame.time / end:.4f}" for frame in frames]
    places = [f"0 {-LINE * count_hidden(frame, rows)}" for frame in frames]
    return (
        f'<animateTransform attributeName="transform" type="translate" dur="{end:.2f}s" '
        f'calcMode="discrete" keyTimes="{";".join(times)}" values="{";".join(places)}"/>'
    )


def draw_text(text: Text) -> str:
    """Returns a line of the picture; one that stays is visible without the animation, too."""
    y = LINE * text.row + FONT_SIZE
    color = ' fill="#7ee787"' if text.text.startswith(PROMPT) else ""
    length = f'textLength="{len(text.text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    line = html.escape(text.text).replace(" ", "\N{NO-BREAK SPACE}")  # others are joined into one
    if text.end is None:
        hidden = ""
        if text.start > 0:
            hidden = f'<set attributeName="visibility" to="hidden" dur="{text.start:.2f}s"/>'
        return f'<text x="{MARGIN}" y="{y}" {length}{color}>{line}{hidden}</text>'
    duration = text.end - text.start
    shown = (
        f'<set attributeName="visibility" to="visible" begin="{text.start:.2f}s" '
        f'dur="{duration:.2f}s"/>'
    )
    return f'<text x="{MARGIN}" y="{y}" {length} visibility="hidden"{color}>{line}{shown}</text>'
