"""Compares a checkpoint with the engine that is to load it. What does not fit is refused by name, before any change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import InputError, nearest
from . import view
from .codec import dtype_name
from .manifest import Group, Manifest

if TYPE_CHECKING:
    from ..engine import Engine

_SHOWN = 3
Kinds = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and type by name."""


def kinds_of(engine: Engine, outline: view.Outline) -> dict[str, tuple[tuple[int, ...], str]]:
    """What the engine's model is made of: parameters and the buffers of its state dict."""
    kinds = {f"model/{name}": (tuple(kind.shape), dtype_name(kind.dtype)) for name, kind in engine.kinds.items()}
    for name, buffer in outline.buffers.items():
        if buffer.kept:
            kinds[f"buffer/{name}"] = (buffer.shape, dtype_name(buffer.dtype))
    return kinds


def check_model(manifest: Manifest, engine: Engine) -> list[str]:
    """Refuse another model; tell when numbers will be rounded to another type."""
    saved = {
        name: (entry.shape, entry.dtype)
        for name, entry in manifest.tensors.items()
        if name.startswith(("model/", "buffer/")) and entry.kept
    }
    outline = view.outline(engine)
    view.extra_modules(engine, outline)
    return compare(kinds_of(engine, outline), saved, f"the checkpoint of step {manifest.step}")


def compare(wanted: Kinds, saved: Kinds, where: str) -> list[str]:
    """Refuse missing, extra and misshapen tensors by name."""
    missing = [name for name in wanted if name not in saved]
    extra = [name for name in saved if name not in wanted]
    if missing or extra:
        parts = [f"{_some(names)} {word}" for names, word in ((missing, "missing"), (extra, "unknown")) if names]
        raise InputError(
            f"another model: in {where} {' and '.join(parts)}",
            where=where,
            rule="every parameter and buffer of the model is there, and no other",
            fix=nearest(missing[0], extra) if missing and extra else "",
        )
    for name, (shape, _) in wanted.items():
        if tuple(saved[name][0]) != tuple(shape):
            raise InputError(
                f"another model: {_plain(name)!r} has the shape {tuple(saved[name][0])} in {where}",
                where=where,
                rule=f"the model's has {tuple(shape)}",
            )
    changed = {(saved[n][1], dtype) for n, (_, dtype) in wanted.items() if saved[n][1] != dtype}
    return [f"numbers are converted from {old} to {new}" for old, new in sorted(changed)]


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(_plain(n)) for n in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def _plain(name: str) -> str:
    return name.partition("/")[2]


def check_optimizer(manifest: Manifest, engine: Engine) -> None:
    """Refuse another optimizer, other parameter groups, and a schedule that comes or goes."""
    ours, theirs = type(engine.optimizer).__name__, manifest.optimizer.type
    fix = "load_weights() takes the weights alone"
    if ours != theirs:
        raise InputError(f"the checkpoint's optimizer is {theirs}, the job's is {ours}", fix=fix)
    for i in range(len(engine.optimizer.param_groups)):
        group_of(manifest, engine, i)
    had, has = "schedule" in manifest.state, engine.schedule is not None
    if had != has:
        raise InputError(
            f"the checkpoint has {'a' if had else 'no'} schedule, the job {'has one' if has else 'has none'}", fix=fix
        )
    index = states(manifest)
    for piece in engine.pieces:
        for name in index.get(piece.name, {}).values():
            entry = manifest.tensors[name]
            if entry.shape != tuple(piece.shape) and not piece.is_whole:
                raise InputError(
                    f"the optimizer's state {name!r} has the shape {entry.shape}, and cannot be cut as its parameter",
                    rule="sharded plans need a state of the parameter's shape",
                    fix="a plan with zero=0",
                )


def states(manifest: Manifest) -> dict[str, dict[str, str]]:
    """The optimizer's tensors: entries by parameter and by the state's key."""
    found: dict[str, dict[str, str]] = {}
    for name in manifest.tensors:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            key, _, parameter = rest.partition("/")
            found.setdefault(parameter, {})[key] = name
    return found


def group_of(manifest: Manifest, engine: Engine, i: int) -> Group:
    """The saved parameter group that group `i` of the engine's optimizer was: the one with the same parameters."""
    names = view.groups_names(engine)[i]
    saved = manifest.optimizer.groups
    where = {name: j for j, group in enumerate(saved) for name in group.names}
    if not names:  # this rank has no number of the group
        if i < len(saved):
            return saved[i]
        raise InputError(f"the checkpoint has {len(saved)} parameter groups", rule=f"the job's optimizer has {i + 1}")
    unknown = [name for name in names if name not in where]
    if unknown:
        raise InputError(
            f"{unknown[0]!r} was not in the optimizer of the checkpoint", rule="the same parameters are trained"
        )
    found = {where[name] for name in names}
    if len(found) > 1:
        raise InputError(
            f"parameter group {i} holds parameters of {len(found)} groups of the checkpoint",
            rule="parameters that were in groups of their own stay so",
        )
    return saved[found.pop()]


def check_data(manifest: Manifest, engine: Engine, *, other_data: bool) -> list[str]:
    """Refuse a position in other data; tell of a job file that was edited."""
    now: dict[str, Any] = {"seed": engine.job.seed, "batch_size": engine.job.batch_size}
    dataset = getattr(engine.stream, "dataset", None)
    if dataset is not None:
        now["samples"] = len(dataset)
    for key, value in now.items():
        old = manifest.data.get(key)
        if old is not None and old != value and not other_data:
            raise InputError(
                f"the data has changed: {key} was {old}, and is {value}",
                rule="the order of the samples is a function of these, and the position in it is the step",
                fix="the job as it was, or load(..., other_data=True)",
            )
    was, now_is = manifest.job.get("digest", ""), engine.job.digest
    changed = was and now_is and was != now_is
    return [f"the job's file has changed since step {manifest.step} was saved"] if changed else []
