"""Parse the free text of a table of runs: precision, sharding, recomputation, schedule, and the software of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..costs.plan_columns import SCHEDULES

_FUSED_SINCE = 2023
"""From this year on, runs in bf16 or fp8 use fused attention unless they say otherwise."""
_FUSED_ACCUMULATION_SINCE = 2022
"""From this year on, matmuls accumulate gradients in place, unless an older sharded optimizer copies them."""
_OVERLAP_SINCE = 2024
"""From this year on, sharded optimizers and tensor parallelism overlap their communication."""

OVERLAP_EP_SINCE = 2025
"""From this year on, runs that overlap their messages also overlap those to experts."""


@dataclass(frozen=True, slots=True)
class RunSoftware:
    """How a run was computed; fields as in `LayoutColumns`."""

    precision: str
    fp8: bool
    fused_attention: bool
    portable_attention: bool
    elementwise_fusion: int
    gradient_bytes: float
    master_weights: bool
    fused_accumulation: bool
    flat_buffers: bool
    overlap_dp: bool
    overlap_tp: bool
    overlap_ep: bool
    host_waits: bool


def parse_precision(text: str) -> str | None:
    """`fp32`, `tf32`, `fp16`, `bf16` or `fp8`, or None."""
    low = text.lower()
    if "not stated" in low and "16" in low:
        return "fp16"  # 16 bits, and no sign of newer software
    if "rowwise" in low:
        return "bf16"  # scales per row cost what fp8 gains
    for word, name in (
        ("fp8", "fp8"),
        ("float8", "fp8"),
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("fp16", "fp16"),
        ("amp", "fp16"),
        ("mixed", "fp16"),
        ("tf32", "tf32"),
        ("fp32", "fp32"),
    ):
        if word in low:
            return name
    return None


def parse_zero(text: str) -> int | None:
    """ZeRO stage 0 to 3; `FSDP` alone is 3, `DDP` is 0."""
    low = text.lower()
    number = re.search(r"(?<![\d.])([0-3])(?![\d.])", re.sub(r"[fh]sdp[12]", "fsdp", low))
    if number:
        return int(number[1])
    if "fsdp" in low or "hsdp" in low:
        return 3
    return 0 if low in ("ddp", "dp", "none", "no") else None


def parse_shard(text: str, dp: int, per_node: int) -> int:
    """Replicas that share one sharded copy: all, a node (`within node`), or a number (`within 128`)."""
    match = re.search(r"within\s+(\d+)", text)
    if match:
        return min(dp, int(match[1]))
    return min(dp, per_node) if "within node" in text else dp


def parse_recompute(text: str) -> str | None:
    """`none`, `selective`, `operators`, `half` or `full`, or None."""
    low = text.lower()
    if low.startswith(("full", "yes", "uniform", "every layer", "per layer")):
        return "full"
    if "2nd layer" in low:
        return "half"
    if "op" in re.findall(r"[a-z]+", low):
        return "operators"
    if low.startswith(("selective", "core attention", "attention")):
        return "selective"
    # recipes that differ by machine recompute what costs least: parts that the time hardly shows
    return "none" if low.startswith(("none", "gelu", "recipe")) or low in ("no", "off") else None


def parse_schedule(text: str, pp: int, virtual: int) -> int:
    """The pipeline schedule, as an index into SCHEDULES."""
    low = text.lower()
    if pp == 1:
        return 0
    if "zb-2p" in low:
        return SCHEDULES.index("zero-bubble-2p")
    if "zb" in low or "zero-bubble" in low:
        return SCHEDULES.index("zero-bubble")
    if "gpipe" in low:
        return SCHEDULES.index("gpipe")
    return SCHEDULES.index("interleaved" if virtual > 1 else "1f1b")


def parse_cluster_state(note: str) -> str:
    """Changes of the cluster before a run, from its note: `after a fix of its links`."""
    match = re.search(r"\bafter (?:a|the) [^;(]+", note)
    return match[0].strip() if match else ""


def infer_software(
    *, precision: str, precision_text: str, zero: int, zero_text: str, schedule: str, year: int, note: str
) -> RunSoftware:
    """Infer the software of a run from its year, precision, sharding, schedule and note."""
    low = precision_text.lower()
    remarks = note.lower()
    fsdp = "fsdp" in zero_text.lower() or "hsdp" in zero_text.lower()
    modern = year >= _FUSED_SINCE and precision in ("bf16", "fp8")
    no_overlap = any(w in remarks for w in ("no comm overlap", "no overlap", "no gradient bucketing"))
    hand_fused = (
        "distributed optimizer" in zero_text.lower() or re.search(r"\bTE\b|hand-written|fused", note) is not None
    )
    flat_buffers = "deepspeed" in f"{zero_text} {schedule}".lower() and year < _OVERLAP_SINCE
    eager = fsdp or (modern and not hand_fused)
    compiled = "compile" in low or "xla" in remarks
    sharded_optimizer = "distributed optimizer" in zero_text.lower() and year >= _OVERLAP_SINCE
    wide = "fp32 grad" in low or (precision in ("bf16", "fp8") and "pure" not in low)
    overlap_dp = not no_overlap and (
        (zero == 3 and year >= _FUSED_SINCE) or sharded_optimizer or year >= _OVERLAP_SINCE + 1
    )
    return RunSoftware(
        precision=precision,
        fp8=precision == "fp8",
        fused_attention="flash" in remarks or modern,
        portable_attention=eager and "xla" not in remarks,
        elementwise_fusion=2 if compiled else 1 if eager else 0,
        gradient_bytes=4.0 if wide or precision in ("fp32", "tf32") else 2.0,
        master_weights=precision in ("bf16", "fp16", "fp8") and "pure" not in low and not fsdp,
        fused_accumulation=year >= _FUSED_ACCUMULATION_SINCE
        and (zero == 0 or modern)
        and not eager
        and not flat_buffers,
        flat_buffers=flat_buffers,
        overlap_dp=overlap_dp,
        overlap_tp=not no_overlap and (sharded_optimizer or "async tp" in remarks or "async tp" in low),
        overlap_ep=(overlap_dp and year >= OVERLAP_EP_SINCE) or "dualpipe" in remarks,
        host_waits=eager and not fsdp and not compiled and zero < 3,
    )
