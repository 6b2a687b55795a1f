"""A page in a real browser: headless Chromium, told what to do over two pipes.

The protocol is Chrome's own for developer tools (https://chromedevtools.github.io/devtools-protocol/),
of which a few messages do.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
# All that a page shows, also in parts of it that are pages of their own.
TEXT = """
(() => {
  const found = [];
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) found.push(node.textContent.trim());
    if (['SCRIPT', 'STYLE', 'TEMPLATE'].includes(node.nodeName)) return;
    if (node.nodeName === 'INPUT') found.push(node.value);
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  if (document.body) walk(document.body);  // none yet while it loads
  return found.filter((text) => text).join(' ');
})()
"""


def chromium() -> str:
    """Returns the browser, or skips the test."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    return found


class Page:
    """A page of a browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a message and returns what is answered; what the browser says else is dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                part = os.read(self._read, 1 << 20)
                assert part, "the browser has ended"
                self._buffer += part
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])

    def run(self, script: str) -> Any:
        """Runs an expression of JavaScript, and returns its value."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url: str, *words: str, seconds: float = 300) -> str:
        """Opens a page and waits until it shows all of the words; returns its text."""
        self._ask("Page.navigate", url="about:blank")  # a part of the same page would not load
        self._ask("Page.navigate", url=url)
        return self.shows(*words, seconds=seconds)

    def shows(self, *words: str, seconds: float = 300) -> str:
        """Waits until the page shows all of the words; returns its text."""
        until = time.monotonic() + seconds
        while True:
            text = str(self.run(TEXT) or "")
            missing = [word for word in words if word not in text]
            if not missing:
                return text
            assert time.monotonic() < until, f"{missing} not in: {text}"
            time.sleep(0.3)

    def screenshot(self, path: Path) -> None:
        """Writes what is seen as a PNG file, once nothing moves any more."""
        until, before, data = time.monotonic() + 8, "", "-"
        while data != before and time.monotonic() < until:
            time.sleep(1.0)
            before, data = data, self._ask("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(folder: Path, size: str = "1400,1000") -> Iterator[Page]:
    """Starts the browser, with what it keeps in a folder; ends it afterwards."""
    command = [chromium(), *FLAGS, f"--user-data-dir={folder}", f"--window-size={size}"]
    commands, answers = os.pipe(), os.pipe()
    # The browser reads its file descriptor 3 and writes to 4, wherever the pipes are here.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands[0], answers[1])]
    for fd in (commands[0], answers[1]):
        os.close(fd)
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}', *command],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for fd in theirs:
        os.close(fd)
    try:
        yield Page(commands[1], answers[0])
    finally:
        os.close(commands[1])  # which it takes for its end
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers[0])
