"""FSDP2's messages, told to a recorder through the two seams that FSDP2 has for other ways of sending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...comm.scatter import reduce_scatter

if TYPE_CHECKING:
    from .recorder import Recorder

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch have a new name for it."""


class _Told:
    """What both have in common: they are told to a recorder, and take plain memory."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what arrives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _tell(self, name: str, whole: torch.Tensor, send: Any, *, async_op: bool) -> Any:
        if not async_op:
            with self._recorder.message(name, whole):
                return send()
        return self._recorder.follow(name, send(), whole)


class _Gather(_Told):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        def send() -> Any:
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)

        return self._tell("all_gather", output_tensor, send, async_op=async_op)  # type: ignore[no-any-return]


class _Scatter(_Told):
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

        return self._tell("reduce_scatter", input_tensor, send, async_op=async_op)  # type: ignore[no-any-return]


def watch(recorder: Recorder, model: nn.Module) -> None:
    """Every sharded unit of a model tells the recorder."""
    gather, scatter = _Gather(recorder), _Scatter(recorder)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # it has what FSDP2 calls
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # the same
