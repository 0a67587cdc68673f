"""Selective recomputation: which operators of a layer's forward are kept, and which are computed again in its backward.

Keeping an operator's result costs its bytes, computing it again costs its time. So the operators of a layer are ranked
by bytes saved per second lost, and computed again from the top down to LIMIT. The times are those of a roofline, in
bytes that memory could move meanwhile; the engine and the estimate both choose here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .profile import COMPUTE_KINDS, MATMUL_RATE_SHARE, Affine, Layer, ProfiledOp, Profile

MAX_MOVED_PER_BYTE = 5.0
"""A byte is computed again while that takes no longer than moving so many bytes.

An operator that memory bounds moves two to four for each that it makes: it reads up to three tensors and writes one, or
normalises and is then activated in place. All of these are computed again. Reductions, which read much and leave
little, are kept; so are products whose rows are long (see BALANCE), fused attention over long sequences, convolutions
with many channels. Full recomputation goes on from here, at a higher price for every byte."""

OPERATIONS_PER_VALUE = {"cpu": 32.0, "cuda": 200.0}
"""Operations that a device does while it moves one value (4 bytes in fp32, 2 in bf16, so that the number hardly depends
on the precision). It goes by the kind of the device, because a run knows no more, and must do what was predicted: with
it, products with rows of more than 80 values on a CPU and 500 on a GPU are kept."""

KEPT, RECOMPUTED, UNUSED = "kept", "again", "unused"


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """One value that a layer's forward makes, and what becomes of it."""

    name: str
    """The operators that write it, one after the other."""
    bytes: Affine
    """What keeping it costs, or what computing it again saves."""
    moved: Affine
    """The time to compute it, as the bytes that memory could move meanwhile."""
    verdict: str
    """`kept`, `again`, or `unused`: no backward reads it or anything after it, so it is neither."""
    count: int = 1

    def seconds(self, n: float, bandwidth: float) -> float:
        """The time to compute it for n samples, on a device whose memory moves `bandwidth` bytes a second."""
        return self.count * self.moved.at(n) / bandwidth


def recompute_verdicts(ops: tuple[ProfiledOp, ...], device: str, width: int) -> tuple[str, ...]:
    """What becomes of each operator's result. `width` is bytes of an activation; backward operators get no word."""
    key = (id(ops), device, width)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = ops, _verdicts(ops, OPERATIONS_PER_VALUE[device] / width)
    return _known[key][1]


MOST_KNOWN = 10_000
_known: dict[tuple[int, str, int], tuple[tuple[ProfiledOp, ...], tuple[str, ...]]] = {}
"""A search asks for the same layers again and again. The operators are held, so that no others get their id."""


def _verdicts(ops: tuple[ProfiledOp, ...], balance: float) -> tuple[str, ...]:
    found = [""] * len(ops)
    for members in _groups(ops):
        verdict = _verdict([ops[i] for i in members], balance)
        for i in members:
            found[i] = UNUSED if ops[i].recompute == "never" else verdict
    return tuple(found)


def choices(layer: Layer, device: str, width: int) -> list[RecomputeChoice]:
    """The values that a layer makes, by bytes saved per second lost, best first."""
    balance = OPERATIONS_PER_VALUE[device] / width
    words = recompute_verdicts(layer.ops, device, width)
    found = []
    for members in _groups(layer.ops):
        ops = [layer.ops[i] for i in members]
        whole = ops[0].count if len(ops) == 1 else 1
        made = Affine()
        time = Affine()
        for op in ops:
            times = op.count // whole
            made = made + _times(op.output, times)
            time = time + _times(_time(op, balance), times)
        if not made.at(1) and not time.at(1):
            continue  # a view
        found.append(RecomputeChoice(" ".join(op.name for op in ops), made, time, words[members[0]], whole))
    return sorted(found, key=lambda c: -_rank(c))


def kept_bytes(layer: Layer, device: str, width: int) -> Affine:
    """What stays of a layer beside its input, between its forward and its backward."""
    kept = Affine()
    for op, word in zip(layer.ops, recompute_verdicts(layer.ops, device, width), strict=True):
        if word == KEPT and not op.is_output:
            kept = kept + _times(op.output, op.count)
    return kept


def choice_table(profile: Profile, device: str, *, n: float = 1.0, bandwidth: float = 1.0) -> list[str]:
    """The choice for every layer that recomputation works on, as lines of text for n samples."""
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
    """Forward operators that have to be treated alike: most stand alone."""
    together: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        if op.phase == "forward":
            together.setdefault(op.group or -1 - i, []).append(i)
    yield from together.values()


def _verdict(ops: list[ProfiledOp], balance: float) -> str:
    if all(op.recompute == "never" for op in ops):
        return UNUSED
    # what is written once more after the last needed operator would be found in its later state
    if any(op.recompute for op in ops):
        return RECOMPUTED
    grows = any(op.output.per_sample for op in ops)
    made = sum(_part(op.output, grows) * op.count for op in ops)
    time = sum(_part(_time(op, balance), grows) * op.count for op in ops)
    return KEPT if made and time > MAX_MOVED_PER_BYTE * made * (1 + 1e-9) else RECOMPUTED


def _time(op: ProfiledOp, balance: float) -> Affine:
    """The roofline: the larger of what is moved and what is computed, for large batches."""
    if op.kind not in COMPUTE_KINDS:
        return op.bytes
    balance *= MATMUL_RATE_SHARE.get(op.kind, 1.0)
    computed = Affine(op.flops.fixed / balance, op.flops.per_sample / balance)
    grows = bool(op.flops.per_sample)
    return computed if _part(computed, grows) > _part(op.bytes, grows) else op.bytes


def _part(amount: Affine, grows: bool) -> float:
    """The choice does not depend on the batch: amounts are compared by what a sample adds."""
    return amount.per_sample if grows else amount.fixed


def _rank(choice: RecomputeChoice) -> float:
    grows = bool(choice.bytes.per_sample)
    time = _part(choice.moved, grows)
    return _part(choice.bytes, grows) / time if time else float("inf")


def _times(a: Affine, k: int) -> Affine:
    return Affine(a.fixed * k, a.per_sample * k)
