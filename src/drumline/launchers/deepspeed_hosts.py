"""Hosts by the options of DeepSpeed's launcher: --num_gpus, --num_nodes, --hostfile with slots, --node_rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core import files
from ..core.errors import InputError
from ..core.node_list import MOST_HOSTS, check_host
from .launcher import Launcher, LaunchOptions

PORT = 29500
_LINE = re.compile(r"(\S+)(?:\s+slots\s*=\s*(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options of DeepSpeed's launcher, as they were given."""

    num_gpus: int | None = None
    """Ranks on each host."""
    num_nodes: int | None = None
    hostfile: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    """Where each host's command is typed by hand."""

    @property
    def given(self) -> bool:
        """Whether any of them was."""
        values = (self.num_gpus, self.num_nodes, self.hostfile, self.master_addr, self.master_port, self.node_rank)
        return any(value is not None for value in values)

    @property
    def several(self) -> bool:
        """Whether there are several hosts."""
        return self.hostfile is not None or (self.num_nodes or 1) > 1

    def check(self, ranks: int | None) -> None:
        """Refuse what contradicts itself."""
        if ranks is not None:
            raise InputError("--ranks with options of DeepSpeed's launcher", rule="one of them", fix="--num_gpus")
        for name, value, least in (("num_gpus", self.num_gpus, 1), ("num_nodes", self.num_nodes, 1)):
            if value is not None and value < least:
                raise InputError(f"--{name} {value}", rule="at least 1")
        if self.master_port is not None and not 0 < self.master_port < 2**16:
            raise InputError(f"--master_port {self.master_port}", rule="from 1 to 65535")
        nodes = self.num_nodes or 1
        if self.hostfile is None and nodes > 1 and (self.node_rank is None or self.master_addr is None):
            raise InputError(
                f"--num_nodes {nodes} without --hostfile",
                rule="hosts are started over ssh, or each by hand with its number and where to meet",
                fix="--hostfile FILE, or --node_rank N --master_addr HOST on each host",
            )
        if self.node_rank is not None and self.hostfile is not None:
            raise InputError("--node_rank and --hostfile", rule="by hand, or over ssh", fix="use one of them")
        if self.node_rank is not None and not 0 <= self.node_rank < nodes:
            raise InputError(f"--node_rank {self.node_rank}", rule=f"from 0 to {nodes - 1}: --num_nodes is {nodes}")

    def ranks_here(self) -> int:
        """Ranks of this host: those asked for, else one for each of its GPUs."""
        if self.num_gpus is not None:
            return self.num_gpus
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise InputError(
                "no --num_gpus, and no GPU here",
                rule="one rank for each GPU, or as many as you say",
                fix="--num_gpus 2",
            )
        return count

    def launch(self) -> tuple[Launcher, LaunchOptions]:
        """The launcher of several hosts, and its options."""
        from .local_launcher import LocalLauncher
        from .ssh import SshLauncher

        port = self.master_port or PORT
        meet = f"tcp://{_in_url(self.master_addr)}:{port}" if self.master_addr else ""
        if self.hostfile is None:
            n, nodes = self.ranks_here(), self.num_nodes or 1
            return LocalLauncher(), LaunchOptions(n * nodes, (), nodes, self.node_rank or 0, meet)
        slots = read_slots(self.hostfile)
        nodes = self.num_nodes or len(slots)
        if nodes > len(slots):
            raise InputError(f"--num_nodes {nodes}", where=self.hostfile, rule=f"it names {len(slots)} hosts")
        chosen = dict(list(slots.items())[:nodes])
        n = self._per_host(chosen)
        hosts = tuple(chosen)
        if not meet and self.master_port:
            meet = f"tcp://{_in_url(hosts[0])}:{port}"
        return SshLauncher(), LaunchOptions(n * nodes, hosts, nodes, 0, meet)

    def _per_host(self, slots: dict[str, int | None]) -> int:
        counts = {n for n in slots.values() if n is not None}
        if self.num_gpus is not None:
            small = next((h for h, n in slots.items() if n is not None and n < self.num_gpus), None)
            if small is not None:
                raise InputError(
                    f"--num_gpus {self.num_gpus}", where=str(self.hostfile), rule=f"{small} has slots={slots[small]}"
                )
            return self.num_gpus
        if len(counts) != 1 or None in slots.values():
            raise InputError(
                f"hosts with slots={sorted(counts) or 'none'}",
                where=str(self.hostfile),
                rule="equally many ranks on each host",
                fix=f"--num_gpus {min(counts, default=1)}",
            )
        return counts.pop()


def host_command(words: Sequence[str], options: LaunchOptions, *, local_rank: bool) -> list[str]:
    """The `drumline run` of each rank: with an option of DeepSpeed's, the script gets `--local_rank` there."""
    return ["run", *(["--num_gpus", str(options.per_node)] if local_rank else []), *words]


def read_slots(path: str | Path) -> dict[str, int | None]:
    """The hosts of a hostfile and their slots: `worker-1 slots=4` on a line; a comment begins with #."""
    slots: dict[str, int | None] = {}
    for number, line in enumerate(files.read_text(path).splitlines(), 1):
        text, where = line.partition("#")[0].strip(), f"{path}, line {number}"
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if not match or match[2] == "0":
            raise InputError(f"{text[:80]!r} names no host", where=where, rule="such as worker-1 slots=4")
        host = check_host(match[1])
        if host in slots:
            raise InputError(f"{host} is listed twice", where=where, rule="each host once")
        slots[host] = int(match[2]) if match[2] else None
        if len(slots) > MOST_HOSTS:
            raise InputError(f"more than {MOST_HOSTS} hosts", where=str(path))
    if not slots:
        raise InputError(f"{path} names no host", rule="such as worker-1 slots=4")
    return slots


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
