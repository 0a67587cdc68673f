"""The contract over real processes and gloo, against torch's own collectives; three processes, started once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import comm_contract as contract
import pytest
import torch
import torch.distributed as dist

from drumline.comm import Communicator, TorchTransport
from drumline.errors import InputError

P = 3


def equals_torch(comm: Communicator) -> None:
    """The same result as torch's all_reduce and broadcast, at several sizes."""
    for size in (1, 2, 5, 999, 100_000):
        ours, theirs = (contract.tensor_of(comm.rank, size) for _ in range(2))
        dist.all_reduce(theirs)
        assert torch.equal(comm.all_reduce(ours), theirs)
        ours, theirs = (contract.tensor_of(comm.rank, size) for _ in range(2))
        dist.broadcast(theirs, src=2)
        assert torch.equal(comm.broadcast(ours, root=2), theirs)


def groups_have_numbers_of_their_own(comm: Communicator) -> None:
    """A process group of ranks 2 and 1: the transport speaks of ranks 0 and 1 in it."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    pair = Communicator(TorchTransport(group))
    assert (pair.rank, pair.size) == (dist.get_rank() - 1, 2)
    assert pair.all_reduce(torch.tensor([dist.get_rank()])).item() == 3
    assert pair.broadcast(torch.tensor([dist.get_rank()]), root=1).item() == 2


def rank_main(rank: int, folder: str, results: Queue[tuple[int, str]]) -> None:
    """One process: all checks, the first failure as text."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), P)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=P, timeout=timedelta(seconds=20))
        comm = Communicator(TorchTransport())
        for check in (*contract.CHECKS, equals_torch, groups_have_numbers_of_their_own):
            check(comm)
        results.put((rank, f"done: {comm.traffic.bytes > 0}"))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()))


def test_contract_over_gloo(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, str]] = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, str(tmp_path), results)) for r in range(P)]
    for process in ranks:
        process.start()
    try:
        answers = dict(results.get(timeout=60) for _ in range(P))
        for process in ranks:
            process.join(timeout=20)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    results.close()
    results.join_thread()
    assert answers == dict.fromkeys(range(P), "done: True"), "\n".join(answers.values())
    assert [process.exitcode for process in ranks] == [0] * P


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(InputError, match=r"not initialised\n.*init_process_group\(backend='gloo'\)"):
        TorchTransport()


def test_a_backend_without_tags_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(InputError, match=r"a process group of cuda:nccl\n.*tags, which gloo has\n.*new_group"):
        TorchTransport()
