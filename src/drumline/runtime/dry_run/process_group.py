"""The process groups of a dry run: they send nothing, and log every call.

Each is a torch process group in Python, so that DDP, FSDP2 and the engine call it like a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.process_group.torch_interface import GroupWork, PythonProcessGroup
from ...core.errors import InputError
from ...torchkit.dispatch_modes import UnwrappedDispatchMode
from ...torchkit.fake_tensors import with_real_tensors
from ...torchkit.process_groups import has_backend
from ...tracing.op_costs import tensors as tensors_in
from .result import DryRunMessage

NAME = "dryrun"


class MessageLog:
    """The messages of a step, in order."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        """The backend that the groups emulate: some implement the same call by other messages."""
        self.messages: list[DryRunMessage] = []
        self.phase = ""
        self.recording = False

    def write(self, name: str, tensors: Iterable[Tensor], ranks: Sequence[int]) -> None:
        """Log one message."""
        if self.recording:
            self.messages.append(DryRunMessage(name, sum(t.nbytes for t in tensors), tuple(ranks), self.phase))


_LOGS: list[MessageLog] = []
"""The log of the current world; torch creates the groups, and passes nothing of ours to them."""


@contextmanager
def fake_world(rank: int, size: int, log: MessageLog) -> Iterator[None]:
    """Make this process one rank of a simulated world."""
    if dist.is_initialized():
        raise InputError(
            "a dry run in a process that already has a process group",
            rule="a dry run creates its own groups, of other sizes",
            fix="call dry_run() before initialize(), or in another process",
        )
    if not has_backend(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _LOGS.append(log)
    try:
        dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=size)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _LOGS.pop()


def _create(options: Any, _: Any) -> Any:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return DryRunGroup(_LOGS[-1], options.group_rank, ranks)


class DryRunGroup(PythonProcessGroup):
    """A group that sends nothing. Every call completes at once and leaves its outputs unchanged."""

    def __init__(self, log: MessageLog, rank: int, ranks: list[int]) -> None:
        super().__init__(NAME, rank, len(ranks))
        self._log, self._ranks = log, ranks
        self.stands_for = log.backend
        self.only_records = True
        """Nothing is sent: the ranks are not there."""

    # -- collectives

    def _logged(self, name: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> dist.Work:
        self._log.write(name, tensors, self._ranks)
        return GroupWork(list(outputs), done=True)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._logged("all_reduce", tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._logged("all_reduce", tensors, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._logged("reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._logged("broadcast", tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        flat = [t for outs in outputs for t in outs]
        return self._logged("all_gather", flat, flat)

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._logged("all_gather", [output], [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._logged("all_gather", outputs, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._logged("gather", inputs * len(self._ranks), [t for outs in outputs for t in outs])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return self._logged("scatter", outputs * len(self._ranks), outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return self._logged("reduce_scatter", [t for parts in inputs for t in parts], outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._logged("reduce_scatter", [input], [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._logged("reduce_scatter", inputs, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._logged("all_to_all", inputs, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        return self._logged("all_to_all", [input], [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._logged("barrier", [], [])

    # -- point to point

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        self._log.write("send", tensors, (self._ranks[self._number], self._ranks[dst]))
        return GroupWork(tensors, done=True)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        self._log.write("receive", tensors, (self._ranks[src], self._ranks[self._number]))
        return GroupWork(tensors, done=True)


_CREATE = (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default)


class RealDdpIntegers(UnwrappedDispatchMode):
    """Gives DDP's own int32 tensors real values; entered inside the mode of a dry run.

    DDP's C++ reducer reads from them which parameters were reached and what each bucket holds.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not types and self._is_ddps(func, args, kwargs):
            with with_real_tensors():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_ddps(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in _CREATE:
            return kwargs.get("dtype") is torch.int32
        given = tensors_in(args)
        return bool(given) and all(t.dtype is torch.int32 for t in given)
