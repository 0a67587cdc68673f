"""Splits of parameters that the plan gives: name patterns, each with a word.

`column`: by the output features of a matmul; `column 3`: the features are three equal parts, each split alike (a fused
projection); `row`: by the input features that it sums over; `rows`: along dim 0, as a table; `whole`: not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch.fx import Node

from ..core.errors import PlanError, nearest
from .capture import CapturedGraph
from .sharding.layout import Split, even_split
from .weight_matmuls import WeightMatmul

WORDS = ("column", "row", "rows", "whole")


@dataclass(eq=False)
class ManualSplits:
    """The plan's decisions about a graph's parameters."""

    splits: dict[str, Split] = field(default_factory=dict)
    """Splits of placeholders."""
    whole: set[str] = field(default_factory=set)
    """Placeholders that stay whole."""


def read_manual_splits(
    captured: CapturedGraph, n: int, given: Mapping[str, str], weighings: Iterable[WeightMatmul]
) -> ManualSplits:
    """Read the patterns; the last one that matches a name counts."""
    parameters = captured.placeholders("parameter")
    uses: dict[Node, WeightMatmul] = {}
    for w in weighings:
        uses.setdefault(w.weight, w)
    splits = ManualSplits()
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
        _assign(splits, name, parameters[name], word, uses.get(parameters[name]), n)
    return splits


def _assign(splits: ManualSplits, name: str, node: Node, word: str, use: WeightMatmul | None, n: int) -> None:
    kind, _, count = word.partition(" ")
    if kind not in WORDS or (count and (kind != "column" or not count.isdigit() or int(count) < 1)):
        fix = nearest(kind, WORDS) or f"one of {', '.join(WORDS)}"
        raise PlanError(f"{name} cannot be split by {word!r}", rule="column, column N, row, rows or whole", fix=fix)
    if kind == "whole":
        splits.whole.add(node.name)
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
    splits.splits[node.name] = even_split(dim, size, n, segments)
    if kind == "column" and use is not None and use.bias is not None:
        splits.splits[use.bias.name] = even_split(0, size, n, segments)


def _dim(name: str, kind: str, use: WeightMatmul | None) -> int:
    dim = None if use is None else use.feature_dim if kind == "column" else use.reduced_dim
    if dim is None:
        raise PlanError(
            f"{name} cannot be split as a {kind}",
            rule="columns and rows are weights of a linear layer or a convolution with one group",
            fix="rows (along dim 0), or whole",
        )
    return dim
