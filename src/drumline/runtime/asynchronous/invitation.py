"""The file in a run folder by which more workers find a training in progress: its job, plan and parameter servers.

It contains the servers' tokens, so only its owner may read it. It is removed when the training ends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...core import files
from ...core.errors import CorruptFile, InputError
from ...core.job import Job

WORKERS = "workers.json"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The addresses and options that a worker needs to join."""

    job: str
    """In its file form, with the digest of the file."""
    plan: str
    addresses: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write the file, for its owner alone."""
        path = folder / WORKERS
        before = os.umask(0o077)
        try:
            files.write_json(path, self)
        finally:
            os.umask(before)

    @classmethod
    def read(cls, folder: Path) -> Invitation:
        """The invitation of the training in a run folder."""
        path = folder / WORKERS
        if not path.is_file():
            raise InputError(
                f"no training in {folder} takes more workers",
                where=str(path),
                rule="a training with sync=server, async, stale:k or hogwild does, from its first to its last update",
                fix="the run folder that `drumline train --output` has named, while it trains",
            )
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)


def withdraw_invitation(folder: Path) -> None:
    """Remove the file: the training has ended, well or not."""
    (folder / WORKERS).unlink(missing_ok=True)


def job_reference(job: Job) -> str:
    """The job in its file form, with an absolute path; empty for a job without a file."""
    if not job.source:
        return ""
    path, _, name = job.source.rpartition(":")
    return f"{Path(path).resolve()}:{name}@{job.digest}"
