"""Sections of the run page that are there where there is something to show: collectives, faults, roofline."""

from __future__ import annotations

import dataclasses
import re

import pytest
from fake_run import EVIL, make_cluster, make_run
from page_reader import Reader

from drumline.core.timeline import Span, Timeline
from drumline.reports import StepRecord
from drumline.reports.collective_section import collective_section, collective_totals
from drumline.reports.fault_section import fault_section, pauses
from drumline.reports.page import page
from drumline.theory.collective_forms import ring_all_reduce_seconds


def text_of(markup: str | None) -> str:
    assert markup is not None
    return Reader(f"<main>{markup}</main>").text


# ---- collectives


def timeline(origin: str, *names: str, seconds: float = 0.01, size: float = 0.0) -> Timeline:
    spans = [
        Span(rank, "communication", name, i * 0.1, i * 0.1 + seconds, size)
        for rank in (0, 1)
        for i, name in enumerate(names)
    ]
    return Timeline(origin, (*spans, Span(0, "compute", "all_reduce of nothing", 0.0, 1.0)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all_reduce", "all_reduce"),
        ("all-reduce bucket 3", "all_reduce"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("nccl:all_gather_into_tensor", "all_gather"),
        ("reduce-scatter 0", "reduce_scatter"),
    ],
)
def test_predicted_and_measured_names_are_one_collective(name: str, kind: str) -> None:
    totals = collective_totals(timeline("measured", name, name, size=8.0))
    assert list(totals) == [kind]
    assert totals[kind].calls == 2 and totals[kind].seconds == pytest.approx(0.02) and totals[kind].bytes == 16


def test_the_recorded_step_is_compared() -> None:
    predicted = timeline("predicted", "all-reduce bucket 0", seconds=0.008, size=2.0**20)
    text = text_of(collective_section(make_cluster(), predicted, timeline("measured", "all_reduce", "broadcast")))
    assert "all_reduce 1 1 1.00 MiB 8.00 ms 10.0 ms -20.0%" in text
    assert re.search(r"broadcast 0 1 - - 10.0+ ms -", text)


def test_the_tables_of_the_machine_are_compared_with_the_closed_form() -> None:
    cluster = make_cluster()
    text = text_of(collective_section(cluster, None, None))
    model = ring_all_reduce_seconds(2, 2.0**20, cluster.node.link)
    assert f"{1e6 * model:.0f} us" in text and "1.00 MiB 800 us" in text
    assert collective_section(dataclasses.replace(cluster, collective=()), None, None) is None


# ---- faults


def steps(*, gap: float = 5.0, note: str = "") -> tuple[StepRecord, ...]:
    """Ten steps of 0.1 s; before the sixth the run stood still."""
    return tuple(
        StepRecord(i, 1.0, 1.0, 0.1, 8, elapsed=0.1 * (i + 1) + (gap if i >= 5 else 0), note=note if i == 7 else "")
        for i in range(10)
    )


def test_pauses_are_found() -> None:
    (pause,) = pauses(steps())
    assert pause.after == 4 and pause.seconds == pytest.approx(5.0) and pause.start == pytest.approx(0.5)
    assert pauses(steps(gap=0.1)) == [] and pauses(steps()[:1]) == []
    assert pauses([dataclasses.replace(s, elapsed=None) for s in steps()]) == []


def test_faults_are_drawn_over_the_seconds() -> None:
    text = text_of(fault_section(["rank 1 was ended by signal SIGKILL"], "", steps(note="the loss jumped")))
    assert "1 fault survived. 5.00 s of 6.00 s passed in pauses between steps. 1 step has a note." in text
    assert (
        "rank 1 was ended by signal SIGKILL" in text and "the loss jumped" in text and "5.00 s without a step" in text
    )


def test_a_run_without_faults_has_no_strip() -> None:
    assert fault_section([], "", steps()) is None
    assert "What happened to the run" not in page(make_run())


def test_a_failed_run_and_one_without_times() -> None:
    run = make_run()
    text = text_of(fault_section([], "rank 0 failed", run.steps))
    assert "The run failed: rank 0 failed" in text and "the end of a run that failed" not in text
    assert "the end of a run that failed" in text_of(fault_section([], "rank 0 failed", steps()))
    failed = page(dataclasses.replace(run, faults=(EVIL,), failure=EVIL, steps=steps(note=EVIL)))
    assert "What happened to the run" in failed and "<script>alert" not in failed
