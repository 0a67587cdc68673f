"""What ranks of a group report about themselves while one of them is late."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import small_jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import drumline as dl
from drumline.comm.hang_report import hang_report
from drumline.comm.rank_status import StatusReading, rank_status


def group_of(backend: str) -> dist.ProcessGroup | None:
    """The world, or another group of all ranks."""
    return None if dist.get_backend() == backend else dist.new_group(backend=backend)


def read_in_call(marker: Path, readings: list[StatusReading]) -> None:
    """Wait until this rank is inside a call, keep its status, and tell the late rank by creating `marker`."""
    end = time.monotonic() + 20.0
    while not (reading := rank_status().read()).in_collective and time.monotonic() < end:
        time.sleep(0.01)
    readings.append(reading)
    marker.touch()


def read_after(marker: Path) -> StatusReading:
    """The status of this rank once the other one has written the marker."""
    end = time.monotonic() + 30.0
    while not marker.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return rank_status().read()


def late(what: str, backend: str, folder: str) -> tuple[StatusReading, list[float]]:
    """On every rank: the status while rank 0 is in a call for which rank 1 comes late, and the result."""
    group, rank, x = group_of(backend), dist.get_rank(), torch.ones(6)
    dist.all_reduce(torch.ones(3), group=group)
    model = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=group) if what == "ddp" else None
    wait_until_idle()
    marker, seen = Path(folder) / f"{what}-{backend}", list[StatusReading]()
    reader = threading.Thread(target=read_in_call, args=(marker, seen))
    if rank == 0:
        reader.start()
    else:
        seen.append(read_after(marker))
    if what == "all_reduce":
        dist.all_reduce(x, group=group)
    elif what == "async":
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.wait()
    elif what == "message":
        if rank == 1:
            dist.send(x, group=group, group_dst=0)
        else:
            dist.recv(x, group=group, group_src=1)
    elif ddp is not None:
        ddp(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is not None
        x = model.weight.grad[0]
    if rank == 0:
        reader.join()
    wait_until_idle()
    return seen[0], x.tolist()


def late_for_a_repeated_bucket(folder: str) -> tuple[StatusReading, int]:
    """On every rank: the status while rank 0 waits in a recognized bucket of DDP for rank 1, and the calls that a
    backward and the call after it add.
    """
    group, rank, seen = dist.new_group(backend="checked_gloo"), dist.get_rank(), list[StatusReading]()
    ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False), process_group=group)

    def backward() -> None:
        ddp(torch.ones(1, 4)).sum().backward()

    for _ in range(150):
        backward()
    expected = group._calls.sequence.expected
    assert expected is not None and expected.recognized_by.from_backward
    time.sleep(0.5)  # the last of them are reported
    marker, before = Path(folder) / "repeated", rank_status().read().calls
    reader = threading.Thread(target=read_in_call, args=(marker, seen))
    if rank == 0:
        reader.start()
    else:
        seen.append(read_after(marker))
    backward()
    dist.barrier(group)
    after = rank_status().read()
    if rank == 0:
        reader.join()
    return seen[0], after.calls - before


def wait_until_idle() -> None:
    """Wait until this rank is in no call: the end of an asynchronous call is noted by another thread."""
    end = time.monotonic() + 20.0
    while rank_status().read().in_collective:
        assert time.monotonic() < end
        time.sleep(0.01)


def report(readings: list[StatusReading]) -> str:
    """The hang report of such statuses."""
    return hang_report(dict(enumerate(readings)), silent_for=12.0).text


def places(folder: str) -> list[str]:
    """The place of this rank around steps, in its loop's own code, and around a save."""
    engine, seen = dl.initialize(small_jobs.make("mlp", steps=3)), []
    for number, batch in enumerate(engine.data()):
        seen.append(rank_status().read().place)
        engine.step(batch)
        seen.append(rank_status().read().place)
        if number == 1:
            engine.save(folder)
            seen.append(rank_status().read().place)
    engine.finish_saves()
    return seen
