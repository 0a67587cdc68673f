"""Puts the numbers of a checkpoint where they belong in an engine: each rank reads the runs that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import PlanError
from ...plans import Plan
from ..memory.offload import values_up
from ..strategies.pieces import Piece
from . import view
from .boxes import place_of
from .codec import decode, dtype_of
from .match import group_of, states
from .reader import Reader

if TYPE_CHECKING:
    from ..engine import Engine

_OWN_CHOICE = ("foreach", "fused", "capturable", "differentiable")
"""How an optimizer computes, not what: the job's choice of today counts."""


@torch.no_grad()
def restore(reader: Reader, engine: Engine) -> list[str]:
    """Everything. What a person should know comes back."""
    where = str(reader.folder)
    restore_model(reader, engine)
    index = states(reader.manifest)
    for piece in engine.pieces:
        _restore_state(reader, engine, piece, index.get(piece.name, {}))
    for i, group in enumerate(engine.optimizer.param_groups):
        for key, value in decode(group_of(reader.manifest, engine, i).values, where).items():
            if key not in _OWN_CHOICE or key not in group:
                _set(group, key, value)
    state = reader.manifest.state
    if engine.schedule is not None:
        engine.schedule.load_state_dict(decode(state["schedule"], where))
    modules = dict(engine.model.named_modules())
    for name, value in state.get("extra", {}).items():
        modules[name].set_extra_state(decode(value, where))
    engine.steps, engine.position = reader.manifest.step, reader.manifest.data["position"]
    _restore_random(reader, engine)
    carried = engine.plan.compress == "powersgd"
    notes = ["what PowerSGD carries from step to step is not saved; it starts anew"] if carried else []
    return [*_restore_scaler(reader, engine), *notes]


def restore_model(reader: Reader, engine: Engine) -> None:
    """Parameters, trained and frozen, and buffers."""
    for piece in [*engine.pieces, *engine.frozen]:
        start, box = place_of(piece)
        reader.fill(f"model/{piece.name}", start, piece.value, box)
    settle(engine)
    for name, buffer, _ in view.buffers(engine.model):
        entry = reader.manifest.tensors.get(f"buffer/{name}")
        if entry is not None and entry.shape == tuple(buffer.shape):
            reader.fill(f"buffer/{name}", 0, buffer)


def settle(engine: Engine) -> None:
    """The pieces have new values: bring them to where the model reads them, as after an update."""
    if any(p.home is not None for p in engine.pieces):
        values_up(engine.pieces)
    engine.strategy.updated()


def _restore_state(reader: Reader, engine: Engine, piece: Piece, saved: dict[str, str]) -> None:
    """The optimizer's state of one piece, from entries by key; one that had none has none again."""
    manifest, where = reader.manifest, str(reader.folder)
    start, box = place_of(piece)
    before = engine.optimizer.state.get(piece.value, {})
    made: dict[str, Any] = {}
    for key, name in saved.items():
        entry = manifest.tensors[name]
        alike = entry.shape == tuple(piece.shape)
        shape = piece.value.shape if alike else torch.Size(entry.shape)
        same = entry.dtype == manifest.tensors[f"model/{piece.name}"].dtype
        room = before.get(key)
        if not isinstance(room, torch.Tensor) or room.shape != shape:
            dtype = piece.value.dtype if same else dtype_of(entry.dtype, where)
            room = torch.empty(shape, dtype=dtype, device=piece.value.device)
        reader.fill(name, start if alike else 0, room, box if alike else None)
        made[key] = room
    group = next(g for g in engine.optimizer.param_groups if any(p is piece.value for p in g["params"]))
    on_device = group.get("capturable") or group.get("fused")
    for key, value in decode(manifest.optimizer.numbers.get(piece.name, {}), where).items():
        moved = isinstance(value, torch.Tensor) and on_device
        made[key] = value.to(piece.value.device) if moved else value
    if made:
        engine.optimizer.state[piece.value] = made
    else:
        engine.optimizer.state.pop(piece.value, None)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    old = group.get(key)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
        old.copy_(value)  # a rate that lives on the device stays there
    else:
        group[key] = value


def _restore_scaler(reader: Reader, engine: Engine) -> list[str]:
    """The loss scale, where both the old plan and the new one have one."""
    scaler = getattr(engine, "scaler", None)
    saved = reader.manifest.state.get("scaler")
    if scaler is not None and saved is not None:
        scaler.load_state_dict(decode(saved, str(reader.folder)))
    elif scaler is not None:
        return ["the checkpoint has no loss scale; it starts anew"]
    return []


def _restore_random(reader: Reader, engine: Engine) -> None:
    """Each rank's generators, when there are as many ranks as there were, and the model is split as it was."""
    manifest = reader.manifest
    if manifest.world != engine.ranks or not _split_alike(manifest.plan, engine.plan):
        return  # the engine seeds every step by (seed, step, rank); nothing else is promised to other ranks
    for name in manifest.tensors:
        kind, _, rest = name.partition("/")
        if kind == "random" and rest.endswith(f"/{engine.rank}"):
            view.set_random_state(rest.rpartition("/")[0], reader.whole(name))


def _split_alike(text: str, plan: Plan) -> bool:
    """Whether two plans split the model alike: then the ranks that hold the same tensors are the same."""
    try:
        old = Plan.parse(text)
    except PlanError:
        return False  # a release that knows more keys has written it
    return all(getattr(old, key) == getattr(plan, key) for key in ("tp", "cp", "ep", "pp", "tile"))
