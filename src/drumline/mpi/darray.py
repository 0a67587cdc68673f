"""The layout of one rank's part of a distributed array, in blocks or cyclic, as in High Performance Fortran."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from . import constants as C
from .exception import MPIError
from .type_layout import TypeLayout, box


def distributed_array(
    size: int,
    rank: int,
    gsizes: Sequence[int],
    distribs: Sequence[int],
    dargs: Sequence[int],
    psizes: Sequence[int],
    order: int,
    old: TypeLayout,
) -> TypeLayout:
    """The elements of `rank` in a row-major grid of `size` ranks."""
    if not len(gsizes) == len(distribs) == len(dargs) == len(psizes):
        lengths = [len(values) for values in (gsizes, distribs, dargs, psizes)]
        raise ValueError(f"expecting {lengths[0]} items in each list, got {lengths}")
    if not 0 <= rank < size:
        raise MPIError(C.ERR_RANK, f"rank {rank}", rule=f"0 <= rank < {size}")
    if prod(psizes) != size or any(n < 1 for n in psizes):
        raise MPIError(C.ERR_ARG, f"a grid of {list(psizes)}", rule=f"its product is {size}")
    coords: list[int] = []
    for p in reversed(psizes):
        rank, coord = divmod(rank, p)
        coords.insert(0, coord)
    dims = [
        (n, _runs(n, p, coord, distribution, argument))
        for n, p, coord, distribution, argument in zip(gsizes, psizes, coords, distribs, dargs, strict=True)
    ]
    return box(dims if order == C.ORDER_C else dims[::-1], old)


def _runs(n: int, p: int, coord: int, distribution: int, argument: int) -> list[tuple[int, int]]:
    """(first, count) of the elements of one of p ranks along a dim of n elements."""
    default = argument == C.DISTRIBUTE_DFLT_DARG
    if n < 1 or (not default and argument < 1 and distribution != C.DISTRIBUTE_NONE):
        raise MPIError(C.ERR_ARG, f"a dim of {n} elements in blocks of {argument}", rule="both are at least 1")
    if distribution == C.DISTRIBUTE_NONE:
        if p != 1:
            raise MPIError(C.ERR_ARG, f"{p} ranks along a dim that is not distributed", rule="one rank")
        return [(0, n)]
    if distribution == C.DISTRIBUTE_BLOCK:
        length = -(-n // p) if default else argument
        if length * p < n:
            raise MPIError(C.ERR_ARG, f"{n} elements in blocks of {length} on {p} ranks", rule="one block per rank")
    elif distribution == C.DISTRIBUTE_CYCLIC:
        length = 1 if default else argument
    else:
        raise MPIError(C.ERR_ARG, f"distribution {distribution}", rule="one of DISTRIBUTE_NONE, _BLOCK and _CYCLIC")
    return [(first, min(length, n - first)) for first in range(coord * length, n, p * length)]
