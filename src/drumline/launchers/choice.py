"""The launcher of this process, found from the environment, and the one place where ranks are started or joined."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError, nearest
from .external_ranks import ExternalRanks
from .kubernetes import KubernetesLauncher
from .launcher import Launcher
from .local import run_ranks as run_local_ranks
from .local_launcher import LocalLauncher
from .mpiexec import MpiexecLauncher
from .ray import RayLauncher
from .slurm import SlurmLauncher
from .ssh import SshLauncher
from .torchrun import TorchrunLauncher

if TYPE_CHECKING:
    from .hang_watch import HangWatch
    from .local import Replace

LAUNCHERS: tuple[type[Launcher], ...] = (
    LocalLauncher,
    SshLauncher,
    RayLauncher,
    KubernetesLauncher,
    TorchrunLauncher,
    SlurmLauncher,
    MpiexecLauncher,
)
"""In the order in which they are asked: torchrun inside srun is torchrun."""

_JOINED: ContextVar[ExternalRanks | None] = ContextVar("joined", default=None)
"""The ranks on which the verb in progress runs its tasks; None: it starts local ones."""
_OPEN: list[ExternalRanks] = []
"""The joined ranks of this process, once a verb has used them."""


def find_launcher(environment: Mapping[str, str] | None = None) -> Launcher | None:
    """The launcher that started this process as one of the ranks of a job; None if it is a program of its own."""
    env = os.environ if environment is None else environment
    return next((launcher() for launcher in LAUNCHERS if launcher.detect(env)), None)


def launcher_named(name: str) -> Launcher:
    """The launcher of a name after --launcher."""
    known = {launcher.name: launcher for launcher in LAUNCHERS}
    if name not in known:
        raise InputError(f"--launcher {name}", rule=f"known: {', '.join(known)}", fix=nearest(name, known))
    return known[name]()


def join_ranks() -> ExternalRanks | None:
    """The ranks of this process's launcher; None if it was not started by one. All ranks call it."""
    launcher = find_launcher()
    if launcher is None:
        return None
    if not _OPEN:
        _OPEN.append(ExternalRanks(launcher.where(), launcher.name))
    return _OPEN[0]


def joined_ranks() -> ExternalRanks | None:
    """The joined ranks on which the verb in progress runs."""
    return _JOINED.get()


@contextmanager
def running_on(ranks: ExternalRanks) -> Iterator[None]:
    """Run tasks on joined ranks inside the block."""
    token = _JOINED.set(ranks)
    try:
        yield
    finally:
        _JOINED.reset(token)


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    threads: int | None = None,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
    watch: HangWatch | None = None,
    handles_signals: bool = False,
    replace: Replace | None = None,
) -> list[Any]:
    """Run `function(emit, *arguments)` on all ranks: on those that were joined, or on new local ones.

    `on_event(rank, record)` receives the records that ranks emit. A `watch` ends local ranks that hang; joined ranks
    have the timeouts of their collectives. `replace` restarts local ranks; joined ones are their launcher's.
    """
    joined = joined_ranks()
    if joined is None:
        return run_local_ranks(
            function,
            *arguments,
            ranks=ranks,
            threads=threads,
            on_event=on_event,
            watch=watch,
            handles_signals=handles_signals,
            replace=replace,
        )
    joined.check_size("this", ranks)
    return joined.run(function, *arguments, on_event=on_event)
