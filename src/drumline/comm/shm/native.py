"""Compile core.c at first use with the machine's C compiler, and load it.

Without a compiler `load` raises NativeUnavailable, and python_core.py does the same work, slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("core.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")

SLOW = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)
"""(rank waited for, which counter) -> nonzero to end the wait. Called about ten times a second during a wait."""


class NativeGroup(ctypes.Structure):
    """One rank's view of the shared memory: `Group` of core.c."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("p", ctypes.c_int32),
        ("r", ctypes.c_int32),
        ("small", ctypes.c_uint64),
        ("slot", ctypes.c_uint64),
        ("ring", ctypes.c_uint64),
        ("control_at", ctypes.c_uint64),
        ("small_at", ctypes.c_uint64),
        ("in_at", ctypes.c_uint64),
        ("out_at", ctypes.c_uint64),
        ("ring_at", ctypes.c_uint64),
        ("tick", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("spin_ns", ctypes.c_uint32),
        ("yield_ns", ctypes.c_uint32),
        ("slice_ms", ctypes.c_uint32),
        ("crossed", ctypes.c_uint32),
        ("slow", SLOW),
    )


class NativeUnavailable(Exception):
    """The reason why core.c cannot be used."""


@cache
def load() -> ctypes.CDLL:
    """The compiled core, cached or compiled now; raises NativeUnavailable with the reason if that fails."""
    if os.environ.get("DRUMLINE_NATIVE") == "0":
        raise NativeUnavailable("DRUMLINE_NATIVE=0")
    if platform.system() != "Linux":
        raise NativeUnavailable(f"core.c waits by futex, which {platform.system()} lacks")
    folder, persistent = _cache_folder()
    path = folder / f"shm-{_digest()}.so"
    try:
        if not path.exists():
            _compile(path)
        return _typed(ctypes.CDLL(str(path)))
    except OSError as e:
        raise NativeUnavailable(f"the compiled core cannot be loaded: {e}") from None
    finally:
        if not persistent:
            shutil.rmtree(folder, ignore_errors=True)  # the library stays loaded


def _cache_folder() -> tuple[Path, bool]:
    """A folder that only this user can write to, because its code runs in this process; and whether it persists."""
    base = os.environ.get("DRUMLINE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base or Path.home() / ".cache") / "drumline-native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022 or not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} belongs to another user, or others may write to it")
    except (OSError, RuntimeError):
        # a read-only, foreign or missing home: compile for this process only
        return Path(tempfile.mkdtemp(prefix="drumline-native-")), False
    return folder, True


def _digest() -> str:
    """A hash of source, compiler options and processor, for the file name."""
    processor = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        pass
    text = _SOURCE.read_bytes() + " ".join(_FLAGS).encode() + (platform.machine() + processor).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _compile(path: Path) -> None:
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler (cc, gcc or clang) is on the path")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "core.so"
        command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode:
            raise NativeUnavailable(f"{compiler} failed: {result.stderr.strip()[:400]}")
        # Ranks may compile at the same time: each its own file, and the last rename wins.
        made.replace(path)


def _typed(core: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions' signatures to ctypes."""
    group, pointer, i32, u32, u64 = (
        ctypes.POINTER(NativeGroup),
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_uint64,
    )
    for name, result, arguments in (
        ("dl_all_reduce", i32, (group, pointer, u64, u64, i32, i32, i32, u64, u64)),
        ("dl_reduce_scatter", i32, (group, pointer, pointer, u64, u64, i32, i32, u64, u64)),
        ("dl_spread", i32, (group, pointer, pointer, pointer, u64, u64)),
        ("dl_exchange", i32, (group, pointer, pointer, pointer, pointer, u64, u64)),
        ("dl_barrier", i32, (group, u64, u64)),
        ("dl_ring_write", u64, (group, i32, pointer, u64, i32)),
        ("dl_ring_read", u64, (group, i32, pointer, u64)),
        ("dl_ring_waiting", u64, (group, i32)),
        ("dl_ring_any", i32, (group, i32)),
        ("dl_bell", u32, (group, u32, u32)),
        ("dl_call", None, (group, i32, ctypes.POINTER(u64), ctypes.POINTER(u64))),
        ("dl_control_size", u64, ()),
        ("dl_ring_size", u64, ()),
    ):
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core
