"""Guard rails of a run: numbers that are not finite never reach the weights, and replicas that drift apart are found.

Whether a step is bad costs nothing to know: the loss and the norm of the gradients are agreed on by all ranks anyway,
and one bad number in one of them makes both bad everywhere. Only then the ranks look for where it came from.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...core.errors import GaveUp, InputError, PlanError, nearest
from ...plans import Plan
from .culprit import Culprit, investigate
from .digest import Ballot, Drift, tell_all, vote, vote_by_name

if TYPE_CHECKING:
    from ...datasets.stream import Batch
    from ..engine import Engine

POLICIES = ("stop", "skip")


@dataclass(frozen=True, slots=True)
class Guards:
    """What watches over a run."""

    nonfinite: str = "stop"
    """A loss or gradient that is not finite: `stop` the run, or `skip` the step. The weights stay as they were."""
    patience: int = 5
    """Most steps that are skipped in a row; one more stops the run."""
    vote: int = 0
    """Steps between two comparisons of what the replicas hold; 0 for none."""
    spike: float = 8.0
    """A loss is called a spike that many standard deviations above the mean of the last ones; 0 for never."""

    def __post_init__(self) -> None:
        if self.nonfinite not in POLICIES:
            raise InputError(
                f"nonfinite={self.nonfinite}",
                rule=f"nonfinite is {' or '.join(POLICIES)}",
                fix=nearest(str(self.nonfinite), POLICIES),
            )
        for key, least in (("patience", 1), ("vote", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{key}={value}", rule=f"{key} is a whole number of at least {least}")
        if not 0 <= self.spike < math.inf:
            raise InputError(f"spike={self.spike}", rule="spike is a number of at least 0")


class Guard:
    """The guards of one engine, with what they remember."""

    def __init__(self, guards: Guards, plan: Plan) -> None:
        if guards.nonfinite == "skip" and plan.compress == "powersgd":
            raise PlanError(
                "nonfinite=skip with compress=powersgd",
                where=f"plan {plan}",
                rule="what a bad gradient leaves over is added to all later ones, so no later step would be finite",
                fix="nonfinite=stop, or compress=fp16",
            )
        self.guards = guards
        self.skipped: list[Culprit] = []
        """Every step that was skipped, and why."""
        self.names: list[str] = []
        """What the ranks of a split model hold, once they have told each other."""
        self._row = 0
        self._spikes = Spikes(guards.spike)

    def finite(self, loss: float, norm: float) -> bool:
        """Whether a step may be applied; the same answer on every rank, because both numbers are."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._row = 0
            return True
        return False

    def bad(self, engine: Engine, batch: Batch, loss: float, norm: float) -> Culprit:
        """A step that is not finite: find out why, then stop the run or let it be skipped. Called on all ranks."""
        culprit = investigate(engine, batch, loss, norm)
        self._row += 1
        if self.guards.nonfinite == "skip" and self._row <= self.guards.patience:
            self.skipped.append(culprit)
            return culprit
        rule = "training goes on while the loss and the gradients are finite; the weights are those before this step"
        fix = "--on-nonfinite skip, or Guards(nonfinite='skip'), goes on without such steps"
        if self.guards.nonfinite == "skip":
            rule = f"at most patience={self.guards.patience} steps in a row are skipped"
            fix = "a lower learning rate, clip, or the samples that are named"
        raise GaveUp(culprit.what, where=culprit.where, rule=rule, fix=fix)

    def spike(self, loss: float) -> str:
        """What to say of a loss that is finite but far above the last ones; nothing for most."""
        return self._spikes.see(loss)

    def compares(self, steps: int) -> bool:
        """Whether the replicas are compared before the update that comes after so many."""
        return bool(self.guards.vote) and (steps + 1) % self.guards.vote == 0

    def compare(self, engine: Engine) -> None:
        """The vote, when its step has come. Called on all ranks before the update: it would spread what it finds.

        Under zero=1 and 2 every update sends each number from the one rank that updates it to all. What happened to
        another rank's copy is seen until then, so only vote=1 sees all of it.
        """
        if self.compares(engine.steps):
            drifts = drifted(engine)
            if drifts:
                more = f"; and {len(drifts) - 4} more" if len(drifts) > 4 else ""
                raise GaveUp(
                    f"the replicas hold different numbers at step {engine.position}",
                    where="; ".join(map(str, drifts[:4])) + more,
                    rule=f"replicas are equal bit for bit; they are compared every {self.guards.vote} steps",
                    fix="go on from a checkpoint that is older, without the device of that rank",
                )


class Spikes:
    """Flags a loss that stands far above the last ones."""

    WINDOW, LEAST = 64, 16

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last: deque[float] = deque(maxlen=self.WINDOW)

    def see(self, loss: float) -> str:
        """Take one more loss; what to say of it."""
        told = ""
        if self._limit and len(self._last) >= self.LEAST and math.isfinite(loss):
            # in plain numbers: `statistics` computes with fractions, and a GPU stands still meanwhile
            mean = sum(self._last) / len(self._last)
            spread = math.sqrt(sum((x - mean) ** 2 for x in self._last) / len(self._last))
            # a loss that hardly moves has spikes too, but not every wiggle of it is one
            deviation = max(spread, 0.02 * abs(mean))
            far = (loss - mean) / deviation if deviation else 0.0
            if far > self._limit:
                told = f"loss spike: {loss:.4g} is {far:.1f} standard deviations above the last {len(self._last)}"
        if math.isfinite(loss):
            self._last.append(loss)
        return told


def ballots(engine: Engine) -> list[Ballot]:
    """What must be equal on which ranks: whole tensors on all of them, shards on the replicas of the shard."""
    whole: dict[str, torch.Tensor] = {}
    shards: dict[str, torch.Tensor] = {}
    replicas: dist.ProcessGroup | None = None
    for name, p in engine.model.named_parameters():
        if isinstance(p, DTensor):
            names = p.device_mesh.mesh_dim_names or ()
            if p.device_mesh.ndim > 1:
                # the outer axis is that of the replicas
                replicas = p.device_mesh.get_group(names[0] if names else 0)
                shards[name] = p.to_local()
        else:
            whole[name] = p
    whole.update(engine.model.named_buffers())
    found = [Ballot(whole, engine.group)] if whole else []
    return found + ([Ballot(shards, replicas)] if replicas is not None and shards else [])


def nothing_to_compare(engine: Engine) -> str:
    """Why a vote would say nothing under this plan; empty where it says something."""
    if engine.ranks == 1:
        return "one rank has no replica to be compared with"
    if engine.split is not None:
        alone = engine.plan.pp * engine.plan.tp == engine.ranks
        rest = "what tensor parallelism leaves whole is compared" if engine.plan.tp > 1 else "tied ones are compared"
        return f"under {engine.plan} most parameters lie on one rank alone, {rest}" if alone else ""
    sharded = [p for p in engine.model.parameters() if isinstance(p, DTensor)]
    if sharded and all(p.device_mesh.ndim == 1 for p in sharded):
        buffers = ", buffers alone are compared" if any(True for _ in engine.model.buffers()) else ""
        return f"under {engine.plan} every number of the parameters lies on one rank alone{buffers}"
    return ""


def drifted(engine: Engine) -> list[Drift]:
    """Compare the replicas; every rank gets the drifts of all groups."""
    if engine.split is not None or engine.plan.ep > 1:
        return _drifted_parts(engine)
    held = ballots(engine)
    found = [d for ballot in held for d in vote(ballot, engine.device)]
    if all(ballot.group is engine.group for ballot in held):
        return found  # all ranks have voted together
    flag = torch.tensor([len(found)], dtype=torch.int64, device=engine.device)
    dist.all_reduce(flag, group=engine.group)
    if not int(flag):
        return []
    told = tell_all([[d.name, d.ranks, d.majority] for d in found], engine.group, engine.device)
    every = {(name, tuple(ranks), majority) for row in told for name, ranks, majority in _rows(row)}
    return [Drift(*item) for item in sorted(every)]


def parts(engine: Engine) -> dict[str, torch.Tensor]:
    """What this rank holds of a split model, by names that tell the part: ranks with the same name hold the same."""
    found: dict[str, torch.Tensor] = {}
    for name, p in engine.model.named_parameters():
        part = engine.part(name)
        rows = f"{name}, numbers {part.start} to {part.start + p.numel()}" if p.shape != part.shape else name
        found[rows if part.cut is None else f"{name}, part {part.cut.index} of {part.cut.split}"] = p
    found.update(engine.model.named_buffers())
    return found


def _drifted_parts(engine: Engine) -> list[Drift]:
    """The ranks of a split model hold different parts: each is compared where several hold it."""
    held = parts(engine)
    if not engine.guard.names:
        told = tell_all(list(held), engine.group, engine.device)
        engine.guard.names = sorted({str(name) for names in told if isinstance(names, list) for name in names})
    return vote_by_name(held, engine.guard.names, engine.group, engine.device)


def _rows(row: object) -> list[tuple[str, list[int], bool]]:
    assert isinstance(row, list)
    return row
