"""Ranks that do something together succeed or fail together. Texts travel as bytes in tensors, never pickled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...core.errors import CorruptFile, DrumlineError, GaveUp, InputError

if TYPE_CHECKING:
    from ..engine import Engine

_KINDS = {"InputError": InputError, "CorruptFile": CorruptFile, "GaveUp": GaveUp}


def tell(engine: Engine, text: str | None, source: int = 0) -> str:
    """The text of the rank `source`, on every rank."""
    if engine.ranks == 1:
        assert text is not None
        return text
    data = (text or "").encode() if engine.rank == source else b""
    length = torch.tensor([len(data)], dtype=torch.int64, device=engine.device)
    dist.broadcast(length, group=engine.group, group_src=source)
    room = torch.zeros(int(length.item()), dtype=torch.uint8, device=engine.device)
    if data:
        room.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if room.numel():
        dist.broadcast(room, group=engine.group, group_src=source)
    return bytes(room.tolist()).decode()


def first_error(engine: Engine, error: DrumlineError | None) -> DrumlineError | None:
    """The error of the first rank that has one, on every rank; None when all is well."""
    if engine.ranks == 1:
        return error
    mine = engine.ranks if error is None else engine.rank
    first = torch.tensor([mine], dtype=torch.int64, device=engine.device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=engine.group)
    rank = int(first.item())
    if rank == engine.ranks:
        return None
    text = tell(engine, _text(error) if engine.rank == rank and error is not None else None, rank)
    kind, what, where, rule, fix = json.loads(text)
    return _KINDS[kind](what, where=where, rule=rule, fix=fix)


def _text(error: DrumlineError) -> str:
    kind = next((k for k, cls in _KINDS.items() if isinstance(error, cls)), "GaveUp")
    return json.dumps([kind, error.what, error.where, error.rule, error.fix])


def agree(engine: Engine, error: DrumlineError | None) -> None:
    """Raise on every rank what the first rank that failed has to say."""
    found = first_error(engine, error)
    if found is not None:
        raise found if error is None else error
