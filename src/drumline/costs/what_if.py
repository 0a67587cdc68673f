"""Changes numbers of a cluster: by the user (`--set node.link.bandwidth=400GB/s`), or to another host speed.

A measured table of collectives, or a measured curve of kernels, would hide such a change. So tables of changed
links are dropped, and curves are scaled with their peak rate.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ..clusters import Cluster, DeviceSpec, KernelCurve, ShapeTimes
from ..core import files
from ..core.errors import ClusterError, nearest
from ..models.profile import COMPUTE_KINDS, Profile
from ..plans import Plan
from .operator_model import estimate

FROM_COMMAND_LINE = "given on the command line"

_FORM = "KEY=VALUE, such as node.link.bandwidth=400GB/s or device.peak.bf16=500TFLOP/s"

_CONNECTIONS = ("network.topology", "network.shape")


def with_changes(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """The cluster with some of its numbers changed, each by KEY=VALUE; units as in a cluster file."""
    if not changes:
        return cluster
    table = files.to_plain(cluster)
    keys = []
    for text in changes:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key or not value:
            raise ClusterError(f"--set {text}", rule=_FORM)
        key = files.current_key(Cluster, key)
        _known(key, cluster)
        _put(table, key.split("."), value)
        keys.append(key)
    changed = files.from_plain(Cluster, table, "--set", ClusterError)
    origin = {k: v for k, v in changed.origin.items() if not any(k.startswith(f"{key}.") for key in keys)}
    changed = dataclasses.replace(changed, origin=origin | dict.fromkeys(keys, FROM_COMMAND_LINE))
    return _with_consequences(cluster, changed, keys)


def settable(cluster: Cluster) -> tuple[str, ...]:
    """Every key that can be set: numbers, and how nodes are connected, but no tables."""
    return (*_numbers(Cluster, "", cluster), *(_CONNECTIONS if cluster.network else ()))


def _numbers(cls: Any, prefix: str, value: object) -> Iterator[str]:
    for name, hint in get_type_hints(cls, include_extras=False).items():
        if name.startswith("__"):
            continue
        inner, here = _inside(hint), getattr(value, name, None)
        if dataclasses.is_dataclass(inner):
            yield from _numbers(inner, f"{prefix}{name}.", here)
        elif get_origin(inner) is dict and get_args(inner)[1] is not str:
            yield from (f"{prefix}{name}.{key}" for key in (here or ()))
        elif inner in (int, float, bool):
            yield prefix + name


def _inside(hint: Any) -> Any:
    """The type of a hint, without None and pydantic's annotations."""
    if get_origin(hint) is Annotated:
        return _inside(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return _inside(next(kind for kind in get_args(hint) if kind is not type(None)))
    return hint


def _known(key: str, cluster: Cluster) -> None:
    known = settable(cluster)
    # a precision that the device has no rate for yet may be given one
    if key in known or (key.startswith("device.peak.") and key.count(".") == 2):
        return
    below = [k for k in known if k.startswith(f"{key}.")]
    if below:
        raise ClusterError(f"--set {key}: that is a table", rule=f"it has {', '.join(below)}")
    last = {k.rpartition(".")[2]: k for k in known}
    near = nearest(key, known) or (f"Did you mean {last[key]!r}?" if key in last else "")
    raise ClusterError(f"--set {key}: {cluster.name} has no such number", rule=_FORM, fix=near)


def _put(table: dict[str, Any], path: list[str], value: str) -> None:
    for word in path[:-1]:
        table = table.setdefault(word, {})
    table[path[-1]] = value


def _with_consequences(old: Cluster, new: Cluster, keys: Sequence[str]) -> Cluster:
    """Adapt what depends on the changed numbers."""
    device, origin = new.device, dict(new.origin)
    ratios = {d: device.peak[d] / old.device.peak[d] for d in old.device.peak if device.peak[d] != old.device.peak[d]}
    wider = device.bandwidth / old.device.bandwidth
    if ratios or wider != 1:
        device = _scaled(device, ratios, wider)
        origin["device.curve"] = f"scaled with what was {FROM_COMMAND_LINE}; before: {old.origin_of('device.curve')}"
    if any(".link." in key for key in keys):
        new = dataclasses.replace(new, collective=(), rank_link=())
        origin = {k: v for k, v in origin.items() if k.split(".")[0] not in ("collective", "rank_link")}
    return dataclasses.replace(new, device=device, origin=origin)


def _scaled(device: DeviceSpec, ratios: dict[str, float], wider: float) -> DeviceSpec:
    """Compute curves and shapes follow the peak of their type, memory curves the bandwidth."""

    def scaled(curve: KernelCurve) -> KernelCurve:
        ratio = ratios.get(curve.dtype, 1.0) if curve.kernel in COMPUTE_KINDS else wider
        return dataclasses.replace(curve, rates=tuple(rate * ratio for rate in curve.rates))

    def faster(table: ShapeTimes) -> ShapeTimes:
        ratio = ratios.get(table.dtype, 1.0)
        return dataclasses.replace(table, seconds=tuple(seconds / ratio for seconds in table.seconds))

    return dataclasses.replace(
        device, curve=tuple(map(scaled, device.curve)), shape_times=tuple(map(faster, device.shape_times))
    )


SPEED_PROBE = "speed_probe"
"""The key of `DeviceSpec.host_overhead` that is not a price: the seconds of the small step that measures host speed."""


def with_host_slowdown(cluster: Cluster, slowdown: float) -> Cluster:
    """The cluster if the hosts of its GPUs take `slowdown` times as long as measured."""
    device = cluster.device
    overhead = {k: seconds if k == SPEED_PROBE else slowdown * seconds for k, seconds in device.host_overhead.items()}
    changed = dataclasses.replace(device, host_overhead=overhead, launch=slowdown * device.launch)
    return dataclasses.replace(cluster, device=changed)


def speed_at_host_slowdown(slowdown: float, profile: Profile, plan: Plan, cluster: Cluster) -> float:
    """The speed of a step at that host slowdown, relative to the measured one; 1 for a step bound by its GPU."""
    usual, now = (estimate(profile, plan, c).step_seconds for c in (cluster, with_host_slowdown(cluster, slowdown)))
    return usual / now
