"""Splits of parameters that the plan gives by hand: patterns of names, and one word for each.

`column`: by the features that a product gives; `column 3`: these are three equal parts, each split alike (a fused
projection); `row`: by the features that it sums over; `rows`: along dim 0, as a table; `whole`: not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch.fx import Node

from ..core.errors import PlanError, nearest
from .capture import Captured
from .layout import Split, evenly
from .weights import Weighing

WORDS = ("column", "row", "rows", "whole")


@dataclass(eq=False)
class ByHand:
    """What the plan says of a graph's parameters."""

    splits: dict[str, Split] = field(default_factory=dict)
    """Placeholder -> its split."""
    whole: set[str] = field(default_factory=set)
    """Placeholders that stay whole."""


def by_hand(captured: Captured, n: int, given: Mapping[str, str], weighings: Iterable[Weighing]) -> ByHand:
    """Read the patterns: the last one that matches a name counts."""
    parameters = captured.placeholders("parameter")
    uses: dict[Node, Weighing] = {}
    for w in weighings:
        uses.setdefault(w.weight, w)
    found = ByHand()
    words: dict[str, str] = {}
    for pattern, word in given.items():
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            raise PlanError(
                f"no parameter of the model is named {pattern!r}",
                rule="a pattern matches at least one name",
                fix=nearest(pattern, parameters),
            )
        words |= dict.fromkeys(names, word)
    for name, word in words.items():
        _place(found, name, parameters[name], word, uses.get(parameters[name]), n)
    return found


def _place(found: ByHand, name: str, node: Node, word: str, use: Weighing | None, n: int) -> None:
    kind, _, count = word.partition(" ")
    if kind not in WORDS or (count and (kind != "column" or not count.isdigit() or int(count) < 1)):
        fix = nearest(kind, WORDS) or f"one of {', '.join(WORDS)}"
        raise PlanError(f"{name} cannot be split by {word!r}", rule="column, column N, row, rows or whole", fix=fix)
    if kind == "whole":
        found.whole.add(node.name)
        return
    dim = 0 if kind == "rows" else _dim(name, kind, use)
    segments = int(count or 1)
    size = int(node.meta["val"].shape[dim])
    if size % (segments * n):
        raise PlanError(
            f"{name} cannot be split by {word!r} over {n} ranks",
            rule=f"{size} % ({segments} * {n}) == 0" if segments > 1 else f"{size} % {n} == 0",
            fix="whole",
        )
    found.splits[node.name] = evenly(dim, size, n, segments)
    if kind == "column" and use is not None and use.bias is not None:
        found.splits[use.bias.name] = evenly(0, size, n, segments)


def _dim(name: str, kind: str, use: Weighing | None) -> int:
    dim = None if use is None else use.given if kind == "column" else use.summed
    if dim is None:
        raise PlanError(
            f"{name} cannot be split as a {kind}",
            rule="columns and rows are weights of a linear layer or a convolution with one group",
            fix="rows (along dim 0), or whole",
        )
    return dim
