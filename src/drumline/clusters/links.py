"""Links of a cluster: levels of the network, single links between ranks, and times of short messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from ..core.units import format_seconds, parse_bandwidth
from .measured import STRICT, Positive, Seconds

Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth), Positive]


@dataclass(frozen=True, slots=True)
class LogPTimes:
    """Times of a short message in the LogP model. A message takes o + L + o from one rank to another."""

    __pydantic_config__ = STRICT
    L: Seconds
    """Latency: time on the link."""
    o: Seconds
    """Overhead: time for which a rank is busy with sending, or with receiving."""
    g: Seconds
    """Gap: time from one message of a rank to its next, the reciprocal of the message rate."""

    def __str__(self) -> str:
        return f"L {format_seconds(self.L)}, o {format_seconds(self.o)}, g {format_seconds(self.g)}"


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network in the alpha-beta model: a message of m bytes takes alpha + m / bandwidth."""

    __pydantic_config__ = STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {"wire": "type"}
    alpha: Seconds
    """Start-up time of a message."""
    bandwidth: Bandwidth
    """Bytes per second in one direction: of one device inside a node, of one node between nodes."""
    type: str = ""
    """Its technology, as link_types.toml names it (`nvswitch`, `infiniband`, ...); empty if unknown."""
    logp: LogPTimes | None = None
    """Times of short messages in the LogP model, if measured."""

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return 1 / self.bandwidth


@dataclass(frozen=True, slots=True)
class RankLink:
    """The measured link from one rank to another."""

    __pydantic_config__ = STRICT
    src: Annotated[int, Field(ge=0)]
    """Rank that sends."""
    dst: Annotated[int, Field(ge=0)]
    """Rank that receives."""
    link: Link
