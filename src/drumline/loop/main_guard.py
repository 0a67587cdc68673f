"""Checks that ranks can be started from here, and that they can load the job that was given.

A rank is a fresh process. It loads a job from its file, or unpickles one whose functions it can import. Functions of a
script (`__main__`) can be imported if the script guards the code that starts ranks; functions of a notebook cannot.
"""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..core.errors import JobError
from ..core.job import Job

GUARD = 'if __name__ == "__main__":'
_IN_A_FILE = 'put the job in a file, job.py: `def job(): return dl.Job(...)`, and give its path: "job.py"'
_JOB_MODULE = "drumline_job_"
"""Prefix of the module names under which `Job.load` runs a job's file."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """A job, and the form in which ranks get it."""

    job: Job
    sent: str | Job | Callable[[], Job] | None
    """A reference to its file, or what is pickled; None if no other process can load it."""
    problem: JobError | None = None
    """Why no other process can load it."""


def rank_job(given: Job | Callable[[], Job] | str | Path, job: Job) -> RankJob:
    """Choose how ranks get the job: by its file if it has one, else pickled, if they can import its functions."""
    if job.source:
        return RankJob(job, job.reference)
    sent = given if callable(given) and not isinstance(given, Job) else job
    try:
        text = pickle.dumps(sent)
    except Exception as e:
        return RankJob(job, None, _cannot_pickle(job, e))
    if b"__main__" in text and (problem := _main_cannot_be_imported()):
        return RankJob(job, None, problem)
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
                fix=f"guard the other lines:\n         {GUARD}\n             ...",
            )
        frame = frame.f_back


def _cannot_pickle(job: Job, error: Exception) -> JobError:
    """A lambda, or a function inside another: pickle knows functions by name."""
    fields = (
        "model",
        "loss",
        "optimizer",
        "data",
        "schedule",
        "collate",
        "evaluate",
        "validation",
        "sample_weight",
        "callbacks",
    )
    local = [name for name in fields if "<l" in getattr(getattr(job, name), "__qualname__", "")]
    what = f"Job.{local[0]} is a lambda or a local function" if local else f"the job cannot be pickled: {error}"
    return JobError(
        f"ranks cannot load this job: {what}",
        rule="a job made in memory is sent to ranks by pickle, which needs functions at the top level of a module",
        fix=f"{_IN_A_FILE}; or give the function that makes the job, not its result; or a plan of one rank",
    )


def _main_cannot_be_imported() -> JobError | None:
    """Why a fresh process cannot import the functions of `__main__`; None if it can."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return None  # python -m
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        return JobError(
            "ranks cannot load a job that was defined in a notebook or at a prompt",
            rule="a rank is a fresh process and imports the job's functions from a file",
            fix=f"{_IN_A_FILE}; or a plan of one rank, which runs in this process",
        )
    line = _line_of_main(main.__dict__)
    if line is None or _is_guarded(Path(path), line):
        return None
    return JobError(
        f"{path} starts ranks without a guard",
        where=f"{path}, line {line}",
        rule="ranks import the script for the job's functions, and would run this line again",
        fix=f"guard it:\n         {GUARD}\n             ...\n         or {_IN_A_FILE}",
    )


def _line_of_main(namespace: dict[str, object]) -> int | None:
    """The line of the script's top level that runs now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is namespace:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_guarded(path: Path, line: int) -> bool:
    """Whether a line of a script is inside a top-level `if __name__ == ...`."""
    try:
        body = ast.parse(path.read_bytes()).body
    except SyntaxError:
        return True  # it runs, so it is not the text that is there now
    return any(
        isinstance(node, ast.If)
        and "__name__" in ast.unparse(node.test)
        and node.lineno <= line <= (node.end_lineno or 0)
        for node in body
    )
