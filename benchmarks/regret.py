"""Is the chosen plan the fastest? Six jobs on this machine with 2 and 4 ranks, and the plans that were offered.

    python benchmarks/regret.py [--jobs gpt,cnn] [--ranks 2,4] [--clusters FOLDER] [--paste]

For each number of ranks the machine is measured with that number (or read from FOLDER/cpu-N.toml, and stored there),
and every job is planned from its trace as `drumline train --plan auto` does it, without corrections. Candidates that
differ in micro-batches and recomputation alone are one mesh with one sharding. All meshes are measured: with their two
cheapest choices, or with one where the cheapest is priced at more than DEAR times the chosen plan. Every plan runs a
block of steps; the chosen one and those that came near the fastest then run blocks in turns, and ratios are taken turn
by turn. Expected before measuring: the chosen plan takes at most 1.10 of the fastest's time. Ranks are started once for
each number of ranks; those that a plan leaves idle sleep.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_jobs import NAMES
from engine_peers.ratios import Ratio, ratio
from regret_plans import steps
from regret_plans.served import Worlds
from split_contest.page import paste

from drumline.clusters import Cluster
from drumline.core.errors import PlanError, TraceError
from drumline.core.job import Job
from drumline.core.units import format_seconds
from drumline.loop.forecast import best_runnable, check_job
from drumline.loop.measure import measure_local
from drumline.planner import search
from drumline.plans import Plan
from drumline.tracing import trace

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "log" / "regret.md"
MOST = 1.10
"""Bound on the regret: the chosen plan's time divided by the fastest one's."""
PER_GROUP, DEAR = 2, 1.3
"""Measured plans per mesh and sharding; only one where the price exceeds the chosen plan's by this factor."""
WARM, BLOCK, TURNS = 2, 3, 7
"""Warm-up steps, steps per block, and blocks of each finalist."""
NEAR, FINALISTS = 1.2, 5
"""Plans within this factor of the fastest are finalists; at most this number besides the chosen one."""


@dataclass(frozen=True)
class Offer:
    """A plan that could be chosen, and its price."""

    plan: Plan
    predicted: float


@dataclass(frozen=True)
class Contest:
    """Offered and measured plans of a job with a number of ranks."""

    name: str
    ranks: int
    offered: int
    chosen: Offer
    fastest: Offer
    chosen_seconds: float
    fastest_seconds: float
    regret: Ratio
    first: dict[str, float]
    """Seconds of every plan's first block."""


def main() -> None:
    """Measure the machine, plan, and run all plans."""
    options = _options()
    begin = time.monotonic()
    jobs, ranks = options.jobs.split(","), [int(n) for n in options.ranks.split(",")]
    contests: list[Contest] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.clusters or temporary)
        clusters = {n: _cluster(n, folder) for n in ranks}
    for cluster in clusters.values():
        with Worlds(cluster.device.threads or None) as worlds:
            for name in jobs:
                contests.append(contest(name, cluster, worlds))
                print(line(contests[-1]), flush=True)
    lines = [*page(contests), f"- All of it took {time.monotonic() - begin:.0f} s."]
    print("\n".join(lines))
    if options.paste:
        paste("regret", lines, "pasted by `python benchmarks/regret.py --paste`", PAGE)


def _cluster(n: int, folder: Path) -> Cluster:
    path = folder / f"cpu-{n}.toml"
    if not path.exists():
        measure_local(n).save(path)
    return Cluster.load(path)


def contest(name: str, cluster: Cluster, worlds: Worlds) -> Contest:
    """Plan one job, measure the offered plans, and compare the chosen plan with the fastest."""
    reference = f"{HERE / 'cpu_jobs.py'}:{name}"
    job = Job.load(reference)
    answer, estimates = search(trace(job), cluster)
    chosen, _ = best_runnable(job, answer)
    offers = [Offer(c.plan, estimates[str(c.plan)].step_seconds) for c in answer.candidates if c.fits]
    measured = [o for o in cheapest_of_each(offers) if _runs(job, o.plan)]
    first = {}
    for offer in measured:
        first[str(offer.plan)] = _block(worlds, reference, offer.plan, warm=WARM)
        _each(worlds, offer.plan, steps.forget, reference)
    quick = min(first.values())
    rest = sorted((o for o in measured if o.plan != chosen), key=lambda o: first[str(o.plan)])
    near = [o for o in rest if first[str(o.plan)] <= NEAR * quick][:FINALISTS]
    finalists = [next(o for o in measured if o.plan == chosen), *near]
    times = in_turns(worlds, reference, finalists)
    fastest = min(finalists, key=lambda o: statistics.median(times[str(o.plan)]))
    mine, other = times[str(chosen)], times[str(fastest.plan)]
    return Contest(
        name,
        cluster.devices,
        len(offers),
        finalists[0],
        fastest,
        statistics.median(mine),
        statistics.median(other),
        ratio(mine, other),
        first,
    )


def cheapest_of_each(offers: Sequence[Offer]) -> list[Offer]:
    """Keep the cheapest of plans that differ only in micro-batches and recomputation; the chosen one is among them."""
    groups: dict[Plan, list[Offer]] = {}
    for offer in sorted(offers, key=lambda o: o.predicted):
        groups.setdefault(dataclasses.replace(offer.plan, micro=1, recompute="none"), []).append(offer)
    most = DEAR * min(o.predicted for o in offers)
    return [o for group in groups.values() for o in group[: PER_GROUP if group[0].predicted <= most else 1]]


def _runs(job: Job, plan: Plan) -> bool:
    """Check that the engine can split this model so; `drumline train` skips plans that it cannot run."""
    try:
        check_job(job, plan)
    except (PlanError, TraceError):
        return False
    return True


def in_turns(worlds: Worlds, reference: str, finalists: Sequence[Offer]) -> dict[str, list[float]]:
    """Time blocks of each plan in turns; each turn begins with another plan."""
    times: dict[str, list[float]] = {str(o.plan): [] for o in finalists}
    for offer in finalists:
        _each(worlds, offer.plan, steps.set_up, reference, WARM)
    for turn in range(TURNS):
        shift = turn % len(finalists)
        for offer in [*finalists[shift:], *finalists[:shift]]:
            times[str(offer.plan)].append(_block(worlds, reference, offer.plan))
    for offer in finalists:
        _each(worlds, offer.plan, steps.forget, reference)
    return times


def _block(worlds: Worlds, reference: str, plan: Plan, *, warm: int = 0) -> float:
    """Time a block: seconds per step of the slowest rank."""
    if warm:
        _each(worlds, plan, steps.set_up, reference, warm)
    return max(_each(worlds, plan, steps.block, reference, BLOCK))


def _each(worlds: Worlds, plan: Plan, what: object, reference: str, *more: int) -> list[float]:
    assert callable(what)
    return worlds.call(plan.processes, what, reference, str(plan), *more)


def page(contests: Sequence[Contest]) -> list[str]:
    """Format the table and compare it with the bound."""
    lines = [
        "| job | ranks | offered | measured | chosen | predicted | step | fastest | predicted | step | ratio | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(line, contests),
    ]
    met = sum(c.regret.middle <= MOST for c in contests)
    worst = max(contests, key=lambda c: c.regret.middle)
    return [
        *lines,
        "",
        f"- At most {MOST:.2f} of the fastest plan's time was expected: {met} of {len(contests)} kept it; the worst is "
        f"{worst.name} with {worst.ranks} ranks, {worst.regret}.",
    ]


def line(c: Contest) -> str:
    """Format a row of the table."""
    cells = [
        c.name,
        str(c.ranks),
        str(c.offered),
        str(len(c.first)),
        f"`{c.chosen.plan}`",
        format_seconds(c.chosen.predicted),
        format_seconds(c.chosen_seconds),
        f"`{c.fastest.plan}`",
        format_seconds(c.fastest.predicted),
        format_seconds(c.fastest_seconds),
        str(c.regret),
        "kept" if c.regret.middle <= MOST else "missed",
    ]
    return f"| {' | '.join(cells)} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(NAMES), help="which of " + ", ".join(NAMES))
    parser.add_argument("--ranks", default="2,4", help="with how many ranks")
    parser.add_argument("--clusters", help="a folder with measurements of this machine, cpu-N.toml; stored there")
    parser.add_argument("--paste", action="store_true", help="write into docs/log/regret.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
