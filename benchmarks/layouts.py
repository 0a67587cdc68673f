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
STORED = Path(__file__).parents[1] / "build"
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
                results = _measure(name, options, Path(folder) / "cluster.toml")
            except Unable as e:
                print(f"not run: {e}", file=sys.stderr)
                return 1
            print("\n".join(table_lines(name, results)), flush=True)
    if options.paste:
        stored = [(name, json.loads(_file(name).read_text(encoding="utf-8"))) for name in SHOWN if _file(name).exists()]
        lines = [line for name, results in stored for line in [*table_lines(name, results), ""]]
        paste("layouts", lines[:-1], "one thread a rank; pasted by `python benchmarks/layouts.py --paste`")
    return 0


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="wide,long", help="of layout_tasks.py; none: paste the stored results")
    parser.add_argument("--rate", default="300mbit", help="of the wire between the hosts, as tc writes it")
    parser.add_argument("--cores", type=float, default=0.45, help="of each rank; 0: they share what there is")
    parser.add_argument("--blocks", type=int, default=12, help="of every layout that comes near the fastest")
    parser.add_argument("--steps", type=int, default=1, help="of a block")
    parser.add_argument("--paste", action="store_true", help="write the tables into docs/log/model-parallel.md")
    return parser.parse_args()


def _file(name: str) -> Path:
    return STORED / f"layouts-{name}.json"


def _measure(name: str, options: Any, cluster: Path) -> dict[str, Any]:
    """Run the ranks numbered host by host, then in turns over the hosts; the first task's ranks measure the cluster."""
    from netns import two_hosts

    with two_hosts(options.rate, burst="8kb", cores=options.cores) as hosts:
        settings = name, str(options.blocks), str(options.steps)
        output = hosts.run(str(RANK), *settings, timeout=LONGEST, LAYOUTS_CLUSTER=str(cluster))
        results: dict[str, Any] = json.loads(output[0].splitlines()[-1])
        results |= {"rate": options.rate, "cores": options.cores, "apart": {}}
        _store(name, results)
        output = hosts.run(str(RANK), name, "0", "1", json.dumps(fastest(results)), timeout=LONGEST, interleaved=True)
    results["apart"] = json.loads(output[0].splitlines()[-1])["tried"]
    _store(name, results)
    return results


def _store(name: str, results: dict[str, Any]) -> None:
    STORED.mkdir(exist_ok=True)
    _file(name).write_text(json.dumps(results, indent=1), encoding="utf-8")


def fastest(results: dict[str, Any]) -> list[str]:
    """List the fastest plan of every combination of mesh axes."""
    from layout_tasks import axes_of

    best: dict[tuple[int, ...], str] = {}
    for plan in sorted(results["tried"], key=lambda p: statistics.median(results["tried"][p])):
        best.setdefault(axes_of(plan), plan)
    return list(best.values())


def table_lines(name: str, results: dict[str, Any]) -> list[str]:
    """Format the table of a task and the conclusions under it."""
    from engine_peers.ratios import ratio
    from layout_tasks import TASKS, places

    task, chosen = TASKS[name], results["chosen"]
    turns: dict[str, list[float]] = results["turns"]
    best = min(turns, key=lambda p: statistics.median(turns[p]))
    rows = [(p, False, turns.get(p, times)) for p, times in results["tried"].items()]
    rows += [(p, True, times) for p, times in results["apart"].items()]
    rows.sort(key=lambda row: statistics.median(row[2]))
    lines = [
        f"### {str(task)[0].upper()}{str(task)[1:]}",
        "",
        f"2 hosts x 2 ranks of {results['cores']:g} cores, {results['rate']} between them; "
        f"measured: {results['links']}. Expected: {task.expected}.",
        "",
        "| plan | inside hosts | across | predicted | step | / the best |",
        "|---|---|---|---|---|---|",
    ]
    for plan, interleaved, times in rows:
        where = places(plan, interleaved)
        inside, across = (" ".join(a for a, w in where.items() if w == side) for side in ("inside", "across"))
        wanted = "" if interleaved else f"{1e3 * results['predicted'][plan]:.0f} ms"
        mark = ", ranks in turns" if interleaved else " (chosen)" if plan == chosen else ""
        share = f"{statistics.median(times) / statistics.median(turns[best]):.2f}"
        if not interleaved and plan in turns:
            share = str(ratio(times, turns[best]))
        took = f"{1e3 * statistics.median(times):.0f} ms"
        lines.append(f"| `{plan}`{mark} | {inside} | {across} | {wanted} | {took} | {share} |")
    return [*lines, "", *_verdict(results, best)]


def _verdict(results: dict[str, Any], best: str) -> list[str]:
    from engine_peers.ratios import ratio
    from layout_tasks import axes_of, places

    chosen, turns = results["chosen"], results["turns"]
    mine, r = statistics.median(turns[chosen]), ratio(turns[chosen], turns[best])
    others = [statistics.median(turns.get(p, t)) for p, t in results["tried"].items() if p != chosen]
    others += [statistics.median(t) for t in results["apart"].values()]
    cheapest = min(results["predicted"], key=lambda p: results["predicted"][p])
    verdict = "right"
    if mine > min(others):
        same = axes_of(best) == axes_of(chosen) and statistics.median(turns[best]) <= min(others)
        verdict = "level" if r.low <= 1 else "the axes are right" if same else "wrong"
    lines = [
        f"- The planner's first of {results['candidates']} candidates is `{chosen}`. Of all {len(others) + 1} "
        f"layouts it takes {r} of the fastest, `{best}`: {verdict}. The next takes {min(others) / mine:.2f} of "
        "it."
    ]
    rest = [statistics.median(turns.get(p, t)) for p, t in results["tried"].items() if axes_of(p) != axes_of(chosen)]
    rest += [statistics.median(t) for t in results["apart"].values()]
    lines.append(f"- The fastest with other axes, or the same in other places, takes {min(rest) / mine:.2f} of it.")
    if results["idle"]:
        lines.append(f"- That is of the plans for four ranks: it would leave some idle, by `{results['idle']}`.")
    same = "is the same plan" if cheapest == chosen else f"is `{cheapest}`, which it does not look at"
    lines.append(f"- The cheapest by its price of all layouts, also of those that it does not look at, {same}.")
    over = [t for p, t in results["tried"].items() if places(p, False).get("tp") == "across"]
    over += [t for p, t in results["apart"].items() if places(p, True).get("tp") == "across"]
    if over:
        least = min(statistics.median(t) for t in over)
        lines.append(f"- The fastest with tensor parallelism over the wire takes {least / mine:.2f} of it.")
    blocks = len(next(iter(turns.values())))
    lines.append(f"- {blocks} blocks in turns for those with an interval, one to three steps for the others.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
