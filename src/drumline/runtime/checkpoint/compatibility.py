"""Compares a checkpoint with the engine that loads it. Mismatches are refused by name, before any change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import InputError, nearest
from ..core.engine_core import EngineCore
from . import contents
from .codec import dtype_name
from .manifest import Manifest, SavedGroup

_SHOWN = 3
Kinds = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype by name."""


def kinds_of(engine: EngineCore, outline: contents.ModelOutline) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the engine's model: parameters and persistent buffers."""
    kinds = {
        f"model/{name}": (tuple(kind.shape), dtype_name(kind.dtype)) for name, kind in engine.parameter_specs.items()
    }
    for name, buffer in outline.buffers.items():
        if buffer.persistent:
            kinds[f"buffer/{name}"] = (buffer.shape, dtype_name(buffer.dtype))
    return kinds


def check_model(manifest: Manifest, engine: EngineCore) -> list[str]:
    """Refuse another model; note conversions to another dtype."""
    saved = {
        name: (entry.shape, entry.dtype)
        for name, entry in manifest.tensors.items()
        if name.startswith(("model/", "buffer/")) and entry.kept
    }
    outline = contents.outline(engine)
    contents.extra_modules(engine, outline)
    return compare(kinds_of(engine, outline), saved, f"the checkpoint of step {manifest.step}")


def compare(wanted: Kinds, saved: Kinds, where: str) -> list[str]:
    """Refuse missing, extra and misshapen tensors by name."""
    missing = [name for name in wanted if name not in saved]
    extra = [name for name in saved if name not in wanted]
    if missing or extra:
        parts = [f"{_listed(names)} {word}" for names, word in ((missing, "missing"), (extra, "unknown")) if names]
        raise InputError(
            f"{where} is of another model: {' and '.join(parts)}",
            where=where,
            rule="it has exactly the parameters and buffers of the model",
            fix=nearest(missing[0], extra) if missing and extra else "",
        )
    for name, (shape, _) in wanted.items():
        if tuple(saved[name][0]) != tuple(shape):
            raise InputError(
                f"{where} is of another model: {_plain(name)!r} has the shape {tuple(saved[name][0])}",
                where=where,
                rule=f"in the model it has {tuple(shape)}",
            )
    changed = {(saved[n][1], dtype) for n, (_, dtype) in wanted.items() if saved[n][1] != dtype}
    return [f"values are converted from {old} to {new}" for old, new in sorted(changed)]


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(_plain(n)) for n in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def _plain(name: str) -> str:
    return name.partition("/")[2]


def check_optimizer(manifest: Manifest, engine: EngineCore) -> None:
    """Refuse another optimizer, other parameter groups, and a missing or extra schedule."""
    ours, theirs = type(engine.optimizer).__name__, manifest.optimizer.type
    fix = "load_weights() loads only the weights"
    if ours != theirs:
        raise InputError(f"the checkpoint's optimizer is {theirs}, the job's is {ours}", fix=fix)
    for i in range(len(engine.optimizer.param_groups)):
        group_of(manifest, engine, i)
    had, has = "schedule" in manifest.state, engine.schedule is not None
    if had != has:
        raise InputError(
            f"the checkpoint has {'a' if had else 'no'} schedule, the job has {'one' if has else 'none'}", fix=fix
        )
    index = optimizer_entries(manifest)
    for piece in engine.pieces:
        for name in index.get(piece.name, {}).values():
            entry = manifest.tensors[name]
            if entry.shape != tuple(piece.shape) and not piece.is_whole:
                raise InputError(
                    f"the optimizer state {name!r} has the shape {entry.shape}; it cannot be cut like its parameter",
                    rule="sharded plans need optimizer state of the parameter's shape",
                    fix="use a plan with zero=0",
                )


def optimizer_entries(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Names of the optimizer's tensors, by parameter and state key."""
    entries: dict[str, dict[str, str]] = {}
    for name in manifest.tensors:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            key, _, parameter = rest.partition("/")
            entries.setdefault(parameter, {})[key] = name
    return entries


def group_of(manifest: Manifest, engine: EngineCore, i: int) -> SavedGroup:
    """The saved parameter group with the same parameters as group `i` of the engine's optimizer."""
    names = contents.group_names(engine)[i]
    saved = manifest.optimizer.groups
    where = {name: j for j, group in enumerate(saved) for name in group.names}
    if not names:  # this rank has no element of the group
        if i < len(saved):
            return saved[i]
        raise InputError(f"the checkpoint has {len(saved)} parameter groups", rule=f"the job's optimizer has {i + 1}")
    unknown = [name for name in names if name not in where]
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is not in the optimizer of the checkpoint", rule="the same parameters are trained"
        )
    groups = {where[name] for name in names}
    if len(groups) > 1:
        raise InputError(
            f"parameter group {i} has parameters of {len(groups)} groups of the checkpoint",
            rule="parameters of different groups stay in different groups",
        )
    return saved[groups.pop()]


def check_data(manifest: Manifest, engine: EngineCore, *, other_data: bool) -> list[str]:
    """Refuse to resume on other data; note a job file that was edited."""
    now: dict[str, Any] = {"seed": engine.job.seed, "batch_size": engine.job.batch_size}
    before: dict[str, Any] = dict(manifest.data)
    source = getattr(engine.stream, "source", None)
    if source is not None:
        now |= {"order": source.name} | ({"samples": source.length} if source.length else {})
        before["order"] = manifest.job.get("order")
    for key, value in now.items():
        old = before.get(key)
        if old is not None and old != value and not other_data:
            raise InputError(
                f"the data has changed: {key} was {old}, and is {value}",
                rule="the order of the samples depends on these, and the checkpoint has a position in it",
                fix="restore the job, or load(..., other_data=True)",
            )
    was, now_is = manifest.job.get("digest", ""), engine.job.digest
    changed = was and now_is and was != now_is
    return [f"the job's file has changed since step {manifest.step} was saved"] if changed else []
