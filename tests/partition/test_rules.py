"""Every rule gives what the operator gives: outputs and gradients, for every split of every input, on 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rule_cases import FAMILIES, run_family
from world import World

Worlds = Callable[[int], World]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_splits_give_what_the_whole_gives(world: Worlds, family: str, n: int) -> None:
    for rank, wrong in enumerate(world(n).run(run_family, family)):
        assert not wrong, f"rank {rank} of {n}:\n" + "\n".join(wrong)
