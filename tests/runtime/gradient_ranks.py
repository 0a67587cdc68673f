"""A rank started by another launcher: verifies plans over a backend and prints how their gradients were reduced.

gradient_ranks.py BACKEND PLAN [PLAN ...]
"""

from __future__ import annotations

import json
import sys

import parity
import small_jobs
import torch

from drumline.comm.environment import connect, disconnect
from drumline.core.errors import PlanError
from drumline.runtime.engine import initialize


def gradient_algorithm(plan: str) -> str:
    """Name the algorithm and transport that reduce the gradients of a plan."""
    strategy = initialize(small_jobs.make("mlp", model=parity.Wide), plan).strategy
    groups = getattr(strategy, "_groups", None)
    schedules = groups.shard_schedules if groups else getattr(strategy, "_schedules", None)
    return "backend" if schedules is None else str(schedules)


def main() -> None:
    torch.set_num_threads(1)
    where = connect(backend=sys.argv[1], timeout=60)
    algorithms = {}
    for plan in sys.argv[2:]:
        try:
            result = parity.run_verify("mlp", plan, 2, {"model": parity.Wide})
            if where.rank == 0:
                parity.check(result)
            algorithms[plan] = gradient_algorithm(plan)
        except PlanError as e:
            algorithms[plan] = str(e.what)
    sys.stdout.write(json.dumps(algorithms) + "\n")  # in one piece, among the lines of other ranks
    sys.stdout.flush()
    disconnect()


if __name__ == "__main__":
    main()
