"""What TF_CONFIG makes of a process, and how the processes of a cluster wait for each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctl_core.__main__ import main
from ctl_core.cluster import supervisor
from ctl_core.cluster import task as tasks
from ctl_core.cluster.task import Task, read_task
from ctl_core.run.errors import PeerLost, SetupError
from ctl_core.run.settings import Config

HOSTS = ["a:1", "b:2", "c:3"]


def tf_config(cluster: object, job: str, index: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


@pytest.mark.parametrize(
    ("cluster", "job", "index", "expected"),
    [
        ({"worker": HOSTS}, "worker", 1, Task(3, 1, tuple(HOSTS))),
        ({"chief": ["d:4"], "worker": HOSTS}, "worker", "0", Task(4, 1, ("d:4", *HOSTS))),
        ({"master": ["d:4"], "worker": HOSTS}, "master", 0, Task(4, 0, ("d:4", *HOSTS))),
        ({"worker": ["here"]}, "worker", 0, Task(1, 0, ("here",))),  # nobody connects to it
        ({"worker": HOSTS}, "evaluator", 0, Task(kind="evaluator")),
        ({"worker": HOSTS, "ps": ["e:5"]}, "ps", 0, Task(kind="ps")),
    ],
)
def test_what_a_process_is(cluster: Any, job: str, index: Any, expected: Task) -> None:
    environ = tf_config(cluster, job, index)
    assert read_task(Config(run_name="a"), environ) == expected
    assert read_task(Config(strategy="mirrored"), environ) == Task()


@pytest.mark.parametrize(
    ("cluster", "job", "index"),
    [
        ({"worker": HOSTS}, "worker", 3),
        ({"worker": HOSTS}, "chief", 0),
        ({"worker": HOSTS}, "tpu_worker", 0),
        ({"chief": ["b:2"], "worker": HOSTS}, "chief", 0),  # one address twice
    ],
)
def test_a_cluster_that_cannot_train_is_refused(cluster: Any, job: str, index: int) -> None:
    with pytest.raises(SetupError, match=r"^TF_CONFIG: expected .*worker.* got [^\n]+$"):
        read_task(Config(run_name="a"), tf_config(cluster, job, index))


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(SetupError, match="run_name: a cluster needs one"):
        read_task(Config(), tf_config({"worker": HOSTS}, "worker", 1))
    with pytest.raises(SetupError, match=r"multi_worker needs TF_CONFIG .* --workers K"):
        read_task(Config(strategy="multi_worker"), {})


def test_a_ps_ends_at_once_and_an_evaluator_watches_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        "ctl_core.commands.use.evaluate",
        lambda _, config, **options: called.append((config.run_name, config.workers, options)),
    )
    monkeypatch.setattr("ctl_core.__main__.LONGEST", 1.0)
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").touch()
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": HOSTS}, "ps", 0)["TF_CONFIG"])
    assert main(["train", "--steps", "3"]) == 0
    assert capsys.readouterr().out == (
        "ps: gradients are summed between the workers; no parameter server is needed.\n"
    )
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": HOSTS}, "evaluator", 0)["TF_CONFIG"])
    words = ["train", "--steps", "3", "--run-name", "a"]
    assert main(words) == 75
    assert "after 1 s, there is no run to evaluate: runs/a" in capsys.readouterr().err
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("steps: 3\nworkers: 2\n")
    assert main(words) == 0
    assert called == [("a", 1, {"checkpoint": None, "watch": True})]


def waiting_for(others: int) -> Task:
    addresses = tuple(f"127.0.0.1:{port}" for port in supervisor.find_free_ports(1 + others))
    return Task(1 + others, 0, addresses)


def test_a_wait_names_who_does_not_answer_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "PATIENCE", 0.1)
    monkeypatch.setattr(tasks, "LONGEST", 0.5)
    task = waiting_for(2)
    with tasks._listen(task.addresses[1]):
        with pytest.raises(PeerLost, match=f"no answer .* from process 2 at {task.addresses[2]}."):
            tasks.wait_for_others(task)
        who = f"process 2 at {task.addresses[2]}"
        assert capsys.readouterr().out == f"cluster: waiting; no answer from {who}\n"
        with tasks._listen(task.addresses[2]):
            tasks.wait_for_others(task)
