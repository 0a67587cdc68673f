"""The answers of `drumline plan` as text for 40 columns and more: candidates, families, fit, what-if, curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..core.money import Money
from ..core.units import format_bytes, format_count, format_rate, format_seconds
from ..core.wrapping import widest_part
from ..costs import Estimate
from ..planner import Answer, PlanFamily
from ..planner.fit_report import FitReport
from ..planner.formula import FormulaTerm
from ..planner.objectives import Scored
from ..planner.scaling_curve import ScalingPoint
from ..planner.training import CheckpointInterval, TrainingCost
from ..planner.what_if import WhatIfAnswer, WhatIfComparison
from .console import NARROW, borderless_table

FREE = Money(0.0)


def plans_table(answer: Answer, *, top: int, width: int) -> RenderableType:
    """The best candidates with their reasons; on a narrow terminal the reason is below the plan."""
    narrow = width < NARROW + 20
    table = borderless_table(gap=1 if narrow else 2)
    shown = [str(c.plan) for c in answer.candidates[:top]]
    # the reasons fold better than the plans do
    room = max(map(widest_part, shown), default=0) if narrow else min(max(map(len, shown), default=0), width // 2)
    table.add_column("plan", overflow="fold", ratio=1 if narrow else None, min_width=room)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("why", overflow="fold")
    for c in answer.candidates[:top]:
        style = "" if c.fits else "dim"
        name: RenderableType = Text(str(c.plan), style="bold" if c is answer.candidates[0] else "")
        if narrow:
            name = Group(name, Text(f"  {c.reason}", style="dim"))
        row = [name, Text(format_seconds(c.step_seconds)), Text(format_bytes(c.memory_bytes))]
        table.add_row(*row, *([] if narrow else [Text(c.reason)]), style=style)
    rest = len(answer.candidates) - top
    return Group(table, Text(f"and {rest} more (--top)", style="dim")) if rest > 0 else table


def estimate_lines(e: Estimate) -> str:
    """One estimate: step time and memory, each by part."""
    parts = ", ".join(f"{k} {format_seconds(v)}" for k, v in e.parts.items() if v)
    memory = ", ".join(f"{k} {format_bytes(v)}" for k, v in e.memory_parts.items() if v)
    host = f"\nhost memory {format_bytes(e.host_bytes)} of {format_bytes(e.host_limit)} {e.host_owner}"
    corrected = f"{correction_line(e)}\n" if e.raw_seconds else ""
    data = f"\n{e.input_text}" if e.input_text else ""
    return (
        f"step {format_seconds(e.step_seconds)} (+-{100 * e.error:.0f}%): {parts}\n{corrected}"
        f"memory {e.memory_text}"
        f"{'' if e.fits else ', does not fit'}: {memory}{host if e.host_bytes else ''}{data}"
    )


def correction_line(e: Estimate) -> str:
    """`corrected by 3 runs on this machine, 1 of them of this job (x1.18); 34 ms without`, or nothing."""
    return f"{e.correction}; {format_seconds(e.raw_seconds)} without" if e.raw_seconds else ""


def families_list(families: Iterable[PlanFamily]) -> RenderableType:
    """The best plan of each family, why it loses, and what would make it the fastest."""
    lines: list[RenderableType] = [Text("The best of each family:")]
    absent = []
    for f in families:
        if not f.plan:
            absent.append(f"{f.name} ({f.reason})")
            continue
        plan = f"{f.plan} {format_seconds(f.step_seconds)}, {format_bytes(f.memory_bytes)}: {f.reason}"
        lines.append(Text.assemble("  ", (f"{f.name}: ", "bold"), plan))
        lines += [Text(f"    becomes the fastest {change}", style="dim") for change in f.wins_if]
    if absent:
        lines.append(Text(f"  no plan: {', '.join(absent)}", style="dim"))
    return Group(*lines)


def fit_lines(fit: FitReport, batch: int) -> RenderableType:
    """Whether it fits, the largest batch, and every single change that was tried."""
    needs = f"needs {format_bytes(fit.memory_bytes)} of {format_bytes(fit.memory_limit)} a device"
    verdict = "fits" if fit.fits else f"does not fit: {format_bytes(fit.lacks_bytes)} too much"
    parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in fit.memory_parts.items())
    lines: list[RenderableType] = [Text(f"{fit.plan} {verdict}. It {needs} ({parts}).")]
    largest = f"The largest batch that fits: {fit.largest_batch}" if fit.largest_batch else "No batch size fits"
    lines.append(Text(f"{largest} (asked for: {batch})."))
    if fit.largest_at_once:
        most = f"{fit.largest_at_once} with {fit.largest_plan}"
        lines.append(Text(f"Without micro-batches and offloading: {most}."))
    else:
        lines.append(Text("Without micro-batches and offloading, no batch fits on replicas."))
    if not fit.fits:
        helps = any(c.fits for c in fit.changes)
        lines.append(
            Text("Single changes that make it fit (+) or do not (-):" if helps else "No single change makes it fit:")
        )
        for c in fit.changes:
            effect = f"{format_seconds(c.step_seconds)} a step" if c.fits else f"{format_bytes(c.lacks_bytes)} too much"
            style = "" if c.fits else "dim"
            sign = "+" if c.fits else "-"
            lines.append(Text(f"  {sign} {c.change}: {format_bytes(c.memory_bytes)}, {effect}", style=style))
    return Group(*lines)


def compared_table(compared: WhatIfComparison) -> RenderableType:
    """Both sides of a what-if question, part by part."""
    before, after = compared.before, compared.after
    table = borderless_table()
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
        lines.append(Text(f"Throughput changes by a factor of {ratio:.2f}; {_old_plan(compared)}."))
    elif not after.plan:
        lines.append(Text(after.explanation))
    return Group(*lines)


def _old_plan(compared: WhatIfComparison) -> str:
    if compared.before.plan == compared.after.plan:
        return "the best plan stays the same"
    if not compared.old_plan_after:
        return "the old plan does not run or fit there"
    return f"the old plan would take {format_seconds(compared.old_plan_after)}"


def _or_none(side: WhatIfAnswer, text: str) -> str:
    return text if side.plan else "-"


def scaling_chart(points: Sequence[ScalingPoint], width: int) -> RenderableType:
    """A line for each number of devices: a bar for samples per second, and the efficiency."""
    most = max((p.samples_per_second for p in points), default=0.0) or 1.0
    room = max(6, min(40, width - 26))
    table = borderless_table()
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
    """The plans on the Pareto front."""
    lines: list[RenderableType] = [Text("Pareto front of time and memory:")]
    for plan, e in front:
        lines.append(Text(f"  {format_seconds(e.step_seconds)}, {format_bytes(e.memory_bytes)}: {plan}"))
    return Group(*lines)


def training_lines(t: TrainingCost, price: Money) -> str:
    """Duration, device hours and cost of the whole training."""
    days = t.seconds / 86400
    long = f"{days:,.1f} days" if days < 800 else f"{days / 365.25:,.1f} years"
    long = format_seconds(t.seconds) if days < 2 else long
    what = [f"{format_count(t.tokens)} tokens"] if t.tokens else []
    what += [f"{t.epochs:g} epochs"] if t.epochs else []
    cost = f", {price.of(t.price)} at {price} each" if price.amount else ""
    return f"training ({', '.join(what)}): {t.steps:,} steps, {long}, {t.device_hours:,.1f} device hours{cost}"


def saving_lines(s: CheckpointInterval) -> str:
    """How often to save."""
    best = "is as often as the storage takes them and loses" if s.waits_for_storage else "loses the least time,"
    by = "" if s.waits_for_storage else " (Young/Daly)"
    return (
        f"save every {format_seconds(s.interval)} (--save-every {s.every}): if {s.failures} (--mtbf), this {best} "
        f"{100 * s.lost:.2g}%{by}. Copying a checkpoint of {format_bytes(s.bytes)} to the host "
        f"stalls {format_seconds(s.stall)}; the storage must take {format_rate(s.storage_rate)}, "
        f"and has it after {format_seconds(s.write)} (node.storage)"
    )


def formula_lines(terms: Iterable[FormulaTerm]) -> RenderableType:
    """The formula with its values."""
    first, *rest = terms
    return Group(Text(str(first)), *(Text(f"  {t}") for t in rest))


def detail_text(key: str, value: Any, *, width: int, price: Money = FREE) -> RenderableType:
    """One further answer about a plan, by its key in the JSON document."""
    if key == "price_of_1000_steps":
        return f"1,000 steps cost {price.of(value)}"
    if key == "rates":
        return f"learning rate: {value}"
    if key == "training":
        return training_lines(value, price)
    if key == "scaling":
        return scaling_chart(value, width)
    lines: dict[str, Callable[[Any], RenderableType]] = {
        "pareto": pareto_lines,
        "formula": formula_lines,
        "what_if": compared_table,
        "saving": saving_lines,
    }
    return lines[key](value)
