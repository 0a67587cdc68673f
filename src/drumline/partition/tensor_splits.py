"""Chooses which parameters tensor parallelism splits, from the graph.

A weight that sums over split features (a row) ends what the weights before it began (columns). For every matmul with a
weight, the weights that lead to its input are split tentatively, and the rules propagate the splits: if they reach the
matmul without a gather, the group is taken. So attention is split by heads because its views allow nothing else, a
gated MLP by its hidden features, two convolutions by the channels between them. Then come the tables: embeddings by
rows, and the last projection by classes where the loss supports that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..plans.engine_constants import LEAST_TABLE_ROWS, UNPAIRED_MATMUL_SHARE
from .capture import CapturedGraph
from .manual_splits import read_manual_splits
from .operator_properties import is_view
from .sharding.layout import Split, even_split
from .sharding.redistribution import Axis
from .tentative_splits import Sizes, SplitProbe, segmentations, split_for
from .weight_matmuls import WeightMatmul, uneven_heads, weight_matmul

aten = torch.ops.aten
FAR = 400
"""No group spans more nodes than this."""
LOSSES = (aten.cross_entropy_loss.default,)


@dataclass(eq=False)
class TensorSplits:
    """The splits that tensor parallelism gives a graph's parameters."""

    splits: dict[str, Split] = field(default_factory=dict)
    """Splits of placeholders."""
    groups: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """(columns, row), by parameter name, in the order of discovery."""
    unsplit: dict[str, str] = field(default_factory=dict)
    """Parameter -> why it stays whole on every rank."""
    uneven_heads: list[tuple[str, int, int]] = field(default_factory=list)
    """(module, heads, n): attention whose heads are not divisible among n ranks, so its projections stay whole."""


def choose_tensor_splits(captured: CapturedGraph, n: int, given: Mapping[str, str] | None = None) -> TensorSplits:
    """Choose the splits of a captured graph for n ranks; `given` ones come from the plan (see manual_splits.py)."""
    return _Chooser(captured, n, given or {}).run()


class _Chooser:
    def __init__(self, captured: CapturedGraph, n: int, given: Mapping[str, str]) -> None:
        self.captured, self.n = captured, n
        self.axis = Axis("tp", n, 0)
        self.order = {node: i for i, node in enumerate(captured.graph.nodes)}
        matmuls = (weight_matmul(node) for node in captured.graph.nodes)
        self.matmuls: dict[Node, WeightMatmul] = {w.node: w for w in matmuls if w}
        self.parameters = captured.placeholders("parameter")
        self.total = sum(math.prod(p.meta["val"].shape) for p in self.parameters.values())
        manual = read_manual_splits(captured, n, given, self.matmuls.values())
        self.choice = TensorSplits(dict(manual.splits))
        self.whole = manual.whole
        self.why: dict[str, str] = dict.fromkeys(manual.whole, "the plan keeps it whole")
        self.alive = _alive(captured)

    def run(self) -> TensorSplits:
        for w in self.matmuls.values():
            self._try_row(w)
        self._tables()
        for w in self.matmuls.values():
            if not self._settled(w.weight):
                self._split_alone(w)
        for node in self.parameters.values():
            if node.name not in self.choice.splits:
                self.choice.unsplit[node.meta["name"]] = self.why.get(node.name, "no matmul is split by it")
        return self.choice

    # -- columns and a row

    def _try_row(self, row: WeightMatmul) -> None:
        """Try the weights before a matmul as columns, and the matmul as their row."""
        if row.reduced_dim is None or self._settled(row.weight):
            return
        columns, between = self._columns(row)
        if not columns or self._escapes(columns, between, row):
            return
        for segments in segmentations(columns, self.n):
            splits = self._probe(columns, between, row, segments)
            if splits is not None:
                self.choice.splits.update(splits)
                names = tuple(c.weight.meta["name"] for c in columns)
                self.choice.groups.append((names, row.weight.meta["name"]))
                return
        for c in columns:
            self.why.setdefault(c.weight.name, f"{self.n} ranks cannot split its input to {row.module}")
        self.choice.uneven_heads += [(m, heads, self.n) for m, heads in uneven_heads(between, columns, self.n)]

    def _settled(self, weight: Node) -> bool:
        """Whether a weight is decided."""
        return weight.name in self.choice.splits or weight.name in self.whole

    def _escapes(self, columns: Sequence[WeightMatmul], between: Sequence[Node], row: WeightMatmul) -> bool:
        """Whether the columns' outputs are read by anything but the row: they would have to be gathered."""
        own = {*between, *(c.node for c in columns)}
        return any(u not in own and u is not row.node and u in self.alive for node in own for u in node.users)

    def _columns(self, row: WeightMatmul) -> tuple[list[WeightMatmul], list[Node]]:
        """The matmuls that lead to a matmul's input with none between, and the nodes between."""
        columns: dict[Node, WeightMatmul] = {}
        seen: set[Node] = set()
        todo = [row.input]
        while todo:
            node = todo.pop()
            if node in seen or self.order[row.node] - self.order[node] > FAR:
                continue
            seen.add(node)
            w = self.matmuls.get(node)
            if w is not None:
                if self._settled(w.weight) or w.feature_dim is None:
                    return [], []
                columns[node] = w
            else:
                todo += [a for a in node.all_input_nodes if _floats(a) and a.op == "call_function"]
        reached = set(columns)
        for node in sorted(seen - reached, key=self.order.__getitem__):
            if any(a in reached for a in node.all_input_nodes):
                reached.add(node)
        return sorted(columns.values(), key=lambda w: self.order[w.node]), sorted(reached, key=self.order.__getitem__)

    def _probe(
        self, columns: Sequence[WeightMatmul], between: Sequence[Node], row: WeightMatmul, segments: int | Sizes
    ) -> dict[str, Split] | None:
        """Split the columns and propagate the splits to the row: all splits, or None if something was gathered."""
        seeds: dict[str, Split] = {}
        for c in columns:
            assert c.feature_dim is not None
            cuts = split_for(c.weight.meta["val"].shape[c.feature_dim], segments, self.n)
            if cuts is None:
                return None
            seeds[c.weight.name] = cuts.along(c.feature_dim)
            if c.bias is not None:
                seeds[c.bias.name] = cuts
        probe = SplitProbe(self.captured, self.axis, {**self.choice.splits, **seeds})
        arrived = probe.to(between, row)
        if arrived is None or row.reduced_dim is None:
            return None
        seeds[row.weight.name] = arrived.along(row.reduced_dim)
        return {**seeds, **probe.taken}

    # -- tables

    def _tables(self) -> None:
        """Split embeddings by rows, and projections to classes whose loss supports it."""
        heads = [w for w in self.matmuls.values() if w.feature_dim is not None and self._to_loss(w)]
        for w in heads:
            size = w.weight.meta["val"].shape[w.feature_dim or 0]
            if self._settled(w.weight) or size % self.n:
                continue
            seeds = {w.weight.name: even_split(w.feature_dim or 0, size, self.n)}
            if w.bias is not None:
                seeds[w.bias.name] = even_split(0, size, self.n)
            self.choice.splits.update(seeds)
            self.choice.groups.append(((w.weight.meta["name"],), "the loss, by classes"))
        for node in self.captured.graph.nodes:
            if node.target is aten.embedding.default and node.args[0].op == "placeholder":
                table = node.args[0]
                size = table.meta["val"].shape[0]
                if not self._settled(table):
                    if size % self.n or size < LEAST_TABLE_ROWS * self.n:
                        self.why.setdefault(table.name, f"a table of {size} rows")
                        continue
                    self.choice.splits[table.name] = even_split(0, size, self.n)
                    self.choice.groups.append(((table.meta["name"],), "a table, by rows"))

    def _to_loss(self, w: WeightMatmul) -> bool:
        """Whether a matmul's output reaches a loss as its logits, through views alone."""
        node = w.node
        for _ in range(12):
            users = [u for u in node.users if u.op == "call_function"]
            if len(users) != 1:
                return False
            user = users[0]
            if user.target in LOSSES:
                weights = user.args[2] if len(user.args) > 2 else None
                return user.args[0] is node and weights is None
            if not _rearranges(user):
                return False
            node = user
        return False

    def _split_alone(self, w: WeightMatmul) -> None:
        """Split a large weight without a partner by columns, and gather its output."""
        size = math.prod(w.weight.meta["val"].shape)
        if w.feature_dim is None or size * UNPAIRED_MATMUL_SHARE < self.total:
            self.why.setdefault(w.weight.name, "small, and no other weight continues its split")
            return
        rows = w.weight.meta["val"].shape[w.feature_dim]
        if rows % self.n:
            self.why.setdefault(w.weight.name, f"{rows} outputs: {rows} % {self.n} != 0")
            return
        self.choice.splits[w.weight.name] = even_split(w.feature_dim, rows, self.n)
        if w.bias is not None:
            self.choice.splits[w.bias.name] = even_split(0, rows, self.n)
        self.choice.groups.append(((w.weight.meta["name"],), "its output is gathered"))


def _alive(captured: CapturedGraph) -> set[Node]:
    """The nodes that the outputs depend on."""
    alive: set[Node] = set()
    for node in reversed(list(captured.graph.nodes)):
        if node.op == "output" or node in alive:
            alive.add(node)
            alive.update(node.all_input_nodes)
    return alive


def _floats(node: Node) -> bool:
    val = node.meta.get("val")
    if isinstance(val, list | tuple):
        return bool(val) and isinstance(val[0], torch.Tensor) and val[0].is_floating_point()
    return isinstance(val, torch.Tensor) and val.is_floating_point()


def _rearranges(node: Node) -> bool:
    plain = (aten.to.dtype, aten.contiguous.default, aten.clone.default, aten.alias.default)
    return is_view(node) or node.target in plain
