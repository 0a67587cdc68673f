"""The server process that ranks are forked from: it has imported torch, so a rank starts in a tenth of a second."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import tempfile
from typing import Any

_PRELOAD = "drumline.runtime.training.preload"
_SOCKET_BYTES = 107
"""The longest path of a Unix socket on Linux."""
_NAME_BYTES = len("/pymp-01234567/listener-01234567")
"""What multiprocessing appends to the folder for temporary files."""
_SHORT_FOLDER = "/tmp"  # noqa: S108  # multiprocessing makes a folder of its own there, for this user only


def fork_server() -> Any:
    """The multiprocessing context of the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    _place_socket()
    return context


def _place_socket() -> None:
    """Let multiprocessing choose its folder now, in /tmp if a socket below TMPDIR would have too long a path."""
    usual = tempfile.gettempdir()
    too_long = len(os.fsencode(usual)) + _NAME_BYTES > _SOCKET_BYTES
    if too_long and os.access(_SHORT_FOLDER, os.W_OK):
        tempfile.tempdir = _SHORT_FOLDER
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
