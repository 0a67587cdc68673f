"""The native part of shared memory: core.c, compiled at first use by the machine's own C compiler, and called here.

Where there is no compiler, `load` says so and python.py does the same work, slower.
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
"""(rank waited for, what for) -> nonzero to stop waiting. Called about ten times a second while a wait lasts."""


class Group(ctypes.Structure):
    """One rank's view of the shared memory, as core.c has it."""

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


class NotNative(Exception):
    """Why the native part is not there."""


@cache
def load() -> ctypes.CDLL:
    """The compiled core, from the cache or compiled now; NotNative with the reason where it cannot be."""
    if os.environ.get("DRUMLINE_NATIVE") == "0":
        raise NotNative("DRUMLINE_NATIVE=0")
    if platform.system() != "Linux":
        raise NotNative(f"core.c waits by futex, which {platform.system()} has not")
    folder, lasting = _folder()
    path = folder / f"shm-{_digest()}.so"
    try:
        if not path.exists():
            _compile(path)
        return _typed(ctypes.CDLL(str(path)))
    except OSError as e:
        raise NotNative(f"the compiled core cannot be loaded: {e}") from None
    finally:
        if not lasting:
            shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays loaded


def _folder() -> tuple[Path, bool]:
    """A folder of this user alone, because what is loaded from there runs in this process; whether it lasts."""
    base = os.environ.get("DRUMLINE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "drumline-native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022 or not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} belongs to somebody else, or others may write to it")
    except OSError:
        # a read-only or foreign home: compile for this process alone
        return Path(tempfile.mkdtemp(prefix="drumline-native-")), False
    return folder, True


def _digest() -> str:
    """Another source, compiler option or processor is another file."""
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
        raise NotNative("no C compiler (cc, gcc or clang) is on the path")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "core.so"
        command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode:
            raise NotNative(f"{compiler} failed: {result.stderr.strip()[:400]}")
        # Ranks compile at the same time: each its own, and the last rename wins.
        made.replace(path)


def _typed(core: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what the functions take."""
    group, pointer, i32, u32, u64 = (
        ctypes.POINTER(Group),
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
