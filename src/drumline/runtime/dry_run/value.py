"""What a dry run says: every message of one step with its bytes and ranks, and what a rank holds, in bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from ...core import files
from ...core.errors import CorruptFile
from ...core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, or one side of a message from rank to rank."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    """As in torch: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `receive`, ..."""
    bytes: int
    """What is summed, what is gathered in the end, what there was before it was scattered; of a message its own."""
    ranks: tuple[int, ...]
    """Of a collective its group; of a message its sender and its receiver."""
    phase: str
    """`forward`, `backward`, `communication` or `optimizer`."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, which stands for all of its kind."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    rank: int
    messages: tuple[Message, ...]
    """Of one step, in their order."""
    parameters: int
    """Bytes of what it holds of the parameters between two steps."""
    buffers: int
    gradients: int
    """Bytes of the memory of its gradients, when they are complete."""
    optimizer: int
    batch: int
    """Bytes of its slice of the batch, on the device."""
    peak: int
    """Most bytes of tensors that are alive at once in a step, all of the above included."""
    peak_phase: str
    host: int = 0
    """Bytes of tensors in host memory, where the plan puts some there."""

    @property
    def sent(self) -> Counter[tuple[str, int]]:
        """How often a message of a name and size is sent."""
        return Counter((m.name, m.bytes) for m in self.messages)


@dataclass(frozen=True, slots=True)
class DryRun:
    """One step of a plan, of one rank of each kind."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    plan: str
    world: int
    """How many ranks the plan has."""
    device: str
    """The kind of device whose operators were run: `cpu` or `cuda`."""
    ranks: tuple[Rank, ...]
    """One of each kind: of every pipeline stage the first."""
    seconds: float
    """How long the dry run took."""
    notes: tuple[str, ...] = ()
    """What had to be assumed."""

    @property
    def peak(self) -> int:
        """The most that any rank has alive at once."""
        return max(r.peak for r in self.ranks)

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        files.write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> DryRun:
        """Read the JSON form back."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)

    def __str__(self) -> str:
        count = sum(len(r.messages) for r in self.ranks)
        return (
            f"dry run of {self.plan} on {self.world} rank{'s' if self.world > 1 else ''}: peak "
            f"{format_bytes(self.peak)}, {count} messages on {len(self.ranks)} of them"
        )
