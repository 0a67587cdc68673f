"""`dl.measure`: the speed of this machine as a `Cluster`, and the cache of such measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from .callbacks import Notify, Progress, ignore_progress, log_note
from .external_ranks import current_ranks, joins_ranks, keep_measurement
from .main_guard import refuse_while_loading

if TYPE_CHECKING:
    from ..clusters import Cluster

BUSY_CORES = 0.3
"""Cores in use by other programs above which a note is issued."""
BUSY_SECONDS = 0.5
"""How long the load of other programs is sampled."""


@joins_ranks
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
    cluster = measure_local(ranks or local_devices(), notify=notify, progress=progress)
    cluster.save(output or cluster_path(cluster))
    return cluster


def measure_local(ranks: int, *, notify: Notify = log_note, progress: Progress = ignore_progress) -> Cluster:
    """Measure ranks of this machine, or those that were joined; writes only a journal, to continue after a crash."""
    from ..launchers import run_ranks
    from ..measurement.machine import STAGES, measure_rank, to_cluster
    from ..measurement.resume_journal import delete_journal

    if load := load_of_others():
        notify(load)
    stages = list(STAGES)

    def on_event(_: int, event: dict[str, Any]) -> None:
        stage = event["measuring"]
        progress(stage, stages.index(stage) if stage in stages else 0, len(stages))

    journal = None if current_ranks() else f"{cached_cluster(ranks)}.part"
    results = run_ranks(measure_rank, journal, ranks=ranks, on_event=on_event)
    if journal:
        delete_journal(journal)
    return to_cluster(results)


def this_machine(ranks: int | None, *, notify: Notify = log_note, progress: Progress = ignore_progress) -> Cluster:
    """This machine with at least that many ranks, or the ranks that were joined: from the cache, or measured now."""
    from ..clusters import Cluster

    path = machine_file(ranks)
    if os.path.exists(path):  # not Path.exists: a home that cannot be read is no error
        return Cluster.load(path)
    from ..core import files
    from ..launchers import run_ranks

    joined = current_ranks()
    if joined is not None and (text := _measurement_of_others(joined.size, joined.hosts)):
        files.write_text(path, text)
        return Cluster.load(path)
    ranks = joined.size if joined else max(ranks or 1, local_devices())
    notify(f"measuring {'the' if joined else 'this machine with'} {ranks} ranks (once; stored in {path})")
    cluster = measure_local(ranks, notify=notify, progress=progress)
    try:
        cluster.save(path)
        if joined is not None:
            keep_measurement(path, joined)
        if joined is not None and joined.hosts > 1:
            run_ranks(store_measurement, path.read_text(), joined.size, joined.hosts, ranks=joined.size)
    except InputError as e:
        notify(f"the measurement is not stored: {e.what}")
    return cluster


def machine_file(ranks: int | None) -> Path:
    """Where `this_machine` finds or stores its measurement.

    Joined ranks of one host use the measurement of local ranks, if there is one; several hosts have one of their own.
    """
    joined = current_ranks()
    local = cached_cluster(max(ranks or 1, local_devices()))
    if joined is None or (joined.hosts == 1 and local.exists()):
        return local
    return cached_cluster(joined.size, joined.hosts)


def _measurement_of_others(ranks: int, hosts: int) -> str:
    """The measurement that another host has kept: a host that replaces another does not measure again."""
    from ..launchers import run_ranks

    return next((text for text in run_ranks(read_measurement, ranks, hosts, ranks=ranks) if text), "")


def read_measurement(emit: Any, ranks: int, hosts: int) -> str:
    """On every rank: the text of this host's measurement of such ranks; empty if it has none."""
    path = cached_cluster(ranks, hosts)
    return path.read_text() if path.exists() else ""


def store_measurement(emit: Any, text: str, ranks: int, hosts: int) -> None:
    """On every rank: keep a measurement on this host."""
    from ..core import files

    path = cached_cluster(ranks, hosts)
    if not path.exists():
        files.write_text(path, text)


def local_devices() -> int:
    """Ranks that this machine has room for: its GPUs, or its cores."""
    if Path("/dev/nvidiactl").exists():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return os.cpu_count() or 1


def cluster_path(cluster: Cluster) -> Path:
    """Where `measure` stores a cluster by default."""
    return cached_cluster(cluster.devices, cluster.devices // cluster.node.devices)


def cached_cluster(ranks: int, hosts: int = 1) -> Path:
    """Where the measurement of that many ranks is stored: of this machine, or of several hosts."""
    name = str(ranks) if hosts == 1 else f"{hosts}x{ranks // hosts}"
    given, base = os.environ.get("DRUMLINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if given or base:
        folder = Path(given) if given else Path(str(base)) / "drumline"
    else:
        try:
            folder = Path.home() / ".cache" / "drumline"
        except RuntimeError:  # a user without a home: nothing can be stored
            folder = Path(os.devnull) / "drumline"
    return folder / f"{platform.node() or 'here'}-{name}.toml"


def load_of_others() -> str:
    """A sentence about cores that other programs use, if there are many: only the rest is measured."""
    import psutil

    cores = psutil.cpu_count() or 1
    busy = psutil.cpu_percent(interval=BUSY_SECONDS) / 100 * cores
    if busy <= BUSY_CORES:
        return ""
    return f"other programs use {busy:.1f} of {cores} cores; the measurement covers only the rest"
