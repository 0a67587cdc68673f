"""Tests whether a custom autograd function is elementwise: by running it, because no function declares it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

SIDE = 6
"""Size of each dim in the test."""


def is_elementwise(node: Node) -> bool:
    """Whether parts of the inputs give the same parts of the output and of the gradients, along every dim."""
    target: Any = node.target
    if not isinstance(getattr(target, "__self__", None), type(torch.autograd.Function)) or node.kwargs:
        return False
    out = node.meta["val"]
    inputs = [a.meta["val"] for a in node.args if isinstance(a, Node)]
    if not isinstance(out, torch.Tensor) or not all(_like(v, out) for v in inputs):
        return False
    cached = node.meta.setdefault("is_elementwise", [])
    if not cached:
        cached.append(_parts_agree(node, out.dim()))
    return bool(cached[0])


def _like(v: Any, out: torch.Tensor) -> bool:
    return isinstance(v, torch.Tensor) and v.shape == out.shape and v.is_floating_point() and out.is_floating_point()


def _parts_agree(node: Node, dims: int) -> bool:
    generator = torch.Generator().manual_seed(5)
    shape = [SIDE] * dims

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    try:
        inputs = [draw() if isinstance(a, Node) else a for a in node.args]
        weight = draw()
        whole = _run(node, inputs, weight)
        for dim in range(dims):
            for start, n in ((0, 2), (2, SIDE - 2)):
                cut = [a.narrow(dim, start, n) if isinstance(a, torch.Tensor) else a for a in inputs]
                part = _run(node, cut, weight.narrow(dim, start, n))
                if not all(
                    torch.allclose(p, w.narrow(dim, start, n), 1e-12, 1e-14) for p, w in zip(part, whole, strict=True)
                ):
                    return False
    except Exception:  # it needs another shape or type, so it is not split
        return False
    return dims > 0


def _run(node: Node, inputs: list[Any], weight: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the inputs."""
    leaves = [a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in inputs]
    with torch.enable_grad():
        out = node.target(*leaves)  # type: ignore[operator]  # it was called when it was captured
        (out * weight).sum().backward()
    results = [out.detach()]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            results.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return results
