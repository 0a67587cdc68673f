"""Messages from one rank to another, also from GPU to GPU where the backend cannot.

Gloo carries a GPU's memory in collectives, but not between two ranks: a send of it ends the process. Here such a
message goes by way of the host's memory, so that ranks that share a GPU, which NCCL refuses, run the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .scatter import backend_of


def by_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether a message goes by way of the host's memory."""
    return tensor.device.type != "cpu" and backend_of(group) == "gloo"


def isend(tensor: torch.Tensor, *, group: dist.ProcessGroup | None, dst: int, tag: int = 0) -> Any:
    """Begin to send to rank `dst` of the group; what is given back is waited for."""
    if by_host(tensor, group):
        host = tensor.cpu()
        return _Sent(host, dist.isend(host, group=group, group_dst=dst, tag=tag))
    return dist.isend(tensor, group=group, group_dst=dst, tag=tag)


def irecv(tensor: torch.Tensor, *, group: dist.ProcessGroup | None, src: int, tag: int = 0) -> Any:
    """Begin to receive from rank `src` of the group; the tensor is filled when it has been waited for."""
    if by_host(tensor, group):
        host = torch.empty_like(tensor, device="cpu")
        return _Received(tensor, host, dist.irecv(host, group=group, group_src=src, tag=tag))
    return dist.irecv(tensor, group=group, group_src=src, tag=tag)


def batch(messages: Sequence[dist.P2POp]) -> list[Any]:
    """Begin several messages of one group together."""
    if messages and by_host(messages[0].tensor, messages[0].group):
        return [
            isend(m.tensor, group=m.group, dst=m.group_peer)
            if m.op is dist.isend
            else irecv(m.tensor, group=m.group, src=m.group_peer)
            for m in messages
        ]
    return dist.batch_isend_irecv(list(messages)) if messages else []


class _Sent:
    """Keeps what is sent until it has left."""

    def __init__(self, host: torch.Tensor, work: Any) -> None:
        self._host, self._work = host, work

    def wait(self, *arguments: Any) -> bool:
        self._work.wait(*arguments)
        return True


class _Received:
    """Puts what came in the host's memory where it belongs."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, work: Any) -> None:
        self._tensor, self._host, self._work = tensor, host, work

    def wait(self, *arguments: Any) -> bool:
        self._work.wait(*arguments)
        self._tensor.copy_(self._host)
        return True
