"""Shards a captured graph over one mesh axis: every operator becomes one rank's part of it.

The pass starts from `initial_splits` of placeholders, and rules propagate the splits. An operator that no rule can
split gets whole tensors: that is always correct, and `gathered` names it. The new graph has local shapes and is a plain
graph again, so the next axis can be sharded in the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..torchkit.dispatch_modes import set_grad_enabled
from ..torchkit.fake_tensors import FakeTensorMode
from .operator_properties import is_elementwise, mutated_values
from .sharding import redistribution
from .sharding.halo_exchange import rebalance
from .sharding.layout import Layout, ShardedValue, Split, fill_arguments, map_values, nodes_of, values_in
from .sharding.redistribution import Axis

Rule = Callable[..., Any]
"""(pass, old node, arguments with ShardedValues) -> a ShardedValue, a list of them, or NotImplemented."""

RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def register(function: Rule) -> Rule:
        for target in targets:
            assert target not in RULES, f"two rules for {target}"
            RULES[target] = function
        return function

    return register


@dataclass(eq=False)
class ShardingPass:
    """The sharding of one graph over one axis."""

    graph: Graph
    """The graph to shard."""
    axis: Axis
    mode: FakeTensorMode
    initial_splits: Mapping[str, Split]
    """Split of each placeholder that has one."""
    sequence_split: Callable[[torch.Size], Split | None] = lambda _: None
    """Shape -> the split that a reduced sum gets between blocks (sequence parallelism), or None."""
    rules: Mapping[Any, Rule] = field(default_factory=lambda: RULES)
    new: Graph = field(default_factory=Graph)
    values: dict[Node, Any] = field(default_factory=dict)
    """Old node -> ShardedValue, a list of them, or a number."""
    gathered: dict[str, list[str]] = field(default_factory=dict)
    """Operators that no rule could split -> the modules where their inputs were gathered."""
    current: Node | None = None
    redistributed: dict[Any, Node] = field(default_factory=dict)
    """(function, value, layout, whether gradients are on) -> its node: each redistribution happens once."""

    def run(self) -> Graph:
        """Shard the graph; returns the new one."""
        grad = torch.is_grad_enabled()
        try:
            set_grad_enabled(True)
            whole = mutated_values(self.graph)
            for node in self.graph.nodes:
                self.current = node
                self.values[node] = self.convert(node)
                if node in whole:
                    self.values[node] = self._whole_of(self.values[node])
        finally:
            set_grad_enabled(grad)
        return self.new

    # -- interface for the rules

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call to the new graph, with its fake value."""
        args, kwargs = nodes_of(args), nodes_of(kwargs)
        with self.mode:
            val = target(*map_arg(args, _fake), **map_arg(kwargs, _fake))
        node = self.new.call_function(target, args, kwargs)
        node.meta["val"] = val
        if self.current is not None:
            for key in ("module", "nn_module_stack", "origin"):
                if key in self.current.meta:
                    node.meta[key] = self.current.meta[key]
        return node

    def value(self, node: Node, layout: Layout, whole: torch.Size | None = None) -> ShardedValue:
        """A value for the current node; `whole` is its shape if it differs from the node's."""
        if whole is None:
            assert self.current is not None
            whole = self.current.meta["val"].shape
        return ShardedValue(node, layout, torch.Size(whole))

    def whole(self, v: ShardedValue, *, enter: bool = False) -> ShardedValue:
        """Gather a value; `enter`: for use in split work."""
        if v.layout is None:
            return self.enter(v) if enter else v
        move = redistribution.gather_into_split_work if enter and v.fake.requires_grad else redistribution.gather
        return ShardedValue(self.redistribute(move, v, v.layout), None, v.whole)

    def enter(self, v: ShardedValue) -> ShardedValue:
        """Pass a whole value to split work, whose gradients are partial sums."""
        if v.layout is not None or not v.fake.requires_grad or not torch.is_grad_enabled():
            return v
        return ShardedValue(self.redistribute(redistribution.enter_split_work, v), None, v.whole)

    def split(self, v: ShardedValue, split: Split) -> ShardedValue:
        """Redistribute a value to a split."""
        if v.layout == split:
            return v
        if v.layout is not None and v.layout.dim == split.dim and len(v.layout.cuts) == len(split.cuts) == 1:
            return self._rebalanced(v, split)
        expanded = self._expanded(v, split)
        if expanded is not None:
            return expanded
        return ShardedValue(self.redistribute(redistribution.take_part, self.whole(v), split), split, v.whole)

    def _expanded(self, v: ShardedValue, split: Split) -> ShardedValue | None:
        """A part of an expanded value: expand it to the part's size only."""
        if v.layout is not None or v.node.target is not torch.ops.aten.expand.default:
            return None
        source = v.node.args[0]
        assert isinstance(source, Node)
        shape, from_end = source.meta["val"].shape, v.dim - split.dim
        if len(shape) >= from_end and shape[-from_end] != 1:
            return None
        local = list(v.fake.shape)
        local[split.dim] = split.length(self.axis.index)
        whole = self.enter(ShardedValue(source, None, shape))
        return ShardedValue(self.call(torch.ops.aten.expand.default, whole, local), split, v.whole)

    def _rebalanced(self, v: ShardedValue, split: Split) -> ShardedValue:
        """Cut at other bounds: only the rows between old and new bounds are sent."""
        key = (rebalance, v.node, (split,), torch.is_grad_enabled())
        if key not in self.redistributed:
            self.redistributed[key] = self.call(rebalance, v.node, split.dim, v.split.bounds, split.bounds, self.axis)
        return ShardedValue(self.redistributed[key], split, v.whole)

    def redistribute(self, move: Any, v: ShardedValue, *layout: Split) -> Node:
        """Redistribute a value, or reuse the node that already did."""
        key = (move, v.node, layout, torch.is_grad_enabled())
        if key not in self.redistributed:
            self.redistributed[key] = self.call(move, v.node, *layout, self.axis)
        return self.redistributed[key]

    def taken_parts(self) -> list[tuple[Node, Split]]:
        """The whole values of which parts were taken, and their splits."""
        return [(key[1], key[2][0]) for key in self.redistributed if key[0] is redistribution.take_part]

    def reduce_partial(self, node: Node, whole: torch.Size) -> ShardedValue:
        """Reduce partial sums: to a whole tensor, or to parts along the sequence if the pass asks for that."""
        split = self.sequence_split(whole)
        if split is not None:
            return ShardedValue(self.call(redistribution.reduce_scatter_partial, node, split, self.axis), split, whole)
        return ShardedValue(self.call(redistribution.reduce_partial, node, self.axis), None, whole)

    # -- nodes

    def convert(self, node: Node) -> Any:
        """The value of an old node in the new graph; its arguments have theirs."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            new = self.new.get_attr(node.target)  # type: ignore[arg-type]
            new.meta.update(node.meta)
            return (
                ShardedValue(new, None, node.meta["val"].shape)
                if isinstance(node.meta.get("val"), torch.Tensor)
                else new
            )
        if node.op == "output":
            return self._output(node)
        if node.target is operator.getitem:
            items = self.values[node.args[0]]  # type: ignore[index]
            if isinstance(items, list | tuple):
                return items[node.args[1]]  # type: ignore[index]
            return ShardedValue(self.call(operator.getitem, items.node, node.args[1]), None, node.meta["val"].shape)
        if node.target is set_grad_enabled:
            return self.call(node.target, *node.args)
        return self._operator(node)

    def _placeholder(self, node: Node) -> ShardedValue:
        split = self.initial_splits.get(node.name)
        whole = node.meta["val"]
        new = self.new.placeholder(node.name)
        new.meta.update(node.meta)
        if split is not None:
            shape = list(whole.shape)
            shape[split.dim] = split.length(self.axis.index)
            with self.mode:
                new.meta["val"] = torch.empty(shape, dtype=whole.dtype, device=whole.device)
            new.meta["splits"] = {**node.meta.get("splits", {}), self.axis.name: split}
        else:
            new.meta["val"] = whole.detach()
        if node.meta.get("trained"):
            new.meta["val"].requires_grad_(True)
        return ShardedValue(new, split, whole.shape)

    def _output(self, node: Node) -> None:
        def leave(n: Node) -> Node:
            v = self.values[n]
            return self.whole(v).node if isinstance(v, ShardedValue) else v

        new = self.new.output(map_arg(node.args[0], leave))
        new.meta.update(node.meta)

    def _operator(self, node: Node) -> Any:
        args, kwargs = fill_arguments(node.args, self.values), fill_arguments(node.kwargs, self.values)
        if any(v.layout is not None for v in values_in((args, kwargs))):
            apply = self.rules.get(node.target) or (self.rules.get("pointwise") if _is_pointwise(node) else None)
            result = apply(self, node, *args, **kwargs) if apply else NotImplemented
            if result is not NotImplemented:
                return result
            where = self.gathered.setdefault(str(node.target), [])
            where.append(node.meta.get("module", ""))
        return self.on_whole_tensors(node, args, kwargs)

    def on_whole_tensors(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The operator itself, on gathered inputs."""
        args = map_values(args, lambda v: self.whole(v).node)
        kwargs = map_values(kwargs, lambda v: self.whole(v).node)
        new = self.call(node.target, *args, **kwargs)
        val = new.meta["val"]
        if isinstance(val, torch.Tensor):
            return ShardedValue(new, None, val.shape)
        if isinstance(val, list | tuple):
            return [
                ShardedValue(self.call(operator.getitem, new, i), None, item.shape)
                if isinstance(item, torch.Tensor)
                else item
                for i, item in enumerate(val)
            ]
        return new

    def _whole_of(self, result: Any) -> Any:
        return self.whole(result) if isinstance(result, ShardedValue) else result


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_elementwise(node)


def _fake(node: Node) -> Any:
    return node.meta["val"]
