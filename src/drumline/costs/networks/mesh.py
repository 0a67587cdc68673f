"""How many rings devices can form over the links between them, where no switch joins all of them.

A ring needs a link in one direction between neighbours; two rings that share a link in the same direction halve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

CUBE = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (0, 4): 2,
    (1, 2): 2,
    (1, 3): 1,
    (1, 5): 2,
    (2, 3): 2,
    (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
}
"""Links between eight devices of six links each: the cube of a DGX-1 with V100, (device, device) -> links."""

_Links = dict[tuple[int, int], int]


def ring_share(devices: int, p: int) -> float:
    """The share of a device's bandwidth that rings over the first p of so many devices get.

    Eight devices form the cube above. Of others each pair has equal links, and p of them use those among themselves.
    """
    if p <= 1:
        return 1.0
    if devices != 8:
        return (p - 1) / max(1, devices - 1)
    each = sum(count for pair, count in CUBE.items() if 0 in pair)
    return rings(p) / each


@cache
def rings(p: int) -> int:
    """Rings over the first p devices of the cube, each with links of its own.

    Two devices have as many as links. Of more, each circle is a ring in either direction. Where there is no circle,
    the ring goes back through a device that it has passed, which has links to spare.
    """
    here = {pair: count for pair, count in CUBE.items() if max(pair) < p}
    if p == 2:
        return here[0, 1]
    return 2 * max(1, _most(here, p))


def _most(links: _Links, p: int) -> int:
    """The most circles through all p devices that do not share a link."""
    best = 0
    for circle in _circles(links, p):
        left = dict(links)
        for pair in circle:
            left[pair] -= 1
        best = max(best, 1 + _most(left, p))
        if 2 * best >= min(_degrees(links, p)):
            break
    return best


def _degrees(links: _Links, p: int) -> list[int]:
    return [2 * (sum(count for pair, count in links.items() if d in pair) // 2) for d in range(p)]


def _circles(links: _Links, p: int) -> Iterator[list[tuple[int, int]]]:
    """Every circle from device 0 through all others, as the links that it takes."""

    def pair(a: int, b: int) -> tuple[int, int]:
        return (a, b) if a < b else (b, a)

    def onward(path: list[int]) -> Iterator[list[int]]:
        if len(path) == p:
            if links.get(pair(path[-1], 0), 0):
                yield path
            return
        for d in range(1, p):
            if d not in path and links.get(pair(path[-1], d), 0):
                yield from onward([*path, d])

    for path in onward([0]):
        yield [pair(a, b) for a, b in zip(path, [*path[1:], 0], strict=True)]
