"""A pass over a captured graph for one mesh axis: every operator becomes what one rank does with its part.

The values that the pass begins with are split as `seeds` say; rules carry the splits on. An operator that no rule can
split gets whole tensors: that is always right, and `gathered` names it. The new graph has local shapes and is a plain
graph again, so that the next axis may be spread in the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from . import moves
from .alone import works_alone
from .layout import Layout, Split
from .moves import Axis
from .values import Value, each, filled, nodes_of, values_in
from .window import rebalance
from .writes import mutated

Rule = Callable[..., Any]
"""(pass, old node, arguments with Values) -> a Value, a list of them, or NotImplemented."""

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
class Pass:
    """The spreading of one graph over one axis."""

    graph: Graph
    """The old one."""
    axis: Axis
    mode: FakeTensorMode
    seeds: Mapping[str, Split]
    """Placeholder -> its split."""
    sequence: Callable[[torch.Size], Split | None] = lambda _: None
    """Where the sum of summands may lie split between blocks: the split, by shape."""
    rules: Mapping[Any, Rule] = field(default_factory=lambda: RULES)
    new: Graph = field(default_factory=Graph)
    values: dict[Node, Any] = field(default_factory=dict)
    """Old node -> Value, a list of Values, or a number."""
    gathered: dict[str, list[str]] = field(default_factory=dict)
    """What could not be split: operator -> the modules where its inputs were made whole."""
    current: Node | None = None
    moved: dict[Any, Node] = field(default_factory=dict)
    """(move, value, layout, whether gradients flow) -> its node: what several operators want is moved once."""

    def run(self) -> Graph:
        """The new graph."""
        grad = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(True)
            whole = mutated(self.graph)  # from the beginning
            for node in self.graph.nodes:
                self.current = node
                self.values[node] = self.made(node)
                if node in whole:
                    self.values[node] = self._whole_of(self.values[node])
        finally:
            torch._C._set_grad_enabled(grad)
        return self.new

    # -- for the rules

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node, and its fake value."""
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

    def value(self, node: Node, layout: Layout, whole: torch.Size | None = None) -> Value:
        """The value of the current node; `whole` where it is another's."""
        if whole is None:
            assert self.current is not None
            whole = self.current.meta["val"].shape
        return Value(node, layout, torch.Size(whole))

    def whole(self, v: Value, *, enter: bool = False) -> Value:
        """Make it whole; `enter`: for work that is split."""
        if v.layout is None:
            return self.enter(v) if enter else v
        move = moves.gather_to_enter if enter and v.fake.requires_grad else moves.gather
        return Value(self.move(move, v, v.layout), None, v.whole)

    def enter(self, v: Value) -> Value:
        """Give a whole value to work that is split."""
        if v.layout is not None or not v.fake.requires_grad or not torch.is_grad_enabled():
            return v
        return Value(self.move(moves.enter, v), None, v.whole)

    def split(self, v: Value, split: Split) -> Value:
        """Make it lie as wanted."""
        if v.layout == split:
            return v
        if v.layout is not None and v.layout.dim == split.dim and len(v.layout.cuts) == len(split.cuts) == 1:
            return self._rebalanced(v, split)
        expanded = self._expanded(v, split)
        if expanded is not None:
            return expanded
        return Value(self.move(moves.take, self.whole(v), split), split, v.whole)

    def _expanded(self, v: Value, split: Split) -> Value | None:
        """A part of something that repeats one number along the split dim: it is repeated less often."""
        if v.layout is not None or v.node.target is not torch.ops.aten.expand.default:
            return None
        source = v.node.args[0]
        assert isinstance(source, Node)
        shape, behind = source.meta["val"].shape, v.dim - split.dim
        if len(shape) >= behind and shape[-behind] != 1:
            return None
        local = list(v.fake.shape)
        local[split.dim] = split.length(self.axis.index)
        whole = self.enter(Value(source, None, shape))
        return Value(self.call(torch.ops.aten.expand.default, whole, local), split, v.whole)

    def _rebalanced(self, v: Value, split: Split) -> Value:
        """Cut at other bounds: only the rows between them travel."""
        key = (rebalance, v.node, (split,), torch.is_grad_enabled())
        if key not in self.moved:
            self.moved[key] = self.call(rebalance, v.node, split.dim, v.split.bounds, split.bounds, self.axis)
        return Value(self.moved[key], split, v.whole)

    def move(self, move: Any, v: Value, *layout: Split) -> Node:
        """Move a value, or find it moved."""
        key = (move, v.node, layout, torch.is_grad_enabled())
        if key not in self.moved:
            self.moved[key] = self.call(move, v.node, *layout, self.axis)
        return self.moved[key]

    def cut(self) -> list[tuple[Node, Split]]:
        """The whole values of which parts were taken, and how they were cut."""
        return [(key[1], key[2][0]) for key in self.moved if key[0] is moves.take]

    def settle(self, node: Node, whole: torch.Size) -> Value:
        """Add up summands: to a whole tensor, or to parts along the sequence where the pass wants that."""
        split = self.sequence(whole)
        if split is not None:
            return Value(self.call(moves.scatter, node, split, self.axis), split, whole)
        return Value(self.call(moves.reduce, node, self.axis), None, whole)

    # -- the nodes

    def made(self, node: Node) -> Any:
        """What becomes of an old node; its arguments have their values."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            new = self.new.get_attr(node.target)  # type: ignore[arg-type]
            new.meta.update(node.meta)
            return Value(new, None, node.meta["val"].shape) if isinstance(node.meta.get("val"), torch.Tensor) else new
        if node.op == "output":
            return self._output(node)
        if node.target is operator.getitem:
            items = self.values[node.args[0]]  # type: ignore[index]
            if isinstance(items, list | tuple):
                return items[node.args[1]]  # type: ignore[index]
            return Value(self.call(operator.getitem, items.node, node.args[1]), None, node.meta["val"].shape)
        if node.target is torch._C._set_grad_enabled:
            return self.call(node.target, *node.args)
        return self._operator(node)

    def _placeholder(self, node: Node) -> Value:
        split = self.seeds.get(node.name)
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
        return Value(new, split, whole.shape)

    def _output(self, node: Node) -> None:
        def leave(n: Node) -> Node:
            v = self.values[n]
            return self.whole(v).node if isinstance(v, Value) else v

        new = self.new.output(map_arg(node.args[0], leave))
        new.meta.update(node.meta)

    def _operator(self, node: Node) -> Any:
        args, kwargs = filled(node.args, self.values), filled(node.kwargs, self.values)
        if any(v.layout is not None for v in values_in((args, kwargs))):
            found = self.rules.get(node.target) or (self.rules.get("pointwise") if _is_pointwise(node) else None)
            made = found(self, node, *args, **kwargs) if found else NotImplemented
            if made is not NotImplemented:
                return made
            where = self.gathered.setdefault(str(node.target), [])
            where.append(node.meta.get("module", ""))
        return self.plain(node, args, kwargs)

    def plain(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The operator itself, on whole tensors."""
        args = each(args, lambda v: self.whole(v).node)
        kwargs = each(kwargs, lambda v: self.whole(v).node)
        new = self.call(node.target, *args, **kwargs)
        val = new.meta["val"]
        if isinstance(val, torch.Tensor):
            return Value(new, None, val.shape)
        if isinstance(val, list | tuple):
            return [
                Value(self.call(operator.getitem, new, i), None, item.shape) if isinstance(item, torch.Tensor) else item
                for i, item in enumerate(val)
            ]
        return new

    def _whole_of(self, made: Any) -> Any:
        return self.whole(made) if isinstance(made, Value) else made


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or works_alone(node)


def _fake(node: Node) -> Any:
    return node.meta["val"]
