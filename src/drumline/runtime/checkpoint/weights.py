"""Loads pretrained weights into an engine under any plan: every rank reads only the elements that it holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from ...core.errors import DrumlineError, InputError
from ..core.agreement import raise_together
from ..core.engine_core import EngineCore
from . import contents
from .boxes import Box, fill_box, location_of
from .compatibility import compare, kinds_of
from .load import propagate_values
from .weight_sources import WeightSource, open_source

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def load_weights(engine: EngineCore, path: str | Path, *, strict: bool = True) -> None:
    """Load parameters and buffers from a file or folder of weights, all ranks together.

    Tied weights may be stored under one of their names or under each. Not `strict`: missing tensors keep their values,
    unknown ones are ignored; a wrong shape is still refused. Prefixes of wrappers (`module.`) are recognized.
    """
    error: DrumlineError | None = None
    try:
        source = open_source(path)
        names = match_names(engine, source, str(path), strict=strict)
    except DrumlineError as e:
        error = e
    raise_together(engine, error)
    try:
        _fill(engine, source, names)
    except DrumlineError as e:
        error = e
    raise_together(engine, error)
    propagate_values(engine)


def match_names(engine: EngineCore, source: WeightSource, where: str, *, strict: bool) -> dict[str, list[str]]:
    """The names in the source of each tensor of the model."""
    outline = contents.outline(engine)
    wanted = {name.partition("/")[2]: kind for name, kind in kinds_of(engine, outline).items()}
    first = {**{name: name for name in wanted}, **outline.tied}
    matches: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in source.kinds:
        plain = name
        for word in _WRAPPER_PREFIXES:
            plain = plain.replace(word, "") if plain not in first else plain
        if plain in first:
            matches.setdefault(first[plain], []).append(name)
        else:
            unknown.append(name)
    present = {n: k for n, k in wanted.items() if n in matches}
    saved = {n: source.kinds[names[0]] for n, names in matches.items()}
    if strict:
        compare(
            {f"model/{n}": k for n, k in wanted.items()},
            {f"model/{n}": k for n, k in (saved | {n: source.kinds[n] for n in unknown}).items()},
            where,
        )
    else:
        compare({f"model/{n}": k for n, k in present.items()}, {f"model/{n}": saved[n] for n in present}, where)
        if not matches:
            raise InputError(f"{where} has no tensor of the model", rule="at least one name matches")
    for name, names in matches.items():
        for other in names[1:]:
            if source.kinds[other][0] != wanted[name][0]:
                raise InputError(f"{other!r} has the shape {source.kinds[other][0]}", rule=f"it is tied to {name!r}")
    return matches


@torch.no_grad()
def _fill(engine: EngineCore, source: WeightSource, names: dict[str, list[str]]) -> None:
    for piece in [*engine.pieces, *engine.frozen]:
        if piece.name in names and piece.value.numel():
            start, box = location_of(piece)
            _fill_one(source, names[piece.name], start, piece.value, box)
    buffers = {name for name in names if name not in engine.parameter_specs}
    for name, buffer, _ in contents.buffers(engine.model):
        if name in buffers:
            _fill_one(source, names[name], 0, buffer, None)


def _fill_one(source: WeightSource, names: list[str], start: int, out: torch.Tensor, box: Box | None) -> None:
    """Fill from a tied weight; its values must be equal under each name."""
    _fill_box(source, names[0], start, out, box)
    for other in names[1:]:
        again = torch.empty_like(out)
        _fill_box(source, other, start, again, box)
        if not torch.equal(out, again):
            raise InputError(
                f"{names[0]!r} and {other!r} differ",
                rule="the model has one weight for both names",
                fix="untie them in the model, or omit one of them",
            )


def _fill_box(source: WeightSource, name: str, start: int, out: torch.Tensor, box: Box | None) -> None:
    if box is None:
        source.fill(name, start, out)
    else:
        fill_box(partial(source.fill, name), source.kinds[name][0], box, start, out)
