"""Six jobs on this machine with 1, 2 and 4 ranks: predicted, run, corrected by what was measured, and run again.

    python benchmarks/predict_cpu.py [--jobs gpt,cnn] [--more gru] [--ranks 1,2,4] [--seconds 40] [--clusters FOLDER]
        [--paste]

For each number of ranks the machine is measured with that number (or read from FOLDER/cpu-N.toml, and stored there).
Then every job is predicted from its trace and run by the engine, as `drumline train` does: the current speed is probed
before the first step. The measurements of the run become a correction, next to those of earlier jobs, and the job is
predicted and run once more, immediately. A run takes as many steps as should fill `--seconds` according to its
prediction: a longer run averages over more of the disturbances of a shared machine (benchmarks/repeats.py). Expected
before measuring: errors of the first runs at most 15% on average; those of the second runs at most half as large. It
should take three quarters of an hour, on a machine that does nothing else; half of it with `--more ""`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_jobs import NAMES
from cpu_more import NAMES as MORE
from cpu_unseen import NAMES as UNSEEN
from split_contest.page import paste

from drumline.clusters import Cluster, DeviceSpec
from drumline.core.job import Job
from drumline.core.units import format_seconds
from drumline.costs import Estimate, estimate
from drumline.costs.correction_fit import fit_corrections
from drumline.costs.observed_runs import ObservedRun, observed_run
from drumline.launchers import run_ranks
from drumline.loop.measure import measure_local
from drumline.models import Profile
from drumline.plans import Plan
from drumline.tracing import trace

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "log" / "cpu.md"
PLANS = {1: "dp=1", 2: "dp=2", 4: "dp=4,zero=1"}
_FILES = {**dict.fromkeys(MORE, "cpu_more.py"), **dict.fromkeys(UNSEEN, "cpu_unseen.py")}
LEAST = 30
"""Steps of a run at least; three of them are not counted."""
MOST, HALF = 0.15, 0.5
"""Bounds: the mean error of first runs, and of second runs relative to it."""


@dataclass(frozen=True)
class Case:
    """A job under a plan on a measured machine."""

    name: str
    plan: Plan
    profile: Profile
    cluster: Cluster

    def predicted(self, runs: Sequence[ObservedRun]) -> Estimate:
        """Predict by the closed form, corrected by some runs."""
        return estimate(self.profile, self.plan, dataclasses.replace(self.cluster, corrections=fit_corrections(runs)))


@dataclass(frozen=True)
class Ran:
    """Measurements of one run of a case."""

    case: Case
    seconds: float
    speed: float
    seen: ObservedRun

    def error(self, predicted: Estimate) -> float:
        """Signed relative error at the current speed."""
        return predicted.at_speed(self.speed).step_seconds / self.seconds - 1


def main() -> None:
    """Measure, predict, run, correct, run again."""
    options = _options()
    start = time.monotonic()
    jobs, ranks = options.jobs.split(","), [int(n) for n in options.ranks.split(",")]
    more = [name for name in options.more.split(",") if name]
    first: list[Ran] = []
    second: list[Ran] = []
    others: list[Ran] = []
    for n in ranks:
        with tempfile.TemporaryDirectory() as temporary:
            cases = _cases([*jobs, *more], n, Path(options.clusters or temporary))
        tried = [case for case in cases if case.name in jobs]
        twice = _round([case for case in tried for _ in range(2)], options.seconds)
        first += twice[::2]
        second += twice[1::2]
        others += _round([case for case in cases if case.name in more], options.seconds)
    lines = page(first, second)
    lines += once("Jobs used while the cost model was made", [r for r in others if r.case.name in MORE])
    lines += once("Jobs never run before", [r for r in others if r.case.name in UNSEEN])
    lines.append(f"- All of it took {time.monotonic() - start:.0f} s.")
    print("\n".join(lines))
    if options.paste:
        paste("here", lines, "pasted by `python benchmarks/predict_cpu.py --paste`", PAGE)


def _cases(jobs: Sequence[str], n: int, folder: Path) -> list[Case]:
    """Every job with n ranks, on this machine as measured with n ranks."""
    path = folder / f"cpu-{n}.toml"
    if not path.exists():
        begin = time.monotonic()
        measure_local(n).save(path)
        print(f"measured with {n} ranks in {time.monotonic() - begin:.0f} s", flush=True)
    cluster = Cluster.load(path)
    return [Case(name, Plan.parse(PLANS[n]), trace(Job.load(_reference(name))), cluster) for name in jobs]


def _reference(name: str) -> str:
    return f"{HERE / _FILES.get(name, 'cpu_jobs.py')}:{name}"


def _round(cases: Sequence[Case], seconds: float) -> list[Ran]:
    """Run the cases one after the other in the same ranks, each for about `seconds` by its prediction."""
    if not cases:
        return []
    device, n = cases[0].cluster.device, cases[0].plan.ranks
    steps = [max(LEAST, round(seconds / c.predicted(()).step_seconds)) for c in cases]
    asked = [(_reference(c.name), str(c.plan), count) for c, count in zip(cases, steps, strict=True)]
    results = run_ranks(run_all, asked, device, ranks=n, threads=device.threads or None)
    return [_ran(case, [rank[i] for rank in results]) for i, case in enumerate(cases)]


def run_all(emit: Callable[[dict[str, Any]], None], asked: list[tuple[str, str, int]], device: DeviceSpec) -> Any:
    """Run the jobs one after the other on every rank, each as `drumline train` does."""
    from drumline.loop.rank_tasks import train_rank
    from drumline.runtime.guards.guard import Guards

    results = []
    for reference, plan, steps in asked:
        events: list[dict[str, Any]] = []
        result = train_rank(events.append, reference, plan, steps, False, device, Guards())
        speed = next((e["speed"] for e in events if "speed" in e), None)
        each = [e["seconds"] for e in events if "seconds" in e][-result["counted"] :]
        timing = {k: result[k] for k in ("step_seconds", "own_by_phase")}
        results.append({"speed": speed, "during": result["speed"], "drift": result["drift"], "each": each, **timing})
    return results


def _ran(case: Case, ranks: list[dict[str, Any]]) -> Ran:
    seconds, speed = max(r["step_seconds"] for r in ranks), ranks[0]["speed"] or 1.0
    raw = case.predicted(())
    seen = observed_run(
        case.profile,
        case.plan,
        raw.at_speed(ranks[0]["during"]),
        step_seconds=seconds,
        phases=[r["own_by_phase"] for r in ranks],
        each=ranks[0]["each"],
        when=datetime.datetime.now(datetime.UTC).isoformat(),
        torch="",
        measurement="",
        drift=ranks[0]["drift"],
    )
    expected = format_seconds(raw.at_speed(speed).step_seconds)
    pace = f"speed {speed:.3f}, {ranks[0]['during']:.3f} by probes before and after"
    print(f"{case.name} {case.plan}: {format_seconds(seconds)}, predicted {expected}, {pace}", flush=True)
    return Ran(case, seconds, speed, seen)


def page(first: Sequence[Ran], second: Sequence[Ran]) -> list[str]:
    """Format the table of errors and compare it with the bounds."""
    lines = [
        "| job | ranks | plan | step | first run | step | second run, corrected | by other jobs alone | uncorrected |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {"first": [], "second": [], "others": [], "raw": [], "again": []}
    for a, b in zip(first, second, strict=True):
        case = a.case
        here = [r for r in first if r.case.cluster is case.cluster]  # each measurement has its own corrections
        previous = [r.seen for r in here[: here.index(a) + 1]]  # all runs until then
        signed = {
            "first": a.error(case.predicted(())),
            "second": b.error(case.predicted(previous)),
            "others": b.error(case.predicted([r.seen for r in here if r.case.name != case.name])),
            "raw": b.error(case.predicted(())),
            "again": a.seconds / b.seconds - 1,
        }
        for key, value in signed.items():
            errors[key].append(abs(value))
        shown = {k: f"{100 * v:+.1f}%" for k, v in signed.items()}
        lines.append(
            f"| {case.name} | {case.plan.ranks} | `{case.plan}` | {format_seconds(a.seconds)} | {shown['first']} | "
            f"{format_seconds(b.seconds)} | {shown['second']} | {shown['others']} | {shown['raw']} |"
        )
    return [*lines, "", *verdicts(errors)]


def once(what: str, ran: Sequence[Ran]) -> list[str]:
    """List the errors of jobs that ran once, by number of ranks."""
    if not ran:
        return []
    shown: dict[str, list[str]] = {}
    errors = [(r, r.error(r.case.predicted(()))) for r in ran]
    for r, error in errors:
        shown.setdefault(r.case.name, []).append(
            f"{100 * error:+.1f}% of {format_seconds(r.seconds)} with {r.case.plan.ranks}"
        )
    mean = statistics.mean(abs(error) for _, error in errors)
    each = "; ".join(f"{name} {', '.join(errors_of)}" for name, errors_of in shown.items())
    verdict = f"mean error {100 * mean:.1f}%: {_kept(mean <= MOST)}"
    return [f"- {what}, uncorrected: {verdict}. By ranks: {each}."]


def verdicts(errors: dict[str, list[float]]) -> list[str]:
    """Write a sentence about each mean error."""
    mean = {k: statistics.mean(v) for k, v in errors.items()}
    percent = {k: f"{100 * v:.1f}%" for k, v in mean.items()}
    half = mean["second"] <= HALF * mean["first"]
    return [
        f"- First runs, uncorrected: mean error {percent['first']} (worst {100 * max(errors['first']):.1f}%); at most "
        f"{100 * MOST:.0f}% was expected: {_kept(mean['first'] <= MOST)}.",
        f"- Second runs, corrected by the first ones: {percent['second']} (worst {100 * max(errors['second']):.1f}%), "
        f"{mean['second'] / mean['first']:.2f} of the first's; at most half was expected: {_kept(half)}.",
        f"- Second runs corrected by other jobs alone: {percent['others']}; without corrections {percent['raw']}: "
        f"{'it helps' if mean['others'] < mean['raw'] else 'it does not help'} a job that never ran here.",
        f"- The first run's own time, as a prediction of the second: {percent['again']} (worst "
        f"{100 * max(errors['again']):.1f}%). That is how repeatable the machine is.",
    ]


def _kept(is_kept: bool) -> str:
    return "kept" if is_kept else "missed"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(NAMES), help="which of " + ", ".join(NAMES))
    more = ",".join((*MORE, *UNSEEN))
    parser.add_argument("--more", default=more, help=f"which of {more}")
    parser.add_argument("--ranks", default="1,2,4", help="which of 1, 2 and 4")
    parser.add_argument("--seconds", type=float, default=40.0, help="of every run, as predicted")
    parser.add_argument("--clusters", help="a folder with measurements of this machine, cpu-N.toml; stored there")
    parser.add_argument("--paste", action="store_true", help="write into docs/log/cpu.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
