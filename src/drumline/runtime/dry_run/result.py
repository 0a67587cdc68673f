"""The result of a dry run: every message of one step with its bytes and ranks, and the memory of each rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from ...core import files
from ...core.errors import CorruptFile
from ...core.units import format_bytes


@dataclass(frozen=True, slots=True)
class DryRunMessage:
    """One collective, or one side of a point-to-point message."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    """As in torch: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `receive`, ..."""
    bytes: int
    """Bytes reduced, gathered (the result) or scattered (the input); for point-to-point, the message's."""
    ranks: tuple[int, ...]
    """The group of a collective; sender and receiver of a point-to-point message."""
    phase: str
    """`forward`, `backward`, `communication` or `optimizer`."""


@dataclass(frozen=True, slots=True)
class DryRunRank:
    """One rank, representative of all ranks of its pipeline stage."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    rank: int
    messages: tuple[DryRunMessage, ...]
    """Messages of one step, in order."""
    parameters: int
    """Bytes of its parameters between steps."""
    buffers: int
    gradients: int
    """Bytes of its complete gradients."""
    optimizer: int
    batch: int
    """Bytes of its slice of the batch, on the device."""
    peak: int
    """Peak bytes of live tensors in a step, all of the above included."""
    peak_phase: str
    host: int = 0
    """Bytes of tensors offloaded to host memory."""

    @property
    def sent(self) -> Counter[tuple[str, int]]:
        """Number of messages by name and size."""
        return Counter((m.name, m.bytes) for m in self.messages)


@dataclass(frozen=True, slots=True)
class DryRun:
    """One step of a plan, on one rank per pipeline stage."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    plan: str
    world: int
    """Number of ranks of the plan."""
    device: str
    """Device type whose operators ran: `cpu` or `cuda`."""
    ranks: tuple[DryRunRank, ...]
    """The first rank of every pipeline stage."""
    seconds: float
    """Duration of the dry run."""
    notes: tuple[str, ...] = ()
    """Assumptions that were made."""

    @property
    def peak(self) -> int:
        """The largest peak of any rank."""
        return max(r.peak for r in self.ranks)

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        files.write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> DryRun:
        """Read the JSON form."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)

    def __str__(self) -> str:
        count = sum(len(r.messages) for r in self.ranks)
        return (
            f"dry run of {self.plan} on {self.world} rank{'s' if self.world > 1 else ''}: peak "
            f"{format_bytes(self.peak)}, {count} messages on {len(self.ranks)} of them"
        )
