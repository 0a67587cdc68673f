"""What the words in a table of runs mean: precision, sharding, recomputation, schedule, the software of the time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..costs.fitted.inputs import SCHEDULES

_FUSED_SINCE = 2023
"""From this year on, runs in bf16 or fp8 use attention in one kernel unless they say otherwise."""
_ADDED_SINCE = 2022
"""From this year on, products add to gradients as they make them, unless an older sharded optimizer copies them."""
_OVERLAP_SINCE = 2024
"""From this year on, sharded optimizers send beside the backward, and tensor parallelism hides its messages."""


@dataclass(frozen=True, slots=True)
class Software:
    """How a run was computed, as far as the closed form asks."""

    precision: str
    low: bool
    fused: bool
    fusion: int
    gradient: float
    master: bool
    added: bool
    copied: bool
    overlap_dp: bool
    overlap_tp: bool


def precision_of(text: str) -> str | None:
    """`fp32`, `tf32`, `fp16`, `bf16` or `fp8` from what people write, or None."""
    low = text.lower()
    if "not stated" in low and "16" in low:
        return "fp16"  # 16 bits, and nothing tells of newer software
    if "rowwise" in low:
        return "bf16"  # a scale for every row costs what fp8 gains
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


def zero_of(text: str) -> int | None:
    """What is sharded: 0 to 3; `FSDP` alone is 3, `DDP` is 0."""
    low = text.lower()
    number = re.search(r"(?<![\d.])([0-3])(?![\d.])", re.sub(r"[fh]sdp[12]", "fsdp", low))
    if number:
        return int(number[1])
    if "fsdp" in low or "hsdp" in low:
        return 3
    return 0 if low in ("ddp", "dp", "none", "no") else None


def shard_of(text: str, dp: int, per_node: int) -> int:
    """Replicas that share one sharded copy: all, a node (`within node`), or a number (`within 128`)."""
    found = re.search(r"within\s+(\d+)", text)
    if found:
        return min(dp, int(found[1]))
    return min(dp, per_node) if "within node" in text else dp


def recompute_of(text: str) -> str | None:
    """`none`, `selective`, `operators`, `half` or `full`."""
    low = text.lower()
    if low.startswith(("full", "yes", "uniform", "every layer", "per layer")):
        return "full"
    if "2nd layer" in low:
        return "half"
    if "op" in re.findall(r"[a-z]+", low):
        return "operators"
    if low.startswith(("selective", "core attention", "attention")):
        return "selective"
    return "none" if low.startswith(("none", "gelu")) or low in ("no", "off") else None


def schedule_of(text: str, pp: int, virtual: int) -> int:
    """The pipeline order, as an index into SCHEDULES."""
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


def state_of(note: str) -> str:
    """What was done to the cluster before a run, where its note tells: `after a fix of its links`."""
    found = re.search(r"\bafter (?:a|the) [^;(]+", note)
    return found[0].strip() if found else ""


def software_of(
    *, precision: str, words: str, zero: int, zero_text: str, schedule: str, year: int, note: str
) -> Software:
    """The software of a run, from its year, its precision, how it shards, its schedule, and words of its note."""
    low = words.lower()
    said = note.lower()
    fsdp = "fsdp" in zero_text.lower() or "hsdp" in zero_text.lower()
    modern = year >= _FUSED_SINCE and precision in ("bf16", "fp8")
    apart = any(w in said for w in ("no comm overlap", "no overlap", "no gradient bucketing"))
    by_hand = "distributed optimizer" in zero_text.lower() or re.search(r"\bTE\b|hand-written|fused", note) is not None
    copied = "deepspeed" in f"{zero_text} {schedule}".lower() and year < _OVERLAP_SINCE
    plain = fsdp or (modern and not by_hand)
    sharded_optimizer = "distributed optimizer" in zero_text.lower() and year >= _OVERLAP_SINCE
    wide = "fp32 grad" in low or (precision in ("bf16", "fp8") and "pure" not in low)
    return Software(
        precision=precision,
        low=precision == "fp8",
        fused="flash" in said or modern,
        fusion=2 if "compile" in low or "xla" in said else 1 if plain else 0,
        gradient=4.0 if wide or precision in ("fp32", "tf32") else 2.0,
        master=precision in ("bf16", "fp16", "fp8") and "pure" not in low and not fsdp,
        added=year >= _ADDED_SINCE and (zero == 0 or modern) and not plain and not copied,
        copied=copied,
        overlap_dp=not apart
        and ((zero == 3 and year >= _FUSED_SINCE) or sharded_optimizer or year >= _OVERLAP_SINCE + 1),
        overlap_tp=not apart and (sharded_optimizer or "async tp" in said or "async tp" in low),
    )
