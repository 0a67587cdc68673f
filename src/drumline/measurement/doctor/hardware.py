"""What the machine is made of, as far as this process may use it: devices, memory, limits, disk."""

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
from . import cgroup
from .findings import Finding

GIB = 1 << 30
_SHM = Path("/dev/shm")  # noqa: S108  # where Linux keeps shared memory
_FILES = 1024
"""Open files that ranks and their data workers should have."""


def cores() -> tuple[float, int, int]:
    """(that may be used at a time, by affinity, of the machine)."""
    whole = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
    quota = cgroup.cpu_quota()
    return min(float(allowed), quota if quota is not None else float(allowed)), allowed, whole


def devices() -> Iterator[Finding]:
    """CPU cores and GPUs."""
    usable, allowed, whole = cores()
    text = f"{usable:g} of {whole}"
    if usable < allowed:
        n = max(1, int(usable))
        remedy = f"export OMP_NUM_THREADS={n}, and use --ranks {n}: threads beyond the quota are put to sleep"
        yield Finding("devices", "CPU cores", f"{text} (quota of the control group)", "note", remedy)
    elif allowed < whole:
        yield Finding("devices", "CPU cores", f"{text} (affinity)", "note", f"use --ranks {allowed}, or taskset -c")
    else:
        yield Finding("devices", "CPU cores", text)
    yield from _gpus()


def _gpus() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            free, total = torch.cuda.mem_get_info(i)
            text = f"{properties.name}, {format_bytes(free)} of {format_bytes(total)} free"
            busy = free < 0.5 * total
            remedy = "nvidia-smi shows who uses it" if busy else ""
            yield Finding("devices", f"GPU {i}", text, "note" if busy else "ok", remedy)
    elif Path("/dev/nvidiactl").exists():
        built = torch.version.cuda or "without CUDA"
        remedy = "nvidia-smi shows the driver; install the torch wheel that fits it from pytorch.org"
        yield Finding("devices", "GPU", f"there is one, but torch ({built}) does not see it", "note", remedy)
    else:
        yield Finding("devices", "GPU", "none")


def memory() -> Iterator[Finding]:
    """What may be used, and what is free of it."""
    seen = psutil.virtual_memory()
    limit = cgroup.memory_limit()
    total = min(seen.total, limit) if limit else seen.total
    free = min(seen.available, total)
    where = " (limit of the control group)" if limit and limit < seen.total else ""
    text = f"{format_bytes(free)} of {format_bytes(total)} free{where}"
    if free < 2 * GIB:
        yield Finding("memory", "memory", text, "note", "each rank takes about 0.5 GiB before its model: fewer --ranks")
    else:
        yield Finding("memory", "memory", text)


def shared_memory() -> Iterator[Finding]:
    """What the `shm` backend and data workers use."""
    topic = "shared memory"
    if _SHM.is_dir():
        space = shutil.disk_usage(_SHM)
        small = space.free < 256 << 20
        remedy = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm" if small else ""
        text = f"{format_bytes(space.free)} of {format_bytes(space.total)} free"
        yield Finding(topic, str(_SHM), text, "note" if small else "ok", remedy)
    else:
        yield Finding(topic, str(_SHM), "absent", "note", "mount -t tmpfs tmpfs /dev/shm")
    yield _anonymous(topic)


def _anonymous(topic: str) -> Finding:
    """Try a memory file without a name: make it, map it, read what was written."""
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
        return Finding(topic, "memory files", f"refused: {e}", "note", "a newer kernel, or a looser seccomp profile")
    return Finding(topic, "memory files", "work" if works else "read other than was written")


def limits() -> Iterator[Finding]:
    """Of this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _FILES
    yield Finding(
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
    yield Finding("limits", "processes", _limit(least), "note" if few else "ok", remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fabric = Path("/sys/class/infiniband")
    tight = locked >= 0 and fabric.is_dir() and any(fabric.iterdir())
    yield Finding(
        "limits",
        "locked memory",
        _limit(locked, size=True),
        "note" if tight else "ok",
        "ulimit -l unlimited: the network adapters need it" if tight else "",
    )
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    small = 0 <= stack < 1 << 20
    remedy = "ulimit -s 8192" if small else ""
    yield Finding("limits", "stack", _limit(stack, size=True), "note" if small else "ok", remedy)


def _limit(n: int, *, size: bool = False) -> str:
    if n < 0:
        return "unlimited"
    return format_bytes(n) if size else str(n)


def disk() -> Iterator[Finding]:
    """Where ranks meet, where runs are written, where measurements are kept."""
    for name, folder, needed in (
        ("temporary files", Path(tempfile.gettempdir()), "export TMPDIR=<a folder that can be written>"),
        ("runs", Path.cwd(), "cd to a folder that can be written"),
    ):
        try:
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as e:
            # Without a place for temporary files ranks cannot meet; runs can go elsewhere.
            state = "problem" if name == "temporary files" else "note"
            yield Finding("disk", name, f"{folder}: {e.strerror}", state, needed)  # type: ignore[arg-type]  # one of two
            continue
        low = free < GIB
        remedy = "make room, or work on another disk" if low else ""
        yield Finding("disk", name, f"{folder}: {format_bytes(free)} free", "note" if low else "ok", remedy)
