"""What the ranks of the image tests do: spread a captured model over tiles or channels, run a step, compare it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from image_nets import CLASSES, MODELS, PIXELS
from torch import nn
from torch.fx import Graph, Node

import drumline.partition.rules  # noqa: F401  # registers them
from drumline.partition import moves
from drumline.partition.capture import Captured, capture
from drumline.partition.choose import choose
from drumline.partition.layout import evenly
from drumline.partition.moves import Axis, part_of
from drumline.partition.overlap import join
from drumline.partition.program import Holder, Program, put, splits_of
from drumline.partition.shared_gradients import leave_summands
from drumline.partition.spatial.pieces import hollow
from drumline.partition.spread import Pass
from drumline.partition.window import rebalance, route, window, windows
from drumline.runtime.groups import group_of
from drumline.tracing.fake import fake_mode

SAMPLES = 3
STEPS = 2


@dataclass
class Result:
    """What one rank found."""

    worst: dict[str, float]
    """The largest difference of the loss, the gradients and the buffers, relative to their size."""
    gathered: dict[str, list[str]] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)
    """Whole tensors on the way, by the module that asked."""
    parameters: int = 0
    """Numbers of parameters that this rank holds."""
    heard: list[tuple[str, str, int]] = field(default_factory=list)
    """(axis, message, bytes)."""
    expected: int = 0
    """Bytes that the spans of the windows say in one forward."""
    hollow: int = 0
    """Operators of which this rank has no part."""


def model_of(name: str) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    return model.train()


def batch_of(name: str, size: Sequence[int]) -> list[torch.Tensor]:
    """Images, and a class for each or for each pixel."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, *size, generator=g, dtype=torch.float64)
    return [x, torch.randint(0, CLASSES, (SAMPLES, *(size if name in PIXELS else ())), generator=g)]


def run_model(model: nn.Module, leaves: list[Any]) -> torch.Tensor:
    """The mean loss."""
    return F.cross_entropy(model(leaves[0]), leaves[1])


@lru_cache
def kept(name: str, size: tuple[int, int]) -> Captured:
    """A graph that several tests spread, each into another one."""
    mode = fake_mode()
    return capture(model_of(name), run_model, [mode.from_tensor(t) for t in batch_of(name, size)], mode)


def captured_of(name: str, size: tuple[int, int]) -> tuple[Captured, nn.Module, list[torch.Tensor]]:
    """The graph, which nobody may change, and what it was made of."""
    return kept(name, size), model_of(name), batch_of(name, size)


def axes_of(tiles: tuple[int, int], heard: list[tuple[str, str, int]]) -> list[tuple[Axis, int]]:
    """This rank's axes and the dims of the images that they split. Every rank makes every group."""
    rows, columns = tiles
    rank = dist.get_rank()
    i, j = divmod(rank, columns)

    class Told:
        def __init__(self, axis: str, message: str, tensor: torch.Tensor) -> None:
            heard.append((axis, message, tensor.numel() * tensor.element_size()))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    down = [group_of([r * columns + c for r in range(rows)]) for c in range(columns)]
    across = [group_of([r * columns + c for c in range(columns)]) for r in range(rows)]
    found = [(Axis("rows", rows, i, down[j], Told), 2), (Axis("columns", columns, j, across[i], Told), 3)]
    return [(axis, dim) for axis, dim in found if axis.size > 1]


def spread_over_tiles(name: str, captured: Captured, axes: list[tuple[Axis, int]]) -> tuple[Graph, list[Pass]]:
    """One pass after the other."""
    graph, passes = captured.graph, []
    for axis, dim in axes:
        image, target = (n for n in graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch")
        size = captured.placeholders("batch")["0"].meta["val"].shape[dim]
        seeds = {image.name: evenly(dim, size, axis.size)}
        if name in PIXELS:
            seeds[target.name] = evenly(dim - 1, size, axis.size)
        done = Pass(graph, axis, captured.mode, seeds)
        graph = done.run()
        leave_summands(graph, axis)
        graph.lint()
        passes.append(done)
    return graph, passes


def program_of(graph: Graph, captured: Captured, model: nn.Module, axes: dict[str, Axis]) -> tuple[Program, Holder]:
    """The graph on this rank's parts of the parameters."""
    root = Holder()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"] != "batch":
            tensor = state[node.meta["name"]].detach()
            for name, split in splits_of(node).items():
                tensor = part_of(tensor, split, axes[name].index)
            put(
                root,
                node.meta["name"],
                nn.Parameter(tensor.clone()) if node.meta["role"] == "parameter" else tensor.clone(),
            )
    return Program(graph, captured.constants, root), root


def own_part(x: torch.Tensor, graph: Graph, i: int, axes: dict[str, Axis]) -> torch.Tensor:
    """This rank's part of tensor i of the batch."""
    node = [n for n in graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"][i]
    for name, split in splits_of(node).items():
        x = part_of(x, split, axes[name].index)
    return x.contiguous()


def whole_tensors(graph: Graph) -> list[str]:
    """Gathers that are not for the output."""
    alls = [n for n in graph.nodes if n.target in (moves.gather, moves.gather_to_enter, moves.take)]
    return [str(n.meta.get("module")) for n in alls if any(u.op != "output" for u in n.users)]


def compared(
    program: Program,
    root: Holder,
    model: nn.Module,
    leaves: list[torch.Tensor],
    axes: dict[str, Axis],
    summed: list[Axis],
) -> Result:
    """Two steps of both (running statistics advance twice), and how far they are apart."""
    graph = program.graph
    splits = {n.meta["name"]: splits_of(n) for n in graph.nodes if n.op == "placeholder"}
    worst = {"loss": 0.0, "gradients": 0.0, "buffers": 0.0}
    for _ in range(STEPS):
        model.zero_grad()
        for p in root.parameters():
            p.grad = None
        loss = run_model(model, leaves)
        loss.backward()
        out = program(*(own_part(x, graph, i, axes) for i, x in enumerate(leaves)))
        made = out[0] if isinstance(out, tuple | list) else out
        made.backward()
        worst["loss"] = max(worst["loss"], abs(float((made - loss).detach())))
        own = dict(root.named_parameters())
        for name, p in model.named_parameters():
            assert p.grad is not None
            gradient, want = own[name].grad, p.grad
            assert gradient is not None, f"{name} has no gradient"
            for axis in summed:
                dist.all_reduce(gradient, group=axis.group)
            for axis_name, split in splits[name].items():
                want = part_of(want, split, axes[axis_name].index)
            far = float((gradient - want).abs().max()) / max(float(p.grad.abs().max()), 1e-3)
            worst["gradients"] = max(worst["gradients"], far)
        for name, b in model.named_buffers():
            mine = dict(root.named_buffers())[name]
            worst["buffers"] = max(worst["buffers"], float((mine - b).abs().max()))
    return Result(worst, parameters=sum(p.numel() for p in root.parameters()))


def _sent(node: Node) -> int:
    """Bytes that one node sends in the forward, by the formula."""
    if node.target not in (window, windows, rebalance):
        return 0
    x, dim, bounds, wanted, axis = node.args[:5]
    spans = {
        window: lambda w: tuple((s,) for s in w),
        windows: tuple,
        rebalance: lambda w: tuple((s,) for s in pairwise(w)),
    }
    sends = route(tuple(bounds), tuple(tuple(s) for s in spans[node.target](wanted)), axis.index).sends
    rows = sum(b - a for _, run in sends for a, b in run)
    val = x.meta["val"]
    return rows * val.element_size() * (val.numel() // max(val.shape[dim], 1))


def on_tiles(cases: list[tuple[str, tuple[int, int]]], tiles: tuple[int, int]) -> list[Result]:
    """Every case on the tiles that the ranks make up."""
    heard: list[tuple[str, str, int]] = []
    axes = axes_of(tiles, heard)
    by_name = {axis.name: axis for axis, _ in axes}
    found = []
    for name, size in cases:
        captured, model, leaves = captured_of(name, size)
        graph, passes = spread_over_tiles(name, captured, axes)
        program, root = program_of(graph, captured, model, by_name)
        heard.clear()
        result = compared(program, root, model, leaves, by_name, [axis for axis, _ in axes])
        result.gathered = {k: v for done in passes for k, v in done.gathered.items()}
        result.moves, result.heard = whole_tensors(graph), list(heard)
        result.expected = sum(_sent(node) for node in graph.nodes)
        result.hollow = sum(node.target is hollow for node in graph.nodes)
        found.append(result)
    return found


def on_channels(cases: list[tuple[str, tuple[int, int]]]) -> list[tuple[Result, list[str]]]:
    """Every case with its channels on the ranks, as they are chosen; and the parameters that are held in parts."""
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    found = []
    for name, size in cases:
        captured, model, leaves = captured_of(name, size)
        choice = choose(captured, axis.size)
        done = Pass(captured.graph, axis, captured.mode, choice.splits)
        graph = done.run()
        program, root = program_of(graph, captured, model, {"tp": axis})
        result = compared(program, root, model, leaves, {"tp": axis}, [])
        result.gathered, result.moves = done.gathered, whole_tensors(graph)
        parts = [n.meta["name"] for n in graph.nodes if n.op == "placeholder" and splits_of(n)]
        found.append((result, parts))
    return found


def overlapped(name: str, size: tuple[int, int]) -> tuple[Result, int]:
    """On tiles of rows, with windows and convolutions joined; and how many were."""
    heard: list[tuple[str, str, int]] = []
    axes = axes_of((dist.get_world_size(), 1), heard)
    captured, model, leaves = captured_of(name, size)
    graph, _ = spread_over_tiles(name, captured, axes)
    count = join(graph)
    graph.lint()
    program, root = program_of(graph, captured, model, {"rows": axes[0][0]})
    heard.clear()
    result = compared(program, root, model, leaves, {"rows": axes[0][0]}, [axes[0][0]])
    result.heard = list(heard)
    return result, count


def on_tiles_and_channels(name: str, size: tuple[int, int]) -> Result:
    """Four ranks: two tiles of rows, then the channels of each on two ranks."""
    axes = axes_of((2, 2), [])
    rows, channels = axes[0][0], Axis("tp", 2, axes[1][0].index, axes[1][0].group)
    captured, model, leaves = captured_of(name, size)
    choice = choose(captured, 2)
    graph, _ = spread_over_tiles(name, captured, axes[:1])
    done = Pass(graph, channels, captured.mode, choice.splits)
    graph = done.run()
    by_name = {"rows": rows, "tp": channels}
    program, root = program_of(graph, captured, model, by_name)
    result = compared(program, root, model, leaves, by_name, [rows])
    result.gathered = done.gathered
    return result
