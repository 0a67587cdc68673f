"""Four workers, one of them four times as slow: throughput and loss of plans that wait, and of those that do not.

    python benchmarks/stragglers.py [--steps 400] [--rounds 1] [--output build/stragglers] [--paste]

Workers train a real small task (straggler_job.py) whose layers sleep, so that each is a device of its own, however few
cores there are. Predictions are those of `drumline plan --slow 3:4` for a cluster with the link that the ranks measure
first, and a device as fast as one worker alone. Plans run in shuffled turns. Bar: predicted within 15%. `--paste`
writes the table into docs/log/asynchronous.md and draws the losses, docs/images/stragglers.svg; `drumline report` of
the run folders draws more.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

SLOW = "3:4"
PLANS = (
    "dp=4",
    "dp=4,sync=async",
    "dp=4,sync=stale:4",
    "dp=4,sync=server,backup=1",
    "dp=4,sync=local:8",
)
LOSS = 0.25
"""The loss that every plan is to reach."""
SMOOTHED = 10
"""Steps over which losses are averaged."""
JOB = Path(__file__).parent / "straggler_job.py"
PAGE = Path(__file__).parents[1] / "docs" / "log" / "asynchronous.md"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "stragglers.svg"
COLOURS = ("#666666", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES = ("", "6 3", "2 3", "10 3 2 3", "4 2")
MARKS = ("<!-- stragglers -->\n", "<!-- /stragglers -->")


def main() -> int:
    import drumline as dl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", default="build/stragglers")
    parser.add_argument("--paste", action="store_true")
    given = parser.parse_args()
    os.environ["STRAGGLER"] = SLOW  # before the first rank: all are forked from one process
    cluster = sleeping_cluster()
    runs: dict[str, list[Any]] = {plan: [] for plan in PLANS}
    for i in range(given.rounds):
        for plan in random.Random(i).sample(PLANS, len(PLANS)):
            folder = Path(given.output) / f"{plan.replace(',', '-').replace('=', '').replace(':', '')}-{i}"
            run = dl.train(
                str(JOB), plan, cluster=cluster, steps=given.steps, output=folder, overwrite=True, corrections=False
            )
            runs[plan].append(run)
            print(f"{plan}: {milliseconds(run.step_seconds)}, predicted {milliseconds(predicted(run))}", flush=True)
    lines = table(runs)
    print("\n".join(lines))
    if given.paste:
        paste(lines)
        PICTURE.write_text(picture({plan: mine[0] for plan, mine in runs.items()}))
    return 0


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.1f} ms"


def predicted(run: Any) -> float:
    """Predict the seconds of a run's step."""
    return float(run.estimate.step_seconds)


def sleeping_cluster() -> Any:
    """Describe four devices as fast as the layers sleep, one of them slower, with the link that the ranks measure."""
    import straggler_job

    from drumline.clusters import Cluster, DeviceSpec, Link, Node, StepTimeDistribution
    from drumline.costs import OperatorCostModel
    from drumline.launchers.local import spawn
    from drumline.plans import Plan
    from drumline.tracing import trace

    alpha, bandwidth = spawn(link, ranks=4)[0]
    alone = spawn(one_worker, ranks=1)[0]
    print(
        f"one worker: {milliseconds(alone)} a batch; link: {milliseconds(alpha)}, {bandwidth / 1e9:.2f} GB/s",
        flush=True,
    )
    profile = trace(straggler_job.job())

    def cluster(speed: float) -> Any:
        device = DeviceSpec("sleeping", "cpu", 8e9, 1e12 * speed, {"fp32": 1e10 * speed}, 0.0)
        spread = StepTimeDistribution.of([SLOW])
        return Cluster("four workers", device, Node(4, Link(alpha, bandwidth)), step_times=spread)

    parts = OperatorCostModel(profile, cluster(1.0), "fp32").estimate(Plan()).parts
    return cluster(sum(parts[part] for part in ("forward", "backward", "optimizer")) / alone)


def link() -> tuple[float, float]:
    """Measure the latency of a message between two ranks, and its bytes per second."""
    import torch
    import torch.distributed as dist

    from drumline.comm.environment import connect

    where = connect()
    seconds = {}
    for size in (8, 4 * 2**20):
        data, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(20):
            dist.barrier()
            start = time.perf_counter()
            if where.rank < 2:
                for turn in (0, 1):
                    dist.send(data, 1 - where.rank) if where.rank == turn else dist.recv(data, 1 - where.rank)
            times.append((time.perf_counter() - start) / 2)
        seconds[size] = statistics.median(times)
    return seconds[8], (4 * 2**20 - 8) / (seconds[4 * 2**20] - seconds[8])


def one_worker() -> float:
    """Measure the seconds of a whole batch on one worker, without messages."""
    import straggler_job
    import torch

    from drumline.runtime.engine import initialize

    torch.set_num_threads(1)  # as each of the four has
    engine = initialize(straggler_job.job(), "dp=1")
    times = []
    for batch in engine.data(20):
        start = time.perf_counter()
        engine.step(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def reached(run: Any) -> tuple[int | None, float | None]:
    """Find the step and the second of the run at which the smoothed loss first reaches LOSS."""
    losses = run.losses
    for i in range(SMOOTHED, len(losses) + 1):
        if statistics.mean(losses[i - SMOOTHED : i]) <= LOSS:
            first = run.steps[0].elapsed - run.steps[0].seconds
            return i, run.steps[i - 1].elapsed - first
    return None, None


def table(runs: dict[str, list[Any]]) -> list[str]:
    """Format the runs as a Markdown table and compare them with the bound."""
    head = (
        "plan",
        "step",
        "predicted",
        "error",
        "samples/s",
        "against `dp=4`",
        "staleness",
        "most",
        f"steps to {LOSS}",
        "seconds",
    )
    rows = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    rates = {plan: statistics.median(rate(r) for r in mine) for plan, mine in runs.items()}
    errors = []
    for plan, mine in runs.items():
        step = statistics.median(r.step_seconds for r in mine)
        errors.append(predicted(mine[0]) / step - 1)
        stale = [s for r in mine for record in r.steps for s in record.staleness]
        ends = [reached(r) for r in mine]
        steps = [s for s, _ in ends if s is not None]
        seconds = [t for _, t in ends if t is not None]
        cells = (
            f"`{plan}`",
            milliseconds(step),
            milliseconds(predicted(mine[0])),
            f"{errors[-1]:+.0%}",
            f"{rates[plan]:.0f}",
            f"{rates[plan] / rates[PLANS[0]]:.2f}",
            f"{statistics.mean(stale) if stale else 0:.1f}",
            f"{max(stale, default=0)}",
            f"{statistics.median(steps):.0f}" if steps else "-",
            f"{statistics.median(seconds):.1f}" if seconds else "-",
        )
        rows.append(f"| {' | '.join(cells)} |")
    worst = max(errors, key=abs)
    verdict = "holds" if abs(worst) <= 0.15 else "missed"
    return [*rows, "", f"Predictions are off by {worst:+.0%} at most; the bar is 15%: {verdict}."]


def rate(run: Any) -> float:
    """Count the samples per second that entered an update, after the first tenth of the steps."""
    steps = run.steps[len(run.steps) // 10 :]
    return float(sum(s.samples for s in steps[1:]) / (steps[-1].elapsed - steps[0].elapsed))


def smoothed(run: Any) -> list[tuple[int, float, float]]:
    """Steps, seconds and mean loss of the last steps."""
    first = run.steps[0].elapsed - run.steps[0].seconds
    return [
        (i, run.steps[i - 1].elapsed - first, statistics.mean(run.losses[i - SMOOTHED : i]))
        for i in range(SMOOTHED, len(run.losses) + 1)
    ]


def picture(runs: dict[str, Any]) -> str:
    """Plot the losses against steps and against seconds, side by side, with dots where they reach LOSS."""
    width, height, left, gap = 400, 240, 40, 60
    curves = [smoothed(run) for run in runs.values()]
    top = max(loss for curve in curves for *_, loss in curve)
    parts = []
    for panel, (name, x_of) in enumerate((("steps", 0), ("seconds", 1))):
        start, last = left + panel * (width + gap), max(curve[-1][x_of] for curve in curves)
        parts.append(f'<text x="{start + width / 2}" y="{height + 36}" text-anchor="middle">{name}</text>')
        for i in range(5):
            x, y = start + width * i / 4, 10 + height * i / 4
            parts.append(f'<text x="{x}" y="{height + 22}" text-anchor="middle">{last * i / 4:.0f}</text>')
            parts.append(f'<text x="{start - 6}" y="{y + 4}" text-anchor="end">{top * (1 - i / 4):.1f}</text>')
            parts.append(f'<line x1="{start}" x2="{start + width}" y1="{y}" y2="{y}" stroke="#8884"/>')
        for colour, dash, curve in zip(COLOURS, DASHES, curves, strict=True):
            points = " ".join(
                f"{start + width * c[x_of] / last:.1f},{10 + height * (1 - c[2] / top):.1f}" for c in curve
            )
            style = f'stroke="{colour}" stroke-dasharray="{dash}" stroke-width="1.8" fill="none"'
            parts.append(f'<polyline points="{points}" {style}/>')
            if (there := next((c for c in curve if c[2] <= LOSS), None)) is not None:
                x, y = start + width * there[x_of] / last, 10 + height * (1 - there[2] / top)
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        y = 10 + height * (1 - LOSS / top)
        target = f'x1="{start}" x2="{start + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#777" stroke-dasharray="1 3"'
        parts.append(f"<line {target}/>")
        parts.append(f'<text x="{start + width}" y="{y - 5:.1f}" text-anchor="end">loss {LOSS}</text>')
    for i, (plan, colour, dash) in enumerate(zip(runs, COLOURS, DASHES, strict=True)):
        x, y = left + (i % 3) * 300, height + 60 + 20 * (i // 3)
        style = f'stroke="{colour}" stroke-dasharray="{dash}" stroke-width="2.5"'
        parts.append(
            f'<line x1="{x}" x2="{x + 34}" y1="{y - 4}" y2="{y - 4}" {style}/><text x="{x + 42}" y="{y}">{plan}</text>'
        )
    style = "text { font: 12px sans-serif; fill: #777 }"
    size = f'viewBox="0 0 {2 * width + gap + left + 20} {height + 95}"'
    title = f"Loss of four workers, worker {SLOW.replace(':', ' slower by ')}, mean of {SMOOTHED} steps"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>{title}</title><style>{style}</style>\n{body}\n</svg>\n'
    )


def paste(lines: list[str]) -> None:
    """Write the table into the lab notebook."""
    from drumline.measurement.machine import cpu_name

    text = PAGE.read_text()
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    machine = f"{os.cpu_count()} cores of {cpu_name()}"
    head = f"`python benchmarks/stragglers.py {shlex.join(sys.argv[1:])}`, {datetime.date.today()}, {machine}:"
    PAGE.write_text("\n".join([text[:start] + head, "", *lines, text[end:]]))


if __name__ == "__main__":
    sys.exit(main())
