"""Pages that play a collective or a pipeline: what they show, their size, and the script in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import command
import pytest
from report_browser import needs_browser, visit

from drumline.core.errors import InputError
from drumline.reports.markup import Html
from drumline.reports.schedule_page import (
    LARGEST_PAGE,
    collective_page,
    pipeline_page,
    stored_micro_batches,
)
from drumline.schedules import ALGORITHMS, ORDERS, collective_schedule, contents, pipeline_order, prove_pipeline
from drumline.simulator import bubble, replay_in_thirds

PAIRS = [(collective, algorithm) for collective, names in ALGORITHMS.items() for algorithm in names]


def of_order(name: str, ranks: int, micros: int) -> Html:
    order = pipeline_order(name, ranks, micros, (ORDERS[name].virtual or (2,))[0])
    timeline = replay_in_thirds(order)
    return pipeline_page(order, timeline, bubble=bubble(timeline))


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_collective_ends_as_its_contract_says(collective: str, algorithm: str) -> None:
    schedule = collective_schedule(collective, algorithm, 5)
    states = [state for _, state in contents(schedule)]
    assert len(states) == schedule.count_rounds() + 1
    for rank in range(5):
        for chunk in range(schedule.chunks):
            expected = schedule.contract.after(schedule, rank, chunk)
            assert expected is None or states[-1][rank, chunk] == expected
    page = collective_page(schedule, where="here", seconds=1e-6)
    assert page.count('class="step"') == len(states)
    assert len(page) < LARGEST_PAGE


def test_the_rounds_of_a_ring() -> None:
    (first, start), (sends, after), *_ = contents(collective_schedule("all_reduce", "ring", 4))
    assert first == () and len(sends) == 4
    assert start[2, 0] == (2,)
    assert after[sends[0].dst, sends[0].chunk] == tuple(sorted((sends[0].src, sends[0].dst)))
    page = collective_page(collective_schedule("all_reduce", "ring", 4), where="here", seconds=1e-6)
    assert "Round 6 of 6" in page and "0-&gt;1 +1" in page


@pytest.mark.parametrize("name", ORDERS)
def test_every_pipeline_order(name: str) -> None:
    order = pipeline_order(name, 4, 8, (ORDERS[name].virtual or (2,))[0])
    timeline = replay_in_thirds(order)
    moments = sorted({s.start for s in timeline.spans})
    stored = [stored_micro_batches(order, timeline.spans, t) for t in moments]
    most = [max(counts[rank] for counts in stored) for rank in range(4)]
    assert tuple(most) == prove_pipeline(order).activations
    assert stored_micro_batches(order, timeline.spans, timeline.seconds) == [0] * 4
    page = of_order(name, 4, 8)
    assert page.count('class="step"') == len(moments) + 1
    assert page.count("data-start=") == len(timeline.spans)
    assert len(page) < LARGEST_PAGE


def test_large_ones_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"ring_all_reduce over 64 ranks is too large to draw, 520,192 cells"):
        collective_page(collective_schedule("all_reduce", "ring", 64), where="here", seconds=1.0)
    with pytest.raises(InputError, match=r"1f1b: 16 stages on 16 ranks, 256 micro-batches is too large to draw, 8,192"):
        of_order("1f1b", 16, 256)
    with pytest.raises(InputError, match=r"64 micro-batches is too large to draw, 1.\d MB"):
        of_order("1f1b", 30, 64)
    assert len(collective_page(collective_schedule("all_reduce", "ring", 16), where="here", seconds=1.0)) < LARGEST_PAGE


def test_the_command_writes_pages_of_one_schedule(tmp_path: Path) -> None:
    words = ("simulate", "all_reduce:ring", "--ranks", 4, "--cluster", "dgx-a100", "--page", "ring.html")
    done = command.here(*words, cwd=tmp_path)
    assert done.returncode == 0 and "page: ring.html" in done.stdout, done.stderr
    assert (tmp_path / "ring.html").read_text().startswith("<!doctype html>")
    done = command.here("simulate", "pipeline:1f1b", "--page", "p.html", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["bubble"] and (tmp_path / "p.html").exists()
    command.here("simulate", "pipeline:pipedream", "--page", "p.html", cwd=tmp_path)
    assert "a full pipeline has no bubble" in (tmp_path / "p.html").read_text()
    for target, fix in (("all_reduce", "all_reduce:ring"), ("pipeline", "pipeline:")):
        done = command.here("simulate", target, "--page", "x.html", cwd=tmp_path)
        assert done.returncode == 2 and f"--page of {target}" in done.stderr and fix in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_without_javascript_all_steps_are_there() -> None:
    page = of_order("1f1b", 2, 2)
    controls = re.search(r'<div class="player"[^>]*>', page)
    assert controls and "hidden" in controls[0]  # shown by the script
    assert '<li class="step"' in page and 'class="step" hidden' not in page


PLAY = """
  const root = document.documentElement, steps = [...document.querySelectorAll(".step")];
  const shown = () => steps.findIndex((s) => !s.hidden), press = (key) => document.body.dispatchEvent(
    new KeyboardEvent("keydown", {key, bubbles: true}));
  const seen = [shown()];
  press("ArrowRight"); seen.push(shown());
  press("End"); seen.push(shown());
  press("ArrowLeft"); seen.push(shown());
  press("Home"); seen.push(shown());
  const bar = document.querySelector(".player input");
  bar.value = 3; bar.dispatchEvent(new Event("input")); seen.push(shown());
  document.querySelector("[data-go=back]").click(); seen.push(shown());
  document.querySelector("[data-play]").click(); seen.push(document.querySelector("[data-play]").textContent);
  press(" "); seen.push(document.querySelector("[data-play]").textContent);
  root.dataset.seen = seen.join(",");
  root.dataset.later = document.querySelectorAll(".later").length;
  root.dataset.wide = root.scrollWidth - innerWidth;
"""


@needs_browser
@pytest.mark.parametrize(("kind", "width", "dark"), [("ring", 400, True), ("pipeline", 1280, False)])
def test_the_player_in_a_browser(kind: str, width: int, dark: bool, tmp_path: Path) -> None:
    ring = collective_schedule("all_reduce", "ring", 4)
    text = collective_page(ring, where="here", seconds=1e-6) if kind == "ring" else of_order("1f1b", 4, 4)
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    document, console = visit(path, width=width, dark=dark)
    assert console == [] and 'data-ready="yes"' in document  # under its policy
    assert re.search(r'<div class="player"(?![^>]*hidden)', document)
    document, console = visit(path, width=width, dark=dark, script=PLAY)
    assert console == []
    last = text.count('class="step"') - 1
    assert f'data-seen="0,1,{last},{last - 1},0,3,2,Pause,Play"' in document
    assert int(re.findall(r'data-wide="(-?\d+)"', document)[0]) <= 0  # nothing sticks out
    if kind == "pipeline":
        assert int(re.findall(r'data-later="(\d+)"', document)[0]) > 0
