"""Several runs side by side: what is compared, the page, and the table on a terminal."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import pytest
from fake_run import EVIL, make_bare_run, make_run, make_waiting_run
from page_reader import Reader
from rich.console import Console

from drumline.reports import Run, StepRecord
from drumline.reports.comparison import MOST_SMOOTHED, Comparison, UnreadableRun, compare_runs
from drumline.reports.comparison_page import comparison_page, write_comparison
from drumline.reports.comparison_text import comparison_json, comparison_lines
from drumline.reports.page_script import POLICY
from drumline.reports.svg_lines import LINE_STYLE, LineSeries, dashes, lines_chart


def with_losses(name: str, losses: list[float], pace: float | None = 1.0) -> Run:
    """A run of these losses; a step takes `pace` seconds, or was not timed."""
    steps = tuple(
        StepRecord(i, loss, 1.0, 0.1, 8, elapsed=None if pace is None else pace * (i + 1))
        for i, loss in enumerate(losses)
    )
    return dataclasses.replace(make_run(), name=name, steps=steps)


def three() -> Comparison:
    return compare_runs([make_waiting_run(kind) for kind in ("sync", "async", "local")])


# ---- values


def test_steps_and_seconds_until_the_loss_that_all_reached() -> None:
    slow = with_losses("slow", [5, 4, 3, 2.5, 2.0, 1.5], pace=1.0)
    fast = with_losses("fast", [5, 3, 2, 1.8], pace=0.25)
    comparison = compare_runs([slow, fast])
    assert comparison.loss == pytest.approx(1.8) and comparison.window == 1 and not comparison.given
    assert [(c.reached.steps, c.reached.seconds) for c in comparison.runs if c.reached] == [(6, 6.0), (4, 1.0)]
    assert comparison.verdict() == "fast reached a loss of 1.8 after 1 s, slow after 6 s: 6.00 times as long."
    given = compare_runs([slow, fast], loss=1.6)
    assert given.given and given.runs[1].reached is None and given.runs[0].reached is not None
    assert given.verdict() == "slow reached a loss of 1.6 after 6 s."
    assert compare_runs([slow, fast], loss=0.1).verdict() == "2 runs side by side."


def test_the_common_loss_is_rounded_up() -> None:
    """So that each run has reached what is printed."""
    for low in (1.23456, 0.000123456, 123.4567, -1.23456, 9.99999):
        comparison = compare_runs([with_losses("a", [200.0, low]), with_losses("b", [200.0, low - 1])])
        assert comparison.loss is not None and low <= comparison.loss <= low + abs(low) / 1000
        assert comparison.runs[0].reached is not None and float(f"{comparison.loss:.4g}") == pytest.approx(
            comparison.loss, rel=1e-6
        )


def test_all_runs_are_smoothed_alike() -> None:
    long, short = [3.0] * 4000, [3.0] * 100
    assert compare_runs([with_losses("a", long), with_losses("b", short)]).window == 5
    assert compare_runs([with_losses("a", long)]).window == MOST_SMOOTHED
    assert "the last 5 steps" in compare_runs([with_losses("b", short)]).smoothing
    spike = [3.0] * 50 + [0.1] + [3.0] * 49
    comparison = compare_runs([with_losses("a", spike), with_losses("b", [2.0] * 100)])
    assert comparison.loss is not None and comparison.loss > 2.0, "one lucky batch is not a loss that was reached"


def test_runs_without_a_loss_do_not_hide_the_others() -> None:
    broken, empty = with_losses("broken", [math.nan] * 3), with_losses("empty", [])
    comparison = compare_runs([broken, empty, with_losses("good", [3.0, 2.0])])
    assert comparison.loss == 2.0 and [bool(c.reached) for c in comparison.runs] == [False, False, True]
    assert comparison.runs[0].lowest is None
    none = compare_runs([broken, empty])
    assert none.loss is None and "no finite value" in Reader(comparison_page(none)).text


def test_differences_are_noted() -> None:
    run = with_losses("a", [2.0])
    other = dataclasses.replace(
        with_losses("b", [2.0], pace=None), job="other.py:job", batch_size=64, machine="another", failure="rank 1 died"
    )
    notes = compare_runs([run, other], unreadable=[UnreadableRun("runs/c", "no run at runs/c")]).notes
    assert [note.split(":")[0] for note in notes] == [
        "The runs are of different jobs (examples/gpt.py",
        "A step is not equally large in all runs",
        "The runs were made on different machines.",
        "Without recorded seconds, and so not in the charts over time",
        "b failed",
        "runs/c",
    ]
    changed = dataclasses.replace(run, digest="0000")
    assert "whose file was changed" in compare_runs([run, changed]).notes[0]
    assert compare_runs([run, run]).notes == []


def test_equal_names_get_their_folders() -> None:
    a, b = (dataclasses.replace(with_losses("gpt", [2.0]), folder=Path(f"runs/{x}/gpt")) for x in "ab")
    assert [c.name for c in compare_runs([a, b]).runs] == ["gpt (runs/a/gpt)", "gpt (runs/b/gpt)"]


# ---- the page


def test_the_page_names_everything_that_is_compared() -> None:
    text = Reader(comparison_page(three())).text
    order = [
        "gpt-async reached a loss of 1.218",
        "The runs",
        "Steps and seconds until loss ≤ 1.218",
        "It is the lowest loss that all of these runs reached. A loss is the mean of the last 20 steps.",
        "Loss against steps",
        "Loss against seconds",
        "Throughput in samples/s",
        "Step time",
        "How long ranks waited for each other",
        "How stale the gradients were",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "dp=4, sync=local:8" in text and "80.0 ms (7.5% slower)" in text
    given = Reader(comparison_page(compare_runs([make_waiting_run("sync")] * 2, loss=0.5))).text
    assert "not reached; its lowest is 1.203" in given and "The loss was given." in given


def test_runs_without_waiting_have_no_such_section() -> None:
    text = Reader(comparison_page(compare_runs([make_run(), make_run()]))).text
    assert "How long ranks" not in text and "How stale" not in text and "Throughput in" not in text
    assert "Without recorded seconds" in text and "Loss against seconds: no finite value." in text


def test_it_is_inert_and_accessible() -> None:
    evil = dataclasses.replace(make_bare_run(), folder=Path(EVIL))
    comparison = compare_runs([evil, evil, *(c.run for c in three().runs)], unreadable=[UnreadableRun(EVIL, EVIL)])
    text = comparison_page(comparison)
    read = Reader(text)
    assert "<script>alert" not in text and "<img" not in text and POLICY in text
    assert read.tags.count("script") == 1 and not re.search(r"(?i)@import|url\((?!#idle)", text)
    assert not [x for x in read.attributes if x[1].startswith("on") or x[1] in ("src", "srcset", "action")]
    ids = [v for _, k, v in read.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    assert {v[1:] for _, k, v in read.attributes if k == "href" and v.startswith("#")} <= set(ids)
    assert read.tags.count("table") == read.tags.count("thead") == read.tags.count("caption") == 8
    assert read.attributes.count(("svg", "role", "img")) == read.tags.count("desc")
    assert comparison_page(comparison) == text


def test_long_runs_make_a_small_page(tmp_path: Path) -> None:
    steps = tuple(
        StepRecord(i, 3 / (1 + i / 1e4), 1.0, 0.1, 8, elapsed=0.1 * i, staleness=(i % 60,)) for i in range(20_000)
    )
    runs = [dataclasses.replace(make_run(), name=f"run {i}", steps=steps) for i in range(12)]
    path = write_comparison(compare_runs(runs), tmp_path)
    assert path == tmp_path / "comparison.html" and path.stat().st_size < 1_000_000
    assert "0 to 3" in path.read_text(encoding="utf-8")


def test_lines_differ_in_colour_or_dashes() -> None:
    assert len({(i % 8, dashes(i)) for i in range(64)}) == 64
    assert dashes(0) is None and len({dashes(i) for i in range(8)}) == 8
    for scheme in ("", "dark", "print"):
        part = LINE_STYLE[LINE_STYLE.index(scheme) :]
        assert len(set(re.findall(r"--run\d: (#\w+)", part[: part.index("}")]))) == 8, scheme
    chart = lines_chart(
        "t", [LineSeries("a", [(0, 1.0), (9, math.nan), (10, 2.0)], 0)], axis="step", form=lambda v: f"{v:g}"
    )
    assert "nan" not in chart.lower()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("scheme", "paper"), [("root", "#fdfdfb"), ("dark", "#15181c")])
def test_lines_stand_out_from_the_paper(scheme: str, paper: str) -> None:
    part = LINE_STYLE[LINE_STYLE.index(scheme) :]
    for colour in re.findall(r"--run\d: (#\w{6})", part[: part.index("}")]):
        light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4, colour


# ---- a terminal, and JSON


@pytest.mark.parametrize("width", [40, 70, 120])
def test_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False)
    console.print(comparison_lines(three(), width=width))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    text = re.sub(r"\s+", " ", out.getvalue())
    assert "until loss <= 1.218" in text and "12.49" in text and "mean of the last 20 steps" in text
    assert ("74.4 ms (7.5% slower)" in text) == (width >= 70)


def test_json_document() -> None:
    document = json.loads(json.dumps(comparison_json(three()), allow_nan=False))
    assert (document["loss"], document["smoothing"]) == (1.218, 20) and document["unreadable"] == []
    sync, stale, _ = document["runs"]
    assert sync["steps_to_loss"] == 365 and sync["seconds_to_loss"] == pytest.approx(30.4, abs=0.05)
    assert len(sync["wait_seconds"]) == 4 and sync["staleness"] is None and sync["network_share"] == 0.14
    assert sum(stale["staleness"].values()) == 400 and stale["max_staleness"] == 9 and stale["dropped"] == 3
    nothing = comparison_json(compare_runs([with_losses("x", [math.nan])]))
    assert nothing["loss"] is None and nothing["runs"][0]["last_loss"] is None
