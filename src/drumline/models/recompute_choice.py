"""Selective recomputation: the choice which results of a layer's forward are kept and which are recomputed.

Keeping a result costs its bytes, recomputing it costs its time. So the operators of a layer are ranked by bytes saved
per second lost, and recomputed down to MAX_MOVED_PER_BYTE. Times follow a roofline, in bytes that memory could move
meanwhile. The engine and the estimate both use this choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .profile import COMPUTE_KINDS, MATMUL_RATE_SHARE, Affine, Layer, Profile, ProfiledOp

MAX_MOVED_PER_BYTE = 5.0
"""A byte is recomputed if that takes no longer than moving this many bytes.

A memory-bound operator moves two to four bytes per byte of its result: it reads up to three tensors and writes one, or
normalises and is then activated in place. All of these are recomputed. Reductions, which read much and write little,
are kept; so are matmuls with long rows (see OPERATIONS_PER_VALUE), fused attention over long sequences, and
convolutions with many channels. Full recomputation also recomputes these, at a higher price per byte."""

OPERATIONS_PER_VALUE = {"cpu": 32.0, "cuda": 200.0}
"""Operations that a device does while it moves one value (4 bytes in fp32, 2 in bf16, so the number hardly depends on
the precision). It depends on the kind of device only, because a run knows no more and must follow the prediction:
matmuls with rows of more than 80 values on a CPU and 500 on a GPU are kept."""

KEPT, RECOMPUTED, UNUSED = "kept", "again", "unused"


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """One result of a layer's forward, and its treatment."""

    name: str
    """The operators that write it, in order."""
    bytes: Affine
    """Bytes that recomputing it saves."""
    moved: Affine
    """Time to compute it, as bytes that memory could move meanwhile."""
    verdict: str
    """`kept`, `again` (recomputed), or `unused`: no backward reads it or anything after it."""
    count: int = 1

    def seconds(self, n: float, bandwidth: float) -> float:
        """Time to compute it for n samples, on a device with that memory bandwidth in bytes per second."""
        return self.count * self.moved.at(n) / bandwidth


def recompute_verdicts(ops: tuple[ProfiledOp, ...], device: str, width: int) -> tuple[str, ...]:
    """Treatment of each operator's result; empty for backward operators. `width` is bytes of an activation."""
    key = (id(ops), device, width)
    if key not in _cache:
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        _cache[key] = ops, _verdicts(ops, OPERATIONS_PER_VALUE[device] / width)
    return _cache[key][1]


CACHE_SIZE = 10_000
_cache: dict[tuple[int, str, int], tuple[tuple[ProfiledOp, ...], tuple[str, ...]]] = {}
"""Cache, because a search asks for the same layers repeatedly. It references the operators to keep their ids unique."""


def _verdicts(ops: tuple[ProfiledOp, ...], balance: float) -> tuple[str, ...]:
    verdicts = [""] * len(ops)
    for members in _groups(ops):
        verdict = _verdict([ops[i] for i in members], balance)
        for i in members:
            verdicts[i] = UNUSED if ops[i].recompute == "never" else verdict
    return tuple(verdicts)


def choices(layer: Layer, device: str, width: int) -> list[RecomputeChoice]:
    """The results of a layer, by bytes saved per second lost, best first."""
    balance = OPERATIONS_PER_VALUE[device] / width
    verdicts = recompute_verdicts(layer.ops, device, width)
    values = []
    for members in _groups(layer.ops):
        ops = [layer.ops[i] for i in members]
        count = ops[0].count if len(ops) == 1 else 1
        made = Affine()
        time = Affine()
        for op in ops:
            times = op.count // count
            made = made + op.output.times(times)
            time = time + _time(op, balance).times(times)
        if not made.at(1) and not time.at(1):
            continue  # a view
        values.append(RecomputeChoice(" ".join(op.name for op in ops), made, time, verdicts[members[0]], count))
    return sorted(values, key=lambda c: -_rank(c))


def kept_bytes(layer: Layer, device: str, width: int) -> Affine:
    """Bytes of a layer kept between its forward and its backward, besides its input."""
    kept = Affine()
    for op, verdict in zip(layer.ops, recompute_verdicts(layer.ops, device, width), strict=True):
        if verdict == KEPT and not op.is_output:
            kept = kept + op.output.times(op.count)
    return kept


def choice_table(profile: Profile, device: str, *, n: float = 1.0, bandwidth: float = 1.0) -> list[str]:
    """The choices for all recomputable layers, as lines of text for n samples."""
    lines = []
    for layer in profile.layers:
        if layer.composite:
            lines.append(f"{layer.name or profile.name} ({layer.kind})")
            lines += (
                f"  {c.verdict:6} {c.bytes.at(n) * c.count:14.6g} B {c.seconds(n, bandwidth):12.4g} s  {c.name}"
                for c in choices(layer, device, profile.activation_bytes)
            )
    return lines


def _groups(ops: Sequence[ProfiledOp]) -> Iterator[list[int]]:
    """Groups of forward operators that are treated alike; most have one member."""
    together: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        if op.phase == "forward":
            together.setdefault(op.group or -1 - i, []).append(i)
    yield from together.values()


def _verdict(ops: list[ProfiledOp], balance: float) -> str:
    if all(op.recompute == "never" for op in ops):
        return UNUSED
    # a value overwritten after the last needed operator would be kept in its later state
    if any(op.recompute for op in ops):
        return RECOMPUTED
    grows = any(op.output.per_sample for op in ops)
    made = sum(_part(op.output, grows) * op.count for op in ops)
    time = sum(_part(_time(op, balance), grows) * op.count for op in ops)
    return KEPT if made and time > MAX_MOVED_PER_BYTE * made * (1 + 1e-9) else RECOMPUTED


def _time(op: ProfiledOp, balance: float) -> Affine:
    """Roofline: the larger of moved bytes and computed operations, for large batches."""
    if op.kind not in COMPUTE_KINDS:
        return op.bytes
    balance *= MATMUL_RATE_SHARE.get(op.kind, 1.0)
    computed = Affine(op.flops.fixed / balance, op.flops.per_sample / balance)
    grows = bool(op.flops.per_sample)
    return computed if _part(computed, grows) > _part(op.bytes, grows) else op.bytes


def _part(amount: Affine, grows: bool) -> float:
    """Amounts are compared per sample, so that the choice does not depend on the batch."""
    return amount.per_sample if grows else amount.fixed


def _rank(choice: RecomputeChoice) -> float:
    grows = bool(choice.bytes.per_sample)
    time = _part(choice.moved, grows)
    return _part(choice.bytes, grows) / time if time else float("inf")
