"""A rank on one of two hosts: finds the hosts, and reduces over both transports with every algorithm that uses them."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from drumline.comm import Communicator, TorchTransport
from drumline.comm.environment import connect, disconnect
from drumline.comm.hosts import HostTransport, find_hosts, per_node


def main() -> None:
    kind = sys.argv[1]
    torch.set_num_threads(1)
    where = connect(timeout=60)
    across = TorchTransport()
    groups = find_hosts(across)
    inner = [dist.new_group(list(group)) for group in groups]
    rails = [dist.new_group(list(ranks)) for ranks in zip(*groups, strict=True)]
    mine = next(i for i, group in enumerate(groups) if where.rank in group)
    if kind == "shm":
        from drumline.comm.shm.transport import ShmTransport

        inside = ShmTransport.over(inner[mine])
    else:
        inside = TorchTransport(inner[mine])
    rail = TorchTransport(rails[groups[mine].index(where.rank)])
    comm = Communicator(HostTransport(inside, across, groups, rail=rail))
    wrong = []
    for n in (0, 1, 2, 3, 1000, 1_000_001):
        for algorithm, segments in (("native", None), ("hierarchical", 1), ("hierarchical", 3), ("auto", None)):
            for dtype, op in ((torch.float32, "sum"), (torch.int64, "max"), (torch.float64, "avg")):
                values = [(torch.arange(n) % 7 + r).to(dtype) for r in range(4)]
                whole = torch.stack(values)
                expected = {"sum": whole.sum(0), "max": whole.amax(0) if n else whole[0], "avg": whole.sum(0) / 4}[op]
                result = comm.all_reduce(values[comm.rank], op=op, algorithm=algorithm, segments=segments)
                if not torch.equal(result, expected.to(dtype)):
                    wrong.append([n, algorithm, segments, op])
    print(json.dumps({"hosts": groups, "per_node": per_node(groups), "wrong": wrong}))
    disconnect()


if __name__ == "__main__":
    main()
