"""Reduce-scatter, also where the backend has none of its own.

Torch's gloo does it by an all-reduce of a copy: twice the bytes, and two more passes over the memory. Here every rank
sends each shard to its owner at once, (p-1)/p m bytes a rank, and the owner adds up what came, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_of_torch: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Newer releases of torch have a new name for it."""


def backend_of(group: dist.ProcessGroup | None) -> str:
    """The backend that a group has, or in a dry run the one that it stands for."""
    there = dist.group.WORLD if group is None else group
    return getattr(there, "stands_for", "") or str(dist.get_backend(group))


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> Any:
    """This rank's shard of the ranks' sum or mean into `output`, which may lie in `input`, when it is waited for."""
    sums = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    if not sums or backend_of(group) != "gloo" or not input.is_contiguous():
        return _of_torch(output, input, op=op, group=group, async_op=async_op)
    work = _Exchange(output, input, group, mean=op == dist.ReduceOp.AVG)
    if async_op:
        return work
    work.wait()
    return None


class _Exchange:
    """Shards on their way to their owners; `wait` adds them up."""

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None, *, mean: bool
    ) -> None:
        self._output, self._p = output, dist.get_world_size(group)
        self._mean = mean
        self._came: torch.Tensor | None = torch.empty_like(input)
        self._work: Any = dist.all_to_all_single(self._came, input, group=group, async_op=True)

    def wait(self, *arguments: Any) -> bool:
        """Until this rank's shard is complete."""
        self._work.wait(*arguments)
        if self._came is not None:
            self._add_up(self._came.view(self._p, *self._output.shape))
            self._came = None
        return True

    def get_future(self) -> Any:
        """Done when the shards have come."""
        return self._work.get_future()

    @torch.no_grad()
    def _add_up(self, shards: torch.Tensor) -> None:
        if self._p == 1:
            self._output.copy_(shards[0])
            return
        torch.add(shards[0], shards[1], out=self._output)  # one pass for the first two
        for shard in shards[2:]:
            self._output += shard
        if self._mean:
            self._output /= self._p
