"""The command line on the ranks of another launcher: one rank speaks, and verbs that would run twice are refused."""

from __future__ import annotations

import os
import sys
import time

from ..core.errors import InputError
from ..core.rank_info import is_launched, rank_info

JOINED = ("train", "verify", "measure", "bench")
"""Verbs in which all ranks take part."""
_ANYWHERE = ("run", "launch")
"""Verbs that start programs: their output is the programs'."""
_PATIENCE = 3.0
"""Seconds that a silent rank waits: some launchers end all ranks when one fails, and the first has something to say."""


def enter(arguments: list[str]) -> None:
    """Before a command runs: silence all ranks but the first, or refuse the command."""
    verb = next((word for word in arguments if not word.startswith("-")), "")
    if not verb or verb in _ANYWHERE or not is_launched():
        return
    where = rank_info()
    if where.rank > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if verb in JOINED:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's C++ warnings are for torch developers
        return
    error = InputError(
        f"drumline {verb} on {where.size} ranks",
        rule=f"it is one program, not one of several ranks; under a launcher run {', '.join(JOINED)} or run",
        fix=f"drumline {verb}, without the launcher",
    )
    error.silent = where.rank > 0
    if error.silent:
        time.sleep(_PATIENCE)
    raise error
