"""A Slurm cluster of two nodes on this machine, from Debian's packages in a temporary folder.

Both nodes are this machine. Their names are in a separate /etc/hosts, which requires a mount
namespace and therefore root.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ctl_core.cluster.supervisor import find_free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
OURS = ("SLURM_", "SBATCH_", "CTL_", "TF_", "VENV", "VIRTUAL_ENV", "PYTHONPATH")
NODES = ("node9", "node10")  # in alphabetical order, node10 is before node9
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
MpiDefault=none
KillWait=10
SchedulerParameters=sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node9 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=node10 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=work Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10
"""


def missing() -> str:
    """Returns the reason why Slurm cannot run on this machine; empty if it can."""
    if lacks := [name for name in PROGRAMS if not shutil.which(name, path=_PATH)]:
        return f"{', '.join(lacks)} not installed"
    return "needs root" if os.geteuid() else ""


_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slurm:
    """A controller and two nodes, which run until ``stop`` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname()
        (folder / "state").mkdir()
        conf = CONF.format(folder=folder, host=host, ports=find_free_ports(3))
        (folder / "slurm.conf").write_text(conf)
        hosts = "127.0.0.1 localhost {} {} {}\n".format(host, *NODES)
        (folder / "hosts").write_text(hosts)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(OURS)},
            "PATH": _PATH,
            "VENV": sys.prefix,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def start(self) -> None:
        """Starts the controller and the nodes, and waits until both nodes accept jobs."""
        files = [f"--{k}-file={self.folder}/munge.{k}" for k in ("key", "pid", "log", "seed")]
        socket_of = f"--socket={self.folder}/munge.socket"
        self._run("munged", "--foreground", "--force", socket_of, *files)
        self._run("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for node in NODES:
            self._run("slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))
        end = time.monotonic() + 60
        ask = ("sinfo", "-h", "-N", "-p", "work", "-o", "%t")
        while self.call(*ask, check=False).split() != 2 * ["idle"]:
            if time.monotonic() > end:
                raise AssertionError(self._logs())
            time.sleep(0.2)

    def _run(self, *command: str) -> None:
        own_hosts = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", own_hosts, "sh", *command],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._processes.append(process)

    def _logs(self) -> str:
        texts = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log")]
        return "\n".join(texts)

    def call(self, *command: str, cwd: Path | None = None, check: bool = True) -> str:
        """Runs a command of Slurm, and returns its output."""
        how: dict[str, Any] = {"cwd": cwd, "env": self.environ, "timeout": 60}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}\n{self._logs()}")
        return done.stdout

    def submit(self, project: Path, *options: str, partition: str = "work") -> str:
        """Submits a job in a project, and returns the job's number."""
        printed = self.call("sbatch", "--parsable", "--partition", partition, *options, cwd=project)
        return printed.strip().split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Returns the fields that scontrol shows for a job."""
        printed = self.call("scontrol", "show", "--oneliner", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", printed.splitlines()[0]))

    def wait(self, number: str, state: str = "COMPLETED", seconds: float = 900) -> dict[str, str]:
        """Waits until a job is in this state, and fails if the job ends in another state."""
        end = time.monotonic() + seconds
        while True:
            description = self.job(number)
            if description["JobState"] == state:
                return description
            ended = description["JobState"] in (
                "COMPLETED",
                "FAILED",
                "CANCELLED",
                "TIMEOUT",
                "NODE_FAIL",
            )
            if time.monotonic() > end or (ended and description["Requeue"] == "0"):
                raise AssertionError(f"{description}\n{self._logs()}")
            time.sleep(0.3)

    def stop(self) -> None:
        """Ends all jobs, nodes and the controller."""
        self.call("scancel", "--partition=work", "--partition=urgent", check=False)
        for process in reversed(self._processes):
            with_children = os.getpgid(process.pid)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(with_children, signal.SIGKILL)


if __name__ == "__main__" and (lacks := missing()):
    sys.exit(
        f"test-slurm: {lacks}; on Debian, as root: apt-get install --no-install-recommends "
        "slurmctld slurmd slurm-client munge"
    )
