"""Two hosts with a slow wire between them, two ranks each: where the planner puts each axis, and whether that is right.

    python benchmarks/layouts.py [--tasks wide,long] [--rate 300mbit] [--cores 0.45] [--blocks 12] [--paste]

Hosts are network namespaces joined by a wire of that rate. Each rank has a share of a core of its own, so that it is a
device whose speed does not depend on what the others do: on fewer cores than ranks, bubbles would cost nothing. The
ranks measure themselves, inside hosts and between them, and the planner says which plan it would take. Then every
layout that the engine runs on four ranks (each product of pp, dp, cp and tp, with and without ZeRO, at the best level,
order and micro-batches by price) runs on the same ranks, and every product once more with ranks numbered in turns over
the hosts, which puts the inner axes across the wire. What comes near the fastest runs on, in turns. What was expected
before measuring stands in layout_tasks.py. A task's results are kept in build/layouts-TASK.json, and `--paste` writes
those of all tasks into docs/log/model-parallel.md. Needs root and iproute2; about five minutes a task.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

RANK = Path(__file__).parent / "layout_rank.py"
KEPT = Path(__file__).parents[1] / "build"
LONGEST = 900.0
"""Seconds that the ranks may take."""


def main() -> int:
    from layout_tasks import SHOWN
    from netns import Unable
    from split_contest.page import paste

    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and ranks are removed then, too
    names = [name for name in options.tasks.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                found = _found(name, options, Path(folder) / "cluster.toml")
            except Unable as e:
                print(f"not run: {e}", file=sys.stderr)
                return 1
            print("\n".join(lines_of(name, found)), flush=True)
    if options.paste:
        kept = [(name, json.loads(_file(name).read_text(encoding="utf-8"))) for name in SHOWN if _file(name).exists()]
        lines = [line for name, found in kept for line in [*lines_of(name, found), ""]]
        paste("layouts", lines[:-1], "one thread a rank; pasted by `python benchmarks/layouts.py --paste`")
    return 0


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="wide,long", help="of layout_tasks.py; none: paste what was found before")
    parser.add_argument("--rate", default="300mbit", help="of the wire between the hosts, as tc writes it")
    parser.add_argument("--cores", type=float, default=0.45, help="of each rank; 0: they share what there is")
    parser.add_argument("--blocks", type=int, default=12, help="of every layout that comes near the fastest")
    parser.add_argument("--steps", type=int, default=1, help="of a block")
    parser.add_argument("--paste", action="store_true", help="write the tables into docs/log/model-parallel.md")
    return parser.parse_args()


def _file(name: str) -> Path:
    return KEPT / f"layouts-{name}.json"


def _found(name: str, options: Any, cluster: Path) -> dict[str, Any]:
    """What ranks found that are numbered host by host, and then in turns; the first task's measure the cluster."""
    from netns import two_hosts

    with two_hosts(options.rate, burst="8kb", cores=options.cores) as hosts:
        settings = name, str(options.blocks), str(options.steps)
        said = hosts.run(str(RANK), *settings, timeout=LONGEST, LAYOUTS_CLUSTER=str(cluster))
        found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
        found |= {"rate": options.rate, "cores": options.cores, "apart": {}}
        _keep(name, found)
        said = hosts.run(str(RANK), name, "0", "1", json.dumps(fastest(found)), timeout=LONGEST, interleaved=True)
    found["apart"] = json.loads(said[0].splitlines()[-1])["tried"]
    _keep(name, found)
    return found


def _keep(name: str, found: dict[str, Any]) -> None:
    KEPT.mkdir(exist_ok=True)
    _file(name).write_text(json.dumps(found, indent=1), encoding="utf-8")


def fastest(found: dict[str, Any]) -> list[str]:
    """Of every product of axes the plan that was fastest."""
    from layout_tasks import axes_of

    best: dict[tuple[int, ...], str] = {}
    for plan in sorted(found["tried"], key=lambda p: statistics.median(found["tried"][p])):
        best.setdefault(axes_of(plan), plan)
    return list(best.values())


def lines_of(name: str, found: dict[str, Any]) -> list[str]:
    """The table of a task and what it says."""
    from engine_peers.ratios import ratio
    from layout_tasks import TASKS, places

    task, chosen = TASKS[name], found["chosen"]
    turns: dict[str, list[float]] = found["turns"]
    best = min(turns, key=lambda p: statistics.median(turns[p]))
    rows = [(p, False, turns.get(p, times)) for p, times in found["tried"].items()]
    rows += [(p, True, times) for p, times in found["apart"].items()]
    rows.sort(key=lambda row: statistics.median(row[2]))
    lines = [
        f"### {str(task)[0].upper()}{str(task)[1:]}",
        "",
        f"2 hosts x 2 ranks of {found['cores']:g} cores, {found['rate']} between them; measured: {found['links']}. "
        f"Expected: {task.expected}.",
        "",
        "| plan | inside hosts | across | predicted | step | / the best |",
        "|---|---|---|---|---|---|",
    ]
    for plan, apart, times in rows:
        where = places(plan, apart)
        inside, across = (" ".join(a for a, w in where.items() if w == side) for side in ("inside", "across"))
        wanted = "" if apart else f"{1e3 * found['predicted'][plan]:.0f} ms"
        mark = ", ranks in turns" if apart else " (chosen)" if plan == chosen else ""
        share = f"{statistics.median(times) / statistics.median(turns[best]):.2f}"
        if not apart and plan in turns:
            share = str(ratio(times, turns[best]))
        took = f"{1e3 * statistics.median(times):.0f} ms"
        lines.append(f"| `{plan}`{mark} | {inside} | {across} | {wanted} | {took} | {share} |")
    return [*lines, "", *_verdict(found, best)]


def _verdict(found: dict[str, Any], best: str) -> list[str]:
    from engine_peers.ratios import ratio
    from layout_tasks import axes_of, places

    chosen, turns = found["chosen"], found["turns"]
    mine, r = statistics.median(turns[chosen]), ratio(turns[chosen], turns[best])
    others = [statistics.median(turns.get(p, t)) for p, t in found["tried"].items() if p != chosen]
    others += [statistics.median(t) for t in found["apart"].values()]
    cheapest = min(found["predicted"], key=lambda p: found["predicted"][p])
    words = "right"
    if mine > min(others):
        same = axes_of(best) == axes_of(chosen) and statistics.median(turns[best]) <= min(others)
        words = "level" if r.low <= 1 else "the axes are right" if same else "wrong"
    lines = [
        f"- The planner's first of {found['candidates']} candidates is `{chosen}`. Of all {len(others) + 1} "
        f"layouts it takes {r} of the fastest, `{best}`: {words}. The next takes {min(others) / mine:.2f} of "
        "it."
    ]
    rest = [statistics.median(turns.get(p, t)) for p, t in found["tried"].items() if axes_of(p) != axes_of(chosen)]
    rest += [statistics.median(t) for t in found["apart"].values()]
    lines.append(f"- The fastest with other axes, or the same in other places, takes {min(rest) / mine:.2f} of it.")
    if found["idle"]:
        lines.append(f"- That is of the plans for four ranks: it would leave some idle, by `{found['idle']}`.")
    same = "is the same plan" if cheapest == chosen else f"is `{cheapest}`, which it does not look at"
    lines.append(f"- The cheapest by its price of all layouts, also of those that it does not look at, {same}.")
    over = [t for p, t in found["tried"].items() if places(p, False).get("tp") == "across"]
    over += [t for p, t in found["apart"].items() if places(p, True).get("tp") == "across"]
    if over:
        least = min(statistics.median(t) for t in over)
        lines.append(f"- The fastest with tensor parallelism over the wire takes {least / mine:.2f} of it.")
    blocks = len(next(iter(turns.values())))
    lines.append(f"- {blocks} blocks in turns for those with an interval, one to three steps for the others.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
