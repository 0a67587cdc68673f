"""Records the messages of torch's own engines by their hooks: DDP's buckets, and the collectives of FSDP2's units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...comm.gloo_fallbacks import reduce_scatter
from .recorder import StepRecorder


def record_ddp(recorder: StepRecorder, ddp: nn.Module, group: dist.ProcessGroup) -> bool:
    """Record DDP's buckets, where its group does not report.

    True if they pass through a hook in Python, which costs 30 us each: they are then summed, not averaged.
    """
    if not recorder.needs_hooks:
        return False
    if hasattr(group, "watch_buckets"):
        recorder.watch_buckets_of(group)
        return False

    def sum_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        message = recorder.start_message("all_reduce", float(buffer.nbytes))
        work = dist.all_reduce(buffer, group=group, async_op=True)

        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises on failure
            message.end()
            return buffer

        assert work is not None
        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
        return reduced

    sum_bucket.__annotations__.clear()  # DDP inspects them, and these are strings
    ddp.register_comm_hook(None, sum_bucket)  # type: ignore[operator]  # a method of DDP
    return True


def record_fsdp(recorder: StepRecorder, model: nn.Module) -> None:
    """Record the messages of every FSDP2 unit of a model, where its group does not report."""
    if not recorder.needs_hooks:
        return
    gather, scatter = _RecordedGather(recorder), _RecordedScatter(recorder)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # it has what FSDP2 calls
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # the same


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer torch releases renamed it."""


class _RecordedCollective:
    """Base of the two custom collectives: allocates plain memory and records the message."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, name: str, whole: torch.Tensor, send: Callable[[], Any], *, async_op: bool) -> Any:
        if not async_op:
            with self._recorder.message(name, whole):
                return send()
        return self._recorder.track(name, send(), whole)


class _RecordedGather(_RecordedCollective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        def send() -> Any:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

        return self._run("all_gather", output_tensor, send, async_op=async_op)  # type: ignore[no-any-return]


class _RecordedScatter(_RecordedCollective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        def send() -> Any:
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

        return self._run("reduce_scatter", input_tensor, send, async_op=async_op)  # type: ignore[no-any-return]
