"""Image rules match the operators, for every split of every input, and gather only where listed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from image_cases import FAMILIES, run_family
from rule_contract import captured_of, gathers, seeds_of, shard
from world import World

from drumline.partition.sharding.redistribution import Axis

Worlds = Callable[[int], World]


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_image_splits_match_the_whole(world: Worlds, family: str, n: int) -> None:
    for rank, wrong in enumerate(world(n).run(run_family, family)):
        assert not wrong, f"rank {rank} of {n}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_listed_splits_are_gathered(family: str) -> None:
    for case in FAMILIES[family]:
        if case.gathers == "*":
            continue
        captured, _, batch = captured_of(case)
        for name, splits in seeds_of(case, 2):
            if len(splits) > 1:
                continue
            expected = name in case.gathers.split() or name.split("/")[0] in case.gathers.split()
            done = shard(captured, batch, splits, Axis("tp", 2, 0))
            assert gathers(done) == expected, f"{case.name} {name}: {done.gathered}"
