"""Cuts the layers of a profile into pipeline stages, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.errors import PlanError, nearest
from ..models.profile import Layer, Profile


@dataclass(frozen=True, slots=True)
class StageLayer:
    """A layer, or an equal share of one, in a stage: seconds and bytes of one micro-batch."""

    layer: int
    """Its index in the profile."""
    name: str
    share: float
    forward: float
    backward: float
    """With its recomputation."""
    weight: float
    """The part of the backward that is for weights."""
    comm_forward: float
    """Seconds that it waits for messages of its own."""
    comm_backward: float
    hidden: float
    """Seconds of its messages that run behind computation."""
    has_parameters: bool
    """Whether it reads parameters: a stage may begin here."""
    saved: float
    output: float
    working: float
    """Bytes that its backward needs beyond what was saved."""
    deferred: float
    """Bytes that a backward for the input leaves for the one for weights."""
    recompute: float = 0.0
    """Seconds of its backward in which its forward is recomputed."""

    @property
    def seconds(self) -> float:
        """All of its compute and waiting."""
        return self.forward + self.backward + self.comm_forward + self.comm_backward


Stage = tuple[StageLayer, ...]


def layer_names(layers: Sequence[Layer]) -> list[str]:
    """The name of every layer, repeats one by one: their numbers count up."""
    names = []
    for x in layers:
        number = re.search(r"\d+(?!.*\d)", x.name)
        for k in range(x.repeats):
            if k and number:
                names.append(f"{x.name[: number.start()]}{int(number[0]) + k}{x.name[number.end() :]}")
            else:
                names.append(x.name)
    return names


def cut_stages(layers: Sequence[StageLayer], stages: int, split: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Cut into `stages` stages, or at the layers named in `split`; each stage begins at a layer with parameters."""
    if split:
        return _by_name(layers, stages, split)
    blocks = _blocks(layers)
    if len(blocks) < stages:
        blocks = _blocks(_finer(layers, -(-stages // len(blocks))))
    costs = [sum(x.seconds for x in b) for b in blocks]
    limit = _least_limit(costs, stages)
    return tuple(tuple(x for b in run for x in b) for run in _runs(blocks, costs, stages, limit))


def _by_name(layers: Sequence[StageLayer], stages: int, split: Sequence[str]) -> tuple[Stage, ...]:
    if len(split) != stages - 1:
        raise PlanError(f"split={'+'.join(split)}", rule=f"{stages} stages begin at {stages - 1} layers and the first")
    starts = [0]
    for name in split:
        matches = [i for i, x in enumerate(layers) if x.name == name or (name.startswith(f"{x.name}.") and x.name)]
        if not matches:
            raise PlanError(f"split={name}: no layer of this name", fix=nearest(name, [x.name for x in layers]))
        starts.append(matches[0])
    if starts != sorted(set(starts)):
        raise PlanError(f"split={'+'.join(split)}", rule="the layers are named in the order in which they run")
    return tuple(tuple(layers[a:b]) for a, b in zip(starts, [*starts[1:], len(layers)], strict=True))


def _blocks(layers: Sequence[StageLayer]) -> list[Stage]:
    """Runs that begin where a stage may begin; layers before the first such place belong to the first run."""
    blocks: list[list[StageLayer]] = []
    has_parameters = False
    for x in layers:
        if not blocks or (x.has_parameters and has_parameters):
            blocks.append([])
            has_parameters = False
        blocks[-1].append(x)
        has_parameters = has_parameters or x.has_parameters
    return [tuple(b) for b in blocks]


def _finer(layers: Sequence[StageLayer], parts: int) -> list[StageLayer]:
    """Each layer in equal shares: it contains modules with parameters, where a stage may begin."""
    pieces = []
    for x in layers:
        k = parts if x.has_parameters else 1
        piece = replace(
            x,
            share=x.share / k,
            forward=x.forward / k,
            backward=x.backward / k,
            weight=x.weight / k,
            comm_forward=x.comm_forward / k,
            comm_backward=x.comm_backward / k,
            hidden=x.hidden / k,
            saved=x.saved / k,
            deferred=x.deferred / k,
            recompute=x.recompute / k,
        )
        pieces += [piece] * k
    return pieces


def _least_limit(costs: Sequence[float], stages: int) -> float:
    """The least time such that `stages` stages no longer than it are enough."""
    low, high = max(costs), sum(costs)
    for _ in range(40):
        middle = (low + high) / 2
        if _needed(costs, middle) <= stages:
            high = middle
        else:
            low = middle
    return high


def _needed(costs: Sequence[float], limit: float) -> int:
    count, filled = 1, 0.0
    for c in costs:
        if filled and filled + c > limit:
            count, filled = count + 1, 0.0
        filled += c
    return count


def _runs(blocks: Sequence[Stage], costs: Sequence[float], stages: int, limit: float) -> list[list[Stage]]:
    """Stages up to the limit, the later ones not fuller than necessary: each has at least one block."""
    runs: list[list[Stage]] = [[]]
    filled = 0.0
    left = sum(costs)
    for i, (b, c) in enumerate(zip(blocks, costs, strict=True)):
        open_ = stages - len(runs)
        must = runs[-1] and len(blocks) - i <= open_
        # an even share of what is left: a first stage as full as the limit would starve the last ones
        full = filled + c > limit * (1 + 1e-12) or filled + c / 2 > (left + filled) / (open_ + 1)
        if runs[-1] and open_ and (must or (full and _needed(costs[i:], limit) <= open_)):
            runs.append([])
            filled = 0.0
        runs[-1].append(b)
        filled += c
        left -= c
    return runs


def layer_shares(stages: Sequence[Stage]) -> tuple[tuple[int, float], ...]:
    """How many of each layer of the profile some stages have, by index."""
    counts: dict[int, float] = {}
    for x in (x for s in stages for x in s):
        counts[x.layer] = counts.get(x.layer, 0.0) + x.share
    return tuple(sorted(counts.items()))


def stage_profile(profile: Profile, shares: Sequence[tuple[int, float]]) -> Profile:
    """The layers that a rank has of a profile, for what is priced by layer: the update and gradient messages."""
    here = {i for i, _ in shares}
    layers = []
    for i, share in shares:
        x, whole = profile.layers[i], max(1, int(share + 1e-9))
        part = share / whole
        # a tied table is among the common parameters; the stage that counts it sums its gradients
        counted = not x.tied or any(profile.layers[j].largest >= x.tied for j in here if j < i)
        common = x.tp_replicated if counted else min(x.tp_replicated, x.parameters)
        layers.append(
            replace(
                x,
                repeats=whole,
                parameters=round(x.parameters * part),
                frozen=round(x.frozen * part),
                tp_replicated=round(common * part),
                tensors=max(1, round(x.tensors * part)) if x.tensors else 0,
            )
        )
    return replace(profile, layers=tuple(layers))
