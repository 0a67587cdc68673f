"""Runs a sharded graph: Python code of its operators, on this rank's parts of the parameters.

The parameters are kept in a module tree of their own, `ParameterHolder`, under the user's names; programs for other
batch shapes share it. A value is freed after its last use, as Python frees a local variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from .sharding.layout import Split

ValueObserver = Callable[[Node, Any], Any]
"""(node, value) -> the value to continue with; called while a program is observed."""


class ParameterHolder(nn.Module):
    """A node of the module tree; it only has parameters and buffers."""

    def forward(self) -> None:
        """Never called."""
        raise RuntimeError("a program is called, not the module that holds its parameters")


def register_tensor(
    root: nn.Module, name: str, tensor: torch.Tensor | nn.Parameter, *, persistent: bool = True
) -> None:
    """Register a parameter or a buffer under a dotted name."""
    *path, last = name.split(".")
    for key in path:
        if key not in root._modules:
            root.add_module(key, ParameterHolder())
        root = root._modules[key]  # type: ignore[assignment]  # just added
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor, persistent=persistent)


def splits_of(node: Node) -> dict[str, Split]:
    """The splits of a placeholder, by axis."""
    return dict(node.meta.get("splits", {}))


class GraphProgram:
    """`program(*tensors)` runs a graph (or a stage of one) and returns its outputs.

    With a root, the tensors are those of a batch; without, all placeholders of the graph are arguments, in order. Nodes
    with meta["shows"] can be observed.
    """

    def __init__(self, graph: Graph, constants: Mapping[str, torch.Tensor], root: nn.Module | None = None) -> None:
        self.graph = graph
        self._code = _Code(root, graph, constants)
        self._plain = self._code.compile(())
        self._shown: Callable[..., Any] | None = None
        self.observer: ValueObserver | None = None
        """Called with the values of observable nodes, or None."""

    @property
    def inputs(self) -> list[Node]:
        """The placeholders that a call fills, in order."""
        return self._code.inputs

    def observe(self, seen: ValueObserver | None) -> None:
        """Call `observer` with the values of observable nodes, also of nested programs; None stops that."""
        self.observer = seen
        for node in self.graph.nodes:
            inner = getattr(node.target, "program", None)
            if isinstance(inner, GraphProgram):
                inner.observe(seen)

    def __call__(self, *tensors: Any) -> Any:
        if self.observer is None:
            return self._plain(*tensors)
        if self._shown is None:
            self._shown = self._code.compile(n for n in self.graph.nodes if n.meta.get("shows"))
        return self._shown(*tensors, seen=self.observer)

    @property
    def source(self) -> str:
        """The generated code."""
        return self._code.text(())


class _Code:
    """Generates the code; without a root, parameters and buffers are arguments like the batch."""

    def __init__(self, root: nn.Module | None, graph: Graph, constants: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.inputs: list[Node] = []
        self._globals: dict[str, Any] = {}
        self._names: dict[Node, str] = {}
        self._prologue: list[str] = []
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
        self._prologue.append(f"{name} = t_{name}[{key!r}]")

    def compile(self, watched: Iterable[Node]) -> Callable[..., Any]:
        """A function of the batch's tensors, which shows the observed values as they come."""
        text = self.text(frozenset(watched))
        space = dict(self._globals)
        exec(compile(text, f"<program of {len(self._names)} operators>", "exec"), space)  # noqa: S102  # our own lines
        return space["run"]  # type: ignore[no-any-return]  # just defined

    def text(self, watched: Iterable[Node]) -> str:
        """The function's source."""
        watched = frozenset(watched)
        names = [self._names[n] for n in self.inputs]
        lines = [f"def run({', '.join([*names, 'seen=None'])}):", *(f"    {line}" for line in self._prologue)]
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
        """An argument as code; values without a literal become globals."""
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
    """The table and key of a parameter or buffer: looked up at every call, because its tensor may be replaced."""
    *path, last = name.split(".")
    for key in path:
        root = root._modules[key]  # type: ignore[assignment]  # it is there
    return (root._parameters if last in root._parameters else root._buffers), last


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """Node -> the values that are not read after it."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            last.setdefault(node, node)
        last.update(dict.fromkeys(node.all_input_nodes, node))
    ends: dict[Node, list[Node]] = {}
    for value, node in last.items():
        ends.setdefault(node, []).append(value)
    return ends
