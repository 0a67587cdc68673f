"""What `recompute=selective` keeps of each layer and what it computes again: as a table, and as rows for JSON."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ..core.errors import InputError, nearest
from ..core.units import format_bytes
from ..models.profile import Profile
from ..models.selective import BALANCE, LIMIT, choices, kept_bytes
from .text import NARROW, folded


def recompute_rows(profile: Profile, device: str, n: int) -> list[dict[str, Any]]:
    """The values that every layer's forward makes for n samples, those with most bytes for their time first."""
    rows = []
    for name, count, layer in folded(profile):
        if not layer.composite:
            continue  # a single operator has nothing that could be computed again
        for c in choices(layer, device, profile.activation_bytes):
            made, moved = c.count * c.bytes.at(n), c.count * c.moved.at(n)
            found = {"layer": name, "layers": count, "value": c.name, "verdict": c.verdict}
            rows.append({**found, "bytes": made, "moved_bytes": moved})
    return rows


def recompute_table(rows: list[dict[str, Any]], *, width: int) -> RenderableType:
    """The rows by layer; the price is bytes that memory could move while one byte is computed again."""
    table = Table(box=None, pad_edge=False, padding=(0, 2 if width >= NARROW else 1, 0, 0), show_edge=False)
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
    """What it comes to, beside the inputs of the layers, which are kept in any case."""
    layers = [x for x in profile.layers if x.composite]
    if not layers:
        return "recompute=selective: no layer holds other modules, so there is nothing to compute again"
    whole = sum(x.saved.at(n) * x.repeats for x in layers)
    kept = sum(kept_bytes(x, device, profile.activation_bytes).at(n) * x.repeats for x in layers)
    return (
        f"recompute=selective on {device}, for {n} sample{'s' if n > 1 else ''}: {format_bytes(kept)} are kept beside "
        f"the inputs of these layers, instead of {format_bytes(whole)}\n"
        f"price: bytes that memory could move while one byte is computed again; above {LIMIT:g} it is kept"
    )


def check_kind(device: str) -> None:
    """Refuse a kind of device that nobody knows."""
    if device not in BALANCE:
        rule = f"a kind of device is {' or '.join(BALANCE)}"
        raise InputError(f"--recompute {device}", rule=rule, fix=nearest(device, list(BALANCE)))
