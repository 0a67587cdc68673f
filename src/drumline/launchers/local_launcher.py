"""Local processes: Drumline's own ranks of one host, or this host's part of a job over several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import final

from ..comm.parent_process import die_with_parent
from ..comm.rendezvous import RENDEZVOUS
from ..core.errors import InputError
from ..core.rank_info import STORE
from .launcher import Launcher, LaunchOptions, rank_environment, started_by
from .processes import wait_for_all


@final
class LocalLauncher(Launcher):
    """Processes of this host."""

    name = "local"
    how = "drumline launch --ranks N train JOB"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By the file store of our own ranks, or by the name that `start` leaves."""
        own = STORE in environment and environment.get("WORLD_SIZE", "1") != "1"
        return own or started_by(cls.name, environment)

    def start(self, command: Sequence[str], options: LaunchOptions) -> int:
        """Start this host's ranks and wait for them; the exit code of the first that failed."""
        if options.nodes > 1 and not options.rendezvous:
            raise InputError(
                f"--nodes {options.nodes} without --rendezvous",
                rule="ranks of several hosts meet at an address of the first host",
                fix="--rendezvous tcp://HOST:29500, the same on all hosts",
            )
        with tempfile.TemporaryDirectory(prefix="drumline-") as folder:
            meet = options.rendezvous or f"file://{folder}/store"
            processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "drumline", *command],
                    env={**os.environ, **rank_environment(options, i), RENDEZVOUS: meet},
                    preexec_fn=die_with_parent,  # safe: no other thread holds a lock here
                )
                for i in range(options.per_node)
            ]
            if options.started_by == "ssh":
                _end_with_input()
            return wait_for_all(processes)


def _end_with_input() -> None:
    """End this process when its standard input is closed: the program that has started it over ssh is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="standard input", daemon=True).start()
