"""How ranks get a job, and a check that no verb runs while a job's file is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..core.errors import InputError, JobError
from ..core.job import Job

_JOB_MODULE = "drumline_job_"
"""Prefix of the module names under which `Job.load` runs a job's file."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """A job, and the form in which ranks get it."""

    job: Job
    sent: str | Job | Callable[[], Job] | None
    """A reference to its file, or what is sent by name or by value; None if no other process can have it."""
    problem: JobError | None = None
    """Why no other process can have it."""


def rank_job(given: Job | Callable[[], Job] | str | Path, job: Job) -> RankJob:
    """Choose how ranks get the job: by its file if it has one, else it is sent, with the functions it is made of."""
    if job.source:
        return RankJob(job, job.reference)
    from ..launchers.payload import pack

    sent = given if callable(given) and not isinstance(given, Job) else job
    try:
        pack(sent)
    except InputError as e:
        fix = "make it inside the function that uses it; or a plan of one rank, which runs in this process"
        return RankJob(job, None, JobError(e.what, rule=e.rule, fix=fix))
    return RankJob(job, sent)


def refuse_while_loading() -> None:
    """Refuse to go on while a job's file is being loaded: the file would run this very call again, and again."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith(_JOB_MODULE):
            path = frame.f_code.co_filename
            raise JobError(
                f"{path} runs the loop while it is loaded as a job",
                where=f"{path}, line {frame.f_lineno}",
                rule="every rank loads the job's file, so only definitions may run when it is loaded",
                fix='guard the other lines:\n         if __name__ == "__main__":\n             ...\n'
                "         or give the job itself instead of its path",
            )
        frame = frame.f_back
