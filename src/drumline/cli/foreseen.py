"""What `drumline train` knows before it starts: the traced model, the machines, the plan, and what it should take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.job import Job
    from ..costs import Estimate
    from ..models import Profile
    from ..planner import Answer
    from ..plans import Plan


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A training, foreseen."""

    profile: Profile
    cluster: Cluster
    file: Path | None
    """Where the cluster was read from, if it is a machine of ours: corrections lie beside it."""
    answer: Answer
    """What the planner says, also where the plan is given."""
    plan: Plan
    estimate: Estimate
    why: str = ""
    """What was passed over for this plan, and why."""

    def speed_of(self, told: Mapping[str, Any]) -> float | None:
        """The speed of a step over the measured one, by what the ranks tell: of all, or of the hosts of GPUs alone."""
        from ..costs.pace import speed_at
        from .corrections import with_corrections

        if "pace" not in told:
            return told.get("speed")
        return speed_at(told["pace"], self.profile, self.plan, with_corrections(self.cluster, None, use=False))


def foresee(job: Job, plan: str, ranks: int | None, cluster: str | None, *, corrections: bool, quiet: bool) -> Foreseen:
    """Trace the job and plan it, if `plan` is `auto`; price it on a cluster, or on this machine."""
    from ..costs import estimate
    from ..planner import default_precision, search
    from ..plans import check
    from ..tracing import trace
    from .common import cluster_of, profile_in
    from .corrections import cluster_file, with_corrections
    from .splitting import best, can_split

    given = None if plan == "auto" else _given(plan, ranks)
    if given is not None:
        check(given)
        can_split(job, given)  # before this machine is measured
    profile = trace(job)
    wanted = given.ranks if given else ranks
    machines, _ = cluster_of(cluster, wanted, None, say=not quiet)
    file = cluster_file(cluster, wanted)
    machines = with_corrections(machines, file, use=corrections)
    precision = given.precision if given else default_precision(machines)
    profile = profile_in(job.source, profile, precision, machines.device.kind)
    answer, _ = search(profile, machines, precision=precision)
    chosen, why = (given, "") if given else best(job, answer)
    check(chosen)
    predicted = estimate(profile, chosen, machines)
    if why:
        predicted = dataclasses.replace(predicted, notes=(*predicted.notes, why))
    return Foreseen(profile, machines, file, answer, chosen, predicted, why)


def _given(text: str, ranks: int | None) -> Plan:
    from .common import plan_of
    from .verify import check_ranks

    plan = plan_of(text)
    check_ranks(plan, ranks)
    return plan
