"""A real Slurm cluster on this machine: munged, slurmctld and two slurmd, each with its own ports and folders.

    with slurm_cluster(folder) as cluster:
        cluster.run("srun", "-N2", "-n2", "hostname")

The programs are those of Debian's slurm-wlm and munge. They run as root, as children of the test, and end with it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launched import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")
NODES = 2
CONFIG = """\
ClusterName=drumline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SwitchType=switch/none
KillWait=30
SchedulerParameters=sched_interval=1
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """A Slurm cluster cannot be made here; the text says why."""


@dataclass
class SlurmCluster:
    """A running cluster."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(
        self, *command: str, cwd: Path | None = None, timeout: float = 150, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm, or one inside an allocation."""
        return subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=environment(SLURM_CONF=str(self.folder / "slurm.conf"), **more),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def wait_until_ended(self, job: str, timeout: float = 120) -> str:
        """The last state of a job."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            shown = self.run("scontrol", "show", "job", job).stdout
            state = shown.partition("JobState=")[2].split()[0] if "JobState=" in shown else ""
            if state and state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return state
            time.sleep(0.2)
        raise TimeoutError(f"job {job} has not ended: {shown}")

    def logs(self) -> str:
        """The last lines of all logs."""
        return "\n".join(f"{p.name}:\n{p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.log")))


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes, and end it whatever happens."""
    if os.geteuid() != 0:
        raise NoSlurm("Slurm's daemons are started as root")
    if missing := [name for name in PROGRAMS if _program(name) is None]:
        raise NoSlurm(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    cluster = SlurmCluster(folder)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, ports=_free_ports(1 + NODES)))
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    try:
        _start(
            cluster,
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={key}",
            f"--log-file={folder}/munged.log",
            f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munged.seed",
        )
        _wait(lambda: (folder / "munge.socket").exists(), cluster, "munged")
        _start(cluster, "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for i in range(1, NODES + 1):
            _start(cluster, "slurmd", "-D", "-N", f"n{i}", "-f", str(folder / "slurm.conf"))
        idle = ["sinfo", "-h", "-o", "%t %D"]
        _wait(lambda: cluster.run(*idle).stdout.strip() == f"idle {NODES}", cluster, "the nodes")
        yield cluster
    finally:
        for process in reversed(cluster.processes):
            process.terminate()
        for process in cluster.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")


def _start(cluster: SlurmCluster, *command: str) -> None:
    program = _program(command[0])
    assert program is not None
    with (cluster.folder / f"{command[0]}-errors.log").open("a") as errors:
        cluster.processes.append(
            subprocess.Popen(
                [program, *command[1:]],
                env=environment(SLURM_CONF=str(cluster.folder / "slurm.conf")),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                stdin=subprocess.DEVNULL,
            )
        )


def _wait(ready: object, cluster: SlurmCluster, what: str) -> None:
    end = time.monotonic() + 60
    while not ready():  # type: ignore[operator]
        if time.monotonic() > end or any(p.poll() is not None for p in cluster.processes):
            raise NoSlurm(f"{what} did not start:\n{cluster.logs()}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports
