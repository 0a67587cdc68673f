"""Rank functions with shared samples: BatchNorm statistics over all of them, but not over a stand-in's."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from image_functions import (
    SAMPLES,
    axes_of,
    batch_of,
    cached_graph,
    model_of,
    own_part,
    program_of,
    run_model,
    shard_over_tiles,
)

from drumline.partition.batch_statistics import span_statistics
from drumline.partition.capture import capture
from drumline.partition.sharding.redistribution import Axis
from drumline.tracing.fake import fake_mode


def _group_of_all() -> Axis:
    return Axis("all", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def with_samples_too(name: str, size: tuple[int, int]) -> tuple[dict[str, float], int]:
    """Four ranks: two data-parallel groups (2 samples and 1), each on two tiles of rows; statistics over all four."""
    axes = axes_of((2, 2), [])
    (rows, _), (samples, _) = axes
    model, leaves = model_of(name), batch_of(name, size)
    first = samples.index == 0
    mine = [x[:2] if first else x[2:] for x in leaves]
    mode = fake_mode()
    own = capture(copy.deepcopy(model), run_model, [mode.from_tensor(x) for x in mine], mode)
    graph, _ = shard_over_tiles(name, own, [(rows, 2)])
    spans: list[frozenset[str]] = []

    def axis_of(names: frozenset[str]) -> Axis:
        spans.append(names)
        return _group_of_all() if names else Axis("samples", 2, samples.index, samples.group)

    span_statistics(graph, axis_of)
    program, root = program_of(graph, own, model, {"rows": rows})
    loss = run_model(model, leaves)
    loss.backward()
    out = program(*(own_part(x, graph, i, {"rows": rows}) for i, x in enumerate(mine)))
    made = (out[0] if isinstance(out, tuple | list) else out) * (len(mine[0]) / SAMPLES)
    made.backward()
    whole = made.detach().clone()
    dist.all_reduce(whole, group=samples.group)
    worst = {"loss": float((whole - loss.detach()).abs()), "gradients": 0.0, "buffers": 0.0}
    for name_, p in model.named_parameters():
        gradient = dict(root.named_parameters())[name_].grad
        assert gradient is not None and p.grad is not None
        dist.all_reduce(gradient)
        far = float((gradient - p.grad).abs().max()) / max(float(p.grad.abs().max()), 1e-3)
        worst["gradients"] = max(worst["gradients"], far)
    for name_, b in model.named_buffers():
        worst["buffers"] = max(worst["buffers"], float((dict(root.named_buffers())[name_] - b).abs().max()))
    return worst, len([s for s in spans if s == {"rows"}])


def with_a_stand_in(size: tuple[int, int]) -> dict[str, float]:
    """Two ranks, the second with a stand-in sample: all results equal those of the first rank alone."""
    world = _group_of_all()
    captured, model, leaves = cached_graph.__wrapped__("convnet", size), model_of("convnet"), batch_of("convnet", size)
    graph = captured.graph  # of its own: it is changed
    presence = span_statistics(graph, lambda _: world)
    presence.here = world.index == 0
    program, root = program_of(graph, captured, model, {})
    loss = run_model(model, leaves)
    loss.backward()
    out = program(*(leaves if presence.here else [torch.randn_like(leaves[0]), leaves[1]]))
    made = (out[0] if isinstance(out, tuple | list) else out) * float(presence.here)
    made.backward()
    worst = {"gradients": 0.0, "buffers": 0.0}
    for name, p in model.named_parameters():
        gradient = dict(root.named_parameters())[name].grad
        assert gradient is not None and p.grad is not None
        dist.all_reduce(gradient)
        worst["gradients"] = max(worst["gradients"], float((gradient - p.grad).abs().max()))
    for name, b in model.named_buffers():
        worst["buffers"] = max(worst["buffers"], float((dict(root.named_buffers())[name] - b).abs().max()))
    return worst
