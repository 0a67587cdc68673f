"""The benchmark of timelines: how far critical paths agree, and that the path of another plan does not."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import drumline as dl
from drumline.core.timeline import Span, Timeline
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
    assert agreement(recorded(simulated[plan], noise=0.3), simulated[plan]) > 0.75


@pytest.mark.parametrize("plan", PLANS)
def test_another_plan_or_schedule_fails_the_bar(plan: str, simulated: dict[str, Timeline]) -> None:
    from timeline_paths import agreement
    from timelines import LEAST_AGREEMENT

    for other in set(PLANS) - {plan}:
        assert agreement(recorded(simulated[plan]), simulated[other]) < LEAST_AGREEMENT, other


def test_a_path_covers_the_step_and_keeps_waiting() -> None:
    from timeline_paths import PathPiece, agreement, critical_pieces

    def spans(*message: Span) -> Timeline:
        work = (Span(0, "compute", "forward a m0", 0.0, 4.0), Span(1, "compute", "backward a m0", 6.0, 10.0))
        return Timeline("predicted", (*work, *message))

    idle, sent = spans(), spans(Span(0, "communication", "F to stage 1", 4.0, 6.0))
    alike = {0: 0, 1: 1}
    waits = PathPiece(0.4, 0.6, 1, "waiting", 0)
    assert critical_pieces(idle, alike) == [
        PathPiece(0.0, 0.4, 0, "forward", 0),
        waits,
        PathPiece(0.6, 1.0, 1, "backward", 0),
    ]
    assert critical_pieces(sent, alike)[1] == PathPiece(0.4, 0.6, 1, "communication", 0)
    assert agreement(idle, sent) == pytest.approx(0.8)


def test_symmetric_ranks_are_equal() -> None:
    from timeline_paths import agreement, equal_ranks

    ranks = [Span(r, "compute", "forward (model)", 0.0, 1.0 + r / 100) for r in range(4)]
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
