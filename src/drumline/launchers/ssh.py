"""ssh: one connection to each host of a hostfile, which starts that host's ranks and ends them with the connection."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from ..core import files
from ..core.errors import InputError
from ..core.node_list import MOST_HOSTS, check_host, parse_node_list
from .launcher import Launcher, LaunchOptions, host_command, started_by
from .processes import wait_for_all

_FIRST_PORT, _PORTS = 20_000, 12_000
"""Ports of which one is chosen: below those that Linux gives out by itself."""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
"""Never asks for a password or accepts an unknown host."""


@final
class SshLauncher(Launcher):
    """Processes on several hosts, over ssh."""

    name = "ssh"
    how = "drumline launch --launcher ssh --hostfile hosts --ranks N train JOB"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By the name that `start` leaves."""
        return started_by(cls.name, environment)

    def start(self, command: Sequence[str], options: LaunchOptions) -> int:
        """Run the command on all hosts; the exit code of the first that fails."""
        processes = [
            subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
            for words in self.commands(command, options)
        ]
        return wait_for_all(processes)

    def commands(self, command: Sequence[str], options: LaunchOptions) -> list[list[str]]:
        """The command line for each host. A remote shell reads the last word, so it is quoted."""
        if len(options.hosts) != options.nodes:
            raise InputError(f"{len(options.hosts)} hosts for {options.nodes} nodes", rule="one host for each node")
        port = _FIRST_PORT + secrets.randbelow(_PORTS)
        meet = options.rendezvous or f"tcp://{_in_url(options.hosts[0])}:{port}"
        lines = []
        for node, host in enumerate(options.hosts):
            words = host_command(command, options, self.name, node, meet, python=sys.executable)
            remote = shlex.join(["cd", os.getcwd()]) + " && exec " + shlex.join(words)
            lines.append([*_SSH, "--", check_host(host), remote])
        return lines


def read_hostfile(path: str | Path) -> tuple[str, ...]:
    """The hosts of a file: one on each line, or a list such as gpu[1-4]; a comment begins with #."""
    hosts: list[str] = []
    for number, line in enumerate(files.read_text(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 1:
            raise InputError(
                f"{line.strip()[:80]!r} is not a host name",
                where=f"{path}, line {number}",
                rule="one host on each line",
            )
        hosts += parse_node_list(words[0], f"{path}, line {number}")
        if len(hosts) > MOST_HOSTS:
            raise InputError(f"more than {MOST_HOSTS} hosts", where=str(path))
    if not hosts:
        raise InputError(f"{path} names no host", rule="one host on each line")
    if len(set(hosts)) < len(hosts):
        twice = next(h for h in hosts if hosts.count(h) > 1)
        raise InputError(
            f"{twice} is listed twice", where=str(path), rule="each host once; --ranks counts over all hosts"
        )
    return tuple(hosts)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
