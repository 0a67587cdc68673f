"""The contract of every rule, as a function: a small program, its inputs split in every way, gives on the ranks what it
gives whole, and so do its gradients; and which splits make the pass gather something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import drumline.partition.rules  # noqa: F401  # registers them
from drumline.partition.capture import CapturedGraph, capture
from drumline.partition.program import GraphProgram, ParameterHolder, register_tensor
from drumline.partition.sharding import redistribution
from drumline.partition.sharding.layout import Split, even_bounds
from drumline.partition.sharding.redistribution import Axis, part_of
from drumline.partition.sharding_pass import ShardingPass
from drumline.tracing.fake import fake_mode

NEAR = 1e-12


@dataclass(frozen=True)
class Ids:
    """Integers below `high`: part of the batch, without gradient."""

    shape: tuple[int, ...]
    high: int = 5


@dataclass(frozen=True)
class Bits:
    """Booleans."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A small program of inputs a, b, c ..., and where it cannot stay split."""

    name: str
    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    """Inputs; a shape is a parameter."""
    gathers: str = ""
    """Splits of one input for which something is gathered: `a0`, `b1`, or `a1/segments` for one kind of cut."""
    pairs: bool = False
    """Whether to split pairs of inputs as well."""


def seeds_of(case: Case, n: int) -> Iterator[tuple[str, dict[str, Split]]]:
    """All splits of one input, and of two."""
    single: dict[str, list[Split]] = {}
    for letter, given in zip("abcdefgh", case.inputs, strict=False):
        shape = given.shape if isinstance(given, Ids | Bits) else given
        for dim, size in enumerate(shape):
            for kind, cuts in cuts_of(size, n):
                if n > 2 and kind != "uneven":
                    continue  # two ranks have shown them
                split = Split(dim, cuts)
                yield f"{letter}{dim}/{kind}", {letter: split}
                if kind == "even":
                    single.setdefault(letter, []).append(split)
    for one, other in combinations(single, 2) if case.pairs else ():
        for s in single[one]:
            for t in single[other]:
                yield f"{one}{s.dim} {other}{t.dim}", {one: s, other: t}


def cuts_of(size: int, n: int) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Even, uneven (the last rank has one), and two segments."""
    if size < 2:
        return
    yield "even", (even_bounds(size, n),)
    if size > n:
        yield "uneven", ((*even_bounds(size - 1, n - 1), size),)
    if size >= 4:
        half = even_bounds(size, 2)[1]
        yield "segments", (even_bounds(half, n), even_bounds(size - half, n))


class Plain(nn.Module):
    """A module with the parameters of a case."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            if value.is_floating_point():
                self.register_parameter(name, nn.Parameter(value.clone()))


def values_of(case: Case) -> dict[str, torch.Tensor]:
    """The values of a case, the same on every rank."""
    g = torch.Generator().manual_seed(len(case.name))
    made: dict[str, torch.Tensor] = {}
    for letter, given in zip("abcdefgh", case.inputs, strict=False):
        if isinstance(given, Ids):
            made[letter] = torch.randint(0, given.high, given.shape, generator=g)
        elif isinstance(given, Bits):
            made[letter] = torch.rand(given.shape, generator=g) < 0.5
        else:
            made[letter] = torch.randn(given, generator=g, dtype=torch.float64)
    return made


def captured_of(case: Case) -> tuple[CapturedGraph, dict[str, torch.Tensor], list[str]]:
    """The graph of a case, its values, and the names of those in the batch."""
    values = values_of(case)
    batch = [k for k, v in values.items() if not v.is_floating_point()]
    mode = fake_mode()

    def run(model: nn.Module, leaves: list[Any]) -> Any:
        named = dict(zip(batch, leaves, strict=True)) | dict(model.named_parameters())
        return case.run(*(named[k] for k in values))

    return capture(Plain(values), run, [mode.from_tensor(values[k]) for k in batch], mode), values, batch


def placeholders(captured: CapturedGraph, batch: list[str]) -> dict[str, str]:
    """Letter -> name of its node."""
    names = {name: node.name for name, node in captured.placeholders("parameter").items()}
    return names | {batch[int(i)]: node.name for i, node in captured.placeholders("batch").items()}


def shard(captured: CapturedGraph, batch: list[str], splits: Mapping[str, Split], axis: Axis) -> ShardingPass:
    """Run a sharding pass."""
    names = placeholders(captured, batch)
    sharding = ShardingPass(captured.graph, axis, captured.mode, {names[k]: s for k, s in splits.items()})
    sharding.run()
    sharding.new.lint()
    return sharding


def gathers(done: ShardingPass) -> bool:
    """Whether anything was gathered before the outputs."""
    alls = [n for n in done.new.nodes if n.target in (redistribution.gather, redistribution.gather_into_split_work)]
    return bool(done.gathered) or any(any(u.op != "output" for u in n.users) for n in alls)


def cotangents(outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient for every output."""
    g = torch.Generator().manual_seed(7)
    return [torch.randn(o.shape, generator=g, dtype=torch.float64) for o in outs]


def backward(outs: list[torch.Tensor]) -> None:
    """Backward from all differentiable outputs."""
    pairs = [(o, c.to(o.dtype)) for o, c in zip(outs, cotangents(outs), strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])


def wanted(case: Case) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """Outputs and gradients of the plain program."""
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in values_of(case).items()}
    made = case.run(*leaves.values())
    outs = [made] if isinstance(made, torch.Tensor) else [t for t in made if isinstance(t, torch.Tensor)]
    backward(outs)
    return [o.detach() for o in outs], {k: v.grad for k, v in leaves.items() if v.is_floating_point()}


def got(
    captured: CapturedGraph,
    values: Mapping[str, torch.Tensor],
    batch: list[str],
    splits: Mapping[str, Split],
    axis: Axis,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """Outputs and gradients of this rank's program, run on its parts."""
    done = shard(captured, batch, splits, axis)
    own = {k: part_of(v, splits[k], axis.index).contiguous() if k in splits else v for k, v in values.items()}
    root = ParameterHolder()
    for k, v in own.items():
        if k not in batch:
            register_tensor(root, k, nn.Parameter(v.clone()))
    program = GraphProgram(done.new, captured.constants, root)
    made = program(*(own[k].clone() for k in batch))
    outs = [made] if isinstance(made, torch.Tensor) else list(made)
    backward(outs)
    return [o.detach() for o in outs], {k: p.grad for k, p in root.named_parameters()}


def differences(case: Case, axis: Axis) -> list[str]:
    """Differences on this rank, over all splits."""
    captured, values, batch = captured_of(case)
    outs, gradients = wanted(case)
    wrong = []
    for name, splits in seeds_of(case, axis.size):
        try:
            made, own = got(captured, values, batch, splits, axis)
        except Exception as e:
            wrong.append(f"{case.name} {name}: {type(e).__name__}: {e}")
            continue
        pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(made, outs, strict=True))]
        for k, gradient in gradients.items():
            if gradient is None or own[k] is None:
                if not (_nothing(gradient) and _nothing(own[k])):
                    wrong.append(f"{case.name} {name}: gradient of {k}: {own[k]} instead of {gradient}")
                continue
            whole = part_of(gradient, splits[k], axis.index) if k in splits else gradient
            pairs.append((f"gradient of {k}", own[k], whole))
        wrong += [f"{case.name} {name}: {what}: {_far(a, b)}" for what, a, b in pairs if _far(a, b)]
    return wrong


def _nothing(x: torch.Tensor | None) -> bool:
    return x is None or x.numel() == 0 or not x.any()


def _far(a: Any, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}"
    if not a.is_floating_point():
        return "" if torch.equal(a, b) else "other numbers"
    if a.numel() == 0:
        return ""
    scale = max(1.0, float(b.abs().nan_to_num(posinf=1.0).max()))
    return (
        ""
        if torch.allclose(a, b, rtol=0, atol=NEAR * scale, equal_nan=True)
        else f"off by {float((a - b).abs().max()):.1e}"
    )


def run_cases(cases: list[Case]) -> list[str]:
    """On every rank of a world."""
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    return [line for case in cases for line in differences(case, axis)]
