"""The reserve: device memory that a proposed plan leaves free, because an allocator is slow near its limit."""

from __future__ import annotations

import math
from dataclasses import replace

from ..clusters import Cluster
from ..core.errors import InputError
from ..core.units import format_bytes, parse_bytes
from ..costs import Estimate

GPU_RESERVE = 0.1
"""Share of the memory that a GPU has for tensors, kept free unless `--reserve` says otherwise.

Near the limit the allocator frees its cached blocks and asks the driver again in every step, and fragments may be too
small for the next tensor. In a published sweep on H100 with 80 GB (the table in docs/planning.md) all runs with a peak
of 70.8 GB and more took several times the predicted step, and few of those with less. A tenth of 78.1 GiB puts the
limit at 70.3 GiB: between the two if the sweep's GB are GiB, which its largest value suggests. If they are 1e9 bytes,
slow runs begin at 65.9 GiB and 16% would be needed. It also covers the error of predicted memory. A larger share
proposes plans with more sharding, more micro-batches or more recomputation; a smaller one, plans that may be slow or
run out of memory.
CPUs have none: the limit of a rank is already a share of its host."""

Reserve = str | float | None
"""A share (`10%`, 0.1), a size (`8GB`, 8e9), 0 for none, or None for the default of the device."""


def reserve_bytes(reserve: Reserve, cluster: Cluster) -> float:
    """Bytes of each device that stay free. A number below 1 is a share of the memory for tensors."""
    device = cluster.device
    limit = max(0.0, device.memory - device.context)
    if reserve is None:
        return GPU_RESERVE * limit if device.kind == "cuda" else 0.0
    check_reserve(reserve)
    size = _parsed(reserve)
    size = size * limit if size < 1 else size
    if size >= limit:
        raise InputError(
            f"--reserve {reserve}", rule=f"less than the {format_bytes(limit)} that a device has for tensors"
        )
    return size


def check_reserve(reserve: Reserve) -> None:
    """Refuse what is neither a share nor a size, before anything is traced or measured."""
    rule = "a share of the memory below 100%, such as 10%, or a size such as 8GB; 0 for none"
    try:
        size = 0.0 if reserve is None else _parsed(reserve)
    except ValueError:
        raise InputError(f"--reserve {reserve}", rule=rule) from None
    if not 0 <= size < math.inf:
        raise InputError(f"--reserve {reserve}", rule=rule)


def _parsed(reserve: str | float) -> float:
    """A share below 1, or bytes."""
    if isinstance(reserve, bool):
        raise ValueError(reserve)
    text = str(reserve).strip()
    if not text.endswith("%"):
        return parse_bytes(text)
    share = float(text[:-1]) / 100
    if share >= 1:
        raise ValueError(text)
    return share


def without_reserve(cluster: Cluster, size: float) -> Cluster:
    """The machines with that much less memory a device."""
    return replace(cluster, device=replace(cluster.device, memory=cluster.device.memory - size)) if size else cluster


def with_reserve(e: Estimate, size: float, *, hidden: bool) -> Estimate:
    """The estimate against the whole memory, with its reserve. `hidden`: its limit was without the reserve so far."""
    if not size or e.reserve_bytes:
        return e
    return replace(e, memory_limit=e.memory_limit + size * hidden, reserve_bytes=size)
