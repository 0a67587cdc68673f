"""Grouped matmuls, as mixtures of experts compute them, for the types that torch does not support.

torch's `grouped_mm` supports neither float64 nor, on fake tensors, any type but bfloat16. This replacement runs one
matmul per group. It has its own backward, so a captured graph holds it as one operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..torchkit.fake_tensors import FakeTensor


class GroupedMatmul(torch.autograd.Function):
    """Multiplies the rows up to `ends[e]` by matrix e. Without values, all groups have the same number of rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return _each(rows, matrices, _groups(rows, matrices, ends))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, matrices, ends = ctx.saved_tensors
        groups = _groups(rows, matrices, ends)
        to_rows = _each(gradients[0], matrices.transpose(1, 2), groups) if ctx.needs_input_grad[0] else None
        products = [rows[a:b].T @ gradients[0][a:b] for a, b in groups]
        return to_rows, torch.stack(products) if ctx.needs_input_grad[1] else None, None


def _groups(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> list[tuple[int, int]]:
    n, count = rows.shape[0], matrices.shape[0]
    valued = not isinstance(ends, FakeTensor) and not ends.is_meta
    stops = ends.tolist() if valued else [n * (e + 1) // count for e in range(count)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _each(rows: torch.Tensor, matrices: torch.Tensor, groups: list[tuple[int, int]]) -> torch.Tensor:
    parts = [rows[a:b] @ matrices[e] for e, (a, b) in enumerate(groups)]
    rest = rows.new_zeros(rows.shape[0] - groups[-1][1], matrices.shape[2])  # rows of no group
    return torch.cat([*parts, rest])


def patch_grouped_mm() -> None:
    """Patch `torch.nn.functional.grouped_mm`, once, to support the types that it refuses."""
    plain = getattr(F, "grouped_mm", None)
    if plain is None or getattr(plain, "in_any_type", False):
        return

    def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: Any = None, **rest: Any) -> torch.Tensor:
        usual = (mat_a.dim(), mat_b.dim()) == (2, 3) and offs is not None and all(v is None for v in rest.values())
        refused = mat_a.dtype is torch.float64 or isinstance(mat_a, FakeTensor) or mat_a.is_meta
        if usual and refused:
            return GroupedMatmul.apply(mat_a, mat_b, offs)  # type: ignore[no-any-return,no-untyped-call]  # torch's
        return plain(mat_a, mat_b, offs=offs, **rest)  # type: ignore[no-any-return]  # torch's

    grouped_mm.in_any_type = True  # type: ignore[attr-defined]  # so that it is done once
    F.grouped_mm = grouped_mm
