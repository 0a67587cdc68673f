"""Redistribution between layouts: values and gradients, with real messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from rule_functions import redistributed
from world import World

from drumline.partition.sharding import redistribution
from drumline.partition.sharding.layout import Split
from drumline.partition.sharding.redistribution import Axis
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
def test_every_redistribution_and_its_gradient(world: Worlds, n: int, dim: int) -> None:
    for cuts in SPLITS[n]:
        assert world(n).run(redistributed, Split(dim, cuts)) == [[]] * n, str(cuts)


def test_shapes_without_a_group() -> None:
    split, axis = Split(1, ((0, 3, 4),)), Axis("tp", 2, 1)
    with fake_mode():
        x = torch.empty(2, 1, requires_grad=True)
        whole = redistribution.gather(x, split, axis)
        assert whole.shape == (2, 4) and whole.requires_grad
        assert redistribution.take_part(whole, split, axis).shape == (2, 1)
        assert redistribution.reduce_scatter_partial(whole, split, axis).shape == (2, 1)
        assert (
            redistribution.reduce_partial(whole, axis).shape
            == redistribution.enter_split_work(whole, axis).shape
            == (2, 4)
        )


def test_one_rank_sends_nothing() -> None:
    axis = Axis("tp", 1, 0, observer=lambda *_: pytest.fail("a message") or nullcontext())
    x, split = torch.randn(3, 4), Split(1, ((0, 4),))
    for out in (
        redistribution.gather(x, split, axis),
        redistribution.take_part(x, split, axis),
        redistribution.reduce_scatter_partial(x, split, axis),
        redistribution.reduce_partial(x, axis),
    ):
        assert torch.equal(out, x)
