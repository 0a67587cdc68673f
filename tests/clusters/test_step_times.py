"""Step times as a distribution: slow ranks, jitter, and the same draws for the same seed."""

from __future__ import annotations

import statistics
from itertools import islice
from pathlib import Path

import pytest

from drumline.clusters import Cluster, SlowRank, StepTimeDistribution, load
from drumline.core.errors import InputError


def test_slow_ranks_are_read_from_text() -> None:
    spread = StepTimeDistribution.of(["3:4", "0:1.5"], 0.1, seed=7)
    assert spread.slow == (SlowRank(3, 4.0), SlowRank(0, 1.5)) and spread.jitter == 0.1
    assert spread.factors(4) == (1.5, 1.0, 1.0, 4.0)
    assert str(spread) == "rank 3 4 times as slow, rank 0 1.5 times as slow, jitter 10%"


def test_a_slow_rank_takes_part_in_smaller_plans() -> None:
    """A plan does not say which devices it leaves idle."""
    assert StepTimeDistribution.of(["3:4"]).factors(2) == (1.0, 4.0)
    assert StepTimeDistribution.of(["3:4", "2:2", "0:3"]).factors(2) == (3.0, 4.0)
    assert StepTimeDistribution.of(["3:4"]).factors(1) == (4.0,)


def test_even_ranks_are_the_default() -> None:
    assert not StepTimeDistribution() and not StepTimeDistribution.of(["2:1"]) and StepTimeDistribution.of(["2:2"])
    assert str(StepTimeDistribution()) == "even ranks" and not load("dgx-h100").step_times


def test_draws_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    spread = StepTimeDistribution.of(["1:4"], 0.3)
    for rank, mean in ((0, 1.0), (1, 4.0)):
        draws = list(islice(spread.draws(rank, 2), 20_000))
        assert statistics.fmean(draws) == pytest.approx(mean, rel=0.01)
        assert statistics.stdev(draws) / mean == pytest.approx(0.3, rel=0.03)
    assert list(islice(StepTimeDistribution.of(["1:4"]).draws(1, 2), 3)) == [4.0] * 3


def test_the_same_seed_draws_the_same() -> None:
    def drawn(seed: int, rank: int) -> list[float]:
        return list(islice(StepTimeDistribution(0.1, (), seed).draws(rank, 4), 5))

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(2, 0) and drawn(1, 0) != drawn(1, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["3"],), "RANK:FACTOR"),
        ((["3:"],), "RANK:FACTOR"),
        ((["-1:4"],), "RANK:FACTOR"),
        ((["1:0"],), "RANK:FACTOR"),
        ((["1:nan"],), "RANK:FACTOR"),
        ((["1:2", "1:3"],), "one factor for each slow rank"),
        (([], -0.1), "from 0 to 10"),
        (([], float("nan")), "from 0 to 10"),
        (([], 0.1, -1), "whole number"),
    ],
)
def test_bad_values_are_refused(arguments: tuple[list[str]], words: str) -> None:
    with pytest.raises(InputError) as refused:
        StepTimeDistribution.of(*arguments)
    assert words in refused.value.rule


def test_slow_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="rank 4 is slow"):
        StepTimeDistribution.of(["4:2"]).check_ranks(4)


def test_a_cluster_file_may_have_them(tmp_path: Path) -> None:
    here = load("dgx-h100").with_devices(4)
    path = tmp_path / "c.toml"
    Cluster.save(here, path)
    assert "step_times" not in path.read_text()
    path.write_text(path.read_text() + "\n[step_times]\njitter = 0.1\n[[step_times.slow]]\nrank = 3\nfactor = 4\n")
    assert Cluster.load(path).step_times == StepTimeDistribution.of(["3:4"], 0.1)


def test_ranks_of_a_slower_node() -> None:
    spread = StepTimeDistribution.of(["2-4:1.5", "6:3"])
    assert spread.factors(8) == (1.0, 1.0, 1.5, 1.5, 1.5, 1.0, 3.0, 1.0)
    assert str(spread) == "ranks 2 to 4 1.5 times as slow, rank 6 3 times as slow"
    for text in ("4-2:1.5", "2-:1.5", "1-2-3:4", "0-10000000:2", "3-5:0"):
        with pytest.raises(InputError, match="slow rank"):
            StepTimeDistribution.of([text])
    with pytest.raises(InputError, match="rank 3 is slow twice"):
        StepTimeDistribution.of(["2-4:1.5", "3:2"])
