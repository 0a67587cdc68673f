"""What the commands print for a person: tables that also read in 40 columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.units import format_bytes, format_count, format_percent, format_seconds
from ..costs import Estimate
from ..models.profile import Layer, Profile
from ..planner import Answer

NARROW = 70
"""Below this width tables lose their less important columns."""


def plans_table(answer: Answer, *, top: int, width: int) -> RenderableType:
    """The best candidates with their reasons; on a narrow terminal the reasons stand below the plans."""
    narrow = width < NARROW + 20
    table = Table(box=None, pad_edge=False, padding=(0, 2 if not narrow else 1, 0, 0), show_edge=False)
    table.add_column("plan", overflow="fold", ratio=None if not narrow else 1)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("why", overflow="fold")
    for c in answer.candidates[:top]:
        style = "" if c.fits else "dim"
        name: RenderableType = Text(c.plan, style="bold" if c is answer.candidates[0] else "")
        if narrow:
            name = Group(name, Text(f"  {c.reason}", style="dim"))
        row = [name, Text(format_seconds(c.step_seconds)), Text(format_bytes(c.memory_bytes))]
        table.add_row(*row, *([] if narrow else [Text(c.reason)]), style=style)
    rest = len(answer.candidates) - top
    return Group(table, Text(f"and {rest} more (--top)", style="dim")) if rest > 0 else table


def profile_table(profile: Profile, *, width: int, n: int) -> RenderableType:
    """Layers with their work, parameters and kept activations for n samples; equal neighbours are folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2 if width >= NARROW else 1, 0, 0), show_edge=False)
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
    """The sums: work, depth, average parallelism, parameters, states, activations."""
    work, depth = profile.flops().at(n), profile.depth.at(n)
    state = profile.trained * (2 * profile.parameter_bytes + profile.state_per_parameter)
    kept = sum(x.saved.at(n) * x.repeats for x in profile.layers)
    frozen = profile.parameters - profile.trained
    lines = [
        f"{format_count(profile.parameters)} parameters" + (f", {format_count(frozen)} frozen" if frozen else ""),
        f"parameters, gradients and {profile.optimizer} state: {format_bytes(state)}",
        f"for {n} sample{'s' if n > 1 else ''}: {format_bytes(kept)} of activations kept",
        f"work {format_count(work, 'FLOP')} (forward {format_count(profile.flops('forward').at(n), 'FLOP')}, "
        f"backward {format_count(profile.flops('backward').at(n), 'FLOP')})",
    ]
    if depth:
        lines.append(f"depth {format_count(depth)}, average parallelism {format_count(work / depth)}")
    return "\n".join([*lines, *(f"note: {note}" for note in profile.notes)])


def folded(profile: Profile) -> Iterator[tuple[str, int, Layer]]:
    """Runs of equal layers as one: (name, how many, one of them)."""
    run: list[Layer] = []
    for layer in profile.layers:
        if run and _alike(run[-1], layer):
            run.append(layer)
            continue
        if run:
            yield _named(run), sum(x.repeats for x in run), run[0]
        run = [layer]
    if run:
        yield _named(run), sum(x.repeats for x in run), run[0]


def estimate_lines(e: Estimate) -> str:
    """One estimate in parts."""
    parts = ", ".join(f"{k} {format_seconds(v)}" for k, v in e.parts.items() if v)
    memory = ", ".join(f"{k} {format_bytes(v)}" for k, v in e.memory_parts.items() if v)
    host = f"\nhost memory {format_bytes(e.host_bytes)} of {format_bytes(e.host_limit)} a rank" if e.host_bytes else ""
    corrected = f"{e.correction}; {format_seconds(e.raw_seconds)} without\n" if e.raw_seconds else ""
    return (
        f"step {format_seconds(e.step_seconds)} (+-{100 * e.error:.0f}%): {parts}\n{corrected}"
        f"memory {format_bytes(e.memory_bytes)} of {format_bytes(e.memory_limit)}"
        f"{'' if e.fits else ', does not fit'}: {memory}{host}"
    )


def against(what: str, predicted: str, measured: str, error: float | None) -> str:
    """`step time: predicted 41.2 ms, measured 44.0 ms (-6.4%)`."""
    off = f" ({format_percent(error)})" if error is not None else ""
    return f"{what}: predicted {predicted}, measured {measured}{off}"


class _Console(Console):
    """Leaves it to the command what happens when the reader has gone (`| head`)."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console; where it is not a terminal, lines are as long as they are and tables are 120 wide."""
    stream = sys.stderr if stderr else sys.stdout
    plain = not stream.isatty()
    width = int(os.environ.get("COLUMNS") or 120) if plain else None
    return _Console(
        stderr=stderr, highlight=False, emoji=False, markup=False, soft_wrap=plain, width=width, no_color=plain or None
    )


def _alike(a: Layer, b: Layer) -> bool:
    same_place = a.name.rpartition(".")[0] == b.name.rpartition(".")[0]
    return same_place and (a.kind, a.parameters, a.ops) == (b.kind, b.parameters, b.ops)


def _named(run: list[Layer]) -> str:
    first = run[0].name or "(model)"
    count = sum(x.repeats for x in run)
    if count == 1:
        return first
    head, _, number = first.rpartition(".")
    return f"{head}.{number}-{int(number) + count - 1}" if number.isdigit() else first
