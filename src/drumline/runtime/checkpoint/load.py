"""Loads a checkpoint into an engine, under any plan and on any number of ranks.

First every digest is verified, with the files divided over the ranks; a damaged checkpoint is skipped for the previous
one. Then names and shapes are compared. Only then is anything changed: each rank reads the elements that it holds.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.errors import CorruptFile, DrumlineError, InputError, PlanError
from ...plans import Plan
from ..core.agreement import broadcast_text, first_error, raise_together
from ..core.engine_core import EngineCore
from ..core.update import show_values
from ..state.pieces import Piece
from . import contents
from .boxes import location_of
from .codec import decode, dtype_of
from .compatibility import check_data, check_model, check_optimizer, group_of, optimizer_entries
from .folder import complete_checkpoints, find_checkpoints
from .manifest import Manifest, check_file, read_manifest
from .reader import CheckpointReader


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The checkpoint that was loaded."""

    path: Path
    step: int
    plan: str
    """The plan under which it was saved."""
    world: int
    """Number of ranks that saved it."""
    notes: tuple[str, ...]
    """Remarks: damaged checkpoints that were skipped, dtype conversions."""


def load(engine: EngineCore, path: str | Path, *, other_data: bool = False) -> LoadedCheckpoint:
    """Restore an engine to a saved state, all ranks together.

    `path` is a checkpoint, or a folder of checkpoints: then the newest undamaged one. A checkpoint of other data (size,
    batch, seed) is refused unless `other_data` is set: its position in the data would be meaningless.
    """
    folder, manifest, notes = _newest_intact(engine, Path(path))
    reader = CheckpointReader(folder, manifest)
    error: DrumlineError | None = None
    try:
        notes += check_model(manifest, engine)
        check_optimizer(manifest, engine)
        notes += check_data(manifest, engine, other_data=other_data)
    except DrumlineError as e:
        error = e
    raise_together(engine, error)
    try:
        notes += restore(reader, engine)
    except DrumlineError as e:
        error = e
    except OSError as e:
        error = CorruptFile(f"{folder.name} cannot be read: {e.strerror}", where=str(e.filename or folder))
    raise_together(engine, error)
    if engine.rank == 0:
        for note in notes:
            print(f"drumline: {note}", file=sys.stderr)
    return LoadedCheckpoint(folder, manifest.step, manifest.plan, manifest.world, tuple(notes))


def _newest_intact(engine: EngineCore, path: Path) -> tuple[Path, Manifest, list[str]]:
    """The newest undamaged checkpoint at a path, the same on every rank, with a note for each one skipped."""
    error: DrumlineError | None = None
    listed = "[]"
    try:
        if engine.rank == 0:
            listed = json.dumps([os.path.abspath(p) for p in find_checkpoints(path)])
    except DrumlineError as e:
        error = e
    raise_together(engine, error)
    candidates = [Path(p) for p in json.loads(broadcast_text(engine, listed if engine.rank == 0 else None))]
    problems: list[DrumlineError] = []
    for folder in candidates:
        manifest, problem = _verified(engine, folder)
        if manifest is not None:
            return folder, manifest, [f"{e.what}, in {e.where}; {folder.name} is loaded instead" for e in problems]
        assert problem is not None
        problems.append(problem)
    if len(candidates) > 1:
        rule = "; ".join(f"{e.where}: {e.what}" for e in problems)
        raise CorruptFile(f"every checkpoint in {path} is damaged", where=problems[0].where, rule=rule)
    raise _with_alternatives(problems[0], path)


def _with_alternatives(problem: DrumlineError, path: Path) -> DrumlineError:
    """The error for a damaged checkpoint that was given by name, with the alternatives."""
    others = [p for p in complete_checkpoints(path.parent) if p.name != path.name]
    fix = f"load {path.parent}, which uses the newest undamaged checkpoint, or {others[0]}" if others else problem.fix
    return type(problem)(problem.what, where=problem.where, rule=problem.rule, fix=fix)


def _verified(engine: EngineCore, folder: Path) -> tuple[Manifest | None, DrumlineError | None]:
    """The manifest if every file is intact, else the error; the same on every rank."""
    error: DrumlineError | None = None
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
        # largest first, so that the ranks check about equal bytes
        ordered = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
        for name in ordered[engine.rank :: engine.ranks]:
            check_file(folder, name, manifest.files[name])
    except (CorruptFile, InputError) as e:
        error = e
    problem = first_error(engine, error)
    return (manifest, None) if problem is None else (None, problem)


# -- restoring

_IMPLEMENTATION_KEYS = ("foreach", "fused", "capturable", "differentiable")
"""Options that select an implementation: the current job's values are used."""


@torch.no_grad()
def restore(reader: CheckpointReader, engine: EngineCore) -> list[str]:
    """Restore everything; returns notes."""
    where = str(reader.folder)
    restore_model(reader, engine)
    entries = optimizer_entries(reader.manifest)
    for piece in engine.pieces:
        _restore_state(reader, engine, piece, entries.get(piece.name, {}))
    for i, group in enumerate(engine.optimizer.param_groups):
        for key, value in decode(group_of(reader.manifest, engine, i).values, where).items():
            if key not in _IMPLEMENTATION_KEYS or key not in group:
                _set(group, key, value)
    state = reader.manifest.state
    if engine.schedule is not None:
        engine.schedule.load_state_dict(decode(state["schedule"], where))
    modules = dict(engine.model.named_modules())
    for name, value in state.get("extra", {}).items():
        modules[name].set_extra_state(decode(value, where))
    engine.steps, engine.position = reader.manifest.step, reader.manifest.data["position"]
    engine.batches_missing = (
        frozenset(decode(state["coordinator"], where)["missing"]) if "coordinator" in state else frozenset()
    )
    _restore_random(reader, engine)
    powersgd = engine.plan.compress == "powersgd"
    notes = ["PowerSGD's error feedback is not saved; it starts from zero"] if powersgd else []
    notes += _restore_average(reader, engine)
    if "callbacks" in state:
        engine.callbacks.load_state_dict(decode(state["callbacks"], where))
    return [*_restore_scaler(reader, engine), *_restore_more(reader, engine), *notes]


def restore_model(reader: CheckpointReader, engine: EngineCore) -> None:
    """Restore parameters, trained and frozen, and buffers."""
    for piece in [*engine.pieces, *engine.frozen]:
        start, box = location_of(piece)
        reader.fill(f"model/{piece.name}", start, piece.value, box)
    propagate_values(engine)
    for name, buffer, _ in contents.buffers(engine.model):
        entry = reader.manifest.tensors.get(f"buffer/{name}")
        if entry is not None and entry.shape == tuple(buffer.shape):
            reader.fill(f"buffer/{name}", 0, buffer)


def propagate_values(engine: EngineCore) -> None:
    """Copy new values of the pieces to where the model reads them, as after an update."""
    show_values(engine.pieces, engine.strategy)
    average = getattr(engine, "average", None)
    if average is not None:
        average.restart()


def _restore_state(reader: CheckpointReader, engine: EngineCore, piece: Piece, saved: dict[str, str]) -> None:
    """Restore the optimizer's state of one piece, from entry names by key; no entries, no state."""
    manifest, where = reader.manifest, str(reader.folder)
    start, box = location_of(piece)
    before = engine.optimizer.state.get(piece.value, {})
    restored: dict[str, Any] = {}
    for key, name in saved.items():
        entry = manifest.tensors[name]
        same_shape = entry.shape == tuple(piece.shape)
        shape = piece.value.shape if same_shape else torch.Size(entry.shape)
        same_dtype = entry.dtype == manifest.tensors[f"model/{piece.name}"].dtype
        tensor = before.get(key)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            dtype = piece.value.dtype if same_dtype else dtype_of(entry.dtype, where)
            tensor = torch.empty(shape, dtype=dtype, device=piece.value.device)
        reader.fill(name, start if same_shape else 0, tensor, box if same_shape else None)
        restored[key] = tensor
    group = next(g for g in engine.optimizer.param_groups if any(p is piece.value for p in g["params"]))
    on_device = group.get("capturable") or group.get("fused")
    for key, value in decode(manifest.optimizer.numbers.get(piece.name, {}), where).items():
        move = isinstance(value, torch.Tensor) and on_device
        restored[key] = value.to(piece.value.device) if move else value
    if restored:
        engine.optimizer.state[piece.value] = restored
    else:
        engine.optimizer.state.pop(piece.value, None)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    old = group.get(key)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
        old.copy_(value)  # a tensor learning rate stays on its device
    else:
        group[key] = value


def _restore_scaler(reader: CheckpointReader, engine: EngineCore) -> list[str]:
    """Restore the loss scale, if both plans have one."""
    scaler = getattr(engine, "scaler", None)
    saved = reader.manifest.state.get("scaler")
    if scaler is not None and saved is not None:
        scaler.load_state_dict(decode(saved, str(reader.folder)))
    elif scaler is not None:
        return ["the checkpoint has no loss scale; the initial one is used"]
    return []


def _restore_average(reader: CheckpointReader, engine: EngineCore) -> list[str]:
    """Restore the averaged weights of a job with `ema`; without saved ones the average begins at the weights."""
    average = getattr(engine, "average", None)
    if average is None:
        return []
    if not any(name.startswith("ema/") for name in reader.manifest.tensors):
        return ["the checkpoint has no averaged weights (ema); the average begins at its weights"]
    for piece in engine.pieces:
        start, box = location_of(piece)
        reader.fill(f"ema/{piece.name}", start, average.of(piece), box)
    return []


def _restore_more(reader: CheckpointReader, engine: EngineCore) -> list[str]:
    """Restore what the strategy saves besides model and optimizer, if the plan of the checkpoint had it too."""
    tensors = engine.strategy.saved_tensors()
    missing = [name for name, t in tensors.items() if t.numel() and name not in reader.manifest.tensors]
    if missing:
        return ["the checkpoint has no momentum of an outer optimizer; it starts from zero"]
    for name, tensor in tensors.items():
        if tensor.numel():
            reader.fill(name, 0, tensor)
    return []


def _restore_random(reader: CheckpointReader, engine: EngineCore) -> None:
    """Restore each rank's random state, if the number of ranks and the split of the model are unchanged."""
    manifest = reader.manifest
    if manifest.world != engine.ranks or not _same_split(manifest.plan, engine.plan):
        return  # the engine seeds every step by (seed, step, rank); nothing more is guaranteed
    for name in manifest.tensors:
        kind, _, rest = name.partition("/")
        if kind == "random" and rest.endswith(f"/{engine.rank}"):
            contents.set_random_state(rest.rpartition("/")[0], reader.whole(name))


def _same_split(text: str, plan: Plan) -> bool:
    """Whether two plans split the model the same way, so that every rank has the same tensors."""
    try:
        old = Plan.parse(text)
    except PlanError:
        return False  # written by a release with more keys
    return all(getattr(old, key) == getattr(plan, key) for key in ("tp", "cp", "ep", "pp", "tile"))
