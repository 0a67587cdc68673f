"""The file of runs that corrections are learnt from, beside the cluster file that the runs were predicted with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..clusters.measured import STRICT
from ..core import files
from ..core.errors import CorruptFile, InputError
from .learnt import Observed

FORMAT = 1
"""Of the file; a later one is not touched."""
KEEP = 60
"""Runs that are remembered."""


@dataclass(frozen=True, slots=True)
class _Document:
    __pydantic_config__ = STRICT
    format: int
    runs: tuple[Observed, ...]


def beside(cluster: str | Path) -> Path:
    """Where the runs of a cluster file are kept: `NAME.corrections.json` for `NAME.toml`."""
    path = Path(cluster)
    return path.with_name(f"{path.stem if path.suffix == '.toml' else path.name}.corrections.json")


def measurement_of(cluster: str | Path) -> str:
    """The digest of a cluster file: after a new measurement, what was learnt about the old one means nothing."""
    try:
        return hashlib.sha256(Path(cluster).read_bytes()).hexdigest()[:16]
    except OSError as e:
        raise InputError(f"{cluster} cannot be read: {e.strerror}") from None


def read(path: str | Path) -> tuple[Observed, ...]:
    """The runs of a file; none where there is no file. What is damaged, or of a later version, is refused by name."""
    if not Path(path).exists():
        return ()
    document = files.read_json(path)
    version = document.get("format") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise InputError(
            f"{path} was written by a later drumline",
            where=str(path),
            rule=f"format {version}; this one reads up to {FORMAT}",
            fix="pip install --upgrade drumline",
        )
    try:
        return files.from_plain(_Document, document, str(path), CorruptFile).runs
    except CorruptFile as e:
        raise CorruptFile(
            f"{path} is damaged", where=e.where, rule=e.what, fix="drumline measure --forget removes it"
        ) from None


def usable(runs: Iterable[Observed], *, measurement: str, torch: str) -> tuple[Observed, ...]:
    """Those of this measurement of the machine, and of this torch."""
    return tuple(r for r in runs if (r.measurement, r.torch) == (measurement, torch))


def add(path: str | Path, run: Observed) -> int:
    """One run more; those of another measurement go. A damaged file is written anew. How many there are now."""
    try:
        earlier = read(path)
    except CorruptFile:
        earlier = ()
    kept = [r for r in earlier if r.measurement == run.measurement][-(KEEP - 1) :]
    files.write_json(path, _Document(FORMAT, (*kept, run)))
    return len(kept) + 1


def forget(path: str | Path) -> bool:
    """Remove the file; whether there was one."""
    try:
        Path(path).unlink()
    except FileNotFoundError:
        return False
    except OSError as e:
        raise InputError(f"{path} cannot be removed: {e.strerror}") from None
    return True
