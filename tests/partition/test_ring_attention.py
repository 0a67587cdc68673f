"""Ring attention matches torch's attention of the whole sequence on every rank, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import ring_functions as functions
import torch
import torch.nn.functional as F
from ring_functions import Case
from world import World

from drumline.partition.sharding.ring_messages import RingSchedule

Worlds = Callable[[int], World]

EVEN = {2: (0, 6, 12), 3: (0, 4, 8, 12), 4: (0, 3, 6, 9, 12)}
UNEVEN = {2: (0, 9, 13), 3: (0, 1, 8, 13), 4: (0, 5, 6, 6, 13)}
"""The last one has a rank without positions."""
OTHER = {2: (0, 3, 7), 3: (0, 3, 3, 7), 4: (0, 1, 4, 5, 7)}
FULL = {2: (0, 0, 5), 3: (0, 5, 5, 5), 4: (0, 0, 5, 5, 5)}
"""One rank has all positions."""


def cases(n: int) -> list[Case]:
    even, uneven, other = Case(EVEN[n]), Case(UNEVEN[n]), Case(UNEVEN[n], q_bounds=OTHER[n])
    masks = [
        "bool",
        "float",
        "bool blind",
        "float blind",
        "bool one",
        "float one",
        "bool heads blind",
        "learned",
        "learned heads",
        "learned one",
        "learned one heads",
    ]
    return [
        even,
        uneven,
        other,
        Case(FULL[n]),
        Case(OTHER[n], q_bounds=UNEVEN[n]),
        Case(EVEN[n], q_bounds=FULL[n]),
        *(replace(c, causal=True) for c in (even, uneven, other, Case(FULL[n]), Case(OTHER[n], q_bounds=UNEVEN[n]))),
        *(replace(c, mask=m) for c in (uneven, other) for m in masks),
        replace(uneven, values=5),
        replace(uneven, values=5, causal=True),
        replace(uneven, scale=0.3),
        replace(uneven, scale=0.3, causal=True, values=5),
        replace(uneven, keys=(2, 2), grouped=True),
        replace(uneven, keys=(2, 1), grouped=True, causal=True),
        replace(uneven, keys=(2, 2), grouped=True, mask="float"),
        replace(uneven, lead=(3,)),
        replace(uneven, lead=(3,), mask="bool"),
        replace(uneven, lead=(2, 2, 2), causal=True),
        replace(uneven, lead=(2, 4), keys=(1, 4), mask="bool"),
        replace(uneven, mask="learned heads", scores=40),
        replace(uneven, mask="learned one heads", scores=40),
        replace(uneven, values=5, causal=True, scores=1),
    ]


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_the_whole_sequence(world: Worlds, n: int) -> None:
    grid = cases(n) if n > 1 else [Case((0, 7)), Case((0, 7), causal=True), Case((0, 7), mask="learned blind")]
    for rank, results in enumerate(world(n).run(functions.all_errors, grid)):
        for case, errors in zip(grid, results, strict=True):
            assert set(errors) >= {"out", "dq", "dk", "dv"} | ({"dmask"} if "learned" in case.mask else set())
            assert max(errors.values()) < 1e-12, f"rank {rank}, {case}: {errors}"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 0.06)])
def test_in_lower_precision(world: Worlds, dtype: torch.dtype, bound: float) -> None:
    plain = Case(UNEVEN[3], dtype=dtype)
    grid = [plain, replace(plain, causal=True), replace(plain, mask="bool"), replace(plain, values=5)]
    for results in world(3).run(functions.all_errors, grid):
        for case, errors in zip(grid, results, strict=True):
            assert max(errors.values()) < bound, f"{case}: {errors}"


def test_over_shared_memory(world: Callable[..., World]) -> None:
    grid = [Case(UNEVEN[3]), Case(UNEVEN[3], causal=True), Case(UNEVEN[3], q_bounds=OTHER[3], mask="learned")]
    for results in world(3, "shm").run(functions.all_errors, grid):
        assert max(max(errors.values()) for errors in results) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_rings_in_groups_of_the_world(world: Worlds, causal: bool) -> None:
    assert max(world(4).run(functions.in_pairs, Case(UNEVEN[2], causal=causal))) < 1e-12


def test_bytes_sent(world: Worlds) -> None:
    """Forward: n-1 hops of a block's k and v. Backward: the same, and n-1 hops of their gradients. Causal: half of it."""
    case = Case(EVEN[4])
    block = 2 * 3 * 8 * 8 * 8  # k and v; 3 positions of 8 heads (2 x 4) of 8 numbers of 8 bytes
    assert [sum(sent) for sent in world(4).run(functions.counted, case)] == [9 * block] * 4
    causal = [sum(sent) for sent in world(4).run(functions.counted, replace(case, causal=True))]
    # Rank r forwards the blocks 0 to r, twice, and accumulated gradients; the last rank returns three of them to their
    # owners.
    assert causal == [2 * block, 5 * block, 8 * block, 3 * block]
    assert sum(causal) == 9 * block * 4 // 2


def test_an_observer_sees_every_byte(world: Worlds) -> None:
    block = 2 * 3 * 8 * 8 * 8
    assert world(4).run(functions.observed_bytes, Case(EVEN[4])) == [3 * block] * 4


def test_dropout_is_redrawn_in_the_backward(world: Worlds) -> None:
    """A quarter is dropped, on every rank a different one, and the backward drops the same."""
    results = world(2).run(functions.dropped, Case((0, 45, 90)))
    for share, again, formula in results:
        assert 0.2 < share < 0.3
        assert again == 0 and formula < 1e-12
    assert results[0][0] != results[1][0]


def test_shapes_without_values() -> None:
    assert functions.fake_shapes((0, 4, 9, 12)) == [(2, 4, 5, 6), (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 6), (5, 12)]


def test_number_of_hops_of_blocks() -> None:
    ring = RingSchedule(0, (0, 3, 6, 9), (0, 3, 6, 9), True)
    assert [ring.reach(b) for b in range(3)] == [2, 1, 0]
    assert [ring.offset(b) for b in range(3)] == [0, -3, -6]
    ring = RingSchedule(2, (0, 3, 6, 6), (0, 3, 6, 9), False)
    assert [ring.reach(b) for b in range(3)] == [2, 2, 0], "nobody needs a block without keys"
    assert ring.rows == (3, 0)
    assert [RingSchedule(2, (0, 3, 6, 9), (0, 3, 6, 9), True).offset(b) for b in range(3)] == [None, None, 0]


def test_bounds_of_other_ranks_are_refused() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(AssertionError, match="are not those of 3 ranks"):
        functions.ring_attention(q, q, q, bounds=(0, 4, 8), axis=functions.Axis("cp", 3, 1))
    with pytest.raises(AssertionError, match="4 queries, 4 keys; bounds: \\(2, 2\\)"):
        functions.ring_attention(q, q, q, bounds=(0, 2, 4), axis=functions.Axis("cp", 2, 1))


def test_autocast_as_in_torch() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    mask = torch.randn(6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = functions.ring_attention(q, k, v, bounds=(0, 6), axis=functions.Axis("cp", 1, 0), mask=mask)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
