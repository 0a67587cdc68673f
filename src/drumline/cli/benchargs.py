"""What `drumline bench` is told: sizes, collectives, algorithms and transports, read and refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.errors import InputError, nearest
from ..core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from ..clusters import Cluster

TRANSPORTS = ("threads", "gloo", "shm", "nccl", "mpi")
_FACTOR = 8
_LARGEST = 2**34


def parse_sizes(text: str) -> tuple[int, ...]:
    """`8..1MiB` by a factor of eight, `8..1MiB:2` by two, or a list of sizes and ranges; sorted, each once."""
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, dots, last = span.partition("..")
        try:
            factor = float(step) if step else float(_FACTOR)
            size, end = round(parse_bytes(first)), round(parse_bytes(last if dots else first))
        except ValueError as e:
            raise InputError(f"--sizes {text}", rule=str(e), fix="such as 8..16MiB or 8,4KiB,1MiB") from None
        if not 1 <= size <= end <= _LARGEST or factor <= 1:
            raise InputError(f"--sizes {part}", rule=f"1 <= first <= last <= {format_bytes(_LARGEST)}, factor > 1")
        found.add(end)
        while size < end:
            found.add(size)
            size = max(size + 1, round(size * factor))
    return tuple(sorted(found))


def collectives_of(names: Iterable[str]) -> tuple[str, ...]:
    """Those that were named, or all."""
    from ..measurement.benchconfig import MESSAGES
    from ..schedules import ALGORITHMS

    known = (*MESSAGES, *ALGORITHMS)
    chosen = tuple(dict.fromkeys(names)) or known
    for name in chosen:
        if name not in known:
            raise InputError(
                f"unknown collective {name!r}", rule=f"known: {', '.join(known)}", fix=nearest(name, known)
            )
    return chosen


def algorithms_of(text: str, collectives: tuple[str, ...]) -> tuple[str, ...]:
    """Names between commas, each known to at least one of the collectives."""
    from ..measurement.benchconfig import parse_algorithm
    from ..schedules import ALGORITHMS

    if text == "all":
        return ("all",)
    known = {"auto", "native", *(a for c in collectives for a in ALGORITHMS.get(c, ()))}
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if parse_algorithm(name)[0] not in known:
            raise InputError(
                f"unknown algorithm {name!r}",
                rule=f"known here: all, {', '.join(sorted(known))}",
                fix=nearest(name, known),
            )
    return names


def transports_of(text: str) -> tuple[str, ...]:
    """Names between commas."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in TRANSPORTS:
            raise InputError(
                f"unknown transport {name!r}", rule=f"known: {', '.join(TRANSPORTS)}", fix=nearest(name, TRANSPORTS)
            )
    return names


def dtype_of(name: str) -> str:
    """A type of elements."""
    from ..measurement.benchconfig import DTYPES

    if name not in DTYPES:
        raise InputError(f"--dtype {name}", rule=f"known: {', '.join(DTYPES)}", fix=nearest(name, DTYPES))
    return name


def cluster_of(name: str | None) -> Cluster | None:
    """The file, or one of the catalogue."""
    from ..clusters import load

    return None if name is None else load(name)
