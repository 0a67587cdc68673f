"""What if one number of a cluster were another: `--set node.link.bandwidth=400GB/s`, and what has to follow from it.

A measured table of collectives, or a measured curve of kernels, would hide the change; so tables of the links that
change are left out, and curves are scaled with the rate that they are a share of.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ..clusters import ShapeTimes, Cluster, RateCurve, DeviceSpec
from ..core import files
from ..core.errors import ClusterError, nearest
from ..models.profile import COMPUTE_KINDS

GIVEN = "given on the command line"

_FORM = "KEY=VALUE, such as node.link.bandwidth=400GB/s or device.peak.bf16=500TFLOP/s"


def what_if(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """The cluster with some of its numbers changed, each by KEY=VALUE; units as in a cluster file."""
    if not changes:
        return cluster
    table = files.to_plain(cluster)
    keys = []
    for text in changes:
        key, found, value = (part.strip() for part in text.partition("="))
        if not found or not key or not value:
            raise ClusterError(f"--set {text}", rule=_FORM)
        _known(key, cluster)
        _put(table, key.split("."), value)
        keys.append(key)
    changed = files.from_plain(Cluster, table, "--set", ClusterError)
    origin = {k: v for k, v in changed.origin.items() if not any(k.startswith(f"{key}.") for key in keys)}
    changed = dataclasses.replace(changed, origin=origin | dict.fromkeys(keys, GIVEN))
    return _followed(cluster, changed, keys)


def settable(cluster: Cluster) -> tuple[str, ...]:
    """Every key that can be set: numbers, but no tables."""
    return tuple(_numbers(Cluster, "", cluster))


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
    """The type that a hint is about, without None and without what pydantic is told beside it."""
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


def _followed(old: Cluster, new: Cluster, keys: Sequence[str]) -> Cluster:
    """What the change takes along."""
    device, origin = new.device, dict(new.origin)
    ratios = {d: device.peak[d] / old.device.peak[d] for d in old.device.peak if device.peak[d] != old.device.peak[d]}
    wider = device.bandwidth / old.device.bandwidth
    if ratios or wider != 1:
        device = _scaled(device, ratios, wider)
        origin["device.curve"] = f"scaled with what was {GIVEN}; before: {old.origin_of('device.curve')}"
    if any(".link." in key for key in keys):
        new = dataclasses.replace(new, collective=(), rank_link=())
        origin = {k: v for k, v in origin.items() if k.split(".")[0] not in ("collective", "rank_link")}
    return dataclasses.replace(new, device=device, origin=origin)


def _scaled(device: DeviceSpec, ratios: dict[str, float], wider: float) -> DeviceSpec:
    """Curves and clouds of compute follow the peak of their type, curves of memory the bandwidth."""

    def scaled(curve: RateCurve) -> RateCurve:
        ratio = ratios.get(curve.dtype, 1.0) if curve.kernel in COMPUTE_KINDS else wider
        return dataclasses.replace(curve, rates=tuple(rate * ratio for rate in curve.rates))

    def faster(cloud: ShapeTimes) -> ShapeTimes:
        ratio = ratios.get(cloud.dtype, 1.0)
        return dataclasses.replace(cloud, seconds=tuple(seconds / ratio for seconds in cloud.seconds))

    return dataclasses.replace(device, curve=tuple(map(scaled, device.curve)), shape_times=tuple(map(faster, device.shape_times)))
