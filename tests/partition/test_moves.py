"""Moves between layouts: values and gradients, with real messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from rule_functions import moved
from world import World

from drumline.partition import moves
from drumline.partition.layout import Split
from drumline.partition.moves import Axis
from drumline.tracing.fake import fake_mode

Worlds = Callable[[int], World]

SPLITS = {
    2: [
        ((0, 2, 4),),
        ((0, 3, 4),),
        ((0, 1, 4),),
        ((0, 0, 4),),
        ((0, 4, 4),),
        ((0, 1, 2), (0, 1, 2)),
        ((0, 2, 3), (0, 0, 1)),
    ],
    3: [((0, 2, 4, 6),), ((0, 1, 1, 6),), ((0, 5, 5, 5),), ((0, 1, 2, 3), (0, 1, 2, 3)), ((0, 0, 1, 2), (0, 3, 3, 4))],
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_move_and_its_gradient(world: Worlds, n: int, dim: int) -> None:
    for cuts in SPLITS[n]:
        assert world(n).run(moved, Split(dim, cuts)) == [[]] * n, str(cuts)


def test_shapes_without_a_group() -> None:
    split, axis = Split(1, ((0, 3, 4),)), Axis("tp", 2, 1)
    with fake_mode():
        x = torch.empty(2, 1, requires_grad=True)
        whole = moves.gather(x, split, axis)
        assert whole.shape == (2, 4) and whole.requires_grad
        assert moves.take(whole, split, axis).shape == (2, 1)
        assert moves.scatter(whole, split, axis).shape == (2, 1)
        assert moves.reduce(whole, axis).shape == moves.enter(whole, axis).shape == (2, 4)


def test_one_rank_moves_nothing() -> None:
    axis = Axis("tp", 1, 0, watch=lambda *_: pytest.fail("a message") or nullcontext())
    x, split = torch.randn(3, 4), Split(1, ((0, 4),))
    for out in (
        moves.gather(x, split, axis),
        moves.take(x, split, axis),
        moves.scatter(x, split, axis),
        moves.reduce(x, axis),
    ):
        assert torch.equal(out, x)
