"""Two hosts with 1 Gbit/s between them, two ranks each: gloo's own all-reduce against ours, which knows the hosts.

    python benchmarks/netns.py [--mib 16] [--rounds 15] [--segments 1,4,8] [--inside shm]

Gloo's ring sends 2 (p-1)/p m = 1.5 m bytes over the wire in each direction, a hierarchical one m: at most 1.5x.
`native` is the all-reduce of `HostTransport`, by the transports' own collectives; `hierarchical` runs the schedule of
that name by messages. Needs root and iproute2. Prints the median of each, interleaved, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drumline.comm import Transport

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> int:
    from netns import Unable, two_hosts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--segments", default="1,4,8")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--inside", default="shm", choices=["gloo", "shm"], help="what carries messages inside a host")
    given = parser.parse_args()
    settings = [str(given.mib), str(given.rounds), given.segments, given.inside]
    try:
        with two_hosts(given.rate) as hosts:
            output = hosts.run(__file__, *settings, timeout=300, NETNS_RANK="1")
    except Unable as e:
        print(f"not run: {e}", file=sys.stderr)
        return 1
    result = json.loads(output[0].splitlines()[-1])
    theirs = result["gloo"]
    print(f"all-reduce of {given.mib:g} MiB float32, 2 hosts x 2 ranks, {given.rate} between, {given.inside} inside")
    for name, times in result.items():
        seconds = statistics.median(times)
        spread = (max(times) - min(times)) / seconds
        ratio = statistics.median(theirs) / seconds
        print(f"  {name:<22} {seconds * 1e3:8.1f} ms  {ratio:5.2f}x gloo  (spread {spread:.0%})")
    return 0


def rank() -> None:
    """Run one rank: check the result once, then time all contestants in turns."""
    import torch
    import torch.distributed as dist

    from drumline.comm import Communicator, TorchTransport
    from drumline.comm.hosts import HostTransport, find_hosts

    mib, rounds, segments, inside = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    across = TorchTransport()
    groups = find_hosts(across)
    rails = [dist.new_group(list(ranks)) for ranks in zip(*groups, strict=True)]
    number = next(group.index(dist.get_rank()) for group in groups if dist.get_rank() in group)
    transport = HostTransport(_inside(inside, groups), across, groups, rail=TorchTransport(rails[number]))
    assert transport.per_node == 2, groups
    comm = Communicator(transport)
    x = torch.full((int(mib * 2**18),), float(comm.rank))

    def ours(n: int | None) -> None:
        comm.all_reduce(x, algorithm="hierarchical", segments=n)

    contestants: dict[str, Callable[[], object]] = {
        "gloo": lambda: dist.all_reduce(x),
        "native": lambda: comm.all_reduce(x, algorithm="native"),
    }
    for text in segments.split(","):
        n = None if text == "auto" else int(text)
        contestants[f"hierarchical, {text} segm."] = partial(ours, n)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds + 1):
        for name, run in contestants.items():
            x.fill_(float(comm.rank))
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            assert i or bool((x == 6.0).all()), name
    dist.barrier()
    if comm.rank == 0:
        print(json.dumps({name: t[1:] for name, t in times.items()}))
    dist.destroy_process_group()


def _inside(kind: str, groups: tuple[tuple[int, ...], ...]) -> Transport:
    """Make a transport between the ranks of this host, over gloo or shared memory."""
    import torch.distributed as dist

    from drumline.comm import TorchTransport

    made = [dist.new_group(list(group)) for group in groups]
    mine = next(i for i, group in enumerate(groups) if dist.get_rank() in group)
    if kind == "gloo":
        return TorchTransport(made[mine])
    from drumline.comm.shm.transport import ShmTransport

    return ShmTransport.over(made[mine])


if __name__ == "__main__":
    if os.environ.get("NETNS_RANK"):
        rank()
    else:
        sys.exit(main())
