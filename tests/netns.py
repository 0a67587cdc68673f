"""Several hosts on one machine: network namespaces joined by links of a given rate. Needs root, and `ip` and `tc` of iproute2.

    with two_hosts() as hosts:
        outputs = hosts.run("script.py", "argument")

    with switched_hosts(5, "100mbit") as switch:
        switch.enter(3)  # in a separate process: it is on that host from now on

A rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME in its environment. The hosts
share the file system and the process numbers of this machine; only their network differs.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CPU, PERIOD = Path("/sys/fs/cgroup/cpu"), 5000
"""Control group for shares of cores, and its scheduling period in microseconds."""
NETWORK = 0x40000000
"""CLONE_NEWNET: the kind of namespace."""
PORT = 29561
"""Any port: it is always free in a new namespace."""


class Unable(Exception):
    """Namespaces cannot be made here; the text says why."""


@dataclass(frozen=True)
class Hosts:
    """The names of both namespaces and of the interface in each, and the address of the first."""

    names: tuple[str, str]
    interfaces: tuple[str, str]
    address: str
    cores: float = 0.0
    """Share of a core reserved for each rank; 0: ranks share all cores."""

    def start(
        self, *arguments: str, per_host: int = 2, interleaved: bool = False, **variables: str
    ) -> list[subprocess.Popen[str]]:
        """Start a Python script on all ranks of both hosts, numbered host by host, or in turns if `interleaved`."""
        size = 2 * per_host
        ranks = []
        for rank in range(size):
            host, local = (rank % 2, rank // 2) if interleaved else divmod(rank, per_host)
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(per_host),
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": self.interfaces[host],
                "OMP_NUM_THREADS": "1",
                **variables,
            }
            argv = ["ip", "netns", "exec", self.names[host], sys.executable, *arguments]
            ranks.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            if self.cores:
                _limit(_cpu_group(self.names[host], rank), self.cores, ranks[-1].pid)
        return ranks

    def run(
        self, *arguments: str, per_host: int = 2, timeout: float = 120.0, interleaved: bool = False, **variables: str
    ) -> list[str]:
        """Run a script on all ranks and return their output; raises with their stderr if one fails or the time is up."""
        ranks = self.start(*arguments, per_host=per_host, interleaved=interleaved, **variables)
        end = time.monotonic() + timeout
        outputs, late = [], False
        try:
            for rank in ranks:
                try:
                    outputs.append(rank.communicate(timeout=max(0.1, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    late = True
                    rank.kill()
                    outputs.append(rank.communicate())
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.communicate()
        codes = [rank.returncode for rank in ranks]
        if any(codes):
            errors = "\n".join(f"rank {r} ({codes[r]}): {err[-3000:]}" for r, (_, err) in enumerate(outputs))
            what = f"not done after {timeout:g} s" if late else f"ranks ended with {codes}"
            raise RuntimeError(f"{what}\n{errors}")
        return [out for out, _ in outputs]


def _cpu_group(name: str, rank: int) -> Path:
    return CPU / f"{name}-{rank}"


def _limit(group: Path, cores: float, pid: int) -> None:
    """Limit a process to a share of a core, so that waiting ranks do not make the others faster."""
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD)))
    (group / "cgroup.procs").write_text(str(pid))


@contextmanager
def two_hosts(
    rate: str = "1gbit", *, burst: str = "256kb", latency: str = "50ms", cores: float = 0.0
) -> Iterator[Hosts]:
    """Make both hosts and their link, and always remove them. `cores`: share of a core for each rank."""
    if cores and not CPU.exists():
        raise Unable(f"there is no {CPU}: shares of cores need the cpu controller of control groups, version 1")
    check_tools()
    token = secrets.token_hex(3)
    names = f"drumline-{token}-a", f"drumline-{token}-b"
    interfaces = f"dl{token}a", f"dl{token}b"
    net = network_of(token)
    hosts = Hosts(names, interfaces, f"{net}.1", cores)
    try:
        for name in names:
            run_tool("ip", "netns", "add", name)
        run_tool("ip", "link", "add", interfaces[0], "type", "veth", "peer", "name", interfaces[1])
        for i, (name, interface) in enumerate(zip(names, interfaces, strict=True)):
            run_tool("ip", "link", "set", interface, "netns", name)
            run_tool("ip", "-n", name, "addr", "add", f"{net}.{i + 1}/24", "dev", interface)
            run_tool("ip", "-n", name, "link", "set", interface, "up")
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("tbf", "rate", rate, "burst", burst, "latency", latency)
            run_tool("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", interface, "root", *shape)
        yield hosts
    finally:
        # removing a namespace removes its interfaces; one that was never moved is deleted here
        subprocess.run(["ip", "link", "del", interfaces[0]], capture_output=True, check=False)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            for group in CPU.glob(f"{name}-*"):
                group.rmdir()


@dataclass(frozen=True)
class SwitchedHosts:
    """Hosts with one port each on a switch. Their interface is `eth0`."""

    names: tuple[str, ...]
    net: str

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{self.net}.{host + 1}"

    def enter(self, host: int) -> None:
        """Move the calling thread, and all that it will start, to a host."""
        enter(self.names[host])


@contextmanager
def switched_hosts(count: int, rate: str, *, mtu: int = 1500, limit: str = "64mb") -> Iterator[SwitchedHosts]:
    """Make hosts whose ports send and receive at a rate, and always remove them.

    An idle port sends one packet immediately (`burst`); longer messages are limited by the rate. Its queue holds
    `limit`, so that nothing is lost where many send to one port.
    """
    check_tools()
    token = secrets.token_hex(3)
    names = tuple(f"drumline-{token}-{i}" for i in range(count))
    switch, net = f"drumline-{token}-switch", network_of(token)
    shape = ("root", "tbf", "rate", rate, "burst", str(mtu + 100), "limit", limit)
    try:
        run_tool("ip", "netns", "add", switch)
        run_tool("ip", "-n", switch, "link", "add", "switch", "mtu", str(mtu), "type", "bridge")
        run_tool("ip", "-n", switch, "link", "set", "switch", "up")
        for i, name in enumerate(names):
            port = f"port{i}"
            run_tool("ip", "netns", "add", name)
            ends = ("type", "veth", "peer", "name", port, "mtu", str(mtu), "netns", switch)
            run_tool("ip", "link", "add", "eth0", "mtu", str(mtu), "netns", name, *ends)
            run_tool("ip", "-n", name, "addr", "add", f"{net}.{i + 1}/24", "dev", "eth0")
            run_tool("ip", "-n", name, "link", "set", "eth0", "up")
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
            run_tool("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            run_tool("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
            run_tool("tc", "-n", switch, "qdisc", "add", "dev", port, *shape)
        yield SwitchedHosts(names, net)
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter(name: str) -> None:
    """Move the calling thread, and all that it will start, to a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), NETWORK):
            raise Unable(f"setns({name}): {os.strerror(ctypes.get_errno())}")


def check_tools() -> None:
    """Raise `Unable` where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise Unable("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unable(f"there is no `{tool}`: apt-get install iproute2")


def network_of(token: str) -> str:
    """Choose a network in 10.128.0.0/9 for a token; the namespaces are isolated from all others."""
    return f"10.{128 + int(token[:2], 16) // 2}.{int(token[2:4], 16)}"


def run_tool(*argv: str) -> None:
    """Run a command; raise `Unable` with its output if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise Unable(f"`{' '.join(argv)}`: {output[0] if output else done.returncode}")
