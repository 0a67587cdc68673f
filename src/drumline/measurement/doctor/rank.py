"""One rank of a trial: joins, runs the operations in order, and records each before and after.

The records survive this process: an operation that began and did not finish has ended it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...comm.environment import rank_info
from ...comm.mpi import process_group as mpigroup
from ...comm.shm import process_group as shm
from .operations import OPERATIONS, Operation

JOIN = "join"
"""Name of the record of the group's start."""
_OTHERS = 60.0
"""Seconds that a rank waits for the records of others; the doctor normally ends it sooner."""


def run(
    folder: str,
    backend: str,
    device_type: str,
    operations: Mapping[str, Operation],
    timeout: float,
    rank: int,
    size: int,
) -> None:
    """Run the operations and write one line of JSON for each event.

    No rank begins an operation before all have finished the last one: then a rank dies by the operation that its peers
    run too, and a rank that is late at the start is not missed.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(Path(folder) / f"{rank}.jsonl", "a", buffering=1) as out:

        def write(operation: str, state: str, why: str = "") -> None:
            out.write(json.dumps({"operation": operation, "state": state, "why": why[:300]}) + "\n")

        write(JOIN, "begun")
        _together(folder, size, 1)
        try:
            device = _device(device_type, rank)
            _join(folder, backend, rank, size, timeout)
        except Exception as e:
            write(JOIN, "refused", _first_line(e))
            return
        write(JOIN, "ok")
        for i, (name, operation) in enumerate(operations.items()):
            _together(folder, size, 2 + 2 * i)
            write(name, "begun")
            try:
                right = operation(rank, size, device)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                write(name, "ok" if right else "wrong", "" if right else "the result is wrong")
            except Exception as e:
                write(name, "refused", _first_line(e))
        write(JOIN, "done")
    dist.destroy_process_group()


def _device(device_type: str, rank: int) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _together(folder: str, size: int, lines: int) -> None:
    """Wait until each rank has written `lines` lines."""
    end = time.monotonic() + _OTHERS
    for rank in range(size):
        file = Path(folder) / f"{rank}.jsonl"
        while not file.exists() or file.read_bytes().count(b"\n") < lines:
            if time.monotonic() > end:
                sys.exit(f"rank {rank} did not arrive within {_OTHERS:g} s")
            time.sleep(0.005)


def _join(folder: str, backend: str, rank: int, size: int, timeout: float) -> None:
    mpigroup.register()
    shm.register()
    wait = timedelta(seconds=timeout)
    if backend == mpigroup.NAME:
        dist.init_process_group(backend, init_method="mpi://", timeout=wait)
        return
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)


def _first_line(e: Exception) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0] if lines else traceback.format_exc().splitlines()[-1]}"


def process_main(
    folder: str,
    backend: str,
    device_type: str,
    operations: Mapping[str, Operation],
    timeout: float,
    rank: int,
    size: int,
) -> None:
    """Entry point of a forked rank; its output goes to a file next to its records."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a trial ends with the doctor, even if that is killed
    quiet = os.open(str(Path(folder) / f"{rank}.out"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    run(folder, backend, device_type, operations, timeout, rank, size)
    # threads of a backend may outlive the group, and some abort the process at a normal exit
    os._exit(0)


def main() -> None:
    """Entry point under mpiexec: `python -m ...doctor.rank FOLDER BACKEND DEVICE OPERATIONS TIMEOUT`."""
    where = rank_info()
    folder, backend, device_type, names, timeout = sys.argv[1:]
    operations = {name: OPERATIONS[name] for name in json.loads(names)}
    run(folder, backend, device_type, operations, float(timeout), where.rank, where.size)


if __name__ == "__main__":
    main()
