"""The tensors of a replica that takes steps by itself, in an order that all replicas agree on, and their average.

Averaged are trained parameters, buffers that steps change (running statistics of norms) and the optimizer's states.
Replicas may differ in what they have: one that had no samples in the first batch has no optimizer state yet. So before
an average they compare a hash of their lists, and only if it differs, the lists: then a state that a replica lacks
starts from zero, and numbers such as step counters are those of the replica that has taken the most steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...torchkit.fake_tensors import has_no_values
from ..state.buffer_snapshot import BufferSnapshot
from ..state.json_exchange import gather_json
from ..state.optimizer import is_scalar
from ..state.pieces import bundles

Message = Callable[[str, torch.Tensor], AbstractContextManager[None]]
"""(name, tensor): records a message."""
_HALVES = (torch.float16, torch.bfloat16)


class ReplicaTensors:
    """The tensors that replicas average."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, buffers: BufferSnapshot
    ) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._optimizer, self._buffers = optimizer, buffers
        self._agreed: list[str] = []
        """Buffers that change on some replica, sorted."""

    def weights(self) -> list[torch.Tensor]:
        """Trained parameters and changing floating-point buffers."""
        return [*self.parameters.values(), *(b for b in self._changing() if _averages(b))]

    def states(self) -> list[torch.Tensor]:
        """The optimizer's floating-point states."""
        return [value for _, _, value in self._states() if _averages(value)]

    def counters(self) -> list[torch.Tensor]:
        """Changing buffers that are integers: the first replica's count."""
        return [b for b in self._changing() if not _averages(b)]

    def _changing(self) -> Iterator[torch.Tensor]:
        named = self._buffers.named()
        return (named[name] for name in self._agreed if name in named)

    def _states(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Parameter, key and value of every state that has elements of its own."""
        for name, p in self.parameters.items():
            for key, value in sorted(self._optimizer.state.get(p, {}).items()):
                if isinstance(value, torch.Tensor) and not is_scalar(key, value, p):
                    yield name, key, value

    def _numbers(self) -> Iterator[tuple[str, str, Any]]:
        """Parameter, key and value of every state that is one number."""
        for name, p in self.parameters.items():
            for key, value in sorted(self._optimizer.state.get(p, {}).items()):
                scalar = isinstance(value, torch.Tensor) and is_scalar(key, value, p)
                if scalar or (isinstance(value, int | float) and not isinstance(value, bool)):
                    yield name, key, value

    # -- agreement

    @torch.no_grad()
    def agree(self, group: dist.ProcessGroup, device: torch.device, message: Message, *, states: bool) -> None:
        """Make all replicas of a group have the same tensors, in the same order. All ranks of it call this together.

        Without `states`, optimizers are left alone: weights and buffers are exchanged, their states are not.
        """
        own = sorted({*self._agreed, *self._buffers.changing()})
        if has_no_values(next(iter(self.parameters.values()))):  # a dry run: all ranks are alike
            self._agreed = own
            return
        layout: dict[str, Any] = {"buffers": own}
        if states:
            layout |= {"states": self._state_table(), "numbers": self._number_table()}
        if not _differs(json.dumps(layout, sort_keys=True), group, device, message):
            self._agreed = own
            return
        layouts: list[dict[str, Any]] = gather_json(layout, group, device)
        self._agreed = sorted({name for row in layouts for name in row["buffers"]})
        for name in self.parameters if states else ():
            self._complete(name, [(row["states"].get(name, {}), row["numbers"].get(name, {})) for row in layouts])

    def _state_table(self) -> dict[str, dict[str, Any]]:
        table: dict[str, dict[str, Any]] = {}
        for name, key, value in self._states():
            table.setdefault(name, {})[key] = [list(value.shape), _dtype_name(value)]
        return table

    def _number_table(self) -> dict[str, dict[str, Any]]:
        """[value, dtype] by parameter and key; no dtype for plain numbers."""
        rows = list(self._numbers())
        values = _read([value for _, _, value in rows])
        table: dict[str, dict[str, Any]] = {}
        for (name, key, value), number in zip(rows, values, strict=True):
            dtype = _dtype_name(value) if isinstance(value, torch.Tensor) else ""
            table.setdefault(name, {})[key] = [number, dtype]
        return table

    def _complete(self, name: str, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Give a parameter the states that any replica has, and the numbers of the one with the most steps."""
        states = {key: spec for table, _ in rows for key, spec in table.items()}
        numbers = max((table for _, table in rows), key=lambda table: (bool(table), table.get("step", [-1.0])[0]))
        if not states and not numbers:
            return
        p = self.parameters[name]
        state: dict[str, Any] = self._optimizer.state.setdefault(p, {})
        for key, (shape, dtype) in states.items():
            if state.get(key) is None:
                state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=p.device)
        group = next(g for g in self._optimizer.param_groups if any(q is p for q in g["params"]))
        on_device = group.get("capturable") or group.get("fused")
        for key, (number, dtype) in numbers.items():
            if isinstance(state.get(key), torch.Tensor):
                state[key].fill_(number)
            elif dtype:
                place = p.device if on_device else torch.device("cpu")
                state[key] = torch.tensor(number, dtype=getattr(torch, dtype), device=place)
            else:
                state[key] = number


def _averages(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _read(values: list[Any]) -> list[float]:
    """Plain numbers and those in tensors; the host waits once for each device."""
    numbers: list[float] = [0.0 if isinstance(v, torch.Tensor) else v for v in values]
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(i)
    for places in by_device.values():
        read = torch.stack([values[i].detach().reshape(()).double() for i in places]).tolist()
        for i, number in zip(places, read, strict=True):
            numbers[i] = number
    return numbers


def _differs(text: str, group: dist.ProcessGroup, device: torch.device, message: Message) -> bool:
    """Whether the ranks of a group have different texts: 16 bytes are sent."""
    word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    extremes = torch.tensor([word, ~word], dtype=torch.int64, device=device)  # max(~x) is ~min(x)
    with message("all_reduce", extremes):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    return bool(highest != ~lowest)


# -- averages


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, message: Message) -> None:
    """Replace tensors by their mean over the ranks of a group, the same bits on every rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    for run in bundles(t for t in tensors if t.numel()):
        flat = joined(run)
        with message("all_reduce", flat):
            dist.all_reduce(flat, group=group)
        separate(flat.div_(ranks), run)


@torch.no_grad()
def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, message: Message) -> None:
    """Replace tensors by those of the first rank of a group."""
    for run in bundles(t for t in tensors if t.numel()):
        flat = joined(run)
        with message("broadcast", flat):
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)  # not every backend has every type
        separate(flat, run)


def joined(run: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one type as one flat tensor: their own memory if it is one, else a copy. Halves become float32."""
    if _is_flat(run):
        return _real(run[0]).view(-1)
    flat = torch.cat([_real(t).reshape(-1) for t in run])
    return flat.float() if flat.dtype in _HALVES else flat


def separate(flat: torch.Tensor, run: list[torch.Tensor]) -> None:
    """Write a flat tensor back to the tensors it was joined from."""
    if _is_flat(run):
        return
    for t, values in zip(run, flat.split([_real(t).numel() for t in run]), strict=True):
        _real(t).copy_(values.view(_real(t).shape))


def _is_flat(run: list[torch.Tensor]) -> bool:
    """Whether it is one tensor that can be sent and changed in place."""
    return len(run) == 1 and run[0].is_contiguous() and run[0].dtype not in _HALVES


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Without a gradient; complex numbers as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
