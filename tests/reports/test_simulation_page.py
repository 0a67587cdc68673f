"""The page of a simulation: its sections, and what it leaves out."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from fake_predictions import make_simulation_report, make_spans
from page_reader import Reader

import drumline as dl
from drumline.core.timeline import Timeline
from drumline.loop.prediction_pages import simulation_report
from drumline.reports.shown_stages import MOST_STAGES, shown_stages
from drumline.reports.simulation_page import _stairs, simulation_page, write_simulation_page
from drumline.simulator.memory_curve import StageMemory

sys.path.insert(0, str(Path(__file__).parents[1]))
from command import here

JOB = ("simulate", "gpt:1.3b", "--plan", "pp=4,micro=8,precision=bf16", "--cluster", "dgx-a100")


def text_of(page: str) -> str:
    return Reader(page).text


def test_the_order_of_the_page() -> None:
    text = text_of(simulation_page(make_simulation_report()))
    order = [
        "The step takes 41.5 ms.",
        "Where the time goes",
        "Rank by rank",
        "The critical path",
        "Memory over time",
        "How busy the links are",
    ]
    places = [text.index(x) for x in order]
    assert places == sorted(places)
    assert "Throughput 386 samples/s" in text
    assert "chain of 10 pieces of work" in text and "The largest part, 96%, is forward." in text
    assert "At most 200 MiB on a rank, of 4.00 GiB." in text and "34.0%, 191 MiB" in text


def test_a_step_that_does_not_fit_says_so_at_the_top() -> None:
    report = make_simulation_report()
    assert report.estimate is not None and "does not fit" not in text_of(simulation_page(report))
    full = dataclasses.replace(report.estimate, memory_bytes=2 * report.estimate.memory_limit)
    text = text_of(simulation_page(dataclasses.replace(report, estimate=full)))
    assert "8.00 GiB of 4.00 GiB on the fullest rank: does not fit" in text


def test_every_picture_has_a_title_a_description_and_a_table() -> None:
    read = Reader(simulation_page(make_simulation_report()))
    pictures = [x for x in read.attributes if x == ("svg", "role", "img")]
    assert len(pictures) == read.tags.count("desc") == read.tags.count("details") == read.tags.count("caption") == 5


def test_what_was_not_simulated_is_left_out() -> None:
    report = make_simulation_report()
    bare = dataclasses.replace(report, memory=(), links=(), path=(), parts={"communication": 1.0}, estimate=None)
    text = text_of(simulation_page(bare))
    for title in ("Where the time goes", "The critical path", "Memory over time", "How busy the links are"):
        assert title not in text
    assert "Rank by rank" in text and "The replay takes" in text
    empty = dataclasses.replace(bare, timeline=Timeline("predicted"))
    assert "Nothing was recorded" in text_of(simulation_page(empty))


def test_without_curves_the_peak_is_shown() -> None:
    text = text_of(simulation_page(dataclasses.replace(make_simulation_report(), memory=())))
    assert "The peak of the fullest rank, of 4.00 GiB." in text


def test_many_stages_and_moments_make_a_small_page() -> None:
    times = tuple(1e-5 * i for i in range(20_000))
    curve = tuple(2.0**30 * (1 + (i % 97) / 97) for i in range(20_000))
    stages = tuple(StageMemory(s, times, curve) for s in range(64))
    report = dataclasses.replace(
        make_simulation_report(), memory=stages, timeline=make_spans("predicted", 10_000, ranks=16)
    )
    page = simulation_page(report)
    assert len(page.encode()) < 10**6
    assert f"{MOST_STAGES} of 64 stages are drawn, the fullest among them." in text_of(page)
    assert "Of 10000 predicted spans, short neighbours are drawn as one." in text_of(page)


@pytest.mark.parametrize("count", [1, 2, 399, 400, 401, 802, 2049])
def test_a_curve_of_memory_ends_with_the_step(count: int) -> None:
    """Thinned or not, it begins and ends with its first and last moment, and keeps its peak."""
    times = tuple(0.05 * i for i in range(count))
    curve = StageMemory(63, times, tuple(float(i % 7) for i in range(count)))
    points = _stairs(curve)
    assert (points[0].x, points[-1].x) == (times[0], times[-1]) and max(p.y for p in points) == curve.peak
    assert len(points) <= 2 * 400 + 1 and [p.x for p in points] == sorted(p.x for p in points)


@pytest.mark.parametrize("fullest", [0, 1, 17, 40, 62, 63])
def test_the_fullest_stage_is_among_those_that_are_drawn(fullest: int) -> None:
    stages = [StageMemory(s, (0.0, 1.0), (1.0, 3.0 if s == fullest else 2.0)) for s in range(64)]
    shown = [c.stage for c in shown_stages(stages)]
    assert len(shown) == MOST_STAGES and {0, fullest, 63} <= set(shown) and shown == sorted(shown)
    assert shown_stages(stages[:5]) == stages[:5]


def test_names_that_are_markup_stay_text() -> None:
    page = simulation_page(make_simulation_report(markup=True))
    assert "<script>alert" not in page and "<img" not in page and page.count("<script>") == 1


# ---- as a verb and as a command


def test_the_command(tmp_path: Path) -> None:
    done = here(*JOB, "--page", "s.html", "--trace", "t.json", cwd=tmp_path)
    assert done.returncode == 0 and "page: s.html\ntrace: t.json\n" in done.stdout, done.stderr
    assert "Rank by rank" in text_of((tmp_path / "s.html").read_text(encoding="utf-8"))
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    done = here(*JOB, "--page", str(tmp_path), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["page"] == str(tmp_path / "simulation.html")


def test_a_collective(tmp_path: Path) -> None:
    page = dl.report(dl.simulate("all_reduce:ring", cluster="dgx-a100"), output=tmp_path)
    assert page == tmp_path / "simulation.html" and "over 4 ranks on one node of dgx-a100" in text_of(
        page.read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("option", ["page", "trace", "picture"])
@pytest.mark.parametrize("target", ["pipeline", "all_reduce"])
def test_a_page_is_of_one_replay(target: str, option: str, tmp_path: Path) -> None:
    done = here("simulate", target, f"--{option}", "s.html", cwd=tmp_path)
    assert done.returncode == 2 and f"--{option} of {target}" in done.stderr and f"{target}:" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["pipeline:1f1b", "pipeline:zero-bubble"])
def test_a_pipeline_order(target: str, tmp_path: Path) -> None:
    report = simulation_report(dl.simulate(target, ranks=4, micro=8))
    text = text_of(write_simulation_page(report, tmp_path).read_text(encoding="utf-8"))
    assert "of the time of all ranks" in text and "activations of at most" in text


def test_as_a_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replay = dl.simulate("gpt:1.3b", "dp=4,precision=bf16", "dgx-a100", slow={3: 2.0})
    assert dl.report(replay, trace="t.json") == Path("simulation.html")
    assert Path("t.json").exists() and "rank 3 waits least" in text_of(
        Path("simulation.html").read_text(encoding="utf-8")
    )
    assert dl.report(replay, output="x.html").name == "x.html"


def test_scaling_is_of_a_sweep(tmp_path: Path) -> None:
    done = here(*JOB, "--scaling", "weak", cwd=tmp_path)
    assert done.returncode == 2 and "--scaling weak without --sweep" in done.stderr
