"""A profile as text: its layers with their totals, and the values that `recompute=selective` keeps or recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from ..core.errors import InputError, nearest
from ..core.units import format_bytes, format_count
from ..models.profile import Layer, Profile
from ..models.recompute_choice import MAX_MOVED_PER_BYTE, OPERATIONS_PER_VALUE, choices, kept_bytes
from .console import NARROW, borderless_table


def profile_table(profile: Profile, *, width: int, n: int) -> RenderableType:
    """Layers with work, parameters and saved activations for n samples; equal neighbours are one row."""
    table = borderless_table(gap=2 if width >= NARROW else 1)
    table.add_column("layer", overflow="fold")
    if width >= NARROW + 20:
        table.add_column("kind", overflow="ellipsis", no_wrap=True)
    for name in ("params", "work", "depth", "bytes", "kept")[:: 1 if width >= NARROW else 2]:
        table.add_column(name, justify="right", no_wrap=True)
    for name, count, layer in folded(profile):
        label = name if count == 1 else f"{name} (x{count})"
        cells = [
            format_count(layer.parameters + layer.frozen),
            format_count(layer.flops().at(n), "FLOP"),
            format_count(layer.depth_forward + layer.depth_backward),
            format_bytes(layer.bytes().at(n)),
            format_bytes(layer.saved.at(n)),
        ]
        kind = [layer.kind] if width >= NARROW + 20 else []
        table.add_row(label, *kind, *cells[:: 1 if width >= NARROW else 2])
    return table


def profile_totals(profile: Profile, n: int) -> str:
    """Totals: parameters, model states, activations, work, depth, average parallelism."""
    work, depth = profile.flops().at(n), profile.depth.at(n)
    state = profile.trained * (2 * profile.parameter_bytes + profile.state_per_parameter)
    kept = sum(x.saved.at(n) * x.repeats for x in profile.layers)
    frozen = profile.parameters - profile.trained
    lines = [
        f"{format_count(profile.parameters)} parameters" + (f", {format_count(frozen)} frozen" if frozen else ""),
        f"parameters, gradients and {profile.optimizer} state: {format_bytes(state)}",
        f"activations kept for {n} sample{'s' if n > 1 else ''}: {format_bytes(kept)}",
        f"work {format_count(work, 'FLOP')} (forward {format_count(profile.flops('forward').at(n), 'FLOP')}, "
        f"backward {format_count(profile.flops('backward').at(n), 'FLOP')})",
    ]
    if depth:
        lines.append(f"depth {format_count(depth)}, average parallelism {format_count(work / depth)}")
    return "\n".join([*lines, *(f"note: {note}" for note in profile.notes)])


def folded(profile: Profile) -> Iterator[tuple[str, int, Layer]]:
    """Runs of equal layers as one: (name, count, one of them)."""
    run: list[Layer] = []
    for layer in profile.layers:
        if run and _equal(run[-1], layer):
            run.append(layer)
            continue
        if run:
            yield _name(run), sum(x.repeats for x in run), run[0]
        run = [layer]
    if run:
        yield _name(run), sum(x.repeats for x in run), run[0]


def _equal(a: Layer, b: Layer) -> bool:
    same_parent = a.name.rpartition(".")[0] == b.name.rpartition(".")[0]
    return same_parent and (a.kind, a.parameters, a.ops) == (b.kind, b.parameters, b.ops)


def _name(run: list[Layer]) -> str:
    first = run[0].name or "(model)"
    count = sum(x.repeats for x in run)
    if count == 1:
        return first
    head, _, number = first.rpartition(".")
    return f"{head}.{number}-{int(number) + count - 1}" if number.isdigit() else first


# ---- selective recomputation


def recompute_rows(profile: Profile, device: str, n: int) -> list[dict[str, Any]]:
    """The values that each layer's forward makes for n samples, those that free most bytes per second first."""
    rows = []
    for name, count, layer in folded(profile):
        if not layer.composite:
            continue  # a single operator has nothing to recompute
        for c in choices(layer, device, profile.activation_bytes):
            sizes = {"bytes": c.count * c.bytes.at(n), "moved_bytes": c.count * c.moved.at(n)}
            rows.append({"layer": name, "layers": count, "value": c.name, "verdict": c.verdict, **sizes})
    return rows


def recompute_table(rows: list[dict[str, Any]], *, width: int) -> RenderableType:
    """The rows by layer. Price: bytes that memory could move in the time it takes to recompute one byte."""
    table = borderless_table(gap=2 if width >= NARROW else 1)
    table.add_column("layer", overflow="fold")
    table.add_column("value", overflow="fold")
    for name in ("", "bytes", "price"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        label = row["layer"] if row["layers"] == 1 else f"{row['layer']} (x{row['layers']})"
        price = f"{row['moved_bytes'] / row['bytes']:.1f}" if row["bytes"] else "-"
        table.add_row("" if label == before else label, row["value"], row["verdict"], format_bytes(row["bytes"]), price)
        before = label
    return table


def recompute_totals(profile: Profile, device: str, n: int) -> str:
    """Bytes kept in total, besides the inputs of the layers, which are always kept."""
    layers = [x for x in profile.layers if x.composite]
    if not layers:
        return "recompute=selective: no layer contains other modules, so there is nothing to recompute"
    whole = sum(x.saved.at(n) * x.repeats for x in layers)
    kept = sum(kept_bytes(x, device, profile.activation_bytes).at(n) * x.repeats for x in layers)
    return (
        f"recompute=selective on {device}, for {n} sample{'s' if n > 1 else ''}: keeps {format_bytes(kept)} besides "
        f"the inputs of these layers, instead of {format_bytes(whole)}\n"
        f"price: bytes that memory could move while one byte is recomputed; above {MAX_MOVED_PER_BYTE:g} it is kept"
    )


def check_device_kind(device: str) -> None:
    """Refuse an unknown kind of device."""
    if device not in OPERATIONS_PER_VALUE:
        rule = f"a kind of device is {' or '.join(OPERATIONS_PER_VALUE)}"
        raise InputError(f"--recompute {device}", rule=rule, fix=nearest(device, list(OPERATIONS_PER_VALUE)))
