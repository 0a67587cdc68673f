"""The closed form of one step: compute, the communication that is not hidden, the optimizer; and its memory."""

from __future__ import annotations

import copy
from dataclasses import replace

from ..clusters import Cluster
from ..models.profile import Profile
from ..plans import Plan
from .collectives import collective_seconds
from .corrections import Corrector
from .divided import Divided
from .estimate import Estimate
from .host import as_it_runs, host_bytes, host_of, stream_seconds
from .layers import LayerTime, Sent, communication, computed, host_seconds, waiting
from .layers import largest_share as largest_share
from .memory import Memory, peak_memory
from .traffic import after_backward, after_update, messages, reduced_often
from .update import update_seconds
from .work import Pricer

UNMEASURED_ERROR = 0.5
MEASURED_ERROR = 0.25
"""Stated bounds on the relative error of a step's time, by where the rates come from."""


def layer_times(profile: Profile, plan: Plan, cluster: Cluster) -> list[LayerTime]:
    """The layers in the order in which they run, priced for this plan. Buckets hang on the layer that fills them."""
    return Steps(profile, cluster, plan.precision).layer_times(plan)


def estimate(profile: Profile, plan: Plan, cluster: Cluster) -> Estimate:
    """Time and memory of one step under a plan."""
    return Steps(profile, cluster, plan.precision).estimate(plan)


class Steps:
    """Prices plans of one precision for a model on a cluster. Remembers what plans have in common."""

    def __init__(self, profile: Profile, cluster: Cluster, precision: str) -> None:
        self._profile, self._cluster = profile, cluster
        self._pricer = Pricer(profile, cluster.device, precision)
        self._computed: dict[tuple[object, ...], list[LayerTime]] = {}
        self._sent: dict[tuple[object, ...], Sent] = {}
        self._updated: dict[tuple[object, ...], tuple[float, float]] = {}
        self._memory: dict[Plan, Memory] = {}
        self._memory_limit = max(0.0, cluster.device.memory - cluster.device.context)
        self._norms = any(x.norms for x in profile.layers)
        self._divided = Divided(profile, cluster, precision)
        self._corrected = Corrector(cluster.corrections, profile, precision)

    def on_links_of(self, cluster: Cluster) -> Steps:
        """The same for machines that differ in their links alone: what devices compute and hold is not priced anew."""
        other = copy.copy(self)
        other._cluster, other._sent, other._updated = cluster, {}, {}
        other._divided = self._divided.on_links_of(cluster)
        return other

    def with_batches_of(self, samples: int) -> Steps:
        """The same for another batch: kernels that were priced, and parts of the model, are known already."""
        other = copy.copy(self)
        other._profile, other._memory = replace(self._profile, batch_size=samples), {}
        other._divided = self._divided.with_batches_of(samples)
        return other

    def layer_times(self, plan: Plan) -> list[LayerTime]:
        """The layers with their messages."""
        plan = as_it_runs(plan, self._cluster)
        return [
            LayerTime(t.layer, t.forward, t.backward, t.again, *around)
            for t, around in zip(self._compute(plan), self._messages(plan).around, strict=True)
        ]

    def memory(self, plan: Plan) -> Memory:
        """The memory of a rank at the worst moment."""
        if plan not in self._memory and plan.splits_model:
            self._memory[plan] = replace(self._divided.memory(plan), workspace=self._cluster.device.workspace)
        elif plan not in self._memory:
            n = largest_share(self._profile.batch_size, plan)
            device = self._cluster.device.kind
            memory = peak_memory(self._profile, as_it_runs(plan, self._cluster), n, device=device)
            self._memory[plan] = replace(memory, workspace=self._cluster.device.workspace)
        return self._memory[plan]

    def excess(self, plan: Plan) -> float:
        """Bytes that a plan needs beyond what there is, on the device or on its host; much quicker than an estimate."""
        plan = as_it_runs(plan, self._cluster)
        device = self.memory(plan).total - self._memory_limit
        if plan.offload == "none":
            return device
        return max(device, host_bytes(self._profile, plan) - host_of(self._cluster.device).memory)

    def fits(self, plan: Plan) -> bool:
        """Whether the memory suffices."""
        return self.excess(plan) <= 0

    def estimate(self, plan: Plan) -> Estimate:
        """Time and memory of one step."""
        given, plan = plan, as_it_runs(plan, self._cluster)
        if plan.splits_model:
            step = self._divided.step(plan)
            overhead = step.parts["overhead"] + between_steps(self._cluster)
            return self._answer(given, step.parts | {"overhead": overhead}, step.hidden, step.notes)
        profile, cluster, m = self._profile, self._cluster.with_active_ranks(plan.ranks), plan.micro
        times, sent = self._compute(plan), self._messages(plan)
        again = m * sum(t.again for t in times)
        exposed, hidden = communication(times, sent, plan, cluster)
        if self._norms:
            exposed += m * sum(statistics_seconds(t, plan, cluster) for t in times)
        update, beside = self._update(plan)
        parts = {
            "forward": m * sum(t.forward for t in times),
            "backward": m * sum(t.backward for t in times) - again,
            "recompute": again,
            "communication": exposed + beside + self._copied(plan) + added_on_host(profile, plan, cluster),
            "optimizer": max(update, self._late(plan, m * sum(t.forward + t.backward for t in times))),
            "overhead": agreement(plan, cluster) + between_steps(cluster),
        }
        return self._answer(given, parts, hidden, ())

    def _copied(self, plan: Plan) -> float:
        """Gradients are copied into their buckets. A CPU takes time for it, a GPU does it beside its products."""
        if plan.dp == 1 or plan.zero == 3 or self._cluster.device.kind == "cuda":
            return 0.0
        moved = 2.0 * self._profile.trained * self._profile.parameter_bytes
        often = plan.micro if reduced_often(plan) else 1
        return often * self._cluster.compute_factor(plan.ranks) * moved / self._pricer.memory_rate("pointwise", max(1.0, moved))

    def _late(self, plan: Plan, passes: float) -> float:
        """How much later than the passes a GPU's host is done with telling of the update: it may be ahead of them."""
        device = self._cluster.device
        if device.kind != "cuda" or plan.offload != "none":
            return 0.0
        n = largest_share(self._profile.batch_size, plan)
        key = (n, plan.recompute, "host")
        if key not in self._updated:
            self._updated[key] = host_seconds(self._profile, self._pricer, plan, n), 0.0
        update = self._profile.tensors * device.host_overhead.get("update", 0.0)
        return plan.micro * self._updated[key][0] + update - passes

    def _answer(self, given: Plan, parts: dict[str, float], hidden: float, notes: tuple[str, ...]) -> Estimate:
        profile, cluster, plan = self._profile, self._cluster, as_it_runs(given, self._cluster)
        memory = self.memory(given)
        found = Estimate(
            plan=str(given),
            step_seconds=sum(parts.values()),
            parts=parts,
            memory_bytes=memory.total,
            memory_parts=memory.parts(),
            memory_limit=self._memory_limit,
            hidden_seconds=hidden,
            error=max(MEASURED_ERROR, cluster.measurement_spread) if cluster.measured else UNMEASURED_ERROR,
            origin=f"closed form; rates: {cluster.origin_of('device.peak')}; model: {profile.origin}",
            notes=(*notes_of(given, cluster), *notes),
            host_bytes=host_bytes(profile, plan),
            host_limit=host_of(cluster.device).memory if plan.offload != "none" else 0.0,
        )
        return self._corrected(found, given)

    @property
    def divided(self) -> Divided:
        """What prices plans that split the model."""
        return self._divided

    def _compute(self, plan: Plan) -> list[LayerTime]:
        """The layers without messages."""
        n = largest_share(self._profile.batch_size, plan)
        key = (n, plan.recompute, waiting(plan, self._cluster))
        if key not in self._computed:
            self._computed[key] = computed(self._profile, self._pricer, plan, n, self._cluster)
        return self._computed[key]

    def _messages(self, plan: Plan) -> Sent:
        """The messages around the layers."""
        key = (plan.dp, plan.shards, plan.zero, plan.offload, plan.chunk, plan.compress, plan.bucket)
        if key not in self._sent:
            self._sent[key] = Sent.of(messages(self._profile, plan, self._cluster.with_active_ranks(plan.ranks)))
        return self._sent[key]

    def _update(self, plan: Plan) -> tuple[float, float]:
        """(the update, the messages right before and after it)."""
        key = (plan.dp, plan.shards, plan.zero, plan.offload, plan.bucket, plan.chunk)
        if key not in self._updated:
            profile, cluster = self._profile, self._cluster.with_active_ranks(plan.ranks)
            beside = after_backward(profile, plan, cluster) + after_update(profile, plan, cluster)
            update = cluster.compute_factor(plan.ranks) * update_seconds(profile, plan, cluster.device, self._pricer)
            self._updated[key] = update, sum(message.seconds for message in beside)
        return self._updated[key]


BETWEEN = 12
"""Operators that a host could have started between reading a loss and the next step's first kernel."""


def agreement(plan: Plan, cluster: Cluster) -> float:
    """The engine agrees on the loss: one small all-reduce. Ranks on cores arrive apart at any message amid a step."""
    message = collective_seconds("all_reduce", plan.dp, 16, cluster)
    return max(message, cluster.mid_step_message_s) if plan.dp > 1 and cluster.device.kind == "cpu" else message


def between_steps(cluster: Cluster) -> float:
    """How long a GPU has nothing to do: the host reads the loss, and only then starts the next step."""
    device = cluster.device
    return BETWEEN * device.host_overhead.get("forward", device.launch) if device.kind == "cuda" else 0.0


APART = 0.3
"""How far ranks of a CPU get apart between two messages at most, as a share of what they compute between them."""


def statistics_seconds(t: LayerTime, plan: Plan, cluster: Cluster) -> float:
    """Small messages that BatchNorms wait for: one in the forward and one in the backward of each."""
    layer = t.layer
    if not layer.norms or plan.dp == 1:
        return 0.0
    times = 3 if plan.recompute != "none" and layer.composite else 2
    stall = cluster.mid_step_message_s
    if cluster.device.kind == "cpu":
        stall = min(stall, APART * (t.forward + t.backward) / (layer.norms * times))
    return layer.norms * times * max(stall, collective_seconds("all_reduce", plan.dp, 4096.0, cluster))


def added_on_host(profile: Profile, plan: Plan, cluster: Cluster) -> float:
    """offload=all: from the second micro-batch on, the host adds gradients to those that it has, while ranks wait."""
    if plan.offload != "all" or plan.micro == 1:
        return 0.0
    added = 3.0 * profile.trained * profile.parameter_bytes / plan.shards
    return (plan.micro - 1) * stream_seconds(added, cluster.device)


def notes_of(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What the price of a plan leaves out, or had to assume."""
    notes = []
    if plan.offload != "none" and cluster.device.kind == "cpu":
        notes.append(f"offload={plan.offload} moves nothing here: a CPU has everything in host memory already")
    if plan.chunk > 1:
        notes.append("chunk: the logits are counted whole, whether a loss can do without them is not known here")
    if plan.ep > 1:
        notes.append("ep is priced like ep=1: a profile does not know its experts")
    if plan.compile:
        notes.append("compile=true is priced like compile=false: what the compiler fuses is not known before it runs")
    if plan.backend == "threads":
        notes.append("backend=threads is priced as if replicas were processes, without their one interpreter lock")
    if plan.compress == "powersgd":
        notes.append("compress=powersgd is priced as if every parameter were a square matrix")
    return tuple(notes)
