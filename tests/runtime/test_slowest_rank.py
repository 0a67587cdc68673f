"""The slowest rank and its phase: a rank slowed to half its speed is named within 20 steps, even ranks never are."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import slow_rank_functions as on_ranks
from world import World

from drumline.core.timeline import Span
from drumline.runtime.training import link_probe
from drumline.runtime.training.link_probe import LinkProbe, ring_links, slow_link
from drumline.runtime.training.slowest_rank import (
    EVERY,
    SLOW,
    Slowest,
    Times,
    find_slowest,
    step_seconds,
    transfer_seconds,
    wait_seconds,
)
from drumline.runtime.training.step_times import PHASES, WAIT, step_times

Worlds = Callable[..., World]
DATA = Path(__file__).parents[1] / "data"
USUAL = {
    "data": 0.010,
    "forward": 0.020,
    "backward": 0.040,
    "optimizer": 0.005,
    "network": 0.002,
    "between phases": 0.001,
}
TRANSFER = 0.015


def simulated(ranks: int, steps: int, seed: int, *, slowed: str = "", begin: int = 0, noise: float = 1.0) -> Times:
    """Steps of even ranks on a busy machine; from `begin` on, one phase of rank 1 takes twice as long.

    Each phase varies by 15%, each rank has spells of 20 steps or so in which it is some 10% slower, and one step in 20
    takes 2 to 5 times as long.
    """
    rng = random.Random(seed)
    spell = [0.0] * ranks
    times: Times = [[] for _ in range(ranks)]
    for step in range(steps):
        rows = []
        for r in range(ranks):
            spell[r] = 0.95 * spell[r] + rng.gauss(0, 0.03)
            jump = rng.uniform(2, 5) if rng.random() < 0.05 else 1.0
            varied = [jump * math.exp(noise * (abs(spell[r]) + rng.gauss(0, 0.15))) for _ in PHASES]
            twice = [2.0 if (r, p) == (1, slowed) and step >= begin else 1.0 for p in PHASES]
            rows.append([n * t * s for n, t, s in zip(varied, twice, USUAL.values(), strict=True)])
        last = max(map(sum, rows)) + TRANSFER * math.exp(rng.gauss(0, 0.2))
        for r, row in enumerate(rows):
            times[r].append([*row, last - sum(row)])
    return times


def windows(times: Times) -> Iterator[Times]:
    for at in range(0, len(times[0]), EVERY):
        yield [rows[at : at + EVERY] for rows in times]


def alarms(times: Times) -> list[Slowest]:
    return [s for s in map(find_slowest, windows(times)) if s is not None and s[2] > SLOW]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_alarm_in_1000_clean_steps(ranks: int) -> None:
    assert [alarms(simulated(ranks, 1000, seed)) for seed in range(5)] == [[]] * 5


def test_no_alarm_in_1000_recorded_steps() -> None:
    """Two even ranks of examples/gpt.py over gloo, on two cores with ten other processes; microseconds."""
    times = [[[1e-6 * x for x in row] for row in rows] for rows in json.loads((DATA / "clean_steps.json").read_text())]
    assert [len(rows) for rows in times] == [1000, 1000] and alarms(times) == []
    medians = [[sorted(sum(row[:WAIT]) for row in rows)[EVERY // 2] for rows in part] for part in windows(times)]
    assert sum(max(m) / min(m) > SLOW for m in medians) > 10, "the medians of ten such steps are far apart"
    half = [times[0], [[2 * x if i < WAIT else x for i, x in enumerate(row)] for row in times[1]]]
    assert len(alarms(half)) > 85 and {rank for rank, _, _ in alarms(half)} == {1}
    assert [find_slowest(part)[0] for part in windows(half)].count(1) > 97


@pytest.mark.slow
@pytest.mark.alone  # even ranks must get equal shares of the processors
@pytest.mark.timeout(700)
def test_no_alarm_in_1000_steps_of_two_even_ranks(world: Worlds) -> None:
    """A live training: a comparison in every ten steps, none of them above the factor of an alarm."""
    for comparisons in world(2).run(partial(on_ranks.compare, steps=1000), "dp=2", "", -1, timeout=600):
        assert len(comparisons) == 1000 // EVERY
        assert [c.slowest for c in comparisons if c.slowest is not None and c.slowest[2] > SLOW] == []


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
@pytest.mark.parametrize("begin", [0, 3, 5, 9])
def test_slowed_rank_is_named_within_20_steps(phase: str, begin: int) -> None:
    for seed in range(10):
        times = simulated(4, begin + 20, seed, slowed=phase, begin=begin, noise=0.3)
        whole = [part for part in windows(times) if len(part[0]) == EVERY]
        slowest = find_slowest(whole[-1])
        assert slowest is not None and slowest[:2] == (1, phase) and slowest[2] > 1, seed


def test_factor_is_that_of_four_steps_in_five() -> None:
    even, slow = [0.0, 1.0, 2.0, 0.1, 0.0, 0.0], [0.0, 1.0, 3.9, 0.1, 0.0, 0.0]
    steady = find_slowest([[[*even, 2.0]] * 10, [[*slow, 0.1]] * 10, [[*even, 2.0]] * 10])
    assert steady == (1, "backward", pytest.approx(5.0 / 3.1))
    sometimes = [[*slow, 0.1]] * 7 + [[*even, 2.0]] * 3
    assert find_slowest([[[*even, 2.0]] * 10, sometimes]) == (1, "backward", pytest.approx(1.0))
    assert find_slowest([[[0.0] * 7] * 3] * 2) is None and find_slowest([[], []]) is None


def test_little_work_is_harmless() -> None:
    """A rank with twice the work of the others does not matter if the step is long for another reason."""
    times: Times = [[[0.0, 0.001, 0.0, 0.0, 0.0, 0.0, 0.1]] * 10, [[0.0, 0.002, 0.0, 0.0, 0.0, 0.0, 0.099]] * 10]
    assert find_slowest(times) == (1, "forward", pytest.approx(1 + 0.001 / 0.101))


def test_waiting_is_what_messages_take_beyond_their_transfer() -> None:
    times: Times = [[[0, 0, 1.0, 0, 0, 0, 0.7]] * 4, [[0, 0, 1.5, 0, 0, 0, 0.2]] * 4]
    assert wait_seconds(times) == (pytest.approx(2.0), 0.0)
    assert wait_seconds(times, pipelined=True) == (pytest.approx(2.8), pytest.approx(0.8))
    assert transfer_seconds(times) == 0.2 and step_seconds(times) == pytest.approx(1.7)


# -- the parts of a step


def span(name: str, start: float, end: float) -> Span:
    lane = "communication" if name in ("all_reduce", "all_gather") else "data" if name == "data" else "compute"
    return Span(0, lane, name, start, end)


def times_of(*spans: Span, **options: Any) -> dict[str, float]:
    row = step_times(spans, **options)
    return {k: pytest.approx(v) for k, v in zip((*PHASES, "wait"), row, strict=True) if v > 1e-12}


def test_parts_of_a_step() -> None:
    step = (
        span("data", 0.0, 1.0),
        span("forward", 1.0, 3.0),
        span("all_gather", 1.5, 2.0),
        span("backward", 3.5, 8.0),
        span("all_reduce", 4.0, 5.0),  # hidden behind the backward
        span("all_reduce", 6.0, 8.0),
        span("communication", 8.0, 9.0),
        span("all_reduce", 8.25, 9.0),
        span("optimizer", 9.0, 9.5),
    )
    own = {"data": 1.0, "forward": 2.0, "backward": 2.5, "optimizer": 0.5, "network": 0.25, "between phases": 0.5}
    assert own | {"wait": 2.75} == times_of(*step)
    blocked = times_of(*step, blocked=[(1.5, 2.0), (1.75, 2.25), (6.0, 8.0)], gap=0.25)
    assert own | {"forward": 1.25, "between phases": 0.75, "wait": 3.5} == blocked
    assert times_of() == {}
    assert times_of(span("guard", 0.0, 1.0)) == {"between phases": 1.0}


def test_pipelines_wait_between_their_actions() -> None:
    step = (span("forward", 0.5, 1.0), span("forward", 1.0, 1.5), span("backward", 3.0, 4.0))
    assert times_of(*step, gap=0.5) == {"forward": 1.0, "backward": 1.0, "between phases": 2.5}
    assert times_of(*step, gap=0.5, pipelined=True) == {
        "forward": 1.0,
        "backward": 1.0,
        "between phases": 0.5,
        "wait": 2.0,
    }


# -- links


def test_rings() -> None:
    assert ring_links([0, 1]) == [(0, 1)] and ring_links([0, 4, 8]) == [(0, 4), (4, 8), (8, 0)]
    nine = ring_links(range(9))
    assert sorted(nine) == sorted((i, (i + 1) % 9) for i in range(9)) and nine[:2] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_slow_links_name_their_rank(ranks: int) -> None:
    for slow in range(ranks):
        both, sends = {}, {}
        for a, b in ring_links(range(ranks)):
            for pair in ((a, b), (b, a)):
                both[pair] = [2.0 if slow in pair else 1.0]
                sends[pair] = [2.0 if slow == pair[0] else 1.0]
        assert slow_link(sends) == (slow, 2.0)
        if ranks > 2:
            assert slow_link(both) == (slow, 2.0)
    assert slow_link({(0, 1): [2.0], (1, 0): [2.0]}) == (0, 1.0), "both directions of the only link"


def test_some_messages_are_early_or_late() -> None:
    assert slow_link({(0, 1): [2.0] * 7 + [0.1], (1, 0): [1.0] * 4 + [9.0] * 4}) == (0, 2.0)


def test_when_links_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If messages take long; again if they take longer, or if it costs less than a hundredth of the training."""
    probe, results = LinkProbe(None, 1), iter([(1, 2.0), None, (2, 3.0)])
    monkeypatch.setattr(probe, "_has_links", lambda: True)
    monkeypatch.setattr(probe, "_measure", lambda: next(results))
    monkeypatch.setattr(probe, "_agreed", lambda seconds: 0.5)
    assert probe.slow_rank(0.1, 1.0, steps=10) is None  # a tenth of a step
    assert probe.slow_rank(0.4, 1.0, steps=10) == (1, 2.0)
    assert probe.slow_rank(0.4, 1.0, steps=10) == (1, 2.0)  # not timed again
    assert probe.slow_rank(0.25, 1.0, steps=10) is None  # recovered
    assert probe.slow_rank(0.4, 1.0, steps=10) is None  # slower: timed again, and even
    assert probe.slow_rank(0.4, 1.0, steps=51) == (2, 3.0)  # 51 s since then, and it took half a second


# -- real ranks


@pytest.mark.alone
@pytest.mark.parametrize("slowed", ["data", "backward", "network"])
def test_slowed_rank_of_a_real_run(world: Worlds, slowed: str) -> None:
    results = world(3).run(on_ranks.compare, "dp=3", slowed, 1)[0]
    named = [r for r in results if r.slowest and r.slowest[:2] == (1, slowed) and r.slowest[2] > 1.1]
    assert named, [r.slowest for r in results]
    if slowed == "network":
        assert named[-1].slowest[2] > SLOW and named[-1].network_share > 0.2, "no rank's own work, and still an alarm"
    else:
        waits = named[-1].wait_seconds
        assert waits[1] < 0.3 * min(waits[0], waits[2]), "the others wait for it"
        assert min(waits[0], waits[2]) > 0.5 * EVERY * on_ranks.WORK


@pytest.mark.alone
def test_even_ranks_of_a_real_run(world: Worlds) -> None:
    for backend in ("gloo", "shm"):
        for result in world(2, backend).run(on_ranks.compare, "dp=2", "", 0)[1]:
            assert result.slowest is not None and result.slowest[2] <= SLOW, backend
            assert sum(result.wait_seconds) < 0.2 * EVERY * 4 * on_ranks.WORK


def test_links_are_not_timed_on_one_host(world: Worlds) -> None:
    assert world(2).run(on_ranks.has_links, False) == [False] * 2
    assert world(2).run(on_ranks.has_links, True) == [True] * 2
    assert link_probe.SLOW_LINK == SLOW
