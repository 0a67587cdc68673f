"""`dl.measure`: the speed of this machine as a `Cluster`, and the cache of such measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from .callbacks import Notify, Progress, ignore_progress, log_note
from .main_guard import refuse_while_loading

if TYPE_CHECKING:
    from ..clusters import Cluster

BUSY_CORES = 0.3
"""Cores in use by other programs above which a note is issued."""
BUSY_SECONDS = 0.5
"""How long the load of other programs is sampled."""


def measure(
    *,
    ranks: int | None = None,
    output: str | Path | None = None,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> Cluster:
    """Measure this machine: messages, kernels, memory (half a minute to a minute).

    `ranks` defaults to the number of GPUs, or of cores. The result is written to `output`, or to the cache, where
    `plan` and `train` look for it. Under torchrun, srun or mpiexec every rank calls this, and the first one writes.
    """
    refuse_while_loading()
    if ranks is not None and ranks < 1:
        raise InputError(f"ranks={ranks}", rule="at least one rank")
    cluster, first = _measure_launched(ranks) if _is_launched() else (None, True)
    if cluster is None:
        cluster = measure_local(ranks or local_devices(), notify=notify, progress=progress)
    if first:
        cluster.save(output or cached_cluster(cluster.devices))
    return cluster


def measure_local(ranks: int, *, notify: Notify = log_note, progress: Progress = ignore_progress) -> Cluster:
    """Start the ranks on this machine and measure them; writes nothing but a journal, to continue after a crash."""
    from ..launchers import run_ranks
    from ..measurement.machine import STAGES, measure_rank, to_cluster
    from ..measurement.resume_journal import delete_journal

    if load := load_of_others():
        notify(load)
    stages = list(STAGES)

    def on_event(_: int, event: dict[str, Any]) -> None:
        stage = event["measuring"]
        progress(stage, stages.index(stage) if stage in stages else 0, len(stages))

    journal = f"{cached_cluster(ranks)}.part"
    results = run_ranks(measure_rank, journal, ranks=ranks, on_event=on_event)
    delete_journal(journal)
    return to_cluster(results)


def this_machine(ranks: int | None, *, notify: Notify = log_note, progress: Progress = ignore_progress) -> Cluster:
    """This machine with at least that many ranks: from the cache, or measured now."""
    from ..clusters import Cluster

    ranks = max(ranks or 1, local_devices())
    path = cached_cluster(ranks)
    if os.path.exists(path):  # not Path.exists: a home that cannot be read is no error
        return Cluster.load(path)
    notify(f"measuring this machine with {ranks} ranks (once; stored in {path})")
    cluster = measure_local(ranks, notify=notify, progress=progress)
    try:
        cluster.save(path)
    except InputError as e:
        notify(f"the measurement is not stored: {e.what}")
    return cluster


def local_devices() -> int:
    """Ranks that this machine has room for: its GPUs, or its cores."""
    if Path("/dev/nvidiactl").exists():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return os.cpu_count() or 1


def cached_cluster(ranks: int) -> Path:
    """Where the measurement of this machine with that many ranks is stored."""
    given, base = os.environ.get("DRUMLINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if given or base:
        folder = Path(given) if given else Path(str(base)) / "drumline"
    else:
        try:
            folder = Path.home() / ".cache" / "drumline"
        except RuntimeError:  # a user without a home: nothing can be stored
            folder = Path(os.devnull) / "drumline"
    return folder / f"{platform.node() or 'here'}-{ranks}.toml"


def load_of_others() -> str:
    """A sentence about cores that other programs use, if there are many: only the rest is measured."""
    import psutil

    cores = psutil.cpu_count() or 1
    busy = psutil.cpu_percent(interval=BUSY_SECONDS) / 100 * cores
    if busy <= BUSY_CORES:
        return ""
    return f"other programs use {busy:.1f} of {cores} cores; the measurement covers only the rest"


def _is_launched() -> bool:
    """Whether another launcher has started ranks of this program."""
    if not {"RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys():
        return False  # without importing torch: saves a second
    from ..comm.environment import rank_info

    return rank_info().size > 1


def is_first_rank() -> bool:
    """Whether this process speaks for all: it was not started by a launcher, or is the launcher's first rank."""
    from ..comm.environment import rank_info

    return not _is_launched() or rank_info().rank == 0


def _measure_launched(ranks: int | None) -> tuple[Cluster, bool]:
    """Measure the ranks that were started; every rank gets the result. Also whether this is the first one."""
    import torch.distributed as dist

    from ..comm.environment import connect, disconnect
    from ..measurement.machine import measure_rank, to_cluster

    where = connect()
    if ranks not in (None, where.size):
        raise InputError(
            f"ranks={ranks}, but {where.launcher} started {where.size}",
            rule="the launcher decides the number of ranks",
            fix="leave the number of ranks out",
        )
    results: list[Any] = [None] * where.size
    dist.all_gather_object(results, measure_rank(lambda event: None))
    disconnect()
    return to_cluster(results), where.rank == 0
