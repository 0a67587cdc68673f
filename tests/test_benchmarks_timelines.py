"""The benchmark of timelines: how far critical paths agree, and that the path of another plan does not."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import drumline as dl
from drumline.core.timeline import Span, Timeline
from drumline.costs.pipeline_clock import time_pipeline
from drumline.schedules import pipeline_order
from drumline.simulator.step import unfolded

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PLANS = (
    "pp=2,micro=4,schedule=1f1b",
    "pp=2,micro=4,schedule=gpipe",
    "pp=2,micro=4,schedule=zero-bubble",
    "pp=2,micro=4,schedule=interleaved,virtual=2",
    "pp=2,micro=8",
    "pp=4,micro=4",
    "dp=2,pp=2,micro=4",
    "dp=2",
)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def simulated() -> dict[str, Timeline]:
    options: Any = {"corrections": False}
    return {plan: dl.simulate("gpt:1.3b", f"{plan},precision=bf16", "dgx-a100", **options).timeline for plan in PLANS}


def recorded(timeline: Timeline, noise: float = 0.0) -> Timeline:
    """As ranks would record it: every rank, three times as slow, no names of micro-batches, ranks a little apart.

    Between passes of a pipeline a rank sends something; layers of one pass follow each other at once.
    """
    rng, spans = random.Random(1), []
    for s in unfolded(timeline).spans:
        words = s.name.split()[0].replace("weights", "backward")
        name = f"{words} (model)" if words in ("forward", "backward") else s.name
        start, end = 3 * s.start + 1e-4 * (s.rank + 1), 3 * s.end + 1e-4 * (s.rank + 1)
        end -= 2e-5 if " stage " in s.name else 0.0
        late = noise * (s.end - s.start) * rng.random() if " stage " in s.name else 0.0
        spans.append(Span(s.rank, s.lane, name, start + late, end, s.bytes))
    return Timeline("measured", tuple(spans))


@pytest.mark.parametrize("plan", PLANS)
def test_a_record_of_the_simulated_step_has_its_path(plan: str, simulated: dict[str, Timeline]) -> None:
    from timeline_paths import agreement

    assert agreement(simulated[plan], simulated[plan]) == pytest.approx(1.0)
    assert agreement(recorded(simulated[plan]), simulated[plan]) > 0.97
    assert agreement(recorded(simulated[plan], noise=0.3), simulated[plan]) > 0.9


@pytest.mark.parametrize("plan", PLANS)
def test_another_plan_or_schedule_fails_the_bar(plan: str, simulated: dict[str, Timeline]) -> None:
    from timeline_paths import agreement
    from timelines import LEAST_AGREEMENT

    for other in set(PLANS) - {plan}:
        assert agreement(recorded(simulated[plan]), simulated[other]) < LEAST_AGREEMENT, other


def work(rank: int, phase: str, micro: int, start: float, end: float) -> Span:
    return Span(rank, "compute", f"{phase} stage {rank} m{micro}", start, end)


def steps(*spans: Span) -> Timeline:
    return Timeline("predicted", spans)


def piped(order: str, forward: tuple[float, ...], micros: int = 4) -> Timeline:
    """A pipeline whose stages take these seconds forward, and twice as long backward."""
    pipeline = pipeline_order(order, len(forward), micros, 1)
    times = time_pipeline(pipeline, forward=forward, backward=[2 * f for f in forward], transfer=0.01)
    words = {"F": "forward", "B": "backward"}
    return steps(*(work(t.rank, words[t.action.kind], t.action.micro, t.start, t.end) for t in times.actions))


def test_a_wait_of_one_path_alone_costs_its_own_share_and_no_more() -> None:
    """The moments after the wait differ by a third of the step; the order of work does not."""
    from timeline_paths import align

    passes = [("forward", 0, 1.0), ("backward", 0, 2.0), ("forward", 1, 1.0), ("backward", 1, 2.0)]

    def with_wait(seconds: float) -> Timeline:
        spans, now = [], 0.0
        for i, (phase, micro, length) in enumerate(passes):
            now += seconds if i == 1 else 0.0
            spans.append(work(0, phase, micro, now, now + length))
            now += length
        return steps(*spans)

    aligned = align(with_wait(3.0), with_wait(0.0))
    assert (aligned.measured, aligned.simulated) == (pytest.approx(2 / 3), pytest.approx(1.0))
    assert aligned.agreement == pytest.approx(2 / 3)
    both = align(with_wait(3.0), with_wait(3.0))
    assert both.agreement == both.equally_long == pytest.approx(1.0)
    # of a wait that is longer in one of them, the common part counts
    assert align(with_wait(3.0), with_wait(1.5)).measured == pytest.approx(6 / 9 + 1.5 / 7.5)


def test_work_in_another_order_counts_twice() -> None:
    """F0 F1 B0 B1 and F0 B0 F1 B1: F1, a sixth of the step, is missing in one place and in the way in the other."""
    from timeline_paths import agreement

    together = steps(
        work(0, "forward", 0, 0, 1),
        work(0, "forward", 1, 1, 2),
        work(0, "backward", 0, 2, 4),
        work(0, "backward", 1, 4, 6),
    )
    in_turns = steps(
        work(0, "forward", 0, 0, 1),
        work(0, "backward", 0, 1, 3),
        work(0, "forward", 1, 3, 4),
        work(0, "backward", 1, 4, 6),
    )
    assert agreement(together, in_turns) == pytest.approx(1 - 2 / 6)


@pytest.mark.parametrize(
    ("measured", "predicted"),
    [
        (("1f1b", (1.0, 2.0)), ("1f1b", (2.0, 1.0))),  # another stage is the bottleneck
        (("1f1b", (1.0, 1.0, 3.0, 1.0)), ("1f1b", (1.0, 3.0, 1.0, 1.0))),
        (("1f1b", (1.0, 1.3)), ("1f1b", (1.3, 1.0))),
        (("1f1b", (1.0, 2.0)), ("gpipe", (1.0, 2.0))),  # another order
        (("naive", (1.0, 1.0)), ("1f1b", (1.0, 1.0))),
    ],
)
def test_another_bottleneck_or_order_fails_the_bar(measured: Any, predicted: Any) -> None:
    from timeline_paths import agreement
    from timelines import LEAST_AGREEMENT

    assert agreement(piped(*measured), piped(*measured)) == pytest.approx(1.0)
    assert agreement(piped(*measured), piped(*predicted)) < LEAST_AGREEMENT - 0.1


def test_the_rank_that_all_wait_for_is_on_the_path() -> None:
    """Two ranks, one of which takes half as long: the path of the other one decides."""
    from timeline_paths import agreement

    def ranks(first: float, second: float) -> Timeline:
        end = max(first, second)
        own = [(0, first), (1, second)]
        return steps(
            *(work(r, "forward", 0, 0.0, t) for r, t in own), *(work(r, "optimizer", 0, end, end + 0.1) for r, _ in own)
        )

    assert agreement(ranks(2.0, 1.0), ranks(2.0, 1.1)) == pytest.approx(1.0)
    assert agreement(ranks(2.0, 1.0), ranks(1.0, 2.0)) < 0.1


@pytest.mark.parametrize(("later", "holds"), [(0.02, True), (0.3, False)])
def test_near_ties_are_critical_within_the_stated_share(later: float, holds: bool) -> None:
    """Which of two stages ends last decides the path; within `TIE` of the step, either is accepted."""
    from timeline_paths import TIE, agreement

    assert (later / 2.1 <= TIE) is holds

    def ranks(first: float, second: float) -> Timeline:
        passes = [Span(0, "compute", "forward a", 0.0, first), Span(1, "compute", "forward b", 0.0, second)]
        return steps(*passes, Span(0, "compute", "optimizer", max(first, second), max(first, second) + 0.1))

    assert (agreement(ranks(2.0, 2.0 + later), ranks(2.0 + later, 2.0)) > 0.9) is holds


def test_a_step_that_is_slower_in_one_place_has_the_same_path() -> None:
    from timeline_paths import align

    aligned = align(
        steps(work(0, "forward", 0, 0, 1), work(0, "backward", 0, 1, 4)),
        steps(work(0, "forward", 0, 0, 2), work(0, "backward", 0, 2, 4)),
    )
    assert aligned.agreement == pytest.approx(1.0) and aligned.equally_long == pytest.approx(0.25 + 0.5)


def test_symmetric_ranks_are_equal() -> None:
    from timeline_paths import agreement, equal_ranks

    ranks = [Span(r, "compute", "forward (model)", 0.0, 1.0 + r / 10) for r in range(4)]
    record = Timeline("measured", tuple(ranks))
    one = Timeline("predicted", (Span(0, "compute", "forward x", 0.0, 1.0),), rank_counts={0: 4})
    assert equal_ranks(one) == {0: 0, 1: 0, 2: 0, 3: 0} and agreement(record, one) == pytest.approx(1.0)
    apart = Timeline("predicted", (*one.spans, Span(3, "compute", "forward x", 0.0, 0.5)))
    assert equal_ranks(apart) == {0: 0, 3: 3} and agreement(record, apart) == 0.0


@pytest.mark.parametrize(("recorded_as", "holds"), [("pp=2,micro=4,schedule=1f1b", True), ("pp=2,micro=8", False)])
def test_the_table(recorded_as: str, holds: bool, simulated: dict[str, Timeline]) -> None:
    """A run under one plan whose timeline is that of another is said to disagree."""
    from timelines import table

    def run(plan: str, record: str) -> Any:
        estimate = SimpleNamespace(step_seconds=1.1)
        measured = recorded(simulated[record])
        return SimpleNamespace(step_seconds=1.0, estimate=estimate, measured=measured, predicted=simulated[plan])

    first = "pp=2,micro=4,schedule=1f1b"
    lines, all_hold = table({first: [run(first, recorded_as)], "dp=2": [run("dp=2", "dp=2")]})
    assert all_hold is holds
    assert lines[2].startswith(f"| `{first}` | 1000.0 ms | 1100.0 ms | +10% | ")
    assert f"{1 + holds} of 2 paths agree" in lines[-1]


def test_the_page_has_its_marks() -> None:
    from timelines import PAGE

    text = PAGE.read_text(encoding="utf-8")
    assert text.index("<!-- timelines -->") < text.index("<!-- /timelines -->")
