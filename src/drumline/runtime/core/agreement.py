"""Collective agreement: ranks exchange texts, and succeed or fail together.

Texts are sent as bytes in tensors, never pickled.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...core.errors import CorruptFile, DrumlineError, GaveUp, InputError, StoppedByGuard

if TYPE_CHECKING:
    from .engine_core import EngineCore

_ERRORS = {"InputError": InputError, "CorruptFile": CorruptFile, "StoppedByGuard": StoppedByGuard, "GaveUp": GaveUp}


def broadcast_text(engine: EngineCore, text: str | None, source: int = 0) -> str:
    """The text of the rank `source`, on every rank."""
    if engine.ranks == 1:
        assert text is not None
        return text
    data = (text or "").encode() if engine.rank == source else b""
    length = torch.tensor([len(data)], dtype=torch.int64, device=engine.device)
    dist.broadcast(length, group=engine.group, group_src=source)
    buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=engine.device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if buffer.numel():
        dist.broadcast(buffer, group=engine.group, group_src=source)
    return bytes(buffer.tolist()).decode()


def first_error(engine: EngineCore, error: DrumlineError | None) -> DrumlineError | None:
    """The error of the first rank that has one, on every rank; None if none has."""
    if engine.ranks == 1:
        return error
    mine = engine.ranks if error is None else engine.rank
    first = torch.tensor([mine], dtype=torch.int64, device=engine.device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=engine.group)
    rank = int(first.item())
    if rank == engine.ranks:
        return None
    text = broadcast_text(engine, _to_text(error) if engine.rank == rank and error is not None else None, rank)
    kind, what, where, rule, fix = json.loads(text)
    return _ERRORS[kind](what, where=where, rule=rule, fix=fix)


def _to_text(error: DrumlineError) -> str:
    kind = next((k for k, cls in _ERRORS.items() if isinstance(error, cls)), "GaveUp")
    return json.dumps([kind, error.what, error.where, error.rule, error.fix])


def raise_together(engine: EngineCore, error: DrumlineError | None) -> None:
    """Raise on every rank if any rank has an error: its own, else that of the first rank that failed."""
    first = first_error(engine, error)
    if first is not None:
        raise first if error is None else error
