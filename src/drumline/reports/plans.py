"""What `drumline plan` prints beside its table: families, fit, what-if, curves, formulas. It reads in 40 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.units import format_bytes, format_count, format_seconds
from ..planner import Family
from ..planner.curve import Point
from ..planner.fit import Fit
from ..planner.formula import Term
from ..planner.objectives import Scored
from ..planner.training import Saving, Training
from ..planner.what_if import Compared, Side
from .text import NARROW


def families_list(families: Iterable[Family]) -> RenderableType:
    """The best of each family, with what it lacks and what would let it win."""
    lines: list[RenderableType] = [Text("The best of each family:")]
    absent = []
    for f in families:
        if not f.plan:
            absent.append(f"{f.name} ({f.reason})")
            continue
        told = f"{f.plan} {format_seconds(f.step_seconds)}, {format_bytes(f.memory_bytes)}: {f.reason}"
        lines.append(Text.assemble("  ", (f"{f.name}: ", "bold"), told))
        lines += [Text(f"    would win {way}", style="dim") for way in f.wins_if]
    if absent:
        lines.append(Text(f"  none of: {', '.join(absent)}", style="dim"))
    return Group(*lines)


def fit_lines(fit: Fit, batch: int) -> RenderableType:
    """Whether it fits, the largest batch, and each change that was tried."""
    needs = f"needs {format_bytes(fit.memory_bytes)} of {format_bytes(fit.memory_limit)} a device"
    verdict = "fits" if fit.fits else f"does not fit: {format_bytes(fit.lacks_bytes)} too much"
    parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in fit.memory_parts.items())
    lines: list[RenderableType] = [Text(f"{fit.plan} {verdict}. It {needs} ({parts}).")]
    holds = f"The largest batch that it holds: {fit.largest_batch}" if fit.largest_batch else "It holds no batch at all"
    lines.append(Text(f"{holds} (asked: {batch})."))
    if fit.largest_at_once:
        most = f"{fit.largest_at_once} with {fit.largest_plan}"
        lines.append(Text(f"The most in one piece, with nothing offloaded: {most}."))
    else:
        lines.append(Text("In one piece, with nothing offloaded, replicas hold no batch."))
    if not fit.fits:
        helps = any(c.fits for c in fit.changes)
        lines.append(Text("One change makes it fit (+), or not (-):" if helps else "No single change makes it fit:"))
        for c in fit.changes:
            told = f"{format_seconds(c.step_seconds)} a step" if c.fits else f"{format_bytes(c.lacks_bytes)} too much"
            style = "" if c.fits else "dim"
            sign = "+" if c.fits else "-"
            lines.append(Text(f"  {sign} {c.change}: {format_bytes(c.memory_bytes)}, {told}", style=style))
    return Group(*lines)


def compared_table(compared: Compared) -> RenderableType:
    """Before and after."""
    before, after = compared.before, compared.after
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("", "before", "after"):
        table.add_column(name, no_wrap=True)
    table.add_row("devices", *(str(s.devices) for s in (before, after)))
    table.add_row("batch", *(str(s.batch_size) for s in (before, after)))
    table.add_row("step", *(_or_none(s, format_seconds(s.step_seconds)) for s in (before, after)))
    rates = [_or_none(s, f"{format_count(s.samples_per_second)}/s") for s in (before, after)]
    table.add_row("samples", *rates)
    table.add_row("memory", *(_or_none(s, format_bytes(s.memory_bytes)) for s in (before, after)))
    for part in dict.fromkeys([*before.parts, *after.parts]):
        table.add_row(part, *(_or_none(s, format_seconds(s.parts.get(part, 0.0))) for s in (before, after)))
    lines: list[RenderableType] = [
        Text(f"What if {', '.join(compared.changes)}:"),
        *(Text(f"{name}: {side.plan or 'nothing fits'}") for name, side in (("before", before), ("after", after))),
        table,
    ]
    if before.plan and after.plan:
        ratio = after.samples_per_second / before.samples_per_second
        lines.append(Text(f"{ratio:.2f} times the samples a second; {_kept(compared)}."))
    elif not after.plan:
        lines.append(Text(after.explanation))
    return Group(*lines)


def _kept(compared: Compared) -> str:
    if compared.before.plan == compared.after.plan:
        return "the plan stays"
    if not compared.old_plan_after:
        return "the plan of before does not run or fit there"
    return f"the plan of before would take {format_seconds(compared.old_plan_after)}"


def _or_none(side: Side, text: str) -> str:
    return text if side.plan else "-"


def scaling_chart(points: Sequence[Point], width: int) -> RenderableType:
    """A line for each number of devices: a bar of its samples a second, and its efficiency."""
    most = max((p.samples_per_second for p in points), default=0.0) or 1.0
    room = max(6, min(40, width - 26))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("eff.", justify="right", no_wrap=True)
    wide = width >= NARROW
    if wide:
        table.add_column("plan", overflow="fold")
    for p in points:
        bar = "#" * max(1, round(room * p.samples_per_second / most)) if p.plan else "does not fit"
        rate = f"{format_count(p.samples_per_second)}/s" if p.plan else ""
        eff = f"{100 * p.efficiency:.0f}%" if p.plan else ""
        table.add_row(str(p.devices), bar, rate, eff, *([p.plan] if wide else []))
    lines: list[RenderableType] = [table]
    if not wide:
        lines += [Text(f"{p.devices}: {p.plan}") for p in points if p.plan]
    return Group(*lines)


def pareto_lines(front: Sequence[Scored]) -> RenderableType:
    """Plans that nothing beats in both."""
    lines: list[RenderableType] = [Text("Not beaten in both time and memory:")]
    for plan, e in front:
        lines.append(Text(f"  {format_seconds(e.step_seconds)}, {format_bytes(e.memory_bytes)}: {plan}"))
    return Group(*lines)


def training_lines(t: Training, price: float) -> str:
    """How long, how many device hours, what it costs."""
    days = t.seconds / 86400
    long = f"{days:,.1f} days" if days < 800 else f"{days / 365.25:,.1f} years"
    long = format_seconds(t.seconds) if days < 2 else long
    what = [f"{format_count(t.tokens)} tokens"] if t.tokens else []
    what += [f"{t.epochs:g} epochs"] if t.epochs else []
    cost = f", {t.price:,.2f} at {price:g} each" if price else ""
    return f"training ({', '.join(what)}): {t.steps:,} steps, {long}, {t.device_hours:,.1f} device hours{cost}"


def saving_lines(s: Saving) -> str:
    """How often to save."""
    return (
        f"save every {format_seconds(s.interval)} (--save-every {s.every}): a checkpoint has {format_bytes(s.bytes)}, "
        f"its copy to the host stalls {format_seconds(s.stall)}; with a failure every {format_seconds(s.mtbf)} that "
        f"loses least, {100 * s.lost:.2g}% of the time (Young/Daly)"
    )


def formula_lines(terms: Iterable[Term]) -> RenderableType:
    """The formula with its values."""
    first, *rest = terms
    return Group(Text(str(first)), *(Text(f"  {t}") for t in rest))
