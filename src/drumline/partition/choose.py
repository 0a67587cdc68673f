"""Which parameters tensor parallelism splits, found from the graph.

A weight that sums over split features (a row) ends what the weights before it began (columns). So for every product
with a weight, the weights that lead to its input are looked up, split tentatively, and the rules carry the splits
forward: if they arrive at the product without anything being gathered, the group is taken. So attention is split by
heads because its views allow nothing else, a gated MLP by its hidden features, two convolutions by the channels between
them. Then come the tables: embeddings by rows, and the last projection by classes where the loss can take that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .by_hand import by_hand
from .capture import Captured
from .heads import uneven_heads
from .layout import Split, evenly
from .moves import Axis
from .segments import Sizes, cuts_of, segmentations
from .tidy import is_view
from .trial import Trial
from .weights import Weighing, weighing

aten = torch.ops.aten
FAR = 400
"""Nodes between two products beyond which no group is looked for."""
LOSSES = (aten.cross_entropy_loss.default,)


@dataclass(eq=False)
class Choice:
    """What tensor parallelism does with a graph's parameters."""

    splits: dict[str, Split] = field(default_factory=dict)
    """Placeholder -> its split."""
    groups: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """(columns, row), by the parameters' names, as they were found."""
    left: dict[str, str] = field(default_factory=dict)
    """Parameter -> why it stays whole on every rank."""
    uneven: list[tuple[str, int, int]] = field(default_factory=list)
    """(module, heads, n): attention whose heads n ranks cannot share, so that its projections stay whole."""


def choose(captured: Captured, n: int, given: Mapping[str, str] | None = None) -> Choice:
    """Find the groups of a captured graph for n ranks; what is `given` by hand (see by_hand.py) is as it says."""
    return _Chooser(captured, n, given or {}).run()


class _Chooser:
    def __init__(self, captured: Captured, n: int, given: Mapping[str, str]) -> None:
        self.captured, self.n = captured, n
        self.axis = Axis("tp", n, 0)
        self.order = {node: i for i, node in enumerate(captured.graph.nodes)}
        found = (weighing(node) for node in captured.graph.nodes)
        self.weighings: dict[Node, Weighing] = {w.node: w for w in found if w}
        self.parameters = captured.placeholders("parameter")
        self.total = sum(math.prod(p.meta["val"].shape) for p in self.parameters.values())
        hand = by_hand(captured, n, given, self.weighings.values())
        self.choice = Choice(dict(hand.splits))
        self.kept = hand.whole
        self.why: dict[str, str] = dict.fromkeys(hand.whole, "the plan says so")
        self.alive = _alive(captured)

    def run(self) -> Choice:
        for w in self.weighings.values():
            self._row(w)
        self._tables()
        for w in self.weighings.values():
            if not self._settled(w.weight):
                self._alone(w)
        for node in self.parameters.values():
            if node.name not in self.choice.splits:
                self.choice.left[node.meta["name"]] = self.why.get(node.name, "no product is split by it")
        return self.choice

    # -- columns and a row

    def _row(self, row: Weighing) -> None:
        """Try the weights before a product as columns, and the product as their row."""
        if row.summed is None or self._settled(row.weight):
            return
        columns, between = self._columns(row)
        if not columns or self._escapes(columns, between, row):
            return
        for segments in segmentations(columns, self.n):
            found = self._trial(columns, between, row, segments)
            if found is not None:
                self.choice.splits.update(found)
                names = tuple(c.weight.meta["name"] for c in columns)
                self.choice.groups.append((names, row.weight.meta["name"]))
                return
        for c in columns:
            self.why.setdefault(c.weight.name, f"{self.n} ranks cannot share what it gives to {row.module}")
        self.choice.uneven += [(m, heads, self.n) for m, heads in uneven_heads(between, columns, self.n)]

    def _settled(self, weight: Node) -> bool:
        """Whether it is known what becomes of a weight."""
        return weight.name in self.choice.splits or weight.name in self.kept

    def _escapes(self, columns: Sequence[Weighing], between: Sequence[Node], row: Weighing) -> bool:
        """Whether anybody but the row needs what the columns give: it would have to be gathered for them."""
        own = {*between, *(c.node for c in columns)}
        return any(u not in own and u is not row.node and u in self.alive for node in own for u in node.users)

    def _columns(self, row: Weighing) -> tuple[list[Weighing], list[Node]]:
        """The products that lead to a product's input without another one between, and what is between."""
        found: dict[Node, Weighing] = {}
        seen: set[Node] = set()
        todo = [row.input]
        while todo:
            node = todo.pop()
            if node in seen or self.order[row.node] - self.order[node] > FAR:
                continue
            seen.add(node)
            w = self.weighings.get(node)
            if w is not None:
                if self._settled(w.weight) or w.given is None:
                    return [], []
                found[node] = w
            else:
                todo += [a for a in node.all_input_nodes if _floats(a) and a.op == "call_function"]
        reached = set(found)
        for node in sorted(seen - reached, key=self.order.__getitem__):
            if any(a in reached for a in node.all_input_nodes):
                reached.add(node)
        columns = sorted(found.values(), key=lambda w: self.order[w.node])
        return columns, sorted(reached, key=self.order.__getitem__)

    def _trial(
        self, columns: Sequence[Weighing], between: Sequence[Node], row: Weighing, segments: int | Sizes
    ) -> dict[str, Split] | None:
        """Split the columns, carry the splits to the row: its split, or None where something had to be gathered."""
        seeds: dict[str, Split] = {}
        for c in columns:
            assert c.given is not None
            cuts = cuts_of(c.weight.meta["val"].shape[c.given], segments, self.n)
            if cuts is None:
                return None
            seeds[c.weight.name] = cuts.at(c.given)
            if c.bias is not None:
                seeds[c.bias.name] = cuts
        trial = Trial(self.captured, self.axis, {**self.choice.splits, **seeds})
        arrived = trial.to(between, row)
        if arrived is None or row.summed is None:
            return None
        seeds[row.weight.name] = arrived.at(row.summed)
        return {**seeds, **trial.taken}

    # -- tables

    def _tables(self) -> None:
        """Embeddings by rows, and projections to classes whose loss takes parts."""
        heads = [w for w in self.weighings.values() if w.given is not None and self._to_loss(w)]
        for w in heads:
            size = w.weight.meta["val"].shape[w.given or 0]
            if self._settled(w.weight) or size % self.n:
                continue
            seeds = {w.weight.name: evenly(w.given or 0, size, self.n)}
            if w.bias is not None:
                seeds[w.bias.name] = evenly(0, size, self.n)
            self.choice.splits.update(seeds)
            self.choice.groups.append(((w.weight.meta["name"],), "the loss, by classes"))
        for node in self.captured.graph.nodes:
            if node.target is aten.embedding.default and node.args[0].op == "placeholder":
                table = node.args[0]
                size = table.meta["val"].shape[0]
                if not self._settled(table):
                    if size % self.n or size < 16 * self.n:
                        self.why.setdefault(table.name, f"a table of {size} rows")
                        continue
                    self.choice.splits[table.name] = evenly(0, size, self.n)
                    self.choice.groups.append(((table.meta["name"],), "a table, by rows"))

    def _to_loss(self, w: Weighing) -> bool:
        """Whether a product's output reaches a loss by views alone, as its logits."""
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

    def _alone(self, w: Weighing) -> None:
        """A large weight that found no partner: by columns, and its output is gathered."""
        size = math.prod(w.weight.meta["val"].shape)
        if w.given is None or size * 50 < self.total:
            self.why.setdefault(w.weight.name, "small, and no other weight takes its parts")
            return
        rows = w.weight.meta["val"].shape[w.given]
        if rows % self.n:
            self.why.setdefault(w.weight.name, f"{rows} outputs: {rows} % {self.n} != 0")
            return
        self.choice.splits[w.weight.name] = evenly(w.given, rows, self.n)
        if w.bias is not None:
            self.choice.splits[w.bias.name] = evenly(0, rows, self.n)
        self.choice.groups.append(((w.weight.meta["name"],), "its output is gathered"))


def _alive(captured: Captured) -> set[Node]:
    """The nodes that the outputs need."""
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
