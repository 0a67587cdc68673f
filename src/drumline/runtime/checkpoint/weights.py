"""Pretrained weights into an engine under any plan: every rank reads the runs that it holds, parameter by parameter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...core.errors import DrumlineError, InputError
from . import view
from .agree import agree
from .boxes import Box, fill_box, place_of
from .match import compare, kinds_of
from .restore import settle
from .sources import Source, open_source

if TYPE_CHECKING:
    from ..engine import Engine

_DECORATION = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def load_weights(engine: Engine, path: str | Path, *, strict: bool = True) -> None:
    """Take parameters and buffers from a file or folder of weights, all ranks together.

    Tied weights may be there under one of their names or under each. Not `strict`: what is missing stays as it is, what
    is unknown is left; a shape that does not fit is refused all the same. Names that a wrapper has decorated are known.
    """
    error: DrumlineError | None = None
    try:
        source = open_source(path)
        names = match(engine, source, str(path), strict=strict)
    except DrumlineError as e:
        error = e
    agree(engine, error)
    try:
        _fill(engine, source, names)
    except DrumlineError as e:
        error = e
    agree(engine, error)
    settle(engine)


def match(engine: Engine, source: Source, where: str, *, strict: bool) -> dict[str, list[str]]:
    """For each tensor of the model, its names in the source."""
    outline = view.outline(engine)
    wanted = {name.partition("/")[2]: kind for name, kind in kinds_of(engine, outline).items()}
    first = {**{name: name for name in wanted}, **outline.tied}
    found: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in source.kinds:
        plain = name
        for word in _DECORATION:
            plain = plain.replace(word, "") if plain not in first else plain
        if plain in first:
            found.setdefault(first[plain], []).append(name)
        else:
            unknown.append(name)
    present = {n: k for n, k in wanted.items() if n in found}
    saved = {n: source.kinds[names[0]] for n, names in found.items()}
    if strict:
        compare(
            {f"model/{n}": k for n, k in wanted.items()},
            {f"model/{n}": k for n, k in (saved | {n: source.kinds[n] for n in unknown}).items()},
            where,
        )
    else:
        compare({f"model/{n}": k for n, k in present.items()}, {f"model/{n}": saved[n] for n in present}, where)
        if not found:
            raise InputError(f"{where} has no tensor of the model", rule="at least one name is the same")
    for name, names in found.items():
        for other in names[1:]:
            if source.kinds[other][0] != wanted[name][0]:
                raise InputError(f"{other!r} has the shape {source.kinds[other][0]}", rule=f"it is tied to {name!r}")
    return found


@torch.no_grad()
def _fill(engine: Engine, source: Source, names: dict[str, list[str]]) -> None:
    for piece in [*engine.pieces, *engine.frozen]:
        if piece.name in names and piece.value.numel():
            start, box = place_of(piece)
            _fill_one(source, names[piece.name], start, piece.value, box)
    kept = {name for name in names if name not in engine.kinds}
    for name, buffer, _ in view.buffers(engine.model):
        if name in kept:
            _fill_one(source, names[name], 0, buffer, None)


def _fill_one(source: Source, names: list[str], start: int, out: torch.Tensor, box: Box | None) -> None:
    """Numbers that are there under several names must be the same under each."""
    _fill_box(source, names[0], start, out, box)
    for other in names[1:]:
        again = torch.empty_like(out)
        _fill_box(source, other, start, again, box)
        if not torch.equal(out, again):
            raise InputError(
                f"{names[0]!r} and {other!r} differ",
                rule="the model has one weight for both names",
                fix="untie them in the model, or leave one of them out",
            )


def _fill_box(source: Source, name: str, start: int, out: torch.Tensor, box: Box | None) -> None:
    if box is None:
        source.fill(name, start, out)
    else:
        fill_box(partial(source.fill, name), source.kinds[name][0], box, start, out)
