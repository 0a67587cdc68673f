"""Host names: checked, and read from the short form in which Slurm lists them (`gpu[01-04,7],login`)."""

from __future__ import annotations

import math
import re
from itertools import product

from .errors import InputError

MOST_HOSTS = 65_536
"""A longer list is refused before it is built."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_ADDRESS = re.compile(r"[0-9A-Fa-f:]{2,39}")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def check_host(name: str, where: str = "") -> str:
    """A host name or address; refuse what a shell could read as more than a name."""
    if not (_NAME.fullmatch(name) or (":" in name and _ADDRESS.fullmatch(name))):
        raise InputError(
            f"{name[:80]!r} is not a host name",
            where=where,
            rule="letters, digits, dots, hyphens and underscores, at most 253",
        )
    return name


def parse_node_list(text: str, where: str = "SLURM_NODELIST") -> tuple[str, ...]:
    """All hosts of a Slurm node list, in order."""
    items = _ITEM.findall(text)
    if ",".join(items) != text or not items:
        raise InputError(f"{text[:80]!r} is not a list of hosts", where=where, rule="such as node[01-04,7],login")
    hosts: list[str] = []
    for item in items:
        parts = [part for part in re.split(r"(\[[^\[\]]*\])", item) if part]
        choices = [_numbers(part, text, where) if part.startswith("[") else [part] for part in parts]
        _check_count(len(hosts) + math.prod(map(len, choices)), where)
        hosts += [check_host("".join(words), where) for words in product(*choices)]
    return tuple(hosts)


def _numbers(bracket: str, text: str, where: str) -> list[str]:
    """`[01-03,7]` as 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in bracket[1:-1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise InputError(f"{text[:80]!r} is not a list of hosts", where=where, rule="such as node[01-04,7],login")
        first, last = match[1], match[2] or match[1]
        _check_count(len(numbers) + max(0, int(last) - int(first) + 1), where)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _check_count(count: int, where: str) -> None:
    if count > MOST_HOSTS:
        raise InputError(f"a list of {count} hosts", where=where, rule=f"at most {MOST_HOSTS}")
