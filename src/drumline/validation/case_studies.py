"""Well-known sizing questions answered with the cost models, each with its arithmetic.

Where figures that circulate together do not fit each other, the study says which, and by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..clusters import load
from ..core.errors import InputError, nearest
from ..core.units import format_seconds
from ..costs import cost_model
from ..costs.model_split import split_model
from ..models import zoo
from ..plans import Plan
from ..theory.link_traffic import all_reduce_share, needed_inside, per_link, seconds_per_block
from .zero_table import ZERO_DEVICES, ZERO_PARAMETERS, ZERO_PUBLISHED, ZeroRow, zero_rows

YEAR = 365.25 * 86400
DAY = 86400.0

ACTIVE, PARAMETERS, TOKENS, LAYERS = 280e9, 1.8e12, 13e12, 120
"""Of GPT-4 as commonly quoted; none of it is published: parameters per token, in total, tokens, layers."""
RUN = (25_000, (90, 100), (0.32, 0.36))
"""The run that is quoted with them: devices, days, share of the peak."""
BETWEEN = 160e9
"""Bytes per second measured between two servers with eight 200 Gb/s ports."""


@dataclass(frozen=True, slots=True)
class CaseStudy:
    """A question and its answer."""

    name: str
    question: str
    lines: tuple[str, ...]
    """The answer, the most important first."""
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on what is counted, and figures that contradict each other."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The numbers behind the text."""


def case_study(name: str) -> CaseStudy:
    """One study by its name."""
    if name not in STUDIES:
        raise InputError(f"no case study {name!r}", rule=f"one of {', '.join(STUDIES)}", fix=nearest(name, STUDIES))
    return STUDIES[name]()


def nvlink() -> CaseStudy:
    """A100 against A800 by tensor and pipeline traffic."""
    p, needed = 8, needed_inside(8, BETWEEN)
    m = 2.0 * 2048 * 12288  # activations of 2048 tokens of width 12288 in bf16
    plan = Plan.parse("tp=8,pp=8,micro=64,precision=bf16")
    rows, numbers = [], {"needed": needed, "share": all_reduce_share(p), "activation_bytes": m}
    for name in ("dgx-a100", "a800"):
        cluster = load(name).with_devices(64)
        link = cluster.node.link.bandwidth
        tensor, pipeline = seconds_per_block(m, cluster, p)
        step = cost_model(zoo.profile("gpt:175b", batch_size=64), cluster, "bf16").estimate(plan)
        verdict = "enough" if link >= needed else "too slow"
        times = (format_seconds(tensor), format_seconds(pipeline), format_seconds(step.step_seconds))
        rows.append((name, f"{link / 1e9:g} GB/s", verdict, *times))
        numbers |= {f"{name}.link": link, f"{name}.tensor_block": tensor, f"{name}.pipeline_message": pipeline}
        numbers |= {f"{name}.step": step.step_seconds, f"{name}.step_communication": step.parts["communication"]}
    return CaseStudy(
        "nvlink",
        "Is the link inside a node fast enough for tensor parallelism: A100 against A800?",
        (
            f"An all-reduce of m bytes over {p} devices sends 2(P-1)/P = {all_reduce_share(p):g} m, a pipeline m. "
            f"To keep up with {BETWEEN / 1e9:g} GB/s between servers, the link needs {needed / 1e9:g} GB/s.",
        ),
        ("cluster", "link", "verdict", "tensor", "pipeline", "step"),
        tuple(rows),
        (
            f"tensor: the four all-reduces of one block inside a node, m = {m / 1e6:.1f} MB; pipeline: its message to "
            f"the next node and back; step: gpt:175b with {plan} on 64 devices, by the cost model of `plan`",
            "data sheets say 600 and 400 GB/s: both directions together; half of it counts here",
        ),
        numbers,
    )


def one_device() -> CaseStudy:
    """One device for 13 trillion tokens."""
    device = load("dgx-a100").device
    peak, work, every = device.peak["bf16"], 6 * ACTIVE * TOKENS, 6 * PARAMETERS * TOKENS
    count, days, shares = RUN
    low, high = (count * peak * share * d * DAY for share, d in zip(shares, days, strict=True))
    rows = tuple(
        (name, f"{work / (share * peak) / YEAR:,.0f} years") for name, share in (("peak", 1.0), ("half of it", 0.5))
    )
    return CaseStudy(
        "one-device",
        f"How long does one A100 take for {TOKENS / 1e12:g} trillion tokens?",
        (
            f"6 operations per token and parameter that it meets: 6 x {ACTIVE / 1e9:g} G x {TOKENS / 1e12:g} T = "
            f"{work:.3g} operations, at {peak / 1e12:g} TFLOP/s:",
        ),
        ("at", "time"),
        rows,
        (
            f"quoted with it: {count:,} A100, {days[0]} to {days[1]} days, {100 * shares[0]:.0f}% to "
            f"{100 * shares[1]:.0f}% of the peak, which is {low:.2g} to {high:.2g} operations: it fits",
            f"with all {PARAMETERS / 1e12:g} T parameters it would be {every:.2g} operations, {every / work:.1f} times "
            "more, and does not fit that run: a token meets a sixth of the model (a mixture of experts)",
        ),
        {
            "operations": work,
            "years_at_peak": work / peak / YEAR,
            "years_at_half": 2 * work / peak / YEAR,
            "operations_of_the_run.low": low,
            "operations_of_the_run.high": high,
            "operations_with_all_parameters": every,
        },
    )


def layers() -> CaseStudy:
    """A model of 1.8 trillion parameters and 120 layers."""
    device, each = load("dgx-a100").device, PARAMETERS / LAYERS
    counted = (
        ("weights in bf16", 2),
        ("weights in fp32", 4),
        ("weights and gradients in fp32", 8),
        ("with Adam's moments, to train", 16),
    )
    rows = tuple(
        (name, f"{width}", f"{width * each / 1e9:g} GB", f"{width * PARAMETERS / 1e12:.1f} TB")
        for name, width in counted
    )
    states = 16 * PARAMETERS
    return CaseStudy(
        "layers",
        f"How large is a layer of a model with {PARAMETERS / 1e12:g} trillion parameters and {LAYERS} layers?",
        (
            f"{PARAMETERS / 1e12:g} T / {LAYERS} = {each / 1e9:g} G parameters a layer. 60 GB a layer counts the "
            "weights in fp32 and nothing else:",
        ),
        ("counted", "bytes each", "a layer", "the model"),
        rows,
        (
            f"training needs {states / device.memory:,.0f} A100 of {device.memory / 2**30:g} GiB to store the states "
            "alone, without activations",
            "60 GB a layer and training in bf16 do not fit each other: bf16 weights are 30 GB, and what training "
            "stores is 240 GB",
            f"a token meets {ACTIVE / LAYERS / 1e9:.2f} G parameters of a layer, {4 * ACTIVE / LAYERS / 1e9:.1f} GB in "
            "fp32",
        ),
        {
            "parameters_a_layer": each,
            **{f"layer_bytes.{width}": width * each for _, width in counted},
            "devices_for_states": states / device.memory,
        },
    )


def tensor_pipeline() -> CaseStudy:
    """Tensor against pipeline bytes of the forward pass, by formula and counted from the model."""
    p, stages = 8, 8
    profile = zoo.profile("gpt:175b")
    block = next(x for x in profile.layers if x.repeats > 1)
    m, blocks = block.output.at(1), block.repeats // stages
    traffic = per_link(m, p, blocks=blocks)
    tensor, pipeline = traffic.tensor / 2, traffic.pipeline / 2  # the backward sends as much again
    counted = blocks * _forward_bytes(p)
    return CaseStudy(
        "tensor-pipeline",
        "How many bytes do tensor and pipeline parallelism send in the forward of one micro-batch?",
        (f"gpt:175b, one sample of 2048 tokens: m = {m / 1e6:.1f} MB between blocks. Each device sends:",),
        ("", "bytes", "of m"),
        (
            ("pipeline: one boundary", f"{pipeline / 1e6:.1f} MB", f"{pipeline / m:g}"),
            ("tensor: one all-reduce", f"{all_reduce_share(p) * m / 1e6:.1f} MB", f"{all_reduce_share(p):g}"),
            (f"tensor: a stage of {blocks} blocks", f"{tensor / 1e6:,.1f} MB", f"{tensor / m:g}"),
            ("the same, from the model", f"{counted / 1e6:,.1f} MB", f"{counted / m:g}"),
        ),
        (
            f"a block has two all-reduces: 2 x {blocks} x {all_reduce_share(p):g} = {tensor / m:g}",
            f"the ratio of {all_reduce_share(p):g} that is often quoted compares one all-reduce with one boundary; for "
            f"a whole stage it is {tensor / pipeline:g}",
            "from the model: its gathers and scatters send (P-1)/P m each, two of each in a block",
        ),
        {"m": m, "pipeline": pipeline, "tensor": tensor, "counted": counted, "ratio": tensor / pipeline},
    )


def _forward_bytes(p: int) -> float:
    """Bytes that a tensor-parallel rank sends in the forward of one block, counted from the split model."""
    profile = zoo.profile("gpt:175b")
    rank = split_model(profile, Plan(tp=p))
    shares = {"all_reduce": all_reduce_share(p), "all_gather": (p - 1) / p, "reduce_scatter": (p - 1) / p}
    own = next(own for x, own in zip(rank.profile.layers, rank.messages, strict=True) if x.repeats > 1)
    return sum(shares[msg.collective] * msg.bytes.at(1) for msg in own if msg.phase == "forward" and msg.axis == "tp")


def zero() -> CaseStudy:
    """ZeRO's memory table, and what a rank of ours stores."""
    rows = zero_rows()
    table = tuple(
        (
            str(row.stage),
            f"{ZERO_PUBLISHED[row.stage]:g}",
            *(f"{size / 1e9:.1f}" for size in (row.formula, row.states, row.rest, row.total)),
        )
        for row in rows
    )
    return CaseStudy(
        "zero",
        f"How much does ZeRO store on each of {ZERO_DEVICES} devices for {ZERO_PARAMETERS / 1e9:g} billion parameters?",
        (
            "The paper counts bf16 weights (2 bytes), bf16 gradients (2), and the optimizer's fp32 weights and moments "
            "(12), and divides them by the devices from stage 3, 2 and 1 on. In GB:",
        ),
        ("stage", "paper", "formula", "states", "rest", "total"),
        table,
        (
            f"ours is a GPT of {rows[0].parameters / 1e9:.2f} G parameters with bf16 under autocast, recompute=full, "
            "one sample of 2048 tokens, at the worst moment of the step, by the cost model of `plan`",
            "stage 0 to 2: parameters are fp32 (4) with a bf16 copy for the forward (2), gradients fp32 (4); the "
            "optimizer has the moments alone (8). The sum is 18 instead of 16, and stage 1 divides 8 of it, not 12",
            "stage 3 divides all 16 bytes, as in the paper: weights are gathered in bf16, unit by unit",
            "rest: activations, gathered units and gradients on their way, which the paper's table leaves out",
            _without_gradients(rows),
        ),
        {f"{name}.{row.stage}": value for row in rows for name, value in row.numbers().items()},
    )


def _without_gradients(rows: tuple[ZeroRow, ...]) -> str:
    """The stages whose worst moment is before their gradients exist."""
    early = [str(row.stage) for row in rows if row.peak.gradients < 0.01 * row.peak.optimizer]
    if not early:
        return ""
    return f"stage {' and '.join(early)}: the worst moment comes before the gradients, so they are not in the sum"


STUDIES: dict[str, Callable[[], CaseStudy]] = {
    "nvlink": nvlink,
    "one-device": one_device,
    "layers": layers,
    "tensor-pipeline": tensor_pipeline,
    "zero": zero,
}
"""All studies, by name."""
