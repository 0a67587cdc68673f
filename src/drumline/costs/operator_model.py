"""The cost model that sums a step over the operators of a profile, at the rates of a data sheet or of measurements.

Every plan takes the same path. The model is split into one rank's part (model_split.py), the layers of that part are
timed with their messages, pipeline stages are cut from them, and the tail of the step is added. A plan that splits
nothing, or has one rank, is the case in which parts are whole and messages take no time.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

from ..clusters import Cluster, DeviceSpec
from ..models.profile import COMPUTE_KINDS, Layer, Profile
from ..plans import Plan
from ..plans.sync_caveats import most_delay
from .asynchronous import price_workers, workers_estimate
from .collectives import between_stages
from .corrections import Corrector
from .data_parallel_comm import (
    LayerCollectives,
    bucket_copy_seconds,
    gradient_collectives,
    layer_collectives,
    parameter_collectives,
    sharded_units_seconds,
)
from .estimate import Estimate
from .kernel_time import HOST_CALL, LAUNCHES, Pricer
from .layer_time import (
    LayerCommTime,
    LayerSums,
    LayerTime,
    compute_slowdown,
    gathers_units,
    largest_micro_batch,
    launch_seconds,
    layer_comm_times,
    layer_times,
)
from .memory import PeakMemory, peak_memory
from .model import CostModel, plan_notes
from .model_split import PIPELINE_NOTES, split_model
from .optimizer_update import effective_plan, host_accumulation_seconds, host_bytes, host_memory, update_parts
from .pipeline_cost import PipelineCost, pipeline_cost
from .pipeline_memory import layer_activations, memory_by_rank
from .rank_model import RankModel
from .stages import StageLayer, layer_names, layer_shares, stage_profile
from .step import Step, Tail, TailPart, gap_between_steps, loss_agreement_seconds
from .stored_type import stored_in
from .straggling import with_stragglers
from .tuning import COMPILED_HOST, MEASURED_ERROR, OPS_BEFORE_UPDATE, UNMEASURED_ERROR
from .typical_rates import with_typical_rates
from .worker_memory import server_memory, worker_memory
from .worker_times import TaskCompute, WorkerTimes, worker_times

_Key = tuple[object, ...]
_Layers = tuple[list[LayerTime], list[LayerCommTime], LayerSums]
_RankTail = tuple[TailPart, dict[str, float], TailPart]
"""Gradients to sum, seconds of the update by name, parameters to gather."""


def estimate(profile: Profile, plan: Plan, cluster: Cluster) -> Estimate:
    """Time and memory of one step under a plan."""
    return OperatorCostModel(profile, cluster, plan.precision).estimate(plan)


class OperatorCostModel(CostModel):
    """Prices plans of one precision, operator by operator. Caches what plans have in common."""

    def __init__(self, profile: Profile, cluster: Cluster, precision: str) -> None:
        profile = stored_in(profile, precision)
        cluster = with_typical_rates(cluster)
        self._profile, self._cluster, self._precision = profile, cluster, precision
        self._memory_limit = max(0.0, cluster.device.memory - cluster.device.context)
        self._has_norms = any(x.batch_norms for x in profile.layers)
        self._corrected = Corrector(cluster.corrections, profile, precision)
        # of the devices alone
        self._ranks: dict[_Key, tuple[RankModel, Pricer]] = {}
        self._compute: dict[_Key, list[LayerTime]] = {}
        self._launches: dict[_Key, float] = {}
        self._weight_shares: dict[tuple[int, float], float] = {}
        self._memory: dict[Plan, PeakMemory] = {}
        self._reset_links(cluster)
        self._split(Plan(precision=precision))  # refuses a precision that cannot be priced

    def _reset_links(self, cluster: Cluster) -> None:
        """Forget what depends on links."""
        self._cluster = with_typical_rates(cluster)
        self._active: dict[int, Cluster] = {}
        self._layers: dict[_Key, _Layers] = {}
        self._collectives: dict[_Key, LayerCollectives] = {}
        self._pipelines: dict[_Key, PipelineCost] = {}
        self._tails: dict[_Key, _RankTail] = {}

    def on_links_of(self, cluster: Cluster) -> OperatorCostModel:
        """The same for a cluster that differs in its links alone: compute and memory are not priced again."""
        other = copy.copy(self)
        other._reset_links(cluster)
        return other

    def with_batch_size(self, samples: int) -> OperatorCostModel:
        """The same for another global batch size: what is cached is cached by micro-batch, except memory."""
        other = copy.copy(self)
        other._profile, other._memory = replace(self._profile, batch_size=samples), {}
        return other

    # -- memory

    def memory(self, plan: Plan) -> PeakMemory:
        """Peak memory of the rank that needs the most."""
        if plan not in self._memory:
            most = max(self.memory_by_stage(plan), key=lambda m: m.total)
            streams = 2 if plan.graph else 1  # libraries have a workspace for each stream, also that of the capture
            self._memory[plan] = replace(most, workspace=streams * self._cluster.device.workspace)
        return self._memory[plan]

    def memory_by_stage(self, plan: Plan) -> list[PeakMemory]:
        """Peak memory of a rank of every pipeline stage, without the libraries' workspace."""
        plan, profile = effective_plan(plan, self._cluster), self.rank_model(plan).profile
        n = largest_micro_batch(self._profile.batch_size, plan)
        if plan.sync != "allreduce":
            return [worker_memory(profile, plan, n, device=self._cluster.device.kind)]
        if plan.pp == 1:
            return [peak_memory(profile, plan, n, device=self._cluster.device.kind)]
        pipeline = self.pipeline(plan)
        return memory_by_rank(profile, plan, n, pipeline.order, pipeline.stages, pipeline.homes)

    def excess(self, plan: Plan) -> float:
        """Bytes that a plan needs beyond the memory of the device or its host; much quicker than an estimate."""
        plan = effective_plan(plan, self._cluster)
        device = self.memory(plan).total - self._memory_limit
        if plan.has_coordinator:
            needed, there = server_memory(self._profile, plan, self._cluster, self.memory(plan).total)
            return max(device, needed - there)
        if plan.offload == "none":
            return device
        return max(device, host_bytes(self._profile, plan) - host_memory(self._cluster.device).memory)

    # -- time

    def estimate(self, plan: Plan) -> Estimate:
        """Time and memory of one step."""
        if plan.sync != "allreduce":
            return self._corrected(self._estimate_workers(plan), plan)
        step, memory, cluster = self.step(plan), self.memory(plan), self._cluster
        parts, hidden = step.parts()
        uncorrected = Estimate(
            plan=str(plan),
            step_seconds=sum(parts.values()),
            parts=parts,
            memory_bytes=memory.total,
            memory_parts=memory.parts(),
            memory_limit=self._memory_limit,
            hidden_seconds=hidden,
            error=self.error,
            origin=self._origin,
            notes=(*plan_notes(plan, cluster), *step.notes),
            staleness=float(most_delay(plan)),
            host_bytes=host_bytes(self._profile, step.plan),
            host_limit=host_memory(cluster.device).memory if step.plan.offload != "none" else 0.0,
        )
        return with_stragglers(self._corrected(uncorrected, plan), step, cluster.step_times)

    def _estimate_workers(self, plan: Plan) -> Estimate:
        """Time and memory of a step whose replicas do not meet."""
        price = price_workers(plan, self.worker_times(plan), self._cluster)
        return workers_estimate(
            plan, price, self._profile, self._cluster, self.memory(plan), error=self.error, origin=self._origin
        )

    @property
    def error(self) -> float:
        """Stated bound on the relative error of a step time."""
        cluster = self._cluster
        return max(MEASURED_ERROR, cluster.measurement_spread) if cluster.measured else UNMEASURED_ERROR

    @property
    def _origin(self) -> str:
        """Where the numbers of an estimate come from."""
        return f"closed form; rates: {self._cluster.origin_of('device.peak')}; model: {self._profile.origin}"

    def worker_times(self, plan: Plan) -> WorkerTimes:
        """One worker's task of a plan whose replicas do not meet, for the estimate and for the simulator."""
        *_, sums = self._layers_of(plan)
        m, cluster = plan.micro, self._active_cluster(plan)
        recompute = m * sums.recompute
        overhead = gap_between_steps(cluster, captured=plan.graph) + max(0.0, self._launch_lag(plan))
        compute = TaskCompute(
            m * sums.forward,
            m * sums.backward - recompute,
            recompute,
            overhead,
            sum(self._rank_tail(plan, 0)[1].values()),
        )
        return worker_times(self._profile, plan, cluster, compute)

    def step(self, plan: Plan) -> Step:
        """One step as data, for the estimate and for the simulator."""
        plan = effective_plan(plan, self._cluster)
        cluster = self._active_cluster(plan)
        times, comm, sums = self._layers_of(plan)
        collectives, pipeline = self._collectives_of(plan), self.pipeline(plan) if plan.pp > 1 else None
        tails = tuple(self._tail(plan, stage) for stage in range(plan.pp))
        step = Step(
            plan=plan,
            cluster=cluster,
            layers=times,
            layer_comm=comm,
            collectives=collectives,
            busiest=sums,
            sharded_units=sharded_units_seconds(collectives, plan, cluster),
            pipeline=pipeline,
            tails=tails,
            notes=(*self.rank_model(plan).notes, *(PIPELINE_NOTES if pipeline else ())),
        )
        return step.with_pipeline(pipeline) if pipeline else step

    def rank_model(self, plan: Plan) -> RankModel:
        """The part of the model on one rank, before pipeline stages are cut."""
        return self._split(plan)[0]

    def pipeline(self, plan: Plan) -> PipelineCost:
        """The stages of a plan and their schedule."""
        n = largest_micro_batch(self._profile.batch_size, plan)
        axes = *_split_key(plan), plan.pp, plan.dp
        key = *axes, plan.virtual, plan.schedule, plan.begins, plan.micro, plan.recompute, n
        if key not in self._pipelines:
            cost = pipeline_cost(self._stage_layers(plan, n), plan, self._cluster, self._profile.name)
            self._pipelines[key] = cost
        return self._pipelines[key]

    # -- the parts of a step, each priced once

    def _active_cluster(self, plan: Plan) -> Cluster:
        """The cluster as the ranks of this plan find it."""
        if plan.ranks not in self._active:
            self._active[plan.ranks] = self._cluster.with_active_ranks(plan.ranks)
        return self._active[plan.ranks]

    def _split(self, plan: Plan) -> tuple[RankModel, Pricer]:
        key = _split_key(plan)
        if key not in self._ranks:
            rank = split_model(self._profile, plan)
            self._ranks[key] = rank, Pricer(rank.profile, launched_by(self._cluster.device, plan), self._precision)
        return self._ranks[key]

    def _layers_of(self, plan: Plan) -> _Layers:
        """The layers of one rank, repeats one by one: their compute, their messages, and the sums of both."""
        (rank, pricer), cluster = self._split(plan), self._active_cluster(plan)
        n = largest_micro_batch(self._profile.batch_size, plan)
        alone = *_split_key(plan), n, plan.recompute, compute_slowdown(plan, self._cluster), gathers_units(plan)
        if alone not in self._compute:
            self._compute[alone] = layer_times(rank.profile, pricer, plan, n, cluster)
        times = self._compute[alone]
        # ranks meet other links where only some of a node's ranks are active; norms span all replicas
        key = *alone, plan.ranks if self._cluster.partial_occupancy else 0, plan.dp if self._has_norms else 0
        if key not in self._layers:
            comm = layer_comm_times(rank, times, plan, n, self._profile, cluster, pricer)
            self._layers[key] = times, comm, LayerSums.of(times, comm)
        return self._layers[key]

    def _collectives_of(self, plan: Plan) -> LayerCollectives:
        """The data-parallel collectives around the layers of one rank."""
        key = *_split_key(plan), *_message_key(plan)
        if key not in self._collectives:
            messages = layer_collectives(self.rank_model(plan).profile, plan, self._active_cluster(plan))
            self._collectives[key] = LayerCollectives.of(messages)
        return self._collectives[key]

    def _tail(self, plan: Plan, stage: int) -> Tail:
        """The work of a rank of a pipeline stage after its last backward, in this order."""
        cluster, profile = self._active_cluster(plan), self.rank_model(plan).profile
        gradients, update, parameters = self._rank_tail(plan, stage)
        part = partial(TailPart, "communication")
        copies = bucket_copy_seconds(profile, plan, cluster, self._split(plan)[1])
        return (
            part("communication tied", self._tied_seconds(plan)),
            gradients,
            part("communication copies", copies),
            part("communication host", host_accumulation_seconds(profile, plan, cluster.device)),
            TailPart("overhead", "communication loss", loss_agreement_seconds(plan, cluster)),
            TailPart("overhead", "overhead", gap_between_steps(cluster, captured=plan.graph)),
            TailPart("optimizer", "optimizer weights", self._version_seconds(plan, stage)),
            *(TailPart("optimizer", name, max(seconds, self._launch_lag(plan))) for name, seconds in update.items()),
            parameters,
        )

    def _rank_tail(self, plan: Plan, stage: int) -> _RankTail:
        profile, pricer = self.rank_model(plan).profile, self._split(plan)[1]
        shares = layer_shares(self.pipeline(plan).of_rank(stage)) if plan.pp > 1 else None
        key = *_split_key(plan), shares, *_message_key(plan)
        if key not in self._tails:
            cluster = self._active_cluster(plan)
            profile = profile if shares is None else stage_profile(profile, shares)
            self._tails[key] = (
                TailPart.of("communication gradients", gradient_collectives(profile, plan, cluster)),
                {
                    name: cluster.compute_factor(plan.ranks) * seconds
                    for name, seconds in update_parts(profile, plan, cluster.device, pricer).items()
                },
                TailPart.of("communication parameters", parameter_collectives(profile, plan, cluster)),
            )
        return self._tails[key]

    def _version_seconds(self, plan: Plan, stage: int) -> float:
        """A copy of the weights before each update, where batches in flight still need the old ones."""
        if not plan.keeps_batches_in_flight or stage == plan.pp - 1:
            return 0.0
        profile = stage_profile(self.rank_model(plan).profile, layer_shares(self.pipeline(plan).of_rank(stage)))
        moved = 2.0 * profile.trained * profile.parameter_bytes
        rate = self._split(plan)[1].memory_rate("pointwise", max(1.0, moved))
        return self._active_cluster(plan).compute_factor(plan.ranks) * moved / rate

    def _launch_lag(self, plan: Plan) -> float:
        """How much later than the passes a GPU's host has launched the update: it may be behind its GPU.

        Not with a split model, where the device waits for messages and the host catches up.
        """
        device = self._cluster.device
        if device.kind != "cuda" or plan.offload != "none" or plan.splits_model or plan.graph:
            return 0.0
        (rank, pricer), n = self._split(plan), largest_micro_batch(self._profile.batch_size, plan)
        key = *_split_key(plan), n, plan.recompute, gathers_units(plan)
        if key not in self._launches:
            self._launches[key] = launch_seconds(rank.profile, pricer, plan, n, self._cluster)
        *_, sums = self._layers_of(plan)
        update = rank.profile.tensors * device.host_overhead.get("update", 0.0)
        update += OPS_BEFORE_UPDATE * device.host_overhead.get(HOST_CALL, 0.0)
        return plan.micro * self._launches[key] + update - plan.micro * (sums.forward + sums.backward)

    def _tied_seconds(self, plan: Plan) -> float:
        """Gradients of a table that two pipeline stages have are exchanged at the end."""
        if plan.pp == 1:
            return 0.0
        profile = self.rank_model(plan).profile
        tied = max((x.tied for x in profile.layers), default=0) * profile.parameter_bytes
        return between_stages(float(tied), plan, self._cluster) if tied else 0.0

    def _stage_layers(self, plan: Plan, n: int) -> list[StageLayer]:
        """The layers of one rank, repeats one by one, from which pipeline stages are cut."""
        profile, pricer = self.rank_model(plan).profile, self._split(plan)[1]
        times, comm, _ = self._layers_of(plan)
        kept = layer_activations(profile, plan, n)
        places = [i for i, x in enumerate(profile.layers) for _ in range(x.repeats)]
        return [
            StageLayer(
                layer=i,
                name=name,
                share=1.0,
                forward=t.forward,
                backward=t.backward,
                weight=t.backward * self._weight_share(t.layer, n, pricer),
                comm_forward=c.forward,
                comm_backward=c.backward,
                hidden=c.hidden,
                has_parameters=t.layer.parameters + t.layer.frozen + t.layer.tied > 0,
                saved=kept[i].saved,
                output=kept[i].output,
                working=kept[i].working,
                deferred=kept[i].deferred,
                recompute=t.recompute,
            )
            for i, name, t, c in zip(places, layer_names(profile.layers), times, comm, strict=True)
        ]

    def _weight_share(self, layer: Layer, n: float, pricer: Pricer) -> float:
        """The share of a layer's backward that is for weights: one of the two backward matmuls of each weight."""
        key = id(layer.ops), n
        if key not in self._weight_shares:
            back = [(op, pricer.op_seconds(op, n) * op.count) for op in layer.ops if op.phase == "backward"]
            whole = sum(seconds for _, seconds in back)
            matmuls = sum(s for op, s in back if op.kind in COMPUTE_KINDS and op.kind != "attention_backward")
            self._weight_shares[key] = 0.5 * matmuls / whole if whole else 0.0
        return self._weight_shares[key]


def _message_key(plan: Plan) -> _Key:
    """The choices that set the messages between replicas."""
    sizes = plan.pp, plan.dp, plan.shards, plan.zero, plan.offload, plan.chunk
    return *sizes, plan.compress, plan.bucket, plan.allreduce, plan.backend


def _split_key(plan: Plan) -> _Key:
    """The keys that decide one rank's part of the model, and how it is launched."""
    return plan.tile, plan.halo, plan.cp, plan.tp, plan.ep, plan.graph, plan.compile


def launched_by(device: DeviceSpec, plan: Plan) -> DeviceSpec:
    """A GPU with its host's times under a plan: a graph launches all kernels at once, compiled code takes longer."""
    if device.kind != "cuda" or not (plan.graph or plan.compile):
        return device
    factor = 0.0 if plan.graph else COMPILED_HOST
    changed = {key: factor * device.host_overhead.get(key, device.launch) for key in LAUNCHES}
    kept = {key: s for key, s in changed.items() if key in device.host_overhead or key in ("forward", "backward")}
    return replace(device, host_overhead=device.host_overhead | kept)
