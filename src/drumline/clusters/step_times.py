"""Step times as a distribution: ranks that are slower than the others, and jitter of every rank from step to step.

Jitter is a lognormal factor on the compute of each rank in each step, of mean 1, independent of all others. A slow rank
takes a fixed multiple. Messages are not affected.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..core.errors import InputError
from .measured import STRICT

LARGEST_FACTOR = 1e4
"""Largest factor of a slow rank; with more it counts as lost."""
LARGEST_JITTER = 10.0
MOST_SLOW_RANKS = 100_000
_FORM = (
    "RANK:FACTOR, such as 3:4, or FIRST-LAST:FACTOR, such as 8-15:1.5; ranks from 0 on, "
    f"a factor from {1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}"
)


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank whose compute takes `factor` times as long."""

    __pydantic_config__ = STRICT
    rank: Annotated[int, Field(ge=0, le=10_000_000)]
    """Number of the rank, from 0."""
    factor: Annotated[float, Field(ge=1 / LARGEST_FACTOR, le=LARGEST_FACTOR)]
    """Its compute time over that of the others."""

    @classmethod
    def parse(cls, text: str) -> list[SlowRank]:
        """Read `3:4`, rank 3 takes four times as long; or `8-15:1.5`, such as the ranks of a slower node."""
        ranks, _, factor = text.partition(":")
        first, dash, last = ranks.partition("-")
        try:
            begin, end, value = int(first), int(last if dash else first), float(factor)
        except ValueError:
            raise InputError(f"slow rank {text!r}", rule=_FORM) from None
        if not 0 <= begin <= end or not 1 / LARGEST_FACTOR <= value <= LARGEST_FACTOR:
            raise InputError(f"slow rank {text!r}", rule=_FORM)
        if end - begin >= MOST_SLOW_RANKS:
            raise InputError(f"slow ranks {text!r}", rule=f"at most {MOST_SLOW_RANKS:,} ranks")
        return [cls(rank, value) for rank in range(begin, end + 1)]

    def __str__(self) -> str:
        return f"{self.rank}:{self.factor}"


@dataclass(frozen=True, slots=True)
class StepTimeDistribution:
    """How the compute times of ranks differ. Empty: all ranks take the same time in every step."""

    __pydantic_config__ = STRICT
    jitter: Annotated[float, Field(ge=0, le=LARGEST_JITTER)] = 0.0
    """Standard deviation of a rank's compute time over its mean (coefficient of variation), from step to step."""
    slow: tuple[SlowRank, ...] = ()
    seed: Annotated[int, Field(ge=0, le=2**63)] = 0
    """Seed of the factors that a replay draws."""

    def __bool__(self) -> bool:
        return self.jitter > 0 or any(s.factor != 1.0 for s in self.slow)

    @classmethod
    def of(cls, slow: Iterable[str] = (), jitter: float = 0.0, seed: int = 0) -> StepTimeDistribution:
        """From `RANK:FACTOR` texts and a coefficient of variation, as on the command line."""
        ranks = tuple(rank for text in slow for rank in SlowRank.parse(text))
        twice = [rank for rank, count in Counter(s.rank for s in ranks).items() if count > 1]
        if twice:
            raise InputError(f"rank {twice[0]} is slow twice", rule="one factor for each slow rank")
        if not 0 <= jitter <= LARGEST_JITTER:
            raise InputError(
                f"jitter {jitter:g}", rule=f"a standard deviation over its mean: from 0 to {LARGEST_JITTER:g}"
            )
        if not 0 <= seed <= 2**63:
            raise InputError(f"seed {seed}", rule="a whole number from 0 on")
        return cls(jitter, ranks, seed)

    def check_ranks(self, ranks: int) -> None:
        """Refuse slow ranks that do not exist."""
        beyond = [s.rank for s in self.slow if s.rank >= ranks]
        if beyond:
            raise InputError(
                f"rank {beyond[0]} is slow", rule=f"there are {ranks} ranks, from 0 to {ranks - 1}", fix="another rank"
            )

    def factors(self, ranks: int) -> tuple[float, ...]:
        """The mean factor of every rank of a plan.

        Slow ranks take part in plans with fewer ranks too, as the last of them: a plan does not say which devices it
        leaves idle.
        """
        factors = [1.0] * ranks
        beyond = []
        for s in self.slow:
            if s.rank < ranks:
                factors[s.rank] = s.factor
            else:
                beyond.append(s.factor)
        free = [rank for rank in reversed(range(ranks)) if factors[rank] == 1.0]
        for rank, factor in zip(free, sorted(beyond, reverse=True), strict=False):
            factors[rank] = factor
        return tuple(factors)

    def without_slow_ranks(self) -> StepTimeDistribution:
        """The same jitter on even ranks."""
        return StepTimeDistribution(self.jitter, (), self.seed)

    def draws(self, rank: int, ranks: int) -> Iterator[float]:
        """The factors of one of some ranks in step after step: the same for the same seed, whatever the others draw."""
        return self._draws(rank, self.factors(ranks)[rank])

    def all_draws(self, ranks: int) -> list[Iterator[float]]:
        """The same for every rank."""
        return [self._draws(rank, mean) for rank, mean in enumerate(self.factors(ranks))]

    def _draws(self, rank: int, mean: float) -> Iterator[float]:
        if not self.jitter:
            while True:
                yield mean
        mu, sigma = lognormal(self.jitter)
        chance = random.Random(f"{self.seed}/{rank}")  # text, so that close seeds are not alike
        while True:
            yield mean * math.exp(chance.gauss(mu, sigma))

    def _runs(self) -> Iterator[tuple[str, float]]:
        """Slow ranks in words; those that follow each other with the same factor together."""
        for (_, factor), run in itertools.groupby(
            enumerate(self.slow), key=lambda item: (item[1].rank - item[0], item[1].factor)
        ):
            ranks = [s.rank for _, s in run]
            yield (f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"), factor

    def __str__(self) -> str:
        words = [f"{ranks} {factor:g} times as slow" for ranks, factor in self._runs() if factor != 1.0]
        words += [f"jitter {100 * self.jitter:g}%"] if self.jitter else []
        return ", ".join(words) or "even ranks"


def lognormal(cv: float) -> tuple[float, float]:
    """(mu, sigma) of the lognormal distribution of mean 1 with this coefficient of variation."""
    variance = math.log1p(cv * cv)
    return -variance / 2, math.sqrt(variance)
