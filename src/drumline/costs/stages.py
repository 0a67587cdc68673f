"""The stages of a pipeline, cut from the layers of a profile so that the slowest is as fast as can be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.errors import PlanError, nearest
from ..models.profile import Layer, Profile


@dataclass(frozen=True, slots=True)
class Cell:
    """A layer, or an equal share of one, as a stage takes it up: seconds and bytes of one micro-batch."""

    layer: int
    """Its place in the profile."""
    name: str
    share: float
    forward: float
    backward: float
    weight: float
    """The part of the backward that is for weights."""
    said_forward: float
    """Seconds that it waits for messages of its own."""
    said_backward: float
    hidden: float
    owns: bool
    """Whether it reads parameters: a stage may begin here."""
    saved: float
    output: float
    working: float
    """Bytes that its backward needs beyond what was kept."""
    deferred: float
    """Bytes that a backward for the input leaves for the one for weights."""
    again: float = 0.0
    """Seconds of its backward in which its forward is computed again."""

    @property
    def seconds(self) -> float:
        """Of all it does."""
        return self.forward + self.backward + self.said_forward + self.said_backward


Stage = tuple[Cell, ...]


def names_of(layers: Sequence[Layer]) -> list[str]:
    """Of every layer, repeats one by one: their names count up."""
    found = []
    for x in layers:
        number = re.search(r"\d+(?!.*\d)", x.name)
        for k in range(x.repeats):
            if k and number:
                found.append(f"{x.name[: number.start()]}{int(number[0]) + k}{x.name[number.end() :]}")
            else:
                found.append(x.name)
    return found


def cut(cells: Sequence[Cell], stages: int, split: Sequence[str] = ()) -> tuple[Stage, ...]:
    """So many stages, or those that begin at the layers of `split`; each begins at a layer with parameters."""
    if split:
        return _by_name(cells, stages, split)
    blocks = _blocks(cells)
    if len(blocks) < stages:
        blocks = _blocks(_finer(cells, -(-stages // len(blocks))))
    costs = [sum(c.seconds for c in b) for b in blocks]
    limit = _least_limit(costs, stages)
    return tuple(tuple(c for b in run for c in b) for run in _runs(blocks, costs, stages, limit))


def _by_name(cells: Sequence[Cell], stages: int, split: Sequence[str]) -> tuple[Stage, ...]:
    if len(split) != stages - 1:
        raise PlanError(f"split={'+'.join(split)}", rule=f"{stages} stages begin at {stages - 1} layers and the first")
    starts = [0]
    for name in split:
        found = [i for i, c in enumerate(cells) if c.name == name or (name.startswith(f"{c.name}.") and c.name)]
        if not found:
            raise PlanError(f"split={name}: no layer of this name", fix=nearest(name, [c.name for c in cells]))
        starts.append(found[0])
    if starts != sorted(set(starts)):
        raise PlanError(f"split={'+'.join(split)}", rule="the layers are named in the order in which they run")
    return tuple(tuple(cells[a:b]) for a, b in zip(starts, [*starts[1:], len(cells)], strict=True))


def _blocks(cells: Sequence[Cell]) -> list[Stage]:
    """Runs that begin where a stage may begin; what comes before the first belongs to it."""
    found: list[list[Cell]] = []
    owns = False
    for c in cells:
        if not found or (c.owns and owns):
            found.append([])
            owns = False
        found[-1].append(c)
        owns = owns or c.owns
    return [tuple(b) for b in found]


def _finer(cells: Sequence[Cell], parts: int) -> list[Cell]:
    """Each layer in equal shares: inside of a layer are modules with parameters, where a stage may begin."""
    found = []
    for c in cells:
        k = parts if c.owns else 1
        piece = replace(
            c,
            share=c.share / k,
            forward=c.forward / k,
            backward=c.backward / k,
            weight=c.weight / k,
            said_forward=c.said_forward / k,
            said_backward=c.said_backward / k,
            hidden=c.hidden / k,
            saved=c.saved / k,
            deferred=c.deferred / k,
            again=c.again / k,
        )
        found += [piece] * k
    return found


def _least_limit(costs: Sequence[float], stages: int) -> float:
    """The least time such that stages no longer than it suffice."""
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
    """Stages up to the limit, the later ones not fuller than they must be: each has at least one block."""
    runs: list[list[Stage]] = [[]]
    filled = 0.0
    left = sum(costs)
    for i, (b, c) in enumerate(zip(blocks, costs, strict=True)):
        open_ = stages - len(runs)
        must = runs[-1] and len(blocks) - i <= open_
        # an even share of what is left: a first stage as full as the limit would starve the last ones
        full = filled + c > limit * (1 + 1e-12) or filled + c / 2 > (left + filled) / (open_ + 1)
        later = _needed(costs[i:], limit) <= open_ if open_ else False
        if runs[-1] and open_ and (must or (full and later)):
            runs.append([])
            filled = 0.0
        runs[-1].append(b)
        filled += c
        left -= c
    return runs


def profile_of(profile: Profile, stages: Sequence[Stage]) -> Profile:
    """The layers that a rank has of a profile, for what is priced by layers: the update, and gradients on their way."""
    counts: dict[int, float] = {}
    for c in (c for s in stages for c in s):
        counts[c.layer] = counts.get(c.layer, 0.0) + c.share
    layers = []
    for i, share in sorted(counts.items()):
        x, whole = profile.layers[i], max(1, int(share + 1e-9))
        part = share / whole
        # a tied table is among what is common; the stage that counts it sums its gradients
        counted = not x.tied or any(profile.layers[j].largest >= x.tied for j in counts if j < i)
        common = x.common if counted else min(x.common, x.parameters)
        layers.append(
            replace(
                x,
                repeats=whole,
                parameters=round(x.parameters * part),
                frozen=round(x.frozen * part),
                common=round(common * part),
                tensors=max(1, round(x.tensors * part)) if x.tensors else 0,
            )
        )
    return replace(profile, layers=tuple(layers))
