"""The interface of a launcher: what starts the ranks of a job, and how a verb of Drumline runs on them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..core.errors import InputError
from ..core.rank_info import RankInfo, rank_info

LAUNCHER = "DRUMLINE_LAUNCHER"
"""The variable with the name of the launcher of ours that started this rank."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How many ranks to start, and where."""

    ranks: int
    """Over all hosts."""
    hosts: tuple[str, ...] = ()
    """Their names, where the launcher does not choose them."""
    nodes: int = 1
    node: int = 0
    """The number of this host, from 0."""
    rendezvous: str = ""
    """Where the ranks meet: `tcp://host:port` or `file:///path`; empty: the launcher decides."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for every rank."""
    name: str = ""
    """Name of the job, if the launcher uses names."""
    image: str = ""
    """Container image, if the launcher uses containers."""
    started_by: str = "local"
    """The launcher that has started this command on this host."""

    @property
    def per_node(self) -> int:
        """Ranks on each host."""
        return self.ranks // self.nodes

    def check(self) -> None:
        """Refuse counts that do not divide."""
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise InputError(
                f"--ranks {self.ranks} --nodes {self.nodes}",
                rule="at least one rank on each host, and equally many",
                fix=f"--ranks {max(1, self.ranks // max(1, self.nodes)) * max(1, self.nodes)}",
            )
        if not 0 <= self.node < self.nodes:
            raise InputError(f"--node {self.node}", rule=f"a number from 0 to {self.nodes - 1}")


class Launcher(ABC):
    """Starts the ranks of a job, or has started this one."""

    name: ClassVar[str]
    """As in messages, and after --launcher."""

    @classmethod
    @abstractmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """Whether this launcher has started this process as one of the ranks of a job."""

    def where(self, environment: Mapping[str, str] | None = None) -> RankInfo:
        """This rank, by the launcher's variables."""
        return rank_info(environment)

    def start(self, command: Sequence[str], options: LaunchOptions) -> int:
        """Run a `drumline` command on ranks of this launcher; the exit code."""
        raise InputError(f"--launcher {self.name} starts nothing from here", rule=self.how)

    def script(self, command: Sequence[str], options: LaunchOptions) -> str:
        """The file that starts a `drumline` command through this launcher."""
        raise InputError(f"--launcher {self.name} has no script", rule=self.how)

    how: ClassVar[str] = ""
    """How ranks are started with it."""


def started_by(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a launcher of ours with this name has started this process as one of several ranks."""
    return environment.get(LAUNCHER) == name and "RANK" in environment and "WORLD_SIZE" in environment


def host_command(
    command: Sequence[str], options: LaunchOptions, launcher: str, node: int, rendezvous: str, *, python: str
) -> list[str]:
    """The command line that starts one host's ranks; over ssh it ends them when its standard input is closed."""
    variables = [word for key, value in options.environment.items() for word in ("--env", f"{key}={value}")]
    return [
        *(python, "-m", "drumline", "launch", "--started-by", launcher),
        *("--ranks", str(options.ranks), "--nodes", str(options.nodes), "--node", str(node)),
        *("--rendezvous", rendezvous, *variables, *command),
    ]


def rank_environment(options: LaunchOptions, local: int) -> dict[str, str]:
    """The variables of a rank of this host."""
    per_host = options.per_node
    threads = max(1, (os.cpu_count() or 1) // per_host)
    return {
        "OMP_NUM_THREADS": str(threads),
        **options.environment,
        "RANK": str(options.node * per_host + local),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        LAUNCHER: options.started_by,
    }
