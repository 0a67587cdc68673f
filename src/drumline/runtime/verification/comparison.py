"""Locates where two runs diverge: forward outputs in execution order, then gradients in backward order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...partition.sharding.layout import Split
from ...tracing.fake import dtype_of
from ..engine import Engine
from .activations import ActivationRecorder, Key
from .parcels import gather_tensors


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where the plan's run differs from the reference."""

    module: str
    phase: str
    error: float


def largest_error(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], share: float = 1e-3) -> float:
    """The largest error over tensors by name; a tensor that only one side has is an infinite error."""
    if set(a) != set(b):
        return float("inf")
    floor = share * max((_max_abs(t) for t in b.values()), default=0.0)
    return max((error(a[k], b[k], floor) for k in b), default=0.0)


def error(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """max|a-b| / max(max|b|, floor); NaN is an infinite error."""
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    difference = float((_to_float64(a) - _to_float64(b)).abs().max())
    return float("inf") if difference != difference else difference / max(_max_abs(b), floor, 1e-300)


def gather(
    engine: Engine,
    mine: Mapping[Key, torch.Tensor],
    splits: Mapping[Key, Mapping[str, Split]],
    present: torch.Tensor,
) -> dict[Key, list[torch.Tensor]]:
    """On the first rank: every rank's tensor under each key, whole, in the order of ranks.

    `present` says in which micro-batches this rank has samples; it sends nothing of the others.
    """
    strategy = engine.strategy
    if strategy.output_order is not None:
        keys = [(module, i, call, k) for i in range(len(present)) for module, call, k in strategy.output_order]
    else:
        keys = list(mine)
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(engine.ranks)]
        dist.all_gather(counts, torch.tensor([len(mine)]))
        if any(int(c) != len(mine) for c in counts):
            return {}  # the ranks ran different modules: their outputs cannot be matched
    whole = {key: strategy.whole_output(t, splits[key]).cpu() for key, t in mine.items()}
    chosen = [k for k, key in enumerate(keys) if strategy.shows_outputs and key in whole and present[key[1]] > 0]
    tensors = gather_tensors({k: whole[keys[k]] for k in chosen}, engine.rank, engine.ranks)
    return {keys[k]: tensors[k] for k in sorted(tensors)}


def compare_outputs(
    parts: Mapping[Key, list[torch.Tensor]], reference: Mapping[Key, torch.Tensor], bound: float, share: float = 1e-3
) -> Divergence | None:
    """The first module, in execution order, whose output differs."""
    floor = share * max((_max_abs(t) for t in reference.values()), default=0.0)
    for key, slices in parts.items():
        worst = _slices_error(slices, reference.get(key), 1.0, floor)
        if worst is not None and worst > bound:
            return Divergence(key[0] or "(model)", "forward", worst)
    return None


def compare_gradients(
    parts: Mapping[Key, list[torch.Tensor]],
    whole: Mapping[str, torch.Tensor],
    reference: ActivationRecorder,
    *,
    scale: float,
    bound: float,
    clipped: bool,
    share: float = 1e-3,
) -> Divergence | None:
    """The first module, in backward order, whose gradients differ.

    If the gradient of a module's output is wrong, the module that consumed the output is at fault.
    """
    floor = share * max((_max_abs(t) for t in reference.output_gradients.values()), default=0.0)
    parameter_floor = share * max((_max_abs(t) for t in reference.gradients[0].values()), default=0.0)
    consumer = "(loss)"
    for key in reversed(list(reference.outputs)):
        name = key[0]
        if key in reference.output_gradients and key in parts:
            worst = _slices_error(parts[key], reference.output_gradients[key], scale, floor)
            if worst is not None and worst > bound:
                return Divergence(consumer, "backward", worst)
        own = [k for k in whole if k.rpartition(".")[0] == name and k in reference.gradients[0]]
        for k in own:
            worst = error(whole[k], reference.gradients[0][k], parameter_floor)
            if worst > bound and not clipped:
                return Divergence(name or "(model)", "backward", worst)
        consumer = name or "(model)"
    wrong = {k: error(g, reference.gradients[0][k], parameter_floor) for k, g in whole.items()}
    if wrong and max(wrong.values()) > bound:
        k = max(wrong, key=lambda k: wrong[k])
        return Divergence(k.rpartition(".")[0] or "(model)", "backward", wrong[k])
    return None


def _slices_error(slices: list[torch.Tensor], whole: torch.Tensor | None, scale: float, floor: float) -> float | None:
    """The error of slices concatenated along the sample dim; None if they do not fit together."""
    if whole is None or not slices:
        return None
    if all(s.shape == whole.shape for s in slices) and len(slices) > 1:
        return None if scale != 1.0 else max(error(s, whole, floor) for s in slices)
    for dim in range(whole.dim()):
        rest = [n for d, n in enumerate(whole.shape) if d != dim]
        fits = all([n for d, n in enumerate(s.shape) if d != dim] == rest for s in slices)
        if fits and sum(s.shape[dim] for s in slices) == whole.shape[dim]:
            return error(torch.cat(slices, dim) * scale, whole, floor)
    return None


def _max_abs(t: torch.Tensor) -> float:
    return float(t.detach().abs().max().double()) if t.numel() else 0.0


def _to_float64(t: torch.Tensor) -> torch.Tensor:
    return t.detach().cpu().to(dtype_of(t, torch.float64))
