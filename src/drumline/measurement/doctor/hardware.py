"""Hardware that this process may use: devices, memory, limits, disk."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from ...core.units import format_bytes
from .. import cgroup
from .findings import DoctorFinding

GIB = 1 << 30
_SHM = Path("/dev/shm")  # noqa: S108  # where Linux keeps shared memory
_FILES = 1024
"""Open files that ranks and their data workers need."""


def cores() -> tuple[float, int, int]:
    """Cores: usable at a time, allowed by affinity, of the machine."""
    whole = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
    quota = cgroup.cpu_quota()
    return min(float(allowed), quota.cores if quota else float(allowed)), allowed, whole


def devices() -> Iterator[DoctorFinding]:
    """CPU cores and GPUs."""
    usable, allowed, whole = cores()
    text = f"{usable:g} of {whole}"
    if usable < allowed:
        n = max(1, int(usable))
        remedy = f"export OMP_NUM_THREADS={n}, and use --ranks {n}: threads beyond the quota are throttled"
        yield DoctorFinding("devices", "CPU cores", f"{text} (quota of the control group)", "note", remedy)
    elif allowed < whole:
        yield DoctorFinding(
            "devices", "CPU cores", f"{text} (affinity)", "note", f"use --ranks {allowed}, or taskset -c"
        )
    else:
        yield DoctorFinding("devices", "CPU cores", text)
    yield from _gpus()


def _gpus() -> Iterator[DoctorFinding]:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            free, total = torch.cuda.mem_get_info(i)
            text = f"{properties.name}, {format_bytes(free)} of {format_bytes(total)} free"
            busy = free < 0.5 * total
            remedy = "nvidia-smi shows which process uses it" if busy else ""
            yield DoctorFinding("devices", f"GPU {i}", text, "note" if busy else "ok", remedy)
    elif Path("/dev/nvidiactl").exists():
        built = torch.version.cuda or "without CUDA"
        remedy = "nvidia-smi shows the driver; install the matching torch wheel from pytorch.org"
        yield DoctorFinding("devices", "GPU", f"present, but torch ({built}) does not see it", "note", remedy)
    else:
        yield DoctorFinding("devices", "GPU", "none")


def memory() -> Iterator[DoctorFinding]:
    """Usable and free memory."""
    seen = psutil.virtual_memory()
    limit = cgroup.memory_limit()
    total = min(seen.total, limit) if limit else seen.total
    free = min(seen.available, total)
    where = " (limit of the control group)" if limit and limit < seen.total else ""
    text = f"{format_bytes(free)} of {format_bytes(total)} free{where}"
    if free < 2 * GIB:
        yield DoctorFinding(
            "memory", "memory", text, "note", "each rank needs about 0.5 GiB besides its model: use fewer --ranks"
        )
    else:
        yield DoctorFinding("memory", "memory", text)


def shared_memory() -> Iterator[DoctorFinding]:
    """Shared memory of the `shm` backend and of data workers."""
    topic = "shared memory"
    if _SHM.is_dir():
        space = shutil.disk_usage(_SHM)
        small = space.free < 256 << 20
        remedy = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm" if small else ""
        text = f"{format_bytes(space.free)} of {format_bytes(space.total)} free"
        yield DoctorFinding(topic, str(_SHM), text, "note" if small else "ok", remedy)
    else:
        yield DoctorFinding(topic, str(_SHM), "absent", "note", "mount -t tmpfs tmpfs /dev/shm")
    yield _anonymous(topic)


def _anonymous(topic: str) -> DoctorFinding:
    """Create, map and read an anonymous memory file."""
    try:
        fd = os.memfd_create("drumline-doctor")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as page:
                page[:5] = b"drums"
                works = os.pread(fd, 5, 0) == b"drums"
        finally:
            os.close(fd)
    except (AttributeError, OSError) as e:
        return DoctorFinding(
            topic, "memory files", f"refused: {e}", "note", "a newer kernel, or a looser seccomp profile"
        )
    return DoctorFinding(topic, "memory files", "work" if works else "read back wrong data")


def limits() -> Iterator[DoctorFinding]:
    """Limits of this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _FILES
    yield DoctorFinding(
        "limits",
        "open files",
        _limit(soft),
        "note" if few else "ok",
        f"ulimit -n {hard if hard > 0 else 65536}" if few else "",
    )
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    ceiling = cgroup.process_limit()
    least = min((n for n in (processes, ceiling) if n is not None and n >= 0), default=-1)
    few = 0 <= least < 256
    remedy = "ulimit -u 4096, or a higher pids limit of the container" if few else ""
    yield DoctorFinding("limits", "processes", _limit(least), "note" if few else "ok", remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fabric = Path("/sys/class/infiniband")
    tight = locked >= 0 and fabric.is_dir() and any(fabric.iterdir())
    yield DoctorFinding(
        "limits",
        "locked memory",
        _limit(locked, size=True),
        "note" if tight else "ok",
        "ulimit -l unlimited: the network adapters need it" if tight else "",
    )
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    small = 0 <= stack < 1 << 20
    remedy = "ulimit -s 8192" if small else ""
    yield DoctorFinding("limits", "stack", _limit(stack, size=True), "note" if small else "ok", remedy)


def _limit(n: int, *, size: bool = False) -> str:
    if n < 0:
        return "unlimited"
    return format_bytes(n) if size else str(n)


def disk() -> Iterator[DoctorFinding]:
    """Folders for the rendezvous of ranks, for runs and for measurements."""
    for name, folder, needed in (
        ("temporary files", Path(tempfile.gettempdir()), "export TMPDIR=<a writable folder>"),
        ("runs", Path.cwd(), "cd to a writable folder"),
    ):
        try:
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as e:
            # ranks rendezvous through temporary files; runs can go elsewhere
            state = "problem" if name == "temporary files" else "note"
            yield DoctorFinding("disk", name, f"{folder}: {e.strerror}", state, needed)  # type: ignore[arg-type]  # one of two
            continue
        low = free < GIB
        remedy = "free some space, or use another disk" if low else ""
        yield DoctorFinding("disk", name, f"{folder}: {format_bytes(free)} free", "note" if low else "ok", remedy)
