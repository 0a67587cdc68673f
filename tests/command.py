"""The `drumline` command inside this process: what it prints and how it ends, without a new interpreter.

For what a command refuses: a process of its own spends seconds on importing torch before it says no. What ranks, pipes
or terminals have to do with is tested with real processes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from drumline.cli import main


def here(*arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as `python -m drumline ARGUMENTS` in the folder `cwd` would."""
    words = ["drumline", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", ["", *sys.path]),
        mock.patch.dict(os.environ, env),
        chdir(cwd or Path.cwd()),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as e:
            code = e.code
    assert code is None or isinstance(code, int), code
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())
