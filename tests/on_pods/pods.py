"""Pods of an Indexed Job, as Kubernetes would run them, on this machine.

Each has a network namespace with an address of its own, its host name, and names of the others in
/etc/hosts. What is run, how often, and after which end again, is read from the manifest.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.processes import find_training

BRIDGE = "ctl-pods"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_QUIETLY: dict[str, Any] = {"check": False, "stderr": subprocess.DEVNULL}


def missing() -> str:
    """Says what this machine lacks; empty if nothing."""
    if lacks := [name for name in ("ip", "unshare", "mount") if not shutil.which(name)]:
        return f"{', '.join(lacks)} not installed"
    if os.geteuid():
        return "needs root"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=False)
    return "no namespaces here" if tried.returncode else ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Job:
    """An Indexed Job of a manifest, with the Service and the claim that it names.

    Attributes:
        name: of the job
        restarts: how often each index was started again
    """

    def __init__(self, manifest: Path, project: Path, folder: Path) -> None:
        found = {each["kind"]: each for each in yaml.safe_load_all(manifest.read_text())}
        self.name = found["Job"]["metadata"]["name"]
        self._spec = found["Job"]["spec"]
        self._pod = self._spec["template"]["spec"]
        assert self._pod["subdomain"] == found["Service"]["metadata"]["name"]
        assert found["Service"]["spec"]["clusterIP"] == "None"
        labels = {"batch.kubernetes.io/job-name": self.name}  # that the controller gives to pods
        assert found["Service"]["spec"]["selector"].items() <= labels.items()
        (self._container,) = self._pod["containers"]
        self.size = self._spec["completions"]
        self.restarts = [0] * self.size
        self._project, self._folder = project, folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @contextlib.contextmanager
    def networks(self) -> Iterator[None]:
        """Makes a namespace for each pod, joined by a bridge."""
        self._clear()  # what a test that was killed has left
        hosts = ["127.0.0.1 localhost"]
        _ip("link", "add", BRIDGE, "type", "bridge")
        try:
            _ip("link", "set", BRIDGE, "up")
            for index in range(self.size):
                space, address = f"{BRIDGE}-{index}", f"10.231.7.{index + 1}"
                _ip("netns", "add", space)
                _ip("link", "add", f"ctl-v{index}", "type", "veth", "peer", "eth0", "netns", space)
                _ip("link", "set", f"ctl-v{index}", "master", BRIDGE, "up")
                for words in (
                    ("addr", "add", f"{address}/24", "dev", "eth0"),
                    ("link", "set", "eth0", "up"),
                    ("link", "set", "lo", "up"),
                ):
                    _ip("-n", space, *words)
                hosts.append(f"{address} {self._host(index)}.{self._pod['subdomain']}")
            (self._folder / "hosts").write_text("\n".join(hosts) + "\n")
            yield
        finally:
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self._clear()

    def _clear(self) -> None:
        for index in range(self.size):
            subprocess.run(["ip", "netns", "del", f"{BRIDGE}-{index}"], **_QUIETLY)
        subprocess.run(["ip", "link", "del", BRIDGE], **_QUIETLY)

    def _host(self, index: int) -> str:
        return f"{self.name}-{index}"

    def _start(self, index: int, args: list[str]) -> None:
        kept = ("PATH", "HOME", "LANG")
        environ = {name: os.environ[name] for name in kept if name in os.environ}
        for each in self._container["env"]:
            if "value" in each:
                words = re.sub(r"\$\((\w+)\)", lambda name: environ[name[1]], each["value"])
            else:  # the one field that is read: the pod's number
                assert each["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
                words = str(index)
            environ[each["name"]] = words
        environ |= {"VENV": sys.prefix}  # as the Dockerfile has it
        inside = (
            f"hostname {self._host(index)} && mount --bind {self._folder}/hosts /etc/hosts && "
            'exec "$@"'
        )
        command = ["ip", "netns", "exec", f"{BRIDGE}-{index}", "unshare", "--uts", "--mount"]
        with (self._folder / f"pod-{index}.log").open("ab") as log:
            self._running[index] = subprocess.Popen(
                [*command, "sh", "-c", inside, "sh", "./train.sh", *args],
                cwd=self._project,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, *args: str, kill_when: Any = None, seconds: float = 900) -> str:
        """Runs all pods to their end, each started again as the manifest's rules have it.

        Args:
            args: of the container, in place of the manifest's
            kill_when: once it says so, the training of the last pod is killed by SIGKILL
            seconds: the longest time

        Returns:
            ``Complete``, or ``Failed``.
        """
        end, left = time.monotonic() + seconds, set(range(self.size))
        for index in left:
            self._start(index, list(args))
        while left:
            assert time.monotonic() < end, self.said()
            if kill_when is not None and kill_when():
                last = find_training(f"INDEX={self.size - 1}")
                os.kill(last, signal.SIGKILL)
                kill_when = None
            for index in sorted(left):
                code = self._running[index].poll()
                if code is None:
                    continue
                code = 128 - code if code < 0 else code  # as a container runtime has it
                if code == 0:
                    left.discard(index)
                elif self._action(code) == "FailJob":
                    return "Failed"
                else:
                    assert self._action(code) == "Ignore", code
                    self.restarts[index] += 1
                    self._start(index, list(args))
            time.sleep(0.1)
        return "Complete"

    def _action(self, code: int) -> str:
        for rule in self._spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and codes["containerName"] == self._container["name"]:
                assert codes["operator"] == "In"
                if code in codes["values"]:
                    return str(rule["action"])
        return "Count"

    def said(self) -> str:
        """Returns what all pods have printed."""
        logs = (self._folder / f"pod-{index}.log" for index in range(self.size))
        return "\n".join(log.read_text() for log in logs if log.exists())
