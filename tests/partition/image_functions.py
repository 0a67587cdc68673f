"""Rank functions of the image tests: shard a captured model over tiles or channels, run a step, compare it."""

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
from drumline.partition.capture import CapturedGraph, capture
from drumline.partition.partial_gradients import leave_partial_gradients
from drumline.partition.program import GraphProgram, ParameterHolder, register_tensor, splits_of
from drumline.partition.sharding import redistribution
from drumline.partition.sharding.halo_exchange import rebalance, route, window, windows
from drumline.partition.sharding.layout import even_split
from drumline.partition.sharding.redistribution import Axis, part_of
from drumline.partition.sharding_pass import ShardingPass
from drumline.partition.spatial.conv import overlap_halos
from drumline.partition.spatial.rows import empty_part
from drumline.partition.tensor_splits import choose_tensor_splits
from drumline.runtime.state.process_groups import process_group
from drumline.tracing.fake import fake_mode

SAMPLES = 3
STEPS = 2


@dataclass
class Result:
    """The result of one rank."""

    worst: dict[str, float]
    """The largest relative difference of the loss, the gradients and the buffers."""
    gathered: dict[str, list[str]] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)
    """Gathered tensors, by the module that needed them."""
    parameters: int = 0
    """Number of parameter values on this rank."""
    recorded: list[tuple[str, str, int]] = field(default_factory=list)
    """(axis, message, bytes)."""
    expected: int = 0
    """Bytes of the windows in one forward, by the formula."""
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
def cached_graph(name: str, size: tuple[int, int]) -> CapturedGraph:
    """A graph that several tests shard, each into another one."""
    mode = fake_mode()
    return capture(model_of(name), run_model, [mode.from_tensor(t) for t in batch_of(name, size)], mode)


def captured_of(name: str, size: tuple[int, int]) -> tuple[CapturedGraph, nn.Module, list[torch.Tensor]]:
    """The graph, which must not be changed, and its model and batch."""
    return cached_graph(name, size), model_of(name), batch_of(name, size)


def axes_of(tiles: tuple[int, int], recorded: list[tuple[str, str, int]]) -> list[tuple[Axis, int]]:
    """This rank's axes and the dims of the images that they split. Every rank makes every group."""
    rows, columns = tiles
    rank = dist.get_rank()
    i, j = divmod(rank, columns)

    class Observer:
        def __init__(self, axis: str, message: str, tensor: torch.Tensor) -> None:
            recorded.append((axis, message, tensor.numel() * tensor.element_size()))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    down = [process_group([r * columns + c for r in range(rows)]) for c in range(columns)]
    across = [process_group([r * columns + c for c in range(columns)]) for r in range(rows)]
    axes = [(Axis("rows", rows, i, down[j], Observer), 2), (Axis("columns", columns, j, across[i], Observer), 3)]
    return [(axis, dim) for axis, dim in axes if axis.size > 1]


def shard_over_tiles(
    name: str, captured: CapturedGraph, axes: list[tuple[Axis, int]]
) -> tuple[Graph, list[ShardingPass]]:
    """Shard over one axis after the other."""
    graph, passes = captured.graph, []
    for axis, dim in axes:
        image, target = (n for n in graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch")
        size = captured.placeholders("batch")["0"].meta["val"].shape[dim]
        seeds = {image.name: even_split(dim, size, axis.size)}
        if name in PIXELS:
            seeds[target.name] = even_split(dim - 1, size, axis.size)
        done = ShardingPass(graph, axis, captured.mode, seeds)
        graph = done.run()
        leave_partial_gradients(graph, axis)
        graph.lint()
        passes.append(done)
    return graph, passes


def program_of(
    graph: Graph, captured: CapturedGraph, model: nn.Module, axes: dict[str, Axis]
) -> tuple[GraphProgram, ParameterHolder]:
    """The graph on this rank's parts of the parameters."""
    root = ParameterHolder()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"] != "batch":
            tensor = state[node.meta["name"]].detach()
            for name, split in splits_of(node).items():
                tensor = part_of(tensor, split, axes[name].index)
            register_tensor(
                root,
                node.meta["name"],
                nn.Parameter(tensor.clone()) if node.meta["role"] == "parameter" else tensor.clone(),
            )
    return GraphProgram(graph, captured.constants, root), root


def own_part(x: torch.Tensor, graph: Graph, i: int, axes: dict[str, Axis]) -> torch.Tensor:
    """This rank's part of tensor i of the batch."""
    node = [n for n in graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"][i]
    for name, split in splits_of(node).items():
        x = part_of(x, split, axes[name].index)
    return x.contiguous()


def whole_tensors(graph: Graph) -> list[str]:
    """Gathers that are not for the output."""
    alls = [
        n
        for n in graph.nodes
        if n.target in (redistribution.gather, redistribution.gather_into_split_work, redistribution.take_part)
    ]
    return [str(n.meta.get("module")) for n in alls if any(u.op != "output" for u in n.users)]


def compared(
    program: GraphProgram,
    root: ParameterHolder,
    model: nn.Module,
    leaves: list[torch.Tensor],
    axes: dict[str, Axis],
    summed: list[Axis],
) -> Result:
    """Two steps of both (running statistics advance twice), and their differences."""
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
    """Every case on the tiles of the ranks."""
    recorded: list[tuple[str, str, int]] = []
    axes = axes_of(tiles, recorded)
    by_name = {axis.name: axis for axis, _ in axes}
    results = []
    for name, size in cases:
        captured, model, leaves = captured_of(name, size)
        graph, passes = shard_over_tiles(name, captured, axes)
        program, root = program_of(graph, captured, model, by_name)
        recorded.clear()
        result = compared(program, root, model, leaves, by_name, [axis for axis, _ in axes])
        result.gathered = {k: v for done in passes for k, v in done.gathered.items()}
        result.moves, result.recorded = whole_tensors(graph), list(recorded)
        result.expected = sum(_sent(node) for node in graph.nodes)
        result.hollow = sum(node.target is empty_part for node in graph.nodes)
        results.append(result)
    return results


def on_channels(cases: list[tuple[str, tuple[int, int]]]) -> list[tuple[Result, list[str]]]:
    """Every case with its channels split as chosen, and the names of the split parameters."""
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    results = []
    for name, size in cases:
        captured, model, leaves = captured_of(name, size)
        choice = choose_tensor_splits(captured, axis.size)
        done = ShardingPass(captured.graph, axis, captured.mode, choice.splits)
        graph = done.run()
        program, root = program_of(graph, captured, model, {"tp": axis})
        result = compared(program, root, model, leaves, {"tp": axis}, [])
        result.gathered, result.moves = done.gathered, whole_tensors(graph)
        parts = [n.meta["name"] for n in graph.nodes if n.op == "placeholder" and splits_of(n)]
        results.append((result, parts))
    return results


def overlapped(name: str, size: tuple[int, int]) -> tuple[Result, int]:
    """On tiles of rows, with windows and convolutions fused, and the number of fusions."""
    recorded: list[tuple[str, str, int]] = []
    axes = axes_of((dist.get_world_size(), 1), recorded)
    captured, model, leaves = captured_of(name, size)
    graph, _ = shard_over_tiles(name, captured, axes)
    count = overlap_halos(graph)
    graph.lint()
    program, root = program_of(graph, captured, model, {"rows": axes[0][0]})
    recorded.clear()
    result = compared(program, root, model, leaves, {"rows": axes[0][0]}, [axes[0][0]])
    result.recorded = list(recorded)
    return result, count


def on_tiles_and_channels(name: str, size: tuple[int, int]) -> Result:
    """Four ranks: two tiles of rows, then the channels of each on two ranks."""
    axes = axes_of((2, 2), [])
    rows, channels = axes[0][0], Axis("tp", 2, axes[1][0].index, axes[1][0].group)
    captured, model, leaves = captured_of(name, size)
    choice = choose_tensor_splits(captured, 2)
    graph, _ = shard_over_tiles(name, captured, axes[:1])
    done = ShardingPass(graph, channels, captured.mode, choice.splits)
    graph = done.run()
    by_name = {"rows": rows, "tp": channels}
    program, root = program_of(graph, captured, model, by_name)
    result = compared(program, root, model, leaves, by_name, [rows])
    result.gathered = done.gathered
    return result
