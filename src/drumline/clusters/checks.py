"""Checks of a cluster file beyond its types: forgotten units, mixed hardware, and the line of a bad key."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core import files
from ..core.errors import ClusterError, nearest

if TYPE_CHECKING:
    from .spec import Cluster

SLOWEST = 1e4
"""Bytes per second; a smaller bandwidth lacks its unit: 300 was meant to be 300GB/s."""
LONGEST = 1.0
"""Seconds; a longer startup lacks its unit: 3 was meant to be 3us."""
SMALLEST = 1e6
"""Bytes; a smaller device memory lacks its unit: 40 was meant to be 40GB."""

MOST_DIRECTIONS = 3
"""Directions of a torus."""
TOPOLOGIES = ("fat-tree", "rail", "ethernet", "torus")
"""Words of `network.topology`."""

_WORD = r""""[^"]*"|'[^']*'|[A-Za-z0-9_-]+"""
_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?\Z")
_KEY = re.compile(rf"\s*((?:{_WORD})(?:\s*\.\s*(?:{_WORD}))*)\s*=")

_Path = tuple[str, ...]


def refuse_implausible(cluster: Cluster, where: str) -> None:
    """Refuse numbers that no machine has, by key."""
    rates = {"device.bandwidth": cluster.device.bandwidth, "node.link.bandwidth": cluster.node.link.bandwidth}
    times = {"device.launch": cluster.device.launch, "node.link.alpha": cluster.node.link.alpha}
    for key, link in (("node", cluster.node.link), ("network", cluster.network and cluster.network.link)):
        if link and link.logp:
            times |= {f"{key}.link.logp.{letter}": getattr(link.logp, letter) for letter in ("L", "o", "g")}
    if cluster.network is not None:
        rates["network.link.bandwidth"] = cluster.network.link.bandwidth
        times["network.link.alpha"] = cluster.network.link.alpha
    for key, rate in rates.items():
        if rate < SLOWEST:
            raise _implausible(key, f"{rate:g} bytes per second", f"at least {SLOWEST:g}", '"300GB/s"', where)
    for key, seconds in times.items():
        if seconds > LONGEST:
            raise _implausible(key, f"{seconds:g} seconds", f"at most {LONGEST:g}", '"3us"', where)
    if cluster.device.memory < SMALLEST:
        size = f"{cluster.device.memory:g} bytes"
        raise _implausible("device.memory", size, f"at least {SMALLEST:g}", '"40GB"', where)


def known_topology(word: str) -> str:
    """The word, if it is one of TOPOLOGIES or empty."""
    if word and word not in TOPOLOGIES:
        raise ValueError(f"{word} is none of {', '.join(TOPOLOGIES)}. {nearest(word, TOPOLOGIES)}".rstrip(" "))
    return word


def parse_shape(value: Any) -> Any:
    """`4x8` as two numbers; anything else as it is."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"\d+(x\d+)*", value):
        raise ValueError(f"{value} is not a shape such as 4x8")
    return tuple(map(int, value.split("x")))


def refuse_wrong_topology(cluster: Cluster, where: str) -> None:
    """Refuse a torus whose shape is not that of its nodes, and switches that are oversubscribed to nothing."""
    network = cluster.network
    if network is None:
        return
    if network.topology == "torus" and (
        math.prod(network.shape) != network.nodes or not 1 <= len(network.shape) <= MOST_DIRECTIONS
    ):
        raise ClusterError(
            f"a torus of {network.nodes} nodes in the shape {'x'.join(map(str, network.shape)) or '(none)'}",
            where=f"{where}: network.shape",
            rule=f"one to {MOST_DIRECTIONS} sizes whose product is the {network.nodes} nodes",
            fix=f'network.shape = "{_squarest(network.nodes)}"',
        )
    if network.shape and network.topology != "torus":
        raise ClusterError(
            f"the shape {'x'.join(map(str, network.shape))} of a network that is no torus",
            where=f"{where}: network.shape",
            rule="only a torus has a shape",
            fix='network.topology = "torus"',
        )
    if network.oversubscription > 1 and (network.topology == "torus" or not network.nodes_per_switch):
        raise ClusterError(
            f"oversubscription {network.oversubscription:g} without nodes_per_switch",
            where=f"{where}: network.oversubscription",
            rule="it is the share of a switch's traffic that can leave it; a torus has no switches",
            fix="network.nodes_per_switch = 16, or the number that is under one switch",
        )


def shape_of_part(shape: tuple[int, ...], nodes: int) -> tuple[int, ...]:
    """The shape of some nodes of a torus, or of a larger one: full in the last directions as far as they divide."""
    part: list[int] = []
    left = nodes
    for n in reversed(shape):
        part.insert(0, math.gcd(n, left))
        left //= part[0]
    return (part[0] * left, *part[1:]) if part else ()


def _squarest(nodes: int) -> str:
    """The shape of two factors that are closest to each other."""
    low = max(n for n in range(1, math.isqrt(nodes) + 1) if nodes % n == 0)
    return f"{low}x{nodes // low}"


def refuse_mixed_hardware(table: Mapping[str, Any], where: str) -> None:
    """Refuse several kinds of devices or nodes: a plan gives all ranks equal shares, so the slowest decides."""
    for key in ("device", "node", "network"):
        if isinstance(table.get(key), list):
            raise ClusterError(
                f"{len(table[key])} kinds of {key}",
                where=f"{where}: {key}",
                rule="a cluster has one kind of device, in identical nodes",
                fix="plan for each kind apart, or for all as the smallest, with --slow 8-15:1.5 for slower ranks",
            )


def add_line(error: ClusterError, text: str, kind: type) -> ClusterError:
    """The same error with the line, in the text of a file of `kind`, of the key that it names."""
    line = line_of(text, error.where.rpartition(": ")[2], kind)
    where = f"{error.where} (line {line})" if line else error.where
    return ClusterError(error.what, where=where, rule=error.rule, fix=error.fix)


def line_of(text: str, key: str, kind: type | None = None) -> int | None:
    """The line, from 1, of a key such as `node.link.alpha` or `device.curve.0.rates` in TOML text.

    tomllib and tomlkit do not report positions. A missing key has the line of its table, a key of an inline table the
    line of that table; None if not even the first word is there. With `kind`, the dataclass of the file, keys of
    earlier releases are recognised.
    """
    wanted = tuple(key.split("."))
    longest, line = 0, None
    for number, path in _paths(text):
        current = tuple(files.current_key(kind, ".".join(path)).split(".")) if kind else path
        if current == wanted[: len(current)] and len(current) > longest:
            longest, line = len(current), number
    return line


def _paths(text: str) -> Iterator[tuple[int, _Path]]:
    """(line, path) of each header and key; elements of arrays of tables are numbered."""
    elements: Counter[_Path] = Counter()
    table: _Path = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            words = _words(header[2])
            table = _numbered(words[:-1], elements) + words[-1:]
            if header[1] == "[[":
                elements[words] += 1
                table += (str(elements[words] - 1),)
            elif elements[words]:
                table = _numbered(words, elements)
            yield number, table
        elif key := _KEY.match(line):
            yield number, table + _words(key[1])


def _numbered(words: _Path, elements: Counter[_Path]) -> _Path:
    """The path with the number of the latest element after each array of tables."""
    path: list[str] = []
    for i, word in enumerate(words, 1):
        path.append(word)
        if elements[words[:i]]:
            path.append(str(elements[words[:i]] - 1))
    return tuple(path)


def _words(text: str) -> _Path:
    return tuple(word.strip("\"'") for word in re.findall(_WORD, text))


def _implausible(key: str, value: str, rule: str, example: str, where: str) -> ClusterError:
    return ClusterError(
        f"{key}: {value} is implausible",
        where=f"{where}: {key}",
        rule=f"{rule}; is a unit missing?",
        fix=f"{key.rpartition('.')[2]} = {example}",
    )
