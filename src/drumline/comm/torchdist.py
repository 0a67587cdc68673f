"""Ranks as processes over torch.distributed: point-to-point messages of a process group, with gloo."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ..errors import GaveUp, InputError
from .transport import Pending, Transport


class _Work:
    """A message under way, with what to say when it fails."""

    def __init__(self, work: dist.Work, tensor: Tensor, what: str) -> None:
        # The tensor is kept alive until the wait, because the backend holds only its address.
        self._work, self._tensor, self._what = work, tensor, what

    def wait(self) -> None:
        """Block until it is sent, or there."""
        try:
            self._work.wait()
        except RuntimeError as e:
            raise GaveUp(self._what, rule=str(e).splitlines()[0]) from e


class TorchTransport(Transport):
    """The ranks of a process group, by their numbers in the group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised", fix="call torch.distributed.init_process_group(backend='gloo')"
            )
        backend = dist.get_backend_config(group)
        if "gloo" not in backend:
            raise InputError(
                f"a process group of {backend}", rule="messages need tags, which gloo has",
                fix="torch.distributed.new_group(backend='gloo')",
            )  # fmt: skip
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes the group has."""
        return self._size

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Start a send."""
        work = dist.isend(tensor, group=self._group, group_dst=dst, tag=tag)
        return self._pending(work, tensor, f"rank {self._rank} could not send to rank {dst}")

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Start a receive."""
        work = dist.irecv(tensor, group=self._group, group_src=src, tag=tag)
        return self._pending(work, tensor, f"rank {self._rank} could not receive from rank {src}")

    def _pending(self, work: dist.Work | None, tensor: Tensor, what: str) -> Pending:
        assert work is not None, "torch answers None only to a process outside of the group"
        return _Work(work, tensor, what)
