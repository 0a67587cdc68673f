"""The closed form of a step whose plan splits the model: features, tokens, tiles and stages, beside replicas.

One rank's part is a profile of its own (divide.py). Without a pipeline a step is priced as any other, with what the
layers tell each other in the open. With one, the layers are cut into stages, and the order is played action by action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..core.errors import PlanError
from ..models.profile import COMPUTE_KINDS, Layer, Profile
from ..plans import Plan
from ..schedules import pipeline_order
from .axes import between_stages
from .collectives import collective_seconds
from .divide import divide
from .layers import LayerTime, Sent, communication, computed, largest_share, waiting
from .local import Local
from .memory import Memory, peak_memory
from .piped import Piped
from .said import Said, said_of
from .stage_memory import kept_by_cells, memory_by_rank
from .stages import Cell, cut, names_of, profile_of
from .traffic import Message, after_backward, after_update, messages
from .update import update_seconds
from .work import Pricer


@dataclass(frozen=True, slots=True)
class Step:
    """The parts of a step, which add up."""

    parts: dict[str, float]
    hidden: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """What a rank does after its last backward."""

    before: tuple[Message, ...]
    """Gradients, until they are summed."""
    update: float
    after: tuple[Message, ...]

    @property
    def sent(self) -> float:
        """Seconds of its messages."""
        return sum(m.seconds for m in (*self.before, *self.after))


class Divided:
    """Prices plans that split the model. Remembers what plans have in common."""

    def __init__(self, profile: Profile, cluster: Cluster, precision: str) -> None:
        self._profile, self._cluster, self._precision = profile, cluster, precision
        self._parts: dict[tuple[object, ...], tuple[Local, Pricer]] = {}
        self._times: dict[tuple[object, ...], tuple[list[LayerTime], list[Said]]] = {}
        self._piped: dict[tuple[object, ...], Piped] = {}
        self._tails: dict[tuple[object, ...], Tail] = {}
        self._ends: dict[tuple[object, ...], float] = {}
        self._shares: dict[tuple[int, float], float] = {}

    def on_links_of(self, cluster: Cluster) -> Divided:
        """The same for machines that differ in their links alone: parts of the model are not made anew."""
        return self._alike(self._profile, cluster)

    def with_batches_of(self, samples: int) -> Divided:
        """The same for another batch: what belongs to samples is counted by sample."""
        return self._alike(replace(self._profile, batch_size=samples), self._cluster)

    def _alike(self, profile: Profile, cluster: Cluster) -> Divided:
        other = Divided(profile, cluster, self._precision)
        other._parts, other._shares = self._parts, self._shares
        return other

    def local(self, plan: Plan) -> Local:
        """The part of one rank, before stages are cut."""
        return self._part(plan)[0]

    def step(self, plan: Plan) -> Step:
        """Time of one step."""
        return self._pipelined(plan) if plan.pp > 1 else self._plain(plan)

    def memory(self, plan: Plan) -> Memory:
        """The memory of the fullest rank."""
        return max(self.memories(plan), key=lambda m: m.total)

    def memories(self, plan: Plan) -> list[Memory]:
        """Of a rank of every stage."""
        local, _ = self._part(plan)
        n = largest_share(self._profile.batch_size, plan)
        if plan.pp == 1:
            return [peak_memory(local.profile, plan, n, device=self._cluster.device.kind)]
        piped = self.piped(plan)
        return memory_by_rank(local.profile, plan, n, piped.order, piped.stages, piped.homes)

    # -- one stage

    def _plain(self, plan: Plan) -> Step:
        local, _ = self._part(plan)
        times, said = self.times(plan)
        m, cluster = plan.micro, self._cluster.with_active_ranks(plan.ranks)
        sent = Sent.of(messages(local.profile, plan, cluster))
        exposed, hidden = communication(times, sent, plan, cluster)
        tail = self.tail(plan, local.profile)
        parts = {
            "forward": m * sum(t.forward for t in times),
            "backward": m * sum(t.backward - t.again for t in times),
            "recompute": m * sum(t.again for t in times),
            "communication": m * sum(s.forward + s.backward for s in said) + exposed + tail.sent,
            "optimizer": tail.update,
            "overhead": overhead(plan, cluster),
        }
        return Step(parts, hidden + m * sum(s.hidden for s in said), local.notes)

    def times(self, plan: Plan) -> tuple[list[LayerTime], list[Said]]:
        """The layers of one rank, repeats one by one, and what they wait for."""
        local, pricer = self._part(plan)
        n = largest_share(self._profile.batch_size, plan)
        cluster = self._cluster.with_active_ranks(plan.ranks)
        key = (
            plan.tile,
            plan.halo,
            plan.cp,
            plan.tp,
            n,
            plan.recompute,
            waiting(plan, cluster),
            cluster.mid_step_message_s,
        )
        if key not in self._times:
            found = computed(local.profile, pricer, plan, n, cluster)
            said = [
                s
                for x, t in zip(local.profile.layers, local.talks, strict=True)
                for s in [said_of(x, t, plan, n, self._profile, cluster, pricer)] * x.repeats
            ]
            self._times[key] = found, said
        return self._times[key]

    def tail(self, plan: Plan, profile: Profile, key: object = None) -> Tail:
        """Of a rank that has these layers."""
        known = (key, plan.tile, plan.cp, plan.tp, plan.pp, plan.virtual, plan.dp, plan.shards, plan.zero, plan.bucket)
        if known not in self._tails:
            _, pricer = self._part(plan)
            cluster = self._cluster.with_active_ranks(plan.ranks)
            before, after = (f(profile, plan, cluster) for f in (after_backward, after_update))
            update = cluster.compute_factor(plan.ranks) * update_seconds(profile, plan, cluster.device, pricer)
            self._tails[known] = Tail(tuple(before), update, tuple(after))
        return self._tails[known]

    def _part(self, plan: Plan) -> tuple[Local, Pricer]:
        key = (plan.tile, plan.halo, plan.cp, plan.tp, plan.pp > 1)
        if key not in self._parts:
            local = divide(self._profile, plan)
            self._parts[key] = local, Pricer(local.profile, self._cluster.device, self._precision)
        return self._parts[key]

    # -- stages

    def _pipelined(self, plan: Plan) -> Step:
        local, _ = self._part(plan)
        piped, seconds = self.piped(plan), self._seconds(plan)
        tails = [self.tail(plan, profile_of(local.profile, piped.of_rank(r)), r) for r in range(plan.pp)]
        tail = max(tails, key=lambda t: t.sent + t.update)
        rank = max(range(plan.pp), key=piped.busy)
        cells = [c for s in piped.of_rank(rank) for c in s]
        m = plan.micro
        said = m * sum(c.said_forward + c.said_backward for c in cells)
        forward, backward = m * sum(c.forward for c in cells), m * sum(c.backward for c in cells)
        again = m * sum(c.again for c in cells)
        parts = {
            "forward": forward,
            "backward": backward - again,
            "recompute": again,
            "bubble": max(0.0, seconds - forward - backward - said),
            "communication": said + tail.sent + self.tied_seconds(plan),
            "optimizer": tail.update,
            "overhead": overhead(plan, self._cluster.with_active_ranks(plan.ranks)),
        }
        hidden = m * (piped.sent_by(rank) + sum(c.hidden for c in cells))
        return Step(parts, hidden, local.notes)

    def _seconds(self, plan: Plan) -> float:
        key = self._key(plan)
        if key not in self._ends:
            self._ends[key] = self.piped(plan).seconds
        return self._ends[key]

    def piped(self, plan: Plan) -> Piped:
        """The pipeline of a plan."""
        key = self._key(plan)
        if key not in self._piped:
            self._piped[key] = self._cut(plan)
        return self._piped[key]

    def _key(self, plan: Plan) -> tuple[object, ...]:
        n = largest_share(self._profile.batch_size, plan)
        axes = plan.tile, plan.halo, plan.cp, plan.tp, plan.pp, plan.dp
        return *axes, plan.virtual, plan.schedule, plan.begins, plan.micro, plan.recompute, n

    def _cut(self, plan: Plan) -> Piped:
        order = pipeline_order(plan.schedule, plan.pp, plan.micro, plan.virtual)
        stages = cut(self._cells(plan), order.stages, plan.begins)
        if len(stages) < order.stages:
            raise PlanError(
                f"{order.stages} stages for {self._profile.name}, which has {len(stages)} layers with parameters",
                rule=f"every stage has a layer of its own: {order.stages} > {len(stages)}",
                fix=f"pp x virtual = {len(stages)} or less",
            )
        apart = order.splits_backward
        weight = tuple(sum(c.weight for c in s) if apart else 0.0 for s in stages)
        backward = tuple(sum(c.backward + c.said_backward for c in s) - w for s, w in zip(stages, weight, strict=True))
        return Piped(
            order,
            stages,
            tuple(sum(c.forward + c.said_forward for c in s) for s in stages),
            backward,
            weight,
            tuple(between_stages(s[-1].output, plan, self._cluster) for s in stages[:-1]),
            order.homes(),
        )

    def _cells(self, plan: Plan) -> list[Cell]:
        local, pricer = self._part(plan)
        times, said = self.times(plan)
        n = largest_share(self._profile.batch_size, plan)
        kept = kept_by_cells(local.profile, plan, n)
        places = [i for i, x in enumerate(local.profile.layers) for _ in range(x.repeats)]
        return [
            Cell(
                i,
                name,
                1.0,
                t.forward,
                t.backward,
                t.backward * self._weights(t.layer, n, pricer),
                s.forward,
                s.backward,
                s.hidden,
                t.layer.parameters + t.layer.frozen + t.layer.tied > 0,
                kept[i].saved,
                kept[i].output,
                kept[i].working,
                kept[i].deferred,
                t.again,
            )
            for i, name, t, s in zip(places, names_of(local.profile.layers), times, said, strict=True)
        ]

    def _weights(self, layer: Layer, n: float, pricer: Pricer) -> float:
        """The share of a layer's backward that is for weights: one of the two products of each weight."""
        key = id(layer.ops), n
        if key not in self._shares:
            self._shares[key] = self._weight_share(layer, n, pricer)
        return self._shares[key]

    def _weight_share(self, layer: Layer, n: float, pricer: Pricer) -> float:
        back = [(op, pricer.op_seconds(op, n) * op.count) for op in layer.ops if op.phase == "backward"]
        whole = sum(seconds for _, seconds in back)
        products = sum(s for op, s in back if op.kind in COMPUTE_KINDS and op.kind != "attention_backward")
        return 0.5 * products / whole if whole else 0.0

    def tied_seconds(self, plan: Plan) -> float:
        """Gradients of a table that two stages hold are exchanged at the end."""
        local, _ = self._part(plan)
        tied = max((x.tied for x in local.profile.layers), default=0) * local.profile.parameter_bytes
        return between_stages(float(tied), plan, self._cluster) if tied else 0.0


def overhead(plan: Plan, cluster: Cluster) -> float:
    """The engine agrees on the loss: one small all-reduce of all ranks."""
    return collective_seconds("all_reduce", plan.ranks, 16, cluster)
