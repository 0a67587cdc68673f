"""Environment of the process: network, clock, versions, terminal."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil
import torch

from .findings import DoctorFinding

MASTER_PORT = 29500
"""Default rendezvous port of torch."""
_UNSTEADY = 1.3
"""Ratio of slow to fast moments above which timings are unreliable."""


def network() -> Iterator[DoctorFinding]:
    """Sockets, gloo's interface, and the default port."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2.0):
            pass
        yield DoctorFinding("network", "loopback", "works")
    except OSError as e:
        yield DoctorFinding("network", "loopback", f"refused: {e}", "problem", "ip link set lo up")
    yield _gloo()
    text = os.environ.get("MASTER_PORT", str(MASTER_PORT))
    port = int(text) if text.isdigit() and 0 < int(text) < 65536 else MASTER_PORT
    try:
        with socket.create_server(("127.0.0.1", port)):
            yield DoctorFinding("network", f"port {port}", "free")
    except OSError:
        with socket.create_server(("127.0.0.1", 0)) as server:
            other = server.getsockname()[1]
        remedy = f"for torchrun: --master-port {other}; Drumline's own ranks need no port"
        yield DoctorFinding("network", f"port {port}", "taken", "note", remedy)


def _gloo() -> DoctorFinding:
    """Gloo uses the interface that the host's own name resolves to, unless one is named."""
    real = {name for name, _ in _addresses() if name != "lo"}
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        known = named in psutil.net_if_addrs()
        have = ", ".join(sorted(psutil.net_if_addrs()))
        return DoctorFinding(
            "network",
            "gloo's interface",
            f"{named} (GLOO_SOCKET_IFNAME){'' if known else ', absent'}",
            "ok" if known else "note",
            "" if known else f"one of: {have}",
        )
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    name = next((name for name, own in _addresses() if own == address), "")
    if name and name != "lo":
        return DoctorFinding("network", "gloo's interface", f"{name} ({address})")
    remedy = f"across machines: export GLOO_SOCKET_IFNAME={min(real)}" if real else ""
    what = f"loopback, because {socket.gethostname()} is {address or 'not resolved'}"
    return DoctorFinding("network", "gloo's interface", what, "note" if real else "ok", remedy)


def _addresses() -> list[tuple[str, str]]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and (name in up or entry.address.startswith("127."))
    ]


def clock() -> Iterator[DoctorFinding]:
    """Resolution of the clock, its agreement with file times, and steadiness of the machine's speed."""
    step = _smallest_step()
    coarse = step > 1e-5
    yield DoctorFinding(
        "clock",
        "smallest step",
        f"{step * 1e9:.0f} ns",
        "note" if coarse else "ok",
        "short kernels are timed in longer runs" if coarse else "",
    )
    with tempfile.NamedTemporaryFile() as file:
        difference = os.stat(file.name).st_mtime - time.time()
    off = abs(difference) > 2.0
    yield DoctorFinding(
        "clock",
        "time of files",
        "agrees" if not off else f"{difference:+.1f} s off",
        "note" if off else "ok",
        "set the clock: timedatectl set-ntp true" if off else "",
    )
    spread = steadiness()
    unsteady = spread > _UNSTEADY
    remedy = "other programs compute here too: measure when the machine is idle, and repeat" if unsteady else ""
    yield DoctorFinding(
        "clock", "speed", f"slow moments take {spread:.2f}x as long as fast ones", "note" if unsteady else "ok", remedy
    )


def _smallest_step() -> float:
    steps = []
    for _ in range(200):
        start = now = time.perf_counter()
        while now == start:
            now = time.perf_counter()
        steps.append(now - start)
    return min(steps)


def steadiness(slices: int = 60) -> float:
    """Ninth over first decile of the times of equal work, repeated for about half a second."""
    a, times, threads = torch.randn(256, 256), [], torch.get_num_threads()
    torch.set_num_threads(1)  # else threads that wait for each other would count
    for _ in range(slices):
        start = time.perf_counter()
        for _ in range(8):
            a @ a
        times.append(time.perf_counter() - start)
        time.sleep(0.004)
    torch.set_num_threads(threads)
    tenths = statistics.quantiles(times[slices // 6 :], n=10)
    return tenths[-1] / tenths[0]


def versions() -> Iterator[DoctorFinding]:
    """Versions of required and optional dependencies."""
    from ... import __version__

    yield DoctorFinding("versions", "drumline", __version__)
    old = sys.version_info < (3, 11)
    yield DoctorFinding(
        "versions",
        "Python",
        platform.python_version(),
        "problem" if old else "ok",
        "Drumline needs Python 3.11 or newer" if old else "",
    )
    number = tuple(int(n) for n in torch.__version__.partition("+")[0].split(".")[:2] if n.isdigit())
    old = number < (2, 10)
    remedy = "pip install 'torch>=2.10': older ones load weights unsafely" if old else ""
    yield DoctorFinding("versions", "torch", torch.__version__, "problem" if old else "ok", remedy)
    if torch.cuda.is_available():
        yield DoctorFinding("versions", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    yield _package("mpi4py", "pip install 'drumline[mpi]' for ranks under mpiexec")
    yield _compiler()


def _package(name: str, remedy: str) -> DoctorFinding:
    try:
        return DoctorFinding("versions", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding("versions", name, "not installed", "note", remedy)


def _compiler() -> DoctorFinding:
    path = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    remedy = "apt-get install gcc: without it shared memory is slower"
    if path is None:
        return DoctorFinding("versions", "C compiler", "none", "note", remedy)
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as e:
        return DoctorFinding("versions", "C compiler", f"{path}: {e}", "note", remedy)
    return DoctorFinding("versions", "C compiler", output[0] if output else path)


def terminal() -> Iterator[DoctorFinding]:
    """Encoding and width of the terminal."""
    stream = sys.__stdout__  # a progress bar may replace sys.stdout
    encoding = (stream.encoding if stream else "").lower()
    plain = "utf" not in encoding
    yield DoctorFinding(
        "terminal", "encoding", encoding or "none", "note" if plain else "ok", "export LC_ALL=C.UTF-8" if plain else ""
    )
    size = shutil.get_terminal_size()
    yield DoctorFinding(
        "terminal", "width", f"{size.columns} columns" if stream and stream.isatty() else "not a terminal"
    )
