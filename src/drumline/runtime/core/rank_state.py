"""Builds one rank of a job under a plan: process groups, strategy, and this rank's part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ...comm.environment import RankInfo
from ...core.job import Job
from ...plans import Plan
from ...torchkit.fake_tensors import with_real_tensors
from ...torchkit.recurrent import silence_rnn_contiguity_warning
from ..memory.recompute import recompute
from ..memory.selective import recompute_selectively
from ..memory.tiling import tile, untiled_layers
from ..numerics.batchnorm import SyncedBatchNorm, sync_batchnorms
from ..numerics.float8 import check_float8, left_in_bf16, use_float8
from ..numerics.precision import HALVES
from ..numerics.recurrent import has_recurrent_layers
from ..parallel.model_parallel import ModelParallel
from ..state.pieces import ParameterPart, ParameterSpec, Piece, parameter_specs, with_user_names
from ..state.prebuilt import PrebuiltModel
from ..state.process_groups import mesh_of
from ..state.recorder import StepRecorder
from ..state.weights import fill_sharded, meta_model, seeded_model
from ..strategies.experts import ExpertParallel
from ..strategies.flat_shard import FlatShard
from ..strategies.fsdp import FullyShard
from ..strategies.model_call import ModelCall
from ..strategies.parameter_usage import has_unused_parameters, layers_read_outside
from ..strategies.replicate import ReplicatedModel
from ..strategies.server_shard import ServerShard
from ..strategies.strategy import Strategy
from ..strategies.threads import ThreadReplicas
from .compiling import compile_layers, compiles_whole
from .gradient_schedules import gradient_schedules
from .half_weights import with_half_weights
from .independent_strategy import independent_strategy


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """One rank of a job under a plan, before its first step."""

    strategy: Strategy
    group: dist.ProcessGroup
    """All ranks."""
    record: StepRecorder
    slices: tuple[int, int]
    """Number of slices of a batch, and the index of this rank's."""
    model: nn.Module
    """This rank's part of the user's module, under its own names except for `parts`."""
    module: nn.Module
    """The module to call."""
    template: nn.Module
    """The user's module with all of its parameters and buffers, perhaps on fake tensors."""
    parts: Mapping[str, ParameterPart]
    """The parameters that are parts of one of the user's."""
    specs: dict[str, ParameterSpec]
    """Every parameter of the user's model, whole."""
    trained: frozenset[str]
    """The names of the trained parameters; a rank may have nothing of some."""
    left_whole: Mapping[str, str] = field(default_factory=dict)
    """Layers that `chunk`, or modules that `ep`, does not cut although they are as large, and why."""
    norms: Sequence[SyncedBatchNorm] = ()
    """The norms whose statistics span ranks."""
    owned_buffers: frozenset[str] | None = None
    """The buffers that this rank answers for; None where all ranks have them all, and the first answers."""

    def pieces(self) -> list[Piece]:
        """This rank's pieces of the parameters, under the user's names."""
        return with_user_names(self.strategy.pieces(), self.parts)


def build_rank_state(
    job: Job, plan: Plan, place: RankInfo, device: torch.device, dtype: torch.dtype | None, flops_per_byte: float | None
) -> RankState:
    """Make the process groups of a plan, its strategy, and this rank's part of the job's model."""
    if plan.precision == "fp8":
        check_float8(device, str(plan))
    job = with_half_weights(job, plan)
    if plan.splits_model:
        return _split_model(job, plan, place, device, dtype, flops_per_byte)
    with with_real_tensors():  # the numbers of ranks are real in a dry run too
        group = mesh_of(device.type, (place.size,), ("dp",)).get_group()
        strategy = choose_strategy(job, plan, device, group)
    strategy.record = StepRecorder(place.rank, device, group)
    return _whole_model(job, plan, place, device, dtype, strategy, group)


def choose_strategy(job: Job, plan: Plan, device: torch.device, group: dist.ProcessGroup) -> Strategy:
    """The strategy of a plan whose ranks all run the user's module, and its process groups."""
    ranks = plan.processes
    if plan.has_coordinator:
        return ServerShard(group)
    if plan.backend == "threads":
        return ThreadReplicas(plan.dp, device)
    if plan.steps_alone:
        return independent_strategy(job, plan, group)
    if plan.ep > 1:
        return ExpertParallel(plan, group)
    if not plan.zero or (ranks == 1 and plan.zero < 3):  # one rank has nothing to share
        schedules = gradient_schedules(plan, (ranks,), 0, device)
        return ReplicatedModel(group, plan, unused=ranks > 1 and has_unused_parameters(job), schedules=schedules)
    hybrid = plan.shards < plan.dp
    shape, names = ((plan.dp // plan.shards, plan.shards), ("replica", "shard")) if hybrid else ((ranks,), ("dp",))
    mesh = mesh_of(device.type, shape, names)
    if plan.zero == 3:
        return FullyShard(mesh, plan, device, layers_read_outside(job))
    over_shards = gradient_schedules(plan, shape, len(shape) - 1, device)
    if hybrid:
        over_replicas = gradient_schedules(plan, shape, 0, device)
        groups = mesh.get_group("shard"), mesh.get_group("replica")
        return FlatShard(plan, *groups, schedules=(over_shards, over_replicas))
    return FlatShard(plan, group, None, schedules=(over_shards, None))


def _split_model(
    job: Job, plan: Plan, place: RankInfo, device: torch.device, dtype: torch.dtype | None, flops_per_byte: float | None
) -> RankState:
    """A plan that splits the model itself."""
    world = dist.group.WORLD
    assert world is not None
    record = StepRecorder(place.rank, device, world)
    strategy = ModelParallel(job, plan, place.rank, device, dtype, record, flops_per_byte)
    if has_recurrent_layers():
        silence_rnn_contiguity_warning()
    return RankState(
        strategy=strategy,
        group=world,
        record=record,
        slices=strategy.placement.batch_slices,
        model=strategy.root,
        module=strategy.wrap(strategy.root),
        template=strategy.template,
        parts=strategy.placement.parts,
        specs=strategy.placement.specs,
        trained=_trained(strategy.template, {}),
        owned_buffers=strategy.placement.owned_buffers,
    )


def _whole_model(
    job: Job,
    plan: Plan,
    place: RankInfo,
    device: torch.device,
    dtype: torch.dtype | None,
    strategy: Strategy,
    group: dist.ProcessGroup,
) -> RankState:
    """The user's module with the serial model's weights; the plan's choices are applied from the inside out."""
    # a prebuilt model is equal on every rank already, and is sharded in place
    sharded = plan.zero == 3 and plan.processes > 1 and not isinstance(job.model, PrebuiltModel)
    host = plan.offload == "all" and device.type != "cpu"
    if isinstance(job.model, PrebuiltModel):
        source: nn.Module | None = job.model.trainable(dtype)
    else:
        source = seeded_model(job, dtype) if not sharded or dist.get_rank(group) == 0 else None
    model = meta_model(job, dtype) if sharded else source
    assert model is not None
    parts: Mapping[str, ParameterPart] = {}
    left: Mapping[str, str] = {}
    experts = strategy.distribute(model) if isinstance(strategy, ExpertParallel) else None
    if experts:  # before the model moves to the device, for which all experts may be too much
        parts, left = experts.parts, experts.left_whole
    if not sharded and not host and any(t.device != device for t in [*model.parameters(), *model.buffers()]):
        model.to(device)
    if plan.chunk > 1:
        left = untiled_layers(model)
        # threads concatenate their outputs, which needs all of the logits anyway
        parts = tile(model, plan.chunk, lazy=plan.backend != "threads")
    if plan.precision == "fp8" and (remark := left_in_bf16(use_float8(model))):
        strategy.remarks = (*strategy.remarks, remark)
    norms = _transform(model, plan, device, group, synced=not strategy.steps_alone)
    module = strategy.wrap(model)
    strategy.call = ModelCall(job, model, module, norms, plan.precision, device, dtype)
    if sharded:
        fill_sharded(model, source, group, device, parts=parts, host=host)
    assert strategy.record is not None
    return RankState(
        strategy=strategy,
        group=group,
        record=strategy.record,
        slices=(place.size, place.rank),
        model=model,
        module=module,
        template=model,
        parts=parts,
        specs=dict(experts.specs) if experts else parameter_specs(model, parts),
        trained=experts.trained if experts else _trained(model, parts),
        left_whole=left,
        norms=norms,
    )


def _transform(
    model: nn.Module, plan: Plan, device: torch.device, group: dist.ProcessGroup, *, synced: bool
) -> list[SyncedBatchNorm]:
    """BatchNorm over all ranks if `synced`, compilation, recomputation; returns the norms."""
    # torch's own BatchNorm refuses half-precision weights, which a sharded plan gathers and `bf16-pure` stores
    # a parameter server runs no forward
    half = plan.precision == "bf16-pure" or (plan.zero == 3 and plan.precision in HALVES)
    own = (plan.processes > 1 and not plan.has_coordinator) or half
    norms = sync_batchnorms(model, group) if own and synced else []
    if plan.compile:
        compile_layers(model, whole=compiles_whole(plan))
    if plan.recompute == "full":
        recompute(model)
    elif plan.recompute == "selective":
        recompute_selectively(model, device.type)
    return norms


def _trained(model: nn.Module, parts: Mapping[str, ParameterPart]) -> frozenset[str]:
    names = (name for name, p in model.named_parameters() if p.requires_grad)
    return frozenset(parts[name].name if name in parts else name for name in names)
