"""Loads a checkpoint into an engine, under whatever plan and on however many ranks it runs now.

First every digest is verified, the files divided over the ranks; a damaged checkpoint is left aside for the one before
it. Then names and shapes are compared. Only then is anything changed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import CorruptFile, DrumlineError, InputError
from .agree import agree, first_error, tell
from .folder import complete, find
from .manifest import Manifest, check_file, read_manifest
from .match import check_data, check_model, check_optimizer
from .reader import Reader
from .restore import restore

if TYPE_CHECKING:
    from ..engine import Engine


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded."""

    path: Path
    step: int
    plan: str
    """The plan that it was saved under."""
    world: int
    """The number of ranks that saved it."""
    notes: tuple[str, ...]
    """What a person should know: checkpoints that were left aside, numbers that were rounded."""


def load(engine: Engine, path: str | Path, *, other_data: bool = False) -> Loaded:
    """Bring an engine to the state that was saved, all ranks together.

    `path` is one checkpoint, or the folder that holds a run's: then the newest that is whole. A checkpoint of other
    data (size, batch, seed) is refused unless `other_data`: the position in the data would mean something else.
    """
    folder, manifest, notes = _newest(engine, Path(path))
    reader = Reader(folder, manifest)
    error: DrumlineError | None = None
    try:
        notes += check_model(manifest, engine)
        check_optimizer(manifest, engine)
        notes += check_data(manifest, engine, other_data=other_data)
    except DrumlineError as e:
        error = e
    agree(engine, error)
    try:
        notes += restore(reader, engine)
    except DrumlineError as e:
        error = e
    except OSError as e:
        error = CorruptFile(f"{folder.name} cannot be read: {e.strerror}", where=str(e.filename or folder))
    agree(engine, error)
    if engine.rank == 0:
        for note in notes:
            print(f"drumline: {note}", file=sys.stderr)
    return Loaded(folder, manifest.step, manifest.plan, manifest.world, tuple(notes))


def _newest(engine: Engine, path: Path) -> tuple[Path, Manifest, list[str]]:
    """The first of the checkpoints meant that is whole, the same on every rank; what was left aside is noted."""
    error: DrumlineError | None = None
    listed = "[]"
    try:
        if engine.rank == 0:
            listed = json.dumps([os.path.abspath(p) for p in find(path)])
    except DrumlineError as e:
        error = e
    agree(engine, error)
    candidates = [Path(p) for p in json.loads(tell(engine, listed if engine.rank == 0 else None))]
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
    raise _with_other(problems[0], path)


def _with_other(problem: DrumlineError, path: Path) -> DrumlineError:
    """A damaged checkpoint that was asked for by its name: say which others there are."""
    others = [p for p in complete(path.parent) if p.name != path.name]
    fix = f"load {path.parent}, which takes the newest that is whole, or {others[0]}" if others else problem.fix
    return type(problem)(problem.what, where=problem.where, rule=problem.rule, fix=fix)


def _verified(engine: Engine, folder: Path) -> tuple[Manifest | None, DrumlineError | None]:
    """The manifest, when every file is what was written; else what is wrong, the same on every rank."""
    error: DrumlineError | None = None
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
        # the largest first, so that the ranks get about as many bytes each
        ordered = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
        for name in ordered[engine.rank :: engine.ranks]:
            check_file(folder, name, manifest.files[name])
    except (CorruptFile, InputError) as e:
        error = e
    found = first_error(engine, error)
    return (manifest, None) if found is None else (None, found)
