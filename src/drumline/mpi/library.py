"""The functions of MPI that belong to no object: start and end, time, memory, versions."""

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
from .buffers import address_of
from .exception import MPIError
from .info import INFO_NULL, Info
from .memory import buffer
from .request import Pending, Request

_attached: list[Any] = []


def Init() -> None:
    """Meet the other ranks; the first use of COMM_WORLD does it as well."""
    world.matching()


def Init_thread(required: int = C.THREAD_MULTIPLE) -> int:
    """The same; every thread may send and receive."""
    Init()
    return C.THREAD_MULTIPLE


def Finalize() -> None:
    """Leave the other ranks; the end of the program does it as well."""
    world.finalize()


def Is_initialized() -> bool:
    """Whether MPI may be used: from the import on."""
    return True


def Is_finalized() -> bool:
    """Whether this rank has left."""
    return world.finalized()


def Query_thread() -> int:
    """Every thread may send and receive."""
    return C.THREAD_MULTIPLE


def Is_thread_main() -> bool:
    """Whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


def Get_version() -> tuple[int, int]:
    """The standard whose names are kept."""
    return C.VERSION, C.SUBVERSION


def Get_library_version() -> str:
    """Who we are."""
    return "Drumline {}.{}.{}".format(*get_vendor()[1])


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Who we are."""
    try:
        numbers = [int(n) for n in version("drumline").split(".")[:3]]
    except (PackageNotFoundError, ValueError):
        numbers = []
    return "Drumline", tuple((*numbers, 0, 0, 0)[:3])  # type: ignore[return-value]  # three of them


def Get_processor_name() -> str:
    """The name of this host."""
    return platform.node()


def Get_hw_resource_info() -> Info:
    """Nothing is known of the hardware here."""
    return Info.Create()


def Wtime() -> float:
    """Seconds since some time ago."""
    return time.perf_counter()


def Wtick() -> float:
    """The smallest step of Wtime."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Nothing is profiled here."""


def Get_address(location: Any) -> int:
    """Where memory begins."""
    return address_of(location)


def Aint_add(base: int, disp: int) -> int:
    """An address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """How far apart two addresses are."""
    return addr1 - addr2


def Alloc_mem(size: int, info: Info = INFO_NULL) -> buffer:
    """New memory."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Memory is freed when nobody uses it any more."""


def Attach_buffer(buf: Any) -> None:
    """Memory for buffered sends; they find their own."""
    _attached[:] = [buf]


def Detach_buffer() -> Any:
    """Give the memory back."""
    return _attached.pop() if _attached else None


def Flush_buffer() -> None:
    """Nothing is held back."""


def Iflush_buffer() -> Request:
    """Nothing is held back."""
    return Request._of(Pending(None, ()))


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Dims as equal as can be, whose product is the number of ranks; those above 0 are kept."""
    found = [0] * dims if isinstance(dims, int) else list(dims)
    free = [i for i, d in enumerate(found) if d == 0]
    fixed = prod(d for d in found if d)
    if fixed <= 0 or nnodes % fixed or (not free and fixed != nnodes):
        raise MPIError(C.ERR_DIMS, f"{nnodes} ranks in {found}", rule="the product of the dims divides the ranks")
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
        found[i] = size
    return found
