"""Python programs as processes of their own that need not import torch first: forked from the server of the ranks.

For programs of guides and examples: a fresh interpreter spends seconds on imports before its first line. What a fresh
interpreter imports, and what ranks of it import, is tested with real ones.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from world import PRELOAD


def python(
    *words: object, cwd: Path | None = None, timeout: float = 120.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Return the output and exit code of `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS`.

    Raises subprocess.TimeoutExpired, as `subprocess.run` does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    argv = [str(word) for word in words]
    with tempfile.TemporaryDirectory(prefix="drumline-warm-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        environment = {**os.environ, **env}
        process: Any = context.Process(
            target=_program, args=(argv, str(cwd or Path.cwd()), environment, str(out), str(err))
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(argv, timeout, out.read_bytes(), err.read_bytes())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def _program(argv: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """The life of the process: its files in place of a terminal, then the program as its main module."""
    for fd, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    try:
        if argv[0] == "-m":
            sys.argv[:] = argv[1:]
            sys.path[0] = cwd
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = argv
            sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
