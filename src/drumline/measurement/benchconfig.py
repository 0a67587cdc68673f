"""What `drumline bench` is to measure, and what came out of it. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..clusters import Cluster, Link
from ..clusters.spec import RankLink
from ..core.errors import InputError
from ..reports.bench import Result

MESSAGES = ("latency", "bandwidth")
"""What is measured beside the collectives: between the first two ranks."""
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "complex64",
    "complex128",
)
"""Types of elements that can be summed by every transport."""


@dataclass(frozen=True, slots=True)
class Config:
    """What to measure."""

    collectives: tuple[str, ...]
    """Of the table of schedules, and MESSAGES."""
    sizes: tuple[int, ...]
    """Bytes of the whole buffer."""
    algorithms: tuple[str, ...]
    """Names, `ring*4` for four segments, `native`, `auto`; ("all",) for all of them."""
    transports: tuple[str, ...]
    dtype: str = "float32"
    seconds: float = 20.0
    cluster: Cluster | None = None
    """What auto chooses by; without it, by the links that are measured first."""
    pairs: bool = False
    """Whether the link of every pair of ranks is measured."""


@dataclass(slots=True)
class Outcome:
    """What was measured over one transport, or over several."""

    results: list[Result] = field(default_factory=list)
    links: dict[str, tuple[Link, float]] = field(default_factory=dict)
    """By transport: the fit, and the mean relative error that it left."""
    pairs: list[RankLink] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take in what another transport gave."""
        self.results += other.results
        self.links |= other.links
        self.pairs = self.pairs or other.pairs
        self.left_out += other.left_out


def parse_algorithm(text: str) -> tuple[str, int]:
    """`ring*4`: four segments."""
    name, star, number = text.partition("*")
    if star and not (number.isdigit() and int(number) > 0):
        raise InputError(f"algorithm {text!r}", rule="a name, or name*n for n segments")
    return name, int(number) if star else 1
