"""Makes the model with the serial model's weights, and applies the plan's choices to it, from the inside out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..core.job import Job
from ..plans import Plan
from .batchnorm import Spanning, span_statistics
from .compiling import compile_layers
from .experts import Spread, SpreadExperts
from .given import Given
from .groups import mesh_of
from .memory.recompute import recompute
from .memory.selective import recompute_selectively
from .memory.tiling import left_whole, tile
from .precision import HALVES
from .reads import read_outside
from .strategies.flat import FlatShard
from .strategies.pieces import Part
from .strategies.replicate import Replicate
from .strategies.strategy import Strategy
from .strategies.threads import Threads
from .strategies.zero import Shard
from .unused import unused_parameters
from .weights import fill, seeded_model, shape_of_model


@dataclass(frozen=True, slots=True)
class Built:
    """A model under a plan."""

    model: nn.Module
    """The user's module, under its own names except for `parts`."""
    module: nn.Module
    """What is called."""
    parts: Mapping[str, Part]
    """The parameters that are parts of one of the user's."""
    left: Mapping[str, str]
    """What the plan's key leaves whole although it asks for more, and why: layers for `chunk`, modules for `ep`."""
    norms: list[Spanning]
    """The norms whose statistics span ranks."""
    group: dist.ProcessGroup
    """All data-parallel ranks."""
    spread: Spread | None = None
    """With `ep`: what the user's model is, of which this rank has some of the experts."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the data-parallel ranks of a plan hold a model."""

    strategy: Strategy
    group: dist.ProcessGroup
    """All of them."""
    experts: SpreadExperts | None = None


def choose(job: Job, plan: Plan, device: torch.device) -> Choice:
    """Make the groups of a plan, and its strategy."""
    ranks = plan.processes
    mesh = mesh_of(device.type, (ranks,), ("dp",))
    group = mesh.get_group()
    if plan.backend == "threads":
        return Choice(Threads(plan.dp, device), group)
    if plan.ep > 1:
        experts = SpreadExperts(plan, group)
        return Choice(experts.strategy, group, experts)
    if not plan.zero or (ranks == 1 and plan.zero < 3):  # one rank alone has nothing to share
        return Choice(Replicate(group, plan, unused=ranks > 1 and unused_parameters(job)), group)
    hybrid = plan.shards < plan.dp
    if hybrid:
        mesh = mesh_of(device.type, (plan.dp // plan.shards, plan.shards), ("replica", "shard"))
    if plan.zero == 3:
        return Choice(Shard(mesh, plan, device, read_outside(job)), group)
    if hybrid:
        return Choice(FlatShard(plan, mesh.get_group("shard"), mesh.get_group("replica")), group)
    return Choice(FlatShard(plan, group, None), group)


def build(job: Job, plan: Plan, chosen: Choice, device: torch.device, dtype: torch.dtype | None) -> Built:
    """Build the model on this rank."""
    group = chosen.group
    # a model that was given is here already, equal on every rank, and is sharded where it is
    sharded = plan.zero == 3 and plan.processes > 1 and not isinstance(job.model, Given)
    host = plan.offload == "all" and device.type != "cpu"
    if isinstance(job.model, Given):
        source: nn.Module | None = job.model.take(dtype)
    else:
        source = seeded_model(job, dtype) if not sharded or dist.get_rank(group) == 0 else None
    model = shape_of_model(job, dtype) if sharded else source
    assert model is not None
    parts: Mapping[str, Part] = {}
    left: Mapping[str, str] = {}
    spread = chosen.experts.spread(model) if chosen.experts else None  # first: all experts may be too much for a device
    if spread:
        parts, left = spread.parts, spread.left
    if not sharded and not host and any(t.device != device for t in [*model.parameters(), *model.buffers()]):
        model.to(device)
    if plan.chunk > 1:
        left = left_whole(model)
        # threads lay their outputs side by side, which asks for all of the logits anyway
        parts = tile(model, plan.chunk, lazy=plan.backend != "threads")
    # torch's own BatchNorm refuses the half-precision weights that a sharded plan gathers
    own = plan.processes > 1 or (plan.zero == 3 and plan.precision in HALVES)
    norms = span_statistics(model, group) if own else []
    if plan.compile:
        compile_layers(model)
    if plan.recompute == "full":
        recompute(model)
    elif plan.recompute == "selective":
        recompute_selectively(model, device.type)
    module = chosen.strategy.wrap(model)
    if sharded:
        fill(model, source, group, device, parts=parts, host=host)
    return Built(model, module, parts, left, norms, group, spread)
