"""Checks a whole pack against the digests of its index, and names every file that differs."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import CorruptFile, InputError
from ...core.regular_files import sha256
from .layout import REPAIR, PackIndex

_LISTED = 10
"""Damaged files that a message lists."""


def check_pack(folder: str | Path) -> PackIndex:
    """Read every byte of a pack; raises CorruptFile with the files that are missing or differ from their digests."""
    path = Path(folder)
    index = PackIndex.load(path)
    index.rows(path)
    bad = []
    for shard in index.shards:
        try:
            if sha256(path / shard.file) != shard.sha256:
                bad.append(f"{shard.file} differs from its digest")
        except InputError as e:
            bad.append(e.what.replace(f"{path}/", ""))
    if bad:
        more = f"; and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
        raise CorruptFile(
            f"{len(bad)} of {len(index.shards)} shards of {path} are damaged",
            where="; ".join(bad[:_LISTED]) + more,
            rule="index.json has the SHA-256 of every shard",
            fix=REPAIR,
        )
    return index
