"""The functions of MPI without an object: initialisation, time, memory, versions."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

from . import constants as C
from . import world
from .byte_buffer import buffer
from .exception import MPIError
from .info import INFO_NULL, Info
from .memory import address_of, check_attachable
from .pending import PendingOperation
from .request import Request

_attached: list[Any] = []


def Init() -> None:
    """Connect to the other ranks; the first use of COMM_WORLD does it as well."""
    world.matcher()


def Init_thread(required: int = C.THREAD_MULTIPLE) -> int:
    """Connect to the other ranks; every thread may send and receive."""
    Init()
    return C.THREAD_MULTIPLE


def Finalize() -> None:
    """Disconnect from the other ranks; the end of the program does it as well."""
    world.finalize()


def Is_initialized() -> bool:
    """Whether MPI may be used: always, after the import."""
    return True


def Is_finalized() -> bool:
    """Whether this rank has left."""
    return world.finalized()


def Query_thread() -> int:
    """THREAD_MULTIPLE: every thread may send and receive."""
    return C.THREAD_MULTIPLE


def Is_thread_main() -> bool:
    """Whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


def Get_version() -> tuple[int, int]:
    """The version of the MPI standard."""
    return C.VERSION, C.SUBVERSION


def Get_library_version() -> str:
    """Name and version of this library."""
    return "Drumline {}.{}.{}".format(*get_vendor()[1])


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Name and version of this library."""
    try:
        numbers = [int(n) for n in version("drumline").split(".")[:3]]
    except (PackageNotFoundError, ValueError):
        numbers = []
    return "Drumline", tuple((*numbers, 0, 0, 0)[:3])  # type: ignore[return-value]  # three numbers


def Get_processor_name() -> str:
    """The name of this host."""
    return platform.node()


def Get_hw_resource_info() -> Info:
    """An empty info: hardware resources are not reported."""
    return Info.Create()


def Wtime() -> float:
    """Seconds since an arbitrary time."""
    return time.perf_counter()


def Wtick() -> float:
    """The resolution of Wtime."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Do nothing: there is no profiling interface."""


def Get_address(location: Any) -> int:
    """The address of memory."""
    return address_of(location)


def Aint_add(base: int, disp: int) -> int:
    """The sum of an address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """The difference of two addresses."""
    return addr1 - addr2


def Alloc_mem(size: int, info: Info = INFO_NULL) -> buffer:
    """Allocate memory."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Give memory up; it is freed with its last reference."""
    mem.release()


def Attach_buffer(buf: Any) -> None:
    """Attach a buffer; buffered sends allocate their own."""
    check_attachable(buf)
    _attached[:] = [buf]


def Detach_buffer() -> Any:
    """Detach and return the buffer."""
    return _attached.pop() if _attached else None


def Flush_buffer() -> None:
    """Do nothing: no send is held back."""


def Iflush_buffer() -> Request:
    """Do nothing: no send is held back."""
    return Request._of(PendingOperation(None, ()))


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Balanced dims whose product is the number of ranks; those above 0 are kept."""
    result = [0] * dims if isinstance(dims, int) else list(dims)
    free = [i for i, d in enumerate(result) if d == 0]
    fixed = prod(d for d in result if d)
    if fixed <= 0 or nnodes % fixed or (not free and fixed != nnodes):
        raise MPIError(C.ERR_DIMS, f"{nnodes} ranks in {result}", rule="the product of the dims divides the ranks")
    sizes, left, factor = [1] * len(free), nnodes // fixed, 2
    factors = []
    while left > 1:
        while left % factor == 0:
            factors.append(factor)
            left //= factor
        factor += 1
    for f in reversed(factors):
        sizes[sizes.index(min(sizes))] *= f
    for i, size in zip(free, sorted(sizes, reverse=True), strict=True):
        result[i] = size
    return result
