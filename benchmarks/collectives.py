"""All-reduce of this machine's contestants side by side: gloo, Drumline's shm, Open MPI and MPICH.

    python benchmarks/collectives.py [--ranks 2] [--seconds 60] [--json FILE]

Ranks are started by each MPI's own mpiexec. In each start the contestants of these ranks (gloo, shm and that MPI) take
turns of a tenth of a second on the same buffer, so that all see the same machine; starts of the two MPIs alternate.
Printed are medians, and ratios of the medians of the same start. Open MPI comes with `pip install 'drumline[test]'`;
MPICH has files of the same names and is installed separately:
`pip install --prefix .venv/mpich --no-deps mpich`. An MPI that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = [8, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
PREFIX = Path(sys.prefix)
BLOCK = 0.1
"""Seconds of a contestant's turn. The first third is not counted: a processor that slept through the turn of another
(gloo waits for sockets) runs slowly for some milliseconds."""
STARTERS = {
    "Open MPI": ([str(PREFIX / "bin/mpiexec"), "--allow-run-as-root", "--oversubscribe"], PREFIX / "lib/libmpi.so.40"),
    "MPICH": ([str(PREFIX / "mpich/bin/mpiexec")], PREFIX / "mpich/lib/libmpi.so.12"),
}


def rank_main(name: str, store: str, seconds: float, out: str) -> None:
    """Run one rank: all contestants in turn, size by size; rank 0 writes all times."""
    import numpy
    import torch
    import torch.distributed as dist

    import drumline.comm  # noqa: F401  # makes shm known

    torch.set_num_threads(1)
    comm = None
    if name in STARTERS:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rank, size = comm.Get_rank(), comm.Get_size()
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    shm = dist.new_group(backend="shm")
    contestants = {"gloo": lambda x: dist.all_reduce(x), "shm": lambda x: dist.all_reduce(x, group=shm)}
    if comm is not None:
        contestants[name] = lambda x: comm.Allreduce(MPI.IN_PLACE, x.numpy())
    results: dict[str, dict[int, list[float]]] = {c: {} for c in contestants}
    for n in SIZES:
        x = torch.ones(n // 4)
        block = {}
        for name_, run in contestants.items():
            x.fill_(1.0)
            run(x)
            assert numpy.array_equal(x.numpy(), numpy.full(n // 4, float(size), numpy.float32))
            results[name_][n] = []
            begin = time.perf_counter()
            for _ in range(3):
                run(x)
            each = torch.tensor([(time.perf_counter() - begin) / 3])
            dist.all_reduce(each, dist.ReduceOp.MAX)  # all ranks do as many
            block[name_] = max(3, int(BLOCK / each.item()))
        turns = max(3, int(seconds / len(SIZES) / (BLOCK * len(contestants))))
        for _ in range(turns):
            for name_, run in contestants.items():
                times = []
                x.fill_(1.0)
                dist.barrier(group=shm)
                for _ in range(block[name_]):
                    begin = time.perf_counter()
                    run(x)
                    times.append(time.perf_counter() - begin)
                results[name_][n] += times[len(times) // 3 :]
    if rank == 0:
        medians = {c: {n: statistics.median(t) for n, t in by.items()} for c, by in results.items()}
        Path(out).write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()
    if comm is not None:
        MPI.Finalize()
    sys.exit()


def start(name: str, ranks: int, seconds: float) -> dict[str, dict[int, float]]:
    """Start the ranks of one MPI once: contestant -> size -> median seconds."""
    with tempfile.TemporaryDirectory(prefix="drumline-bench-") as folder:
        out, store = f"{folder}/out.json", f"{folder}/store"
        command = [sys.executable, __file__, "--rank", name, store, str(seconds), out]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if name in STARTERS:
            starter, library = STARTERS[name]
            env |= {"MPI4PY_LIBMPI": str(library)} if name == "MPICH" else {}
            env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
            subprocess.run([*starter, "-n", str(ranks), *command], env=env, check=True, stdin=subprocess.DEVNULL)
        else:
            processes = [
                subprocess.Popen(command, env={**env, "RANK": str(r), "WORLD_SIZE": str(ranks)}) for r in range(ranks)
            ]
            if any(p.wait() for p in processes):
                sys.exit("a rank failed")
        return {c: {int(n): t for n, t in by.items()} for c, by in json.loads(Path(out).read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", "-n", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all starts together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank[0], options.rank[1], float(options.rank[2]), options.rank[3])
    there = [name for name, (_, library) in STARTERS.items() if library.exists()]
    for name in set(STARTERS) - set(there):
        print(f"{name} is not installed and is left out")
    starts = (there or ["none"]) * 2
    runs = [start(name, options.ranks, options.seconds / len(starts)) for name in starts]
    rows = []
    for n in SIZES:
        row: dict[str, float] = {"bytes": n, "shm": statistics.median(run["shm"][n] for run in runs)}
        for rival in ("gloo", *there):
            ratios = [run[rival][n] / run["shm"][n] for run in runs if rival in run]
            row[rival] = statistics.median(run[rival][n] for run in runs if rival in run)
            row[f"{rival} / shm"] = statistics.median(ratios)
        rows.append(row)
    rivals = ["gloo", *there]
    print(f"all_reduce, float32, {options.ranks} ranks on {os.cpu_count()} cores; microseconds, and times shm's")
    print("".join(f"{h:>15}" for h in ("bytes", "shm", *rivals, *(f"{r} / shm" for r in rivals))))
    for row in rows:
        cells = [f"{int(row['bytes'])}", f"{row['shm'] * 1e6:.1f}", *(f"{row[r] * 1e6:.1f}" for r in rivals)]
        print("".join(f"{c:>15}" for c in (*cells, *(f"{row[f'{r} / shm']:.2f}" for r in rivals))))
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
