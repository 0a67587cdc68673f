"""Count the rings that devices can form over direct links, without a switch.

A ring needs one link in one direction between neighbours. Two rings on the same link in the same direction halve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

DGX1_LINKS = {
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
"""Cube mesh of a DGX-1 with eight V100, six links each: (device, device) -> links."""

_Links = dict[tuple[int, int], int]


def ring_share(devices: int, p: int) -> float:
    """Fraction of a device's bandwidth that rings over the first p of `devices` get.

    Eight devices form the cube mesh above. Otherwise every pair has equally many links, and p devices use the links
    among themselves.
    """
    if p <= 1:
        return 1.0
    if devices != 8:
        return (p - 1) / max(1, devices - 1)
    links_per_device = sum(count for pair, count in DGX1_LINKS.items() if 0 in pair)
    return rings(p) / links_per_device


@cache
def rings(p: int) -> int:
    """Link-disjoint rings over the first p devices of the cube mesh.

    Two devices have one ring per link. With more, each cycle is a ring in either direction. Without a cycle, the ring
    returns through a device that it has passed, which has spare links.
    """
    links = {pair: count for pair, count in DGX1_LINKS.items() if max(pair) < p}
    if p == 2:
        return links[0, 1]
    return 2 * max(1, _most_cycles(links, p))


def _most_cycles(links: _Links, p: int) -> int:
    """Most link-disjoint cycles through all p devices."""
    best = 0
    for cycle in _cycles(links, p):
        left = dict(links)
        for pair in cycle:
            left[pair] -= 1
        best = max(best, 1 + _most_cycles(left, p))
        if 2 * best >= min(_even_degrees(links, p)):
            break
    return best


def _even_degrees(links: _Links, p: int) -> list[int]:
    return [2 * (sum(count for pair, count in links.items() if d in pair) // 2) for d in range(p)]


def _cycles(links: _Links, p: int) -> Iterator[list[tuple[int, int]]]:
    """Every cycle from device 0 through all others, as a list of links."""

    def pair(a: int, b: int) -> tuple[int, int]:
        return (a, b) if a < b else (b, a)

    def extend(path: list[int]) -> Iterator[list[int]]:
        if len(path) == p:
            if links.get(pair(path[-1], 0), 0):
                yield path
            return
        for d in range(1, p):
            if d not in path and links.get(pair(path[-1], d), 0):
                yield from extend([*path, d])

    for path in extend([0]):
        yield [pair(a, b) for a, b in zip(path, [*path[1:], 0], strict=True)]
