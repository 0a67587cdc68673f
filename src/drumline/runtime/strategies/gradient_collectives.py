"""The collectives that carry gradients: those of the backend, or schedules of a named algorithm (`allreduce=`).

A schedule is run in a thread by a communicator with channels of its own, so that buckets travel while the backward
computes. An all-reduce is the schedule of that name. Over flat shards an algorithm is its two halves: `halving` is a
halving reduce-scatter and a doubling all-gather. Algorithms without halves (trees, a server) all-reduce the whole
bucket, of which each rank keeps its shard, and gather the updated shards by a ring. Between hosts, `hierarchical` sums
inside each host in shared memory while the network carries the segment before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm import Communicator, Transport
from ...comm.background import BackgroundThread
from ...comm.gloo_fallbacks import reduce_scatter
from ...plans.engine_constants import tree_segments
from ...schedules import NATIVE, SHARDED_HALVES, Schedule, Traffic, collective_schedule, segmented
from ..state.recorder import StepRecorder

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch have a new name for it."""


class GradientCollectives(ABC):
    """Collectives over one group of ranks. Each starts, and returns work with `wait` and `get_future`."""

    scheduled = False
    """Whether messages run outside of the process group, which then cannot report them."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Any:
        """Sum a flat tensor in place."""

    @abstractmethod
    def reduce_scatter(self, own: Tensor, whole: Tensor) -> Any:
        """Sum this rank's shard of `whole` into `own`, which may be that shard; the rest of `whole` may change."""

    @abstractmethod
    def all_gather(self, whole: Tensor, own: Tensor) -> Any:
        """Fill `whole` with the shards of all ranks; `own` is this rank's shard of it."""


class BackendCollectives(GradientCollectives):
    """The collectives of a process group's backend."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def reduce_scatter(self, own: Tensor, whole: Tensor) -> Any:
        return reduce_scatter(own, whole, group=self._group, async_op=True)

    def all_gather(self, whole: Tensor, own: Tensor) -> Any:
        return _gather(whole, own, group=self._group, async_op=True)


class ScheduledCollectives(GradientCollectives):
    """The schedules of one all-reduce algorithm over a transport."""

    scheduled = True

    def __init__(self, transport: Transport, algorithm: str) -> None:
        self._algorithm = algorithm
        # the order of buckets is the same on all ranks, so their calls need no comparison
        self._comm = Communicator(transport, check=False, crossings=False)
        self._per_node = transport.per_node
        # between hosts the transport has the hierarchical algorithm itself, in overlapping segments
        self._native = (
            algorithm == "hierarchical" and transport.native("all_reduce") is not None and _has_hosts(transport)
        )
        self._thread = BackgroundThread("drumline gradients")

    def __str__(self) -> str:
        hosts = f", hosts of {self._per_node} ranks" if self._per_node and self._per_node < self._comm.size else ""
        return f"{self._algorithm} over {self._comm.transport.name}{hosts}"

    @property
    def traffic(self) -> Traffic:
        """This rank's rounds, messages and bytes so far."""
        return self._comm.traffic

    def all_reduce(self, tensor: Tensor) -> Any:
        return self._thread.submit(lambda: self._all_reduce(tensor.view(-1)))

    def reduce_scatter(self, own: Tensor, whole: Tensor) -> Any:
        return self._thread.submit(lambda: self._reduce_scatter(own, whole))

    def all_gather(self, whole: Tensor, own: Tensor) -> Any:
        halves = SHARDED_HALVES.get(self._algorithm)
        return self._thread.submit(lambda: self._run("all_gather", halves[1] if halves else "ring", whole))

    def _all_reduce(self, tensor: Tensor) -> None:
        if self._native:
            self._comm.all_reduce(tensor, algorithm=NATIVE)
        else:
            self._run("all_reduce", self._algorithm, tensor)

    def _reduce_scatter(self, own: Tensor, whole: Tensor) -> None:
        halves = SHARDED_HALVES.get(self._algorithm)
        if halves:
            self._run("reduce_scatter", halves[0], whole)
        else:
            self._all_reduce(whole)
        shard = whole.view(self._comm.size, -1)[self._comm.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

    @torch.no_grad()
    def _run(self, collective: str, algorithm: str, tensor: Tensor) -> None:
        """Run in place: chunks that a reduce-scatter does not promise end with partial sums."""
        self._comm.run(self._schedule(collective, algorithm, tensor.nbytes), tensor)

    def _schedule(self, collective: str, algorithm: str, size: int) -> Schedule:
        made = collective_schedule(collective, algorithm, self._comm.size, per_node=self._per_node)
        return segmented(made, tree_segments(algorithm, size)) if collective == "all_reduce" else made


def _has_hosts(transport: Transport) -> bool:
    return len(getattr(transport, "hosts", ())) > 1


def sum_buckets(ddp: nn.Module, collectives: GradientCollectives, record: StepRecorder | None) -> None:
    """Let DDP sum its buckets by these collectives. They are then summed, not averaged."""

    def start(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        message = record.start_message("all_reduce", float(buffer.nbytes)) if record else None

        def done(future: torch.futures.Future[Any]) -> Tensor:
            future.value()  # raises on failure
            if message:
                message.end()
            return buffer

        reduced: torch.futures.Future[Tensor] = collectives.all_reduce(buffer).get_future().then(done)
        return reduced

    start.__annotations__.clear()  # DDP inspects them, and these are strings
    ddp.register_comm_hook(None, start)  # type: ignore[operator]  # a method of DDP
