"""Kills processes and nodes while ``make prove``'s program trains on Ray; compares its weights.

``python -m scripts.soak_ray FOLDER --kills 20`` needs Ray, and starts a Ray cluster of three nodes
on this machine. Two kinds of runs alternate. In the first, the number of workers is fixed, and each
lost node is replaced. In the second, there are 1 to 3 workers, and lost nodes are replaced at
random. Each run adds a line to FOLDER/log.jsonl.
"""

import argparse
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

from scripts.proof import callbacks as program
from scripts.prove import ENGINE, LIMIT, ROOT, Run, measure

NODES, KILLS = 3, 3  # KILLS: the maximum number of kills of a run
TRAIN = Run(ENGINE, "", []).command(1)


def kill(cluster: Cluster, what: str, draw: random.Random) -> None:
    """Kills all processes of a random node, or only the training on it."""
    import psutil  # type: ignore[import-untyped]  # a dependency of Ray

    for node in draw.sample([*cluster.worker_nodes], len(cluster.worker_nodes)):
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        there = [raylet, *raylet.children(recursive=True)]
        processes = [each for each in there if what == "node" or "ctl_core" in each.cmdline()]
        for process in processes:
            process.kill()
        if what == "node":
            cluster.remove_node(node, allow_graceful=False)
        if processes:
            break


def train(folder: Path, number: int, kills: int, cluster: Cluster, draw: random.Random) -> Any:
    """Trains one run to its end, and kills it several times; returns its counts for the log."""
    fixed = number % 2 == 0
    ids = folder / "now.ids"
    size = 0
    killed_at = 0.0
    what = ""
    ids.write_text("")
    counts: Any = {"fixed": fixed, "process": 0, "node": 0, "early": 0, "seconds": []}
    command = [sys.executable, "launch/ray_job.py", "--max-failures", "-1", "--num-workers"]
    command += ["3" if fixed else "1-3", "--", *TRAIN[4:], f"--run-name={number}"]
    while len(cluster.worker_nodes) < NODES:
        cluster.add_node(num_cpus=1)
    with (folder / f"{number}.log").open("wb") as log:
        job = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    for left in range(kills, -1, -1):
        early = killed_at > 0 and left > 0 and draw.random() < 0.2  # kill during the restart
        while not early and job.poll() is None and ids.stat().st_size <= size:
            time.sleep(0.02)
        if killed_at and not early and job.poll() is None:
            counts["seconds"].append((what, round(time.monotonic() - killed_at, 1)))
        if left:
            time.sleep(draw.uniform(0, 12))
            if job.poll() is not None:
                break
            what = "node" if early else draw.choice(("process", "node"))
            killed_at = time.monotonic()
            kill(cluster, what, draw)
            counts[what] += 1
            counts["early"] += early
            if what == "node" and (fixed or draw.random() < 0.5 or not cluster.worker_nodes):
                cluster.add_node(num_cpus=1)
            time.sleep(2)  # steps that had already begun have ended then
            size = ids.stat().st_size
    assert job.wait() == 0, f"{folder}/{number}.log: exit code {job.returncode}"
    return counts


def count_used(ids: Path) -> tuple[int, int]:
    """Counts examples that were used twice or never in an epoch.

    If a step was taken several times, only its last execution counts.
    """
    steps: Any = collections.defaultdict(list)
    for step, _, examples, _ in map(json.loads, reversed(ids.read_text().splitlines())):
        if len(steps[step]) < program.BATCH:
            steps[step] += examples
    used = collections.Counter(((s - 1) // program.BATCHES, i) for s in steps for i in steps[s])
    return used.total() - len(used), program.EPOCHS * program.EXAMPLES - len(used)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak_ray", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    folder = options.folder.absolute()
    draw = random.Random(options.kills)
    done = 0
    (folder / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "{{cookiecutter.project_slug}}/launch/ray_job.py", folder / "launch")
    (folder / "ctl_core").symlink_to(ROOT / "ctl_core")
    for n in (1, NODES):
        os.environ["PROOF"] = str(folder / f"whole{n}")
        subprocess.run([*TRAIN, f"--run-name=whole{n}", f"--workers={n}"], cwd=folder, check=True)
    os.environ |= {"PROOF": str(folder / "now"), "PAUSE": "0.2", "RAY_AUTH_MODE": "disabled"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    os.environ["RAY_ADDRESS"] = cluster.address
    number = 0
    while done < options.kills:
        counts = train(folder, number, min(KILLS, options.kills - done), cluster, draw)
        files = (folder / "now.npz", folder / f"whole{NODES if counts['fixed'] else 1}.npz")
        counts["difference"] = measure(*(np.load(file).values() for file in files))
        counts["twice, never"] = used = count_used(folder / "now.ids")
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(counts) + "\n")
        print(counts, flush=True)
        assert counts["difference"] <= LIMIT * (not counts["fixed"]), folder
        assert used == (0, 0), folder
        number += 1
        done += counts["process"] + counts["node"]
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
