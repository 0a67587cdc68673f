"""Waiting, staleness and charts over seconds on the page of one run."""

from __future__ import annotations

import dataclasses
import re

import pytest
from fake_run import make_run, make_waiting_run
from page_reader import Reader

from drumline.reports import Run, StepRecord
from drumline.reports.page import page
from drumline.reports.step_summaries import (
    StalenessSummary,
    WaitSummary,
    first_at,
    mean_throughput,
    smoothed_losses,
    staleness_summary,
    throughput,
    wait_summary,
)
from drumline.reports.waiting_sections import MOST_BARS, staleness_bins, wait_bars, wait_table


def record(step: int, **values: object) -> StepRecord:
    return StepRecord(step, 2.0, 1.0, 0.5, 8, **values)  # type: ignore[arg-type]


def text_of(run: Run) -> str:
    return Reader(page(run)).text


# ---- summaries


def test_waiting_by_rank() -> None:
    steps = [record(0, elapsed=0.5), record(1, elapsed=1.0, wait_seconds=(0.2, 0.0), network_share=0.1)]
    steps += [record(2, elapsed=1.5), record(3, elapsed=2.0, wait_seconds=(0.6, 0.0), network_share=0.3)]
    waits = wait_summary([*steps, record(4, elapsed=9.0)])
    assert waits is not None and waits.seconds == (pytest.approx(0.8), 0.0)
    assert waits.period == 2.0 and waits.shares == (pytest.approx(0.4), 0.0) and waits.mean_share == pytest.approx(0.2)
    assert (waits.longest, waits.shortest, waits.network_share) == (0, 1, pytest.approx(0.2))
    assert wait_summary([record(0)]) is None and wait_summary([]) is None
    without_clock = wait_summary([record(0), record(1, wait_seconds=(0.5, 0.0))])
    assert without_clock is not None and without_clock.shares == (0.5, 0.0)
    lost = wait_summary([*steps, record(5, elapsed=4.0, wait_seconds=(0.2,))])  # a rank was lost
    assert lost is not None and lost.seconds == (pytest.approx(1.0), 0.0)


def test_staleness() -> None:
    steps = [record(0, staleness=(0, 3)), record(1), record(2, staleness=(3,), dropped=2)]
    stale = staleness_summary(steps)
    assert stale == StalenessSummary({0: 1, 3: 2}, 2) and stale.gradients == 3
    assert stale.mean == 2.0 and stale.largest == 3
    assert staleness_bins(stale) == [("0", 1), ("1", 0), ("2", 0), ("3", 2)]
    assert staleness_bins(StalenessSummary({0: 5, 40: 1}))[0] == ("0 to 2", 5)
    assert sum(n for _, n in staleness_bins(StalenessSummary(dict.fromkeys(range(1000), 1)))) == 1000
    assert staleness_summary([record(0)]) is None
    workers = staleness_summary([record(i, staleness=(i,), worker=i % 2) for i in range(4)])
    assert workers is not None and workers.workers is not None
    assert [(w.gradients, w.mean_staleness) for w in workers.workers.values()] == [(2, 1.0), (2, 2.0)]


def test_throughput_is_over_the_clock_of_the_run() -> None:
    steps = [record(i, elapsed=0.25 * (i + 1)) for i in range(120)]  # steps that overlap: 0.5 s each, 4 per second
    assert throughput(steps) == [(0.5 * (i + 1), 32.0) for i in range(60)] and mean_throughput(steps) == 32.0
    assert throughput([record(0)]) == [] and mean_throughput([record(0)]) is None
    stopped = [record(0, elapsed=1.0), record(1, elapsed=1.0), record(2, elapsed=3.0)]
    assert throughput(stopped) == [(1.0, 8.0), (3.0, 4.0)]


def test_losses_are_smoothed_over_full_windows() -> None:
    losses = [5.0, 3.0, 1.0, float("nan"), 1.0, 1.0]
    steps = [StepRecord(i, loss, 1.0, 0.1, 8, elapsed=float(i)) for i, loss in enumerate(losses)]
    points = smoothed_losses(steps, 2)
    assert [p.steps for p in points] == [2, 3, 4, 5, 6] and [p.loss for p in points[:2]] == [4.0, 2.0]
    assert [p.loss == p.loss for p in points] == [True, True, False, False, True]
    reached = first_at(points, 2.0)
    assert reached is not None and (reached.steps, reached.seconds) == (3, 2.0)
    assert first_at(points, 0.5) is None and smoothed_losses(steps, 9) == []


# ---- the page


def test_sections_only_where_there_is_data() -> None:
    text = text_of(make_run())
    assert "How long ranks waited" not in text and "stale" not in text and "Throughput in samples/s" not in text
    text = text_of(make_waiting_run("sync"))
    assert "How long ranks waited" in text and "How stale" not in text
    for words in (
        "Ranks waited for others 41.9% of the time; most of all rank 1: 18.7 s, 56.1%.",
        "Rank 2 waited least: the others waited for it.",
        "Messages took another 14.0%, with all ranks there.",
        "rank 2 was slowest: its own work took 1.94 times as long as the fastest rank's, mostly in backward.",
        "Loss over 33.3 s",
        "Throughput in samples/s over all ranks",
    ):
        assert words in text, words
    text = text_of(make_waiting_run("async"))
    assert re.search(r"on average 1\.\d\d updates newer than those it was computed on, at most 9\.", text)
    assert "3 came too late and were dropped." in text and "Gradients by worker" in text


@pytest.mark.parametrize("kind", ["sync", "async", "local"])
def test_each_picture_has_a_title_a_description_and_a_table(kind: str) -> None:
    read = Reader(page(make_waiting_run(kind)))
    ids = [v for _, k, v in read.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    assert {v[1:] for _, k, v in read.attributes if k == "href" and v.startswith("#")} <= set(ids)
    pictures = [x for x in read.attributes if x == ("svg", "role", "img")]
    assert len(pictures) == read.tags.count("desc") == 5 + 2 + 1 + 2 + (kind == "async")
    assert read.tags.count("caption") == read.tags.count("table") == 12 + 1 + 2 * (kind == "async")
    assert read.tags.count("details") == 6 + (kind == "async")


def test_many_ranks_draw_the_extremes() -> None:
    waits = WaitSummary(tuple(float(r) for r in range(200)), 200.0)
    drawn = wait_bars(waits)
    assert drawn.count("<rect") == MOST_BARS and "rank 199" in drawn and "rank 0" in drawn and "rank 100" not in drawn
    assert "168 more ranks" in drawn
    listed = wait_table(waits, most=20)
    assert listed.count("<tr") == 21 and "rank 199" in listed and "rank 100" not in listed
    assert wait_table(waits).count("<tr") == 201


def test_no_rank_waited() -> None:
    even = dataclasses.replace(make_run(), steps=(record(0, elapsed=1.0, wait_seconds=(0.0, 0.0)),) * 2)
    text = text_of(even)
    assert "Ranks waited for others 0.0% of the time" in text and "waited least" not in text
