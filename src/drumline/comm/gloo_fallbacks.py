"""Point-to-point messages and reduce-scatter over torch process groups, also where gloo lacks them.

Gloo supports GPU memory in collectives but not between two ranks: a send of it ends the process. Here such a message
is staged in host memory, so ranks that share a GPU, which NCCL refuses, run the same plans.

Torch's gloo implements reduce-scatter as an all-reduce of a copy: twice the bytes and two more passes over memory. Here
every rank sends each shard to its owner at once, (p-1)/p m bytes per rank, and the owner sums in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_torch_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Newer torch releases renamed it."""


def backend_of(group: dist.ProcessGroup | None) -> str:
    """The backend of a group; in a dry run, the backend that the group imitates."""
    actual = dist.group.WORLD if group is None else group
    return getattr(actual, "stands_for", "") or str(dist.get_backend(group))


def via_host_memory(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether a message is staged in host memory."""
    return tensor.device.type != "cpu" and backend_of(group) == "gloo"


def isend(tensor: torch.Tensor, *, group: dist.ProcessGroup | None, dst: int, tag: int = 0) -> Any:
    """Start to send to rank `dst` of the group; returns a work object to wait for."""
    if via_host_memory(tensor, group):
        host = tensor.cpu()
        return _StagedSend(host, dist.isend(host, group=group, group_dst=dst, tag=tag))
    return dist.isend(tensor, group=group, group_dst=dst, tag=tag)


def irecv(tensor: torch.Tensor, *, group: dist.ProcessGroup | None, src: int, tag: int = 0) -> Any:
    """Start to receive from rank `src` of the group; the tensor is filled after the wait."""
    if via_host_memory(tensor, group):
        host = torch.empty_like(tensor, device="cpu")
        return _StagedReceive(tensor, host, dist.irecv(host, group=group, group_src=src, tag=tag))
    return dist.irecv(tensor, group=group, group_src=src, tag=tag)


def batch_isend_irecv(messages: Sequence[dist.P2POp]) -> list[Any]:
    """Start several messages of one group together."""
    if messages and via_host_memory(messages[0].tensor, messages[0].group):
        return [
            isend(m.tensor, group=m.group, dst=m.group_peer)
            if m.op is dist.isend
            else irecv(m.tensor, group=m.group, src=m.group_peer)
            for m in messages
        ]
    return dist.batch_isend_irecv(list(messages)) if messages else []


class _StagedSend:
    """Keeps the host copy alive until it is sent."""

    def __init__(self, host: torch.Tensor, work: Any) -> None:
        self._host, self._work = host, work

    def wait(self, *arguments: Any) -> bool:
        self._work.wait(*arguments)
        return True


class _StagedReceive:
    """Copies from host memory to the device at the wait."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, work: Any) -> None:
        self._tensor, self._host, self._work = tensor, host, work

    def wait(self, *arguments: Any) -> bool:
        self._work.wait(*arguments)
        self._tensor.copy_(self._host)
        return True


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> Any:
    """Write this rank's shard of the sum or mean into `output`, which may alias `input`; complete after the wait."""
    sums = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    if not sums or backend_of(group) != "gloo" or not input.is_contiguous():
        return _torch_reduce_scatter(output, input, op=op, group=group, async_op=async_op)
    work = _ShardExchange(output, input, group, mean=op == dist.ReduceOp.AVG)
    if async_op:
        return work
    work.wait()
    return None


class _ShardExchange:
    """Shards in transit to their owners; `wait` sums them."""

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None, *, mean: bool
    ) -> None:
        self._output, self._p = output, dist.get_world_size(group)
        self._mean = mean
        self._received: torch.Tensor | None = torch.empty_like(input)
        self._work: Any = dist.all_to_all_single(self._received, input, group=group, async_op=True)

    def wait(self, *arguments: Any) -> bool:
        """Block until this rank's shard is complete."""
        self._work.wait(*arguments)
        if self._received is not None:
            self._sum(self._received.view(self._p, *self._output.shape))
            self._received = None
        return True

    def get_future(self) -> Any:
        """A future that completes when the shards have arrived."""
        return self._work.get_future()

    @torch.no_grad()
    def _sum(self, shards: torch.Tensor) -> None:
        if self._p == 1:
            self._output.copy_(shards[0])
            return
        torch.add(shards[0], shards[1], out=self._output)  # one pass for the first two
        for shard in shards[2:]:
            self._output += shard
        if self._mean:
            self._output /= self._p
