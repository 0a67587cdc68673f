"""Finds where two runs part: forward outputs in the order of execution, then gradients in the order of the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...partition.layout import Split
from ...tracing.fake import dtype_of
from ..engine import Engine
from .witness import Key, Witness

_TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True, slots=True)
class Finding:
    """Where the plan's run first departs from the reference."""

    module: str
    phase: str
    error: float


def largest_error(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], share: float = 1e-3) -> float:
    """The largest error over tensors of the same names; a tensor that only one side has is an infinite one."""
    if set(a) != set(b):
        return float("inf")
    floor = share * max((_size(t) for t in b.values()), default=0.0)
    return max((error(a[k], b[k], floor) for k in b), default=0.0)


def error(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """max|a-b| / max(max|b|, floor); a value that is not a number is an infinite error."""
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    difference = float((_wide(a) - _wide(b)).abs().max())
    return float("inf") if difference != difference else difference / max(_size(b), floor, 1e-300)


def gather(engine: Engine, mine: Mapping[Key, torch.Tensor], present: torch.Tensor) -> dict[Key, list[torch.Tensor]]:
    """On the first rank: every rank's tensor under each key, in the order of ranks; ranks without samples have none."""
    result: dict[Key, list[torch.Tensor]] = {}
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(engine.ranks)]
    dist.all_gather(counts, torch.tensor([len(mine)]))
    if any(int(c) != len(mine) for c in counts):
        return result  # the ranks ran different modules: their outputs cannot be laid side by side
    shares = [torch.zeros_like(present) for _ in range(engine.ranks)]
    dist.all_gather(shares, present)
    for key, tensor in mine.items():
        parts = [tensor.cpu()]
        if engine.rank > 0:
            _post(tensor.cpu().contiguous())
        else:
            parts += [_take(r) for r in range(1, engine.ranks)]
            result[key] = [p for p, share in zip(parts, shares, strict=True) if share[key[1]] > 0]
    return result


def gather_split(
    engine: Engine, mine: Mapping[Key, torch.Tensor], splits: Mapping[Key, Mapping[str, Split]], micros: int
) -> dict[Key, list[torch.Tensor]]:
    """The same where the plan splits the model: parts are put together, and each stage's ranks send what they have."""
    model = engine.split
    assert model is not None
    whole = {key: model.whole(t, splits[key]).cpu() for key, t in mine.items()}
    keys = [(module, micro, call, i) for micro in range(micros) for module, call, i in model.first.outputs]
    number = {key: k for k, key in enumerate(keys)}
    listed = [(number[k], t) for k, t in sorted(whole.items(), key=lambda item: number.get(item[0], -1)) if k in number]
    if not model.places.speaks:
        listed = []
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(engine.ranks)]
    dist.all_gather(counts, torch.tensor([len(listed)]))
    if engine.rank > 0:
        for k, t in listed:
            dist.send(torch.tensor([k]), dst=0)
            _post(t.contiguous())
        return {}
    found: dict[int, list[torch.Tensor]] = {k: [t] for k, t in listed}
    for r in range(1, engine.ranks):
        for _ in range(int(counts[r])):
            which = torch.zeros(1, dtype=torch.long)
            dist.recv(which, src=r)
            found.setdefault(int(which), []).append(_take(r))
    return {keys[k]: found[k] for k in sorted(found)}


def _post(t: torch.Tensor) -> None:
    head = torch.tensor([_TYPES.index(t.dtype), t.dim(), *t.shape, *([0] * (10 - t.dim()))])
    dist.send(head, dst=0)
    if t.numel():
        dist.send(t, dst=0)


def _take(rank: int) -> torch.Tensor:
    head = torch.zeros(12, dtype=torch.long)
    dist.recv(head, src=rank)
    kind, dims, *shape = head.tolist()
    t = torch.empty(shape[:dims], dtype=_TYPES[kind])
    if t.numel():
        dist.recv(t, src=rank)
    return t


def compare_outputs(
    parts: Mapping[Key, list[torch.Tensor]], reference: Mapping[Key, torch.Tensor], bound: float, share: float = 1e-3
) -> Finding | None:
    """The first module, in the order in which they finished, whose output differs."""
    floor = share * max((_size(t) for t in reference.values()), default=0.0)
    for key, slices in parts.items():
        worst = _slices_error(slices, reference.get(key), 1.0, floor)
        if worst is not None and worst > bound:
            return Finding(key[0] or "(model)", "forward", worst)
    return None


def compare_gradients(
    parts: Mapping[Key, list[torch.Tensor]],
    whole: Mapping[str, torch.Tensor],
    reference: Witness,
    *,
    scale: float,
    bound: float,
    clipped: bool,
    share: float = 1e-3,
) -> Finding | None:
    """The first module, in the order of the backward, whose gradients differ.

    Where the gradient of a module's output is wrong, the module that consumed it is the one at fault.
    """
    floor = share * max((_size(t) for t in reference.output_gradients.values()), default=0.0)
    parameter_floor = share * max((_size(t) for t in reference.gradients[0].values()), default=0.0)
    consumer = "(loss)"
    for key in reversed(list(reference.outputs)):
        name = key[0]
        if key in reference.output_gradients and key in parts:
            worst = _slices_error(parts[key], reference.output_gradients[key], scale, floor)
            if worst is not None and worst > bound:
                return Finding(consumer, "backward", worst)
        own = [k for k in whole if k.rpartition(".")[0] == name and k in reference.gradients[0]]
        for k in own:
            worst = error(whole[k], reference.gradients[0][k], parameter_floor)
            if worst > bound and not clipped:
                return Finding(name or "(model)", "backward", worst)
        consumer = name or "(model)"
    wrong = {k: error(g, reference.gradients[0][k], parameter_floor) for k, g in whole.items()}
    if wrong and max(wrong.values()) > bound:
        k = max(wrong, key=lambda k: wrong[k])
        return Finding(k.rpartition(".")[0] or "(model)", "backward", wrong[k])
    return None


def _slices_error(slices: list[torch.Tensor], whole: torch.Tensor | None, scale: float, floor: float) -> float | None:
    """The error of slices laid side by side along the dim that counts samples; None where they cannot be."""
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


def _size(t: torch.Tensor) -> float:
    return float(t.detach().abs().max().double()) if t.numel() else 0.0


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.detach().cpu().to(dtype_of(t, torch.float64))
