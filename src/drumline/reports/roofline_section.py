"""The operators of a model under the roofline of a device: intensity, predicted rate, and which bound holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..clusters.spec import DeviceSpec
from ..core.errors import DrumlineError
from ..core.units import format_bytes, format_count, format_seconds
from ..costs.kernel_time import Pricer
from ..costs.model_split import split_model
from ..models.profile import Profile
from ..plans.plan import Plan
from ..theory.roofline import STORED_BYTES, Roofline
from .markup import Content, Html, cut, join, table, tag
from .page_style import data_table
from .svg_scatter import ChartAxis, ScatterPoint, ScatterSeries, scatter_chart

MOST_OPERATORS = 40
"""Operators that are drawn and listed: those that take the longest."""


@dataclass(frozen=True, slots=True)
class OperatorRate:
    """All calls of one operator in one phase of a micro-batch on one rank."""

    name: str
    phase: str
    calls: int
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def rate(self) -> float:
        """Predicted operations per second."""
        return self.flops / self.seconds if self.seconds else 0.0


def operator_rates(profile: Profile, plan: Plan, device: DeviceSpec, batch_size: int) -> list[OperatorRate]:
    """The operators of one rank in one micro-batch, those that take longest first."""
    rank = split_model(profile, plan).profile
    pricer = Pricer(rank, device, plan.precision)
    samples = batch_size / (plan.slices * plan.micro)
    scale = STORED_BYTES[plan.precision] / rank.activation_bytes
    sums: dict[tuple[str, str], OperatorRate] = {}
    for layer in rank.layers:
        for op in layer.ops:
            n, old = op.count * layer.repeats, sums.get((op.name, op.phase))
            old = old or OperatorRate(op.name, op.phase, 0, 0.0, 0.0, 0.0)
            sums[op.name, op.phase] = OperatorRate(
                op.name,
                op.phase,
                old.calls + n,
                old.flops + n * op.flops.at(samples),
                old.bytes + n * op.bytes.at(samples) * scale,
                old.seconds + n * pricer.op_seconds(op, samples),
            )
    return sorted(sums.values(), key=lambda o: -o.seconds)


def roofline_section(profile: Profile, plan: Plan, device: DeviceSpec, batch_size: int) -> Html | None:
    """The drawing, its table and what they show; None where the model has no operators or they cannot be priced."""
    try:
        operators = operator_rates(profile, plan, device, batch_size)
        roof = Roofline.of(device, plan.precision)
    except DrumlineError:
        return None
    shown = [o for o in operators if o.flops and o.bytes and o.seconds][:MOST_OPERATORS]
    if not shown:
        return None
    whole = sum(o.seconds for o in operators)
    compute = sum(o.seconds for o in operators if roof.bound(o.flops, o.bytes) == "compute")
    lead = (
        f"{device.name}, {plan.precision}: above {roof.ridge:.3g} FLOP per byte the peak of "
        f"{format_count(roof.peak, 'FLOP/s')} is the bound, below it the memory. Operators above it take "
        f"{100 * compute / whole:.0f}% of the computation. The larger a dot, the longer it takes."
    )
    note = (
        "Predicted, for all calls of an operator in one micro-batch on one rank. Small operators are bound by their "
        "launch and lie below the roof."
    )
    moved = [o for o in operators if not o.flops]
    if moved:
        share = 100 * sum(o.seconds for o in moved) / whole
        note += f" {len(moved)} operators that only move bytes take {share:.0f}% and are not drawn."
    return join(
        tag("p", lead, class_="lead"),
        _chart(shown, roof, whole),
        tag("p", note, class_="note"),
        data_table(_table(shown, roof, whole)),
    )


def _chart(operators: Iterable[OperatorRate], roof: Roofline, whole: float) -> Html:
    dots: dict[str, list[ScatterPoint]] = {"forward": [], "backward": []}
    for o in operators:
        tip = (
            f"{o.name[:80]}, {o.phase}\n{o.intensity:.3g} FLOP per byte, {format_count(o.rate, 'FLOP/s')}\n"
            f"{format_seconds(o.seconds)}, {100 * o.seconds / whole:.1f}% of the computation"
        )
        size = 3 + 9 * (o.seconds / whole) ** 0.5
        dots.setdefault(o.phase, []).append(ScatterPoint(o.intensity, o.rate, tip, size))
    places = [p.x for points in dots.values() for p in points]
    ends = sorted((min(min(places), roof.ridge / 2), roof.ridge, max(max(places), roof.ridge * 2)))
    limit = [ScatterPoint(x, roof.rate(x)) for x in ends]
    series = [ScatterSeries("roofline", limit, "", line=True, dots=False)]
    series += [ScatterSeries(phase, points, f"k-{phase}") for phase, points in dots.items() if points]
    return scatter_chart(
        "Roofline with the operators of the model",
        series,
        x=ChartAxis("FLOP per byte", lambda v: f"{v:g}", base=10),
        y=ChartAxis("FLOP/s", lambda v: format_count(v), base=10),
    )


def _table(operators: Iterable[OperatorRate], roof: Roofline, whole: float) -> Html:
    rows: list[list[Content]] = [
        [
            tag("code", cut(o.name, 40)),
            o.phase,
            o.calls,
            format_count(o.flops, "FLOP"),
            format_bytes(o.bytes),
            f"{o.intensity:.3g}",
            roof.bound(o.flops, o.bytes),
            format_count(o.rate, "FLOP/s"),
            format_seconds(o.seconds),
            f"{100 * o.seconds / whole:.1f}%",
        ]
        for o in operators
    ]
    heads = (
        ("operator", "plan"),
        ("phase", ""),
        ("calls", "num"),
        ("work", "num"),
        ("bytes", "num"),
        ("FLOP per byte", "num"),
        ("bound", ""),
        ("rate", "num"),
        ("time", "num"),
        ("of all", "num"),
    )
    return table(heads, rows, caption="The operators under the roofline")
