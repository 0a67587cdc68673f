"""A rank that another launcher started: verifies plans whose replicas step by themselves, and prints the errors.

replica_ranks.py PLAN [PLAN ...]
"""

from __future__ import annotations

import json
import sys

import replica_functions
import torch

from drumline.comm.environment import connect, disconnect


def main() -> None:
    torch.set_num_threads(1)
    connect(backend="gloo", timeout=60)
    results = {plan: replica_functions.verified("mlp", plan, 8) for plan in sys.argv[1:]}
    print(json.dumps({plan: [r.errors, "; ".join(r.notes)] for plan, r in results.items() if r and r.passed}))
    disconnect()


if __name__ == "__main__":
    main()
