"""The roles of the processes of benchmarks/server_or_ring.py: ranks of a ring, workers, and parameter servers.

Workers and servers are the engine's own (`runtime/asynchronous`), with a model that is one vector. The loss is the sum
of its elements, so the gradient is 1 everywhere, and after n updates every weight must be -n RATE.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from drumline.comm import Communicator
from drumline.comm.environment import RankInfo, connect
from drumline.comm.remote_calls import connect_to_server
from drumline.core.job import Job
from drumline.plans import Plan
from drumline.runtime.asynchronous.coordinator import Coordinator
from drumline.runtime.asynchronous.first_server import FirstServer
from drumline.runtime.asynchronous.server import ParameterServer, UpdateCommand
from drumline.runtime.asynchronous.task_streams import TaskStreams
from drumline.runtime.asynchronous.worker import WorkerEngine
from drumline.runtime.engine import Engine
from drumline.runtime.state.group_transports import transport_along
from drumline.schedules import update_rule

if TYPE_CHECKING:
    pass

RATE = 2.0**-10
"""Of learning; a power of two, so that weights are exact."""
STEPS = 1 << 20
"""More updates than any run makes."""
PORT = 29561
PATIENCE = 60.0

Address = str


class Role:
    """Runs one of its actions a number of times, from a common moment of the machine's clock."""

    def run(self, at: float, times: int, every: float, action: str, *arguments: Any) -> list[tuple[float, float]]:
        """Run an action repeatedly; returns the start and end of each run."""
        act, spans = getattr(self, action), []
        for i in range(times):
            if (early := at + i * every - time.monotonic()) > 0:
                time.sleep(early)
            start = time.monotonic()
            act(*arguments)
            spans.append((start, time.monotonic()))
        return spans


class RingRank(Role):
    """A rank of the process group whose communicator runs the ring."""

    def __init__(self, rank: int, size: int, first: Address) -> None:
        _join("gloo", rank, size, first, PORT)
        self._transport = transport_along((size,), 0)
        self._comm = Communicator(self._transport, check=False, crossings=False)  # as the engine makes it
        self._buffers: dict[int, torch.Tensor] = {}
        self._tag = 1 << 24

    def _buffer(self, size: int) -> torch.Tensor:
        return self._buffers.setdefault(size, torch.zeros(max(1, size // 4)))

    def all_reduce(self, size: int) -> None:
        """All-reduce a vector over the ring."""
        self._comm.all_reduce(self._buffer(size), algorithm="ring")

    def trip(self, size: int) -> None:
        """Send a message from rank 0 to rank 1 and back."""
        if self._comm.rank == 0:
            self._comm.send(self._buffer(size), 1)
            self._comm.receive(self._buffer(size), 1)
        elif self._comm.rank == 1:
            self._comm.receive(self._buffer(size), 0)
            self._comm.send(self._buffer(size), 0)

    def shift(self, size: int) -> None:
        """Run one round of a ring: every rank sends to the next one."""
        rank, ranks = self._comm.rank, self._comm.size
        sends = [(self._buffer(size), (rank + 1) % ranks)]
        receives = [(torch.empty_like(self._buffer(size)), (rank - 1) % ranks)]
        for pending in [p for part in self._transport.exchange(sends, receives, self._tag) for p in part]:
            pending.wait()

    def check(self) -> None:
        """Check the sum of the ring."""
        x = torch.full((1000,), float(self._comm.rank + 1))
        self._comm.all_reduce(x, algorithm="ring")
        expected = self._comm.size * (self._comm.size + 1) / 2
        assert bool((x == expected).all()), f"{x[0]} is not {expected}"


class _VectorWorkerEngine(WorkerEngine):
    """A worker with a constant gradient: its step is only the exchange."""

    def begin(self) -> None:
        """Compute the gradient, and make the first exchange."""
        self.next_task()
        self._batch = TaskStreams(self).batch(self.task)
        self.step(self._batch)
        self.next_task()

    def exchange(self) -> None:
        """Push the gradient, and read the weights of the next task."""
        self.record.begin(self.task.step)
        with self.phase("communication"):
            self._hand_in(self._batch, 0.0, 1.0, [])
        self.next_task()
        self.record.end()

    def pull(self) -> None:
        """Read the first server's share of the weights."""
        self._pull(0)

    def pull_others(self) -> None:
        """Read the shares of all other servers at the same time, as before a task."""
        for future in [self._pool.submit(self._pull, i) for i in range(1, self.layout.servers)]:
            future.result()

    def _pull(self, server: int) -> None:
        into = self.layout.shares(self.weights, server)
        self._servers[server].call("pull", {"version": 0}, into=into, most_bytes=self.layout.bytes)


class VectorWorker(Role):
    """A worker of every size of the vector, and of every number of servers."""

    def __init__(self, worker: int, workers: int) -> None:
        self._worker, self._workers = worker, workers
        connect(part=RankInfo())
        self._engines: dict[tuple[int, int], _VectorWorkerEngine] = {}

    def attach(self, servers: int, size: int, addresses: Sequence[Address]) -> None:
        """Connect to the servers of a vector."""
        job = vector_job(size, self._workers)
        engine = _VectorWorkerEngine(job, Plan(), where=RankInfo(), device=torch.device("cpu"), dtype=None)
        engine.attach(self._worker, addresses.__getitem__, servers)
        self._engines[servers, size] = engine
        engine.begin()

    def exchange(self, servers: int, size: int) -> None:
        """Push and pull, as in a step."""
        self._engines[servers, size].exchange()

    def pull(self, servers: int, size: int) -> None:
        """Call the first server."""
        self._engines[servers, size].pull()

    def pull_others(self, servers: int, size: int) -> None:
        """Call the other servers."""
        self._engines[servers, size].pull_others()

    def check(self, servers: int, size: int) -> None:
        """Check that every exchange was an update of all weights."""
        engine = self._engines[servers, size]
        version = min(engine.versions)
        assert version == engine.task.step == engine.counted, (version, engine.task, engine.counted)
        expected = -version * RATE
        assert bool((engine.weights[0] == expected).all()), f"{engine.weights[0][0]} is not {expected}"


class _TimedServer(FirstServer):
    """A first server that records the seconds of its updates."""

    update_seconds: list[float]

    def apply(self, command: UpdateCommand, gradients: list[list[torch.Tensor]]) -> bool:
        """Apply one update."""
        start = time.monotonic()
        stop = super().apply(command, gradients)
        self.update_seconds.append(time.monotonic() - start)
        return stop


class VectorServer(Role):
    """A parameter server of every size of the vector: number `index` of n."""

    def __init__(self, index: int, n: int, workers: int, first: Address, sizes: Sequence[int]) -> None:
        _join("gloo", index, n, first, PORT + n)
        plan = Plan.parse(f"dp={workers},sync=server,servers={n}")
        where = RankInfo(index, n)
        self._servers: dict[int, ParameterServer] = {}
        for size in sizes:
            job = vector_job(size, workers)
            engine = Engine(job, plan, where=where, device=torch.device("cpu"), dtype=None)
            if index:
                self._servers[size] = ParameterServer(engine, index=index, local=False, checkpoints=None)
                continue
            coordinator = Coordinator(update_rule(plan.sync_mode, workers, STEPS), workers)
            server = _TimedServer(engine, coordinator, local=False, checkpoints=None, emit=lambda _: None)
            server.update_seconds = []
            self._servers[size] = server

    def addresses(self) -> dict[int, Address]:
        """Return the addresses for workers, by size."""
        return {size: server.calls.address for size, server in self._servers.items()}

    def serve(self, others: Sequence[dict[int, Address]]) -> None:
        """Connect the first server to the others, and start serving."""
        for size, server in self._servers.items():
            assert isinstance(server, _TimedServer)
            server.connect([connect_to_server(partial(getitem, o, size), -1, patience=PATIENCE) for o in others])
            threading.Thread(target=server.serve, daemon=True).start()

    def update_seconds(self, size: int) -> list[float]:
        """Return the seconds of all updates of a vector so far."""
        server = self._servers[size]
        assert isinstance(server, _TimedServer)
        return server.update_seconds


class _Vector(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


def vector_job(size: int, workers: int) -> Job:
    """Build a job whose model is one vector of `size` bytes with a gradient of 1."""
    data = torch.utils.data.TensorDataset(torch.ones(workers, 1), torch.ones(workers, 1))
    return Job(
        model=partial(_Vector, size // 4),
        loss=lambda output, _: output.mean(),
        optimizer=partial(torch.optim.SGD, lr=RATE),
        data=lambda: data,
        batch_size=workers,
    )


def _join(backend: str, rank: int, size: int, first: Address, port: int) -> None:
    """Join the process group of `size` hosts that meet on the first."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
    connect(backend=backend, part=RankInfo(rank, size, 0, "torchrun"))
    assert dist.get_world_size() == size
