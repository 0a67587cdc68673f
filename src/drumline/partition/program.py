"""A spread graph as something to call: Python code of its operators, on this rank's parts of the parameters.

The parameters live in a tree of names of their own, `Holder`, as the user's model names them; programs for other shapes
of batches share it. A value is dropped after its last use, as Python would drop a local variable of the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from .layout import Split

Seen = Callable[[Node, Any], Any]
"""(node, its value) -> the value to go on with; called where a program is watched."""


class Holder(nn.Module):
    """A node of the tree of names; it only holds parameters and buffers."""

    def forward(self) -> None:
        """A holder is not called."""
        raise RuntimeError("a program is called, not the module that holds its parameters")


def put(root: nn.Module, name: str, tensor: torch.Tensor | nn.Parameter, *, persistent: bool = True) -> None:
    """Register a parameter or a buffer under a dotted name."""
    *path, last = name.split(".")
    for key in path:
        if key not in root._modules:
            root.add_module(key, Holder())
        root = root._modules[key]  # type: ignore[assignment]  # just made
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor, persistent=persistent)


def splits_of(node: Node) -> dict[str, Split]:
    """How a placeholder is split, by axis."""
    return dict(node.meta.get("splits", {}))


class Program:
    """`program(*tensors)` runs a graph (or a stage of one) and gives its outputs.

    With a root, the tensors are those of a batch; without, all placeholders of the graph are arguments, in their order.
    Nodes whose meta has "shows" can be watched.
    """

    def __init__(self, graph: Graph, constants: Mapping[str, torch.Tensor], root: nn.Module | None = None) -> None:
        self.graph = graph
        self._code = _Code(root, graph, constants)
        self._plain = self._code.compile(())
        self._shown: Callable[..., Any] | None = None
        self.seen: Seen | None = None
        """Who wants to see values."""

    @property
    def inputs(self) -> list[Node]:
        """The placeholders that a call fills, in order."""
        return self._code.inputs

    def watch(self, seen: Seen | None) -> None:
        """Show the values that are marked to be shown, also those of programs inside of this one; None: no longer."""
        self.seen = seen
        for node in self.graph.nodes:
            inner = getattr(node.target, "program", None)
            if isinstance(inner, Program):
                inner.watch(seen)

    def __call__(self, *tensors: Any) -> Any:
        if self.seen is None:
            return self._plain(*tensors)
        if self._shown is None:
            self._shown = self._code.compile(n for n in self.graph.nodes if n.meta.get("shows"))
        return self._shown(*tensors, seen=self.seen)

    @property
    def source(self) -> str:
        """The code, for who wants to read it."""
        return self._code.text(())


class _Code:
    """Writes the lines; without a root, parameters and buffers are arguments like the batch."""

    def __init__(self, root: nn.Module | None, graph: Graph, constants: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.inputs: list[Node] = []
        self._globals: dict[str, Any] = {}
        self._names: dict[Node, str] = {}
        self._heads: list[str] = []
        for i, node in enumerate(graph.nodes):
            self._names[node] = f"v{i}"
            role = node.meta.get("role")
            if root is not None and node.op == "placeholder" and role in ("parameter", "buffer"):
                self._read(node, *_place(root, str(node.meta["name"])))
            elif node.op == "placeholder":
                self.inputs.append(node)
            elif node.op == "get_attr":
                self._globals[f"v{i}"] = constants[str(node.target)]
        self._last = _last_uses(graph)

    def _read(self, node: Node, table: dict[str, Any], key: str) -> None:
        name = self._names[node]
        self._globals[f"t_{name}"] = table
        self._heads.append(f"{name} = t_{name}[{key!r}]")

    def compile(self, watched: Iterable[Node]) -> Callable[..., Any]:
        """A function of the batch's tensors; it shows the watched values as they come."""
        text = self.text(frozenset(watched))
        space = dict(self._globals)
        exec(compile(text, f"<program of {len(self._names)} operators>", "exec"), space)  # noqa: S102  # our own lines
        return space["run"]  # type: ignore[no-any-return]  # just defined

    def text(self, watched: Iterable[Node]) -> str:
        """The function's lines."""
        watched = frozenset(watched)
        names = [self._names[n] for n in self.inputs]
        lines = [f"def run({', '.join([*names, 'seen=None'])}):", *(f"    {line}" for line in self._heads)]
        for node in self.graph.nodes:
            name = self._names[node]
            if node.op == "call_function":
                self._globals[f"f_{name}"] = node.target
                lines.append(f"    {name} = f_{name}({self._arguments(node)})")
            elif node.op == "output":
                lines.append(f"    return {self._text(node.args[0], node, 'out')}")
                break
            if node in watched:
                self._globals[f"n_{name}"] = node
                lines.append(f"    {name} = seen(n_{name}, {name})")
            gone = [self._names[n] for n in self._last.get(node, ()) if n.op != "get_attr"]
            if gone:
                lines.append(f"    del {', '.join(gone)}")
        return "\n".join(lines) + "\n"

    def _arguments(self, node: Node) -> str:
        words = [self._text(a, node, f"a{i}") for i, a in enumerate(node.args)]
        words += [f"{k}={self._text(a, node, k)}" for k, a in node.kwargs.items()]
        return ", ".join(words)

    def _text(self, value: Any, node: Node, place: str) -> str:
        """An argument as code; what has no such form becomes a global."""
        if isinstance(value, Node):
            return self._names[value]
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and abs(value) < 1e300):
            return repr(value)
        if type(value) in (tuple, list) or isinstance(value, torch.fx.immutable_collections.immutable_list):
            inner = ", ".join(self._text(v, node, f"{place}_{i}") for i, v in enumerate(value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        key = f"c_{self._names[node]}_{place}"
        self._globals[key] = value
        return key


def _place(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The table and the key of a parameter or buffer: read at every call, because its tensor may be replaced."""
    *path, last = name.split(".")
    for key in path:
        root = root._modules[key]  # type: ignore[assignment]  # it is there
    return (root._parameters if last in root._parameters else root._buffers), last


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """Node -> the values that nobody reads after it."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            last.setdefault(node, node)
        last.update(dict.fromkeys(node.all_input_nodes, node))
    ends: dict[Node, list[Node]] = {}
    for value, node in last.items():
        ends.setdefault(node, []).append(value)
    return ends
