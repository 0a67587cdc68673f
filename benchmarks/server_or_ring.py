"""A parameter server against a ring all-reduce, for 2, 4 and 8 workers on hosts with limited links: where they cross.

    python benchmarks/server_or_ring.py [--workers 2,4,8] [--rate 100mbit,1gbit] [--servers 1,half] [--rounds 9]
                                        [--realtime] [--record FILE] [--paste]

Hosts are network namespaces of this machine on one switch; every port sends and receives at the rate. On each worker's
host are a rank of a process group over gloo, whose communicator runs `allreduce=ring`, and a worker of
`sync=server`; the parameter servers have hosts of their own. Workers, servers, coordinator and remote calls are the
engine's; the model is a vector of a given size, and only the exchange of a step is timed: hand the gradient in, get the
next task with the new weights. All workers begin together, and the time until the last has ended counts: if they went
on at once, the first would push while the last still pulls. Sizes, both ways to exchange them, and the messages that
the predictions are made of take turns in every round, shuffled. Seconds are medians.

A prediction is the closed form of `theory.parameter_server`, with three kinds of start-up times:

    one alpha     that of a message of the ring between two hosts, for both; a server's exchange takes two
    alone         each path has its own, measured between two hosts. An exchange is two remote calls with one server
                  (hand in; next task), four with several (push to all; hand in; next task; pull from all), and the
                  update
    all at once   the same, measured with all workers at once: all ranks send to the next one, all workers call

All processes share the cores of this machine, so start-up times, which are CPU time of a message here, grow with the
number of workers; the last kind contains that. The wire does not share cores: beta is always that of a port in use by
one pair. Two things that formulas do not know: a port that was idle sends its first packet at once, and CPU time of one
worker overlaps with bytes of another.

Expected before the first run: messages of gloo start in 0.15 ms alone and P / 2 times that on two cores, a call takes
0.3 ms, or P times 0.2 ms if all call, an update 0.5 ms. Then two and four workers have no crossing, and eight have it
at 4 kB with 100 Mbit/s and at 40 kB with 1 Gbit/s. Needs root and iproute2; takes about ten minutes. With `--realtime`
all processes run before others of this machine: on a busy one, gloo's messages otherwise wait milliseconds for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from server_ring.table import TINY, bytes_per_second, table_lines
from split_contest.page import paste

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

PAGE = Path(__file__).parents[1] / "docs" / "log" / "asynchronous.md"
LONG = 1 << 20
"""Bytes of the message that beta is taken from."""
SIZES = tuple(1 << i for i in range(4, 23))
"""Bytes of vectors: from where a few workers with one server are still faster than the ring."""
LONGEST = 1.5
"""Seconds; sizes whose exchange takes longer are left out."""
AT_A_TIME = 0.15
"""Seconds for which short exchanges are repeated in one measurement."""
PAUSE = 0.004
"""Seconds between them, at least: half as long as one takes, if that is more."""
JUMBO = 60e6
"""Bytes per second of a port above which its packets have 9000 bytes instead of 1500: fewer of them, less CPU time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--servers", default="1,half", help="numbers, or `half` and `all` of the number of workers")
    parser.add_argument("--rate", default="100mbit,1gbit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--realtime", action="store_true", help="run before all other processes, on a busy machine")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="bytes of the longest vector")
    parser.add_argument("--record", type=Path, help="write all numbers to this file")
    parser.add_argument("--recorded", type=Path, help="make the table of this file instead of measuring")
    parser.add_argument("--paste", action="store_true", help=f"write the tables into docs/log/{PAGE.name}")
    given = parser.parse_args()
    if given.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    if given.recorded:
        results = json.loads(given.recorded.read_text(encoding="utf-8"))
    else:
        results = measure_all(given)
        if not results:
            return 1
    if given.record:
        given.record.write_text(json.dumps(results), encoding="utf-8")
    lines = table_lines(results)
    print("\n".join(lines))
    if given.paste:
        from drumline.measurement.machine import cpu_name

        command = results[0].get("command", "") if given.recorded else command_line()
        by = f"; measured by `{command}`" if command else ""
        how = f"{os.cpu_count()} cores of {cpu_name()}{by}"
        paste("server or ring", lines, how, PAGE)
    return 0


def command_line() -> str:
    """Format the command line of this run for the page."""
    return shlex.join(["python", "benchmarks/server_or_ring.py", *sys.argv[1:]])


def measure_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every rate and number of workers; empty, with the reason printed, if hosts cannot be made."""
    from netns import Unable, switched_hosts

    import drumline.runtime.training.preload  # noqa: F401  # processes are forked from this one

    results = []
    for rate in given.rate.split(","):
        mtu = 9000 if bytes_per_second(rate) > JUMBO else 1500
        for workers in (int(w) for w in given.workers.split(",")):
            servers = sorted({number_of(word, workers) for word in given.servers.split(",")})
            try:
                with switched_hosts(workers + servers[-1], rate, mtu=mtu) as switch:
                    results.append(measure(switch, rate, workers, servers, given.rounds, given.most))
            except Unable as e:
                print(f"not run: {e}", file=sys.stderr)
                return []
            print(f"{rate}, {workers} workers: done, load average {results[-1]['load']:.1f}", file=sys.stderr)
    return results


def number_of(word: str, workers: int) -> int:
    """The number of servers that a word means."""
    return {"half": max(1, workers // 2), "all": workers}.get(word) or int(word)


@dataclass(slots=True)
class Case:
    """An action that processes run at the same time."""

    seconds: Callable[[int, float], list[float]]
    """Seconds of each time, of a number of times, `every` so many seconds or one right after the other."""
    in_a_row: bool
    times: int = 1
    every: float = 0.0

    def prepare(self) -> None:
        """Run it once to warm up, and once to choose the number of repeats."""
        self.seconds(1, 0.0)
        [taken] = self.seconds(1, 0.0)
        self.every = 0.0 if self.in_a_row else taken + max(PAUSE, taken / 2)
        self.times = max(1, min(16, round(AT_A_TIME / (self.every or taken))))

    def run(self) -> list[float]:
        """Seconds of each time."""
        return self.seconds(self.times, self.every)


def measure(switch: Any, rate: str, workers: int, servers: list[int], rounds: int, most: int) -> dict[str, Any]:
    """Time all cases of one number of workers in turns: seconds by name."""
    from server_ring.processes import started

    # what a server's port carries is counted twice for several servers (see above)
    slowest = 2 * workers * max(1 if n == 1 else 2 / n for n in servers) / bytes_per_second(rate)
    sizes = [size for size in SIZES if size <= most and size * slowest <= LONGEST]
    with started(switch, workers, servers, sorted({TINY, LONG, *sizes})) as group:
        cases = cases_of(group, servers, sizes)
        for case in cases.values():
            case.prepare()
        times: dict[str, list[float]] = {name: [] for name in cases}
        for i in range(rounds):
            for name in random.Random(i).sample(list(cases), len(cases)):
                times[name] += cases[name].run()
        updates = {}
        for n, processes in group.servers.items():
            processes[0].ask("update_seconds", sizes[0])
            updates[str(n)] = statistics.median(processes[0].answer())
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "command": command_line(),
        "rate": rate,
        "workers": workers,
        "servers": servers,
        "sizes": sizes,
        "long": LONG,
        "medians": medians,
        "spread": {name: (max(t) - min(t)) / medians[name] for name, t in times.items()},
        "updates": updates,
        "rounds": rounds,
        "realtime": os.sched_getscheduler(0) == os.SCHED_RR,
        "load": os.getloadavg()[0],
    }


def cases_of(group: Any, servers: list[int], sizes: list[int]) -> dict[str, Case]:
    """List the cases by name: an exchange or a message, and its bytes."""
    from server_ring.processes import seconds_of

    def case(processes: Any, action: str, *arguments: Any) -> Case:
        run = partial(seconds_of, processes, action, *arguments)
        return Case(lambda times, every: run(times=times, every=every), action not in ("all_reduce", "exchange"))

    cases = {
        f"trip {TINY}": case(group.ring[:2], "trip", TINY),
        f"trip {LONG}": case(group.ring[:2], "trip", LONG),
        f"shift {TINY}": case(group.ring, "shift", TINY),
    }
    for n in servers:
        cases[f"call{n} {LONG}"] = case(group.workers[:1], "pull", n, LONG)
        for name, action in (("call", "pull"), ("other", "pull_others"))[: min(n, 2)]:
            cases[f"{name}{n} {TINY}"] = case(group.workers[:1], action, n, TINY)
            cases[f"{name}s{n} {TINY}"] = case(group.workers, action, n, TINY)
    for size in sizes:
        cases[f"ring {size}"] = case(group.ring, "all_reduce", size)
        for n in servers:
            cases[f"server{n} {size}"] = case(group.workers, "exchange", n, size)
    return cases


if __name__ == "__main__":
    sys.exit(main())
