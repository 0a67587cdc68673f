"""Sends the tensors of a rank to the first rank in few messages: one with their forms, then their bytes in parcels.

A verification compares hundreds of small tensors. A message of each would cost more than the tensors themselves. Every
rank cuts the same list of forms into the same parcels, so nothing else has to be agreed upon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

PARCEL = 2**26
"""Bytes of tensors in one message; a larger tensor is a parcel of its own. It bounds the second copy of them."""
_ALIGN = 16
"""Tensors begin at multiples of it, so that a parcel's bytes can be read as any type."""
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Form:
    """Number, type and shape of a tensor."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its place in a parcel."""
        return -(-prod(self.shape) * self.dtype.itemsize // _ALIGN) * _ALIGN


def gather_tensors(mine: Mapping[int, torch.Tensor], rank: int, ranks: int) -> dict[int, list[torch.Tensor]]:
    """On the first rank: the tensors of all ranks by number, in the order of ranks; elsewhere nothing.

    The tensors are on the CPU. Every rank calls it.
    """
    head = [x for k, t in mine.items() for x in (k, _TYPES.index(t.dtype), t.dim(), *t.shape)]
    lengths = [torch.zeros(1, dtype=torch.long) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(head)]))
    if rank > 0:
        if head:
            dist.send(torch.tensor(head), dst=0)
            _send_parcels(list(mine.values()), _forms(head))
        return {}
    tensors = {k: [t] for k, t in mine.items()}
    for r in range(1, ranks):
        if length := int(lengths[r]):
            theirs = torch.empty(length, dtype=torch.long)
            dist.recv(theirs, src=r)
            for k, t in _receive_parcels(r, _forms(theirs.tolist())):
                tensors.setdefault(k, []).append(t)
    return tensors


def _forms(head: Sequence[int]) -> list[_Form]:
    forms, at = [], 0
    while at < len(head):
        number, kind, dims = head[at : at + 3]
        forms.append(_Form(number, _TYPES[kind], tuple(head[at + 3 : at + 3 + dims])))
        at += 3 + dims
    return forms


def _parcels(forms: Sequence[_Form]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The places in the list of the tensors of each parcel, and memory for it."""
    members: list[int] = []
    size = 0
    for i, form in enumerate(forms):
        if size and size + form.bytes > PARCEL:
            yield members, torch.empty(size, dtype=torch.uint8)
            members, size = [], 0
        members.append(i)
        size += form.bytes
    yield members, torch.empty(size, dtype=torch.uint8)


def _send_parcels(tensors: Sequence[torch.Tensor], forms: Sequence[_Form]) -> None:
    for members, parcel in _parcels(forms):
        for place, i in zip(_views(parcel, [forms[i] for i in members]), members, strict=True):
            place.copy_(tensors[i])
        if parcel.numel():
            dist.send(parcel, dst=0)


def _receive_parcels(rank: int, forms: Sequence[_Form]) -> Iterator[tuple[int, torch.Tensor]]:
    for members, parcel in _parcels(forms):
        if parcel.numel():
            dist.recv(parcel, src=rank)
        for view, i in zip(_views(parcel, [forms[i] for i in members]), members, strict=True):
            yield forms[i].number, view


def _views(parcel: torch.Tensor, forms: Sequence[_Form]) -> Iterator[torch.Tensor]:
    """The tensors in a parcel."""
    at = 0
    for form in forms:
        yield parcel[at : at + prod(form.shape) * form.dtype.itemsize].view(form.dtype).view(form.shape)
        at += form.bytes
