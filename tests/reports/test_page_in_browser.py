"""Every kind of page in a real browser: no network, no console errors, inert names, zoom, both widths and schemes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fake_predictions import make_plan_report, make_simulation_report, make_spans
from fake_run import make_bare_run, make_run, make_waiting_run
from report_browser import Browser, Tab, needs_browser
from test_graph import A100, IMAGE, UNet, traced, view_of

from drumline.core.timeline import Timeline
from drumline.reports.bench_page import page as bench_page
from drumline.reports.bench_results import BenchResult
from drumline.reports.comparison import compare_runs
from drumline.reports.comparison_page import write_comparison
from drumline.reports.graph_page import graph_page
from drumline.reports.page import write_page
from drumline.reports.partial_page import write_partial_page
from drumline.reports.partial_run import read_partial
from drumline.reports.plan_page import write_plan_page
from drumline.reports.plan_report import PlanReport
from drumline.reports.schedule_page import collective_page, pipeline_page
from drumline.reports.simulation_page import write_simulation_page
from drumline.schedules import collective_schedule, pipeline_order
from drumline.simulator import bubble, replay_in_thirds

pytestmark = needs_browser

WIDE, NARROW = 1200, 400
ALL = [(WIDE, False), (WIDE, True), (NARROW, False), (NARROW, True)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file; it must have ended with all its processes."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with Browser() as running:
        yield running
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive, f"the browser left behind: {alive}"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The browser stays from test to test, so not after each test but at the end `browser` looks for processes."""


def partial(folder: Path) -> Path:
    make_run().save(folder / "run")
    (folder / "run" / "run.json").unlink()
    (folder / "run" / "profile.json").write_text("[")
    return write_partial_page(read_partial(folder / "run"), folder)


def markup_plan(folder: Path) -> Path:
    bare = make_bare_run()
    report = dataclasses.replace(make_plan_report(), profile=bare.profile, cluster=bare.cluster)
    return write_plan_page(report, folder)


def bench(folder: Path) -> Path:
    results = [
        BenchResult("all_reduce", "shm", name, 4, 4**k, (5 + i) * 1e-5 + 4**k * 1e-9, 4e-5 + 4**k * 1e-9)
        for k in range(2, 12)
        for i, name in enumerate(("ring", "doubling", "<script>alert(1)</script>"))
    ]
    path = folder / "bench.html"
    path.write_text(bench_page(results, title="all_reduce over 4 ranks"), encoding="utf-8")
    return path


def graph(folder: Path) -> Path:
    path = folder / "graph.html"
    path.write_text(graph_page(view_of(*traced(UNet, IMAGE), depth=2), A100), encoding="utf-8")
    return path


def collective(folder: Path) -> Path:
    path = folder / "ring.html"
    ring = collective_schedule("all_reduce", "ring", 8)
    path.write_text(collective_page(ring, where="8 ranks on one node of dgx-a100", seconds=1e-6), encoding="utf-8")
    return path


def pipeline(folder: Path) -> Path:
    path, order = folder / "1f1b.html", pipeline_order("1f1b", 4, 8, 1)
    timeline = replay_in_thirds(order)
    path.write_text(pipeline_page(order, timeline, bubble=bubble(timeline)), encoding="utf-8")
    return path


def long_pipeline(folder: Path) -> Path:
    """64 stages of which some are drawn, each with more spans than can be seen."""
    timeline = replay_in_thirds(pipeline_order("1f1b", 64, 256, 1))
    return write_simulation_page(dataclasses.replace(make_simulation_report(), timeline=timeline), folder)


PAGES: dict[str, Callable[[Path], Path]] = {
    "run": lambda folder: write_page(make_run(), folder),
    "asynchronous run": lambda folder: write_page(make_waiting_run("async"), folder),
    "comparison": lambda folder: write_comparison(
        compare_runs([make_waiting_run(kind) for kind in ("sync", "async", "local")]), folder
    ),
    "plan": lambda folder: write_plan_page(make_plan_report(), folder),
    "answer": lambda folder: write_plan_page(PlanReport.of_answer(make_plan_report().answer), folder),
    "simulation": lambda folder: write_simulation_page(make_simulation_report(), folder),
    "long pipeline": long_pipeline,
    "graph": graph,
    "collective": collective,
    "pipeline": pipeline,
    "bench": bench,
    "incomplete run": partial,
    "run of markup": lambda folder: write_page(make_bare_run(), folder),
    "plan of markup": markup_plan,
    "simulation of markup": lambda folder: write_simulation_page(make_simulation_report(markup=True), folder),
}


def widest(tab: Tab) -> float:
    """Pixels by which something is wider than the page, outside of boxes that scroll; invisible text does not count."""
    return float(
        tab.run(
            """Math.max(...[...document.querySelectorAll("header *, main *")].filter(
            (e) => !e.children.length && !e.closest(".scroll, .pan, .unseen, text.in, details:not([open])")
            ).map((e) => e.getBoundingClientRect().right)) - innerWidth"""
        )
    )


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_opens_from_disk(kind: str, browser: Browser, tmp_path: Path) -> None:
    path = PAGES[kind](tmp_path)
    assert path.stat().st_size < 10**6
    for width, dark in ALL if kind != "answer" else ALL[-1:]:
        tab = browser.open(path, width=width, dark=dark)
        assert tab.console == [], f"{width} {dark}"
        assert [x for x in tab.requests if not x.startswith("data:")] == [path.as_uri()]
        assert tab.run("innerWidth") == width and widest(tab) <= 0.5, f"{width} {dark}: {widest(tab)}"
        paper = tab.run("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", paper)[0]) < 80) is dark
        tab.screenshot(tmp_path / f"{kind}-{width}-{'dark' if dark else 'light'}.png")
        tab.close()


def test_words_of_a_narrow_card_are_not_cut_off(browser: Browser, tmp_path: Path) -> None:
    tab = browser.open(write_page(dataclasses.replace(make_run(), step_seconds=0.1), tmp_path))
    tab.run("for (const e of document.querySelectorAll('.cards')) e.style.width = '13rem'")
    wide = "[...document.querySelectorAll('.card p')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    assert "times as long as predicted" in tab.run("document.body.textContent") and tab.run(wide) == 0
    tab.close()


@pytest.mark.parametrize("kind", ["run of markup", "plan of markup", "simulation of markup"])
def test_names_that_are_markup_are_inert(kind: str, browser: Browser, tmp_path: Path) -> None:
    tab = browser.open(PAGES[kind](tmp_path))
    assert tab.run("document.scripts.length") == 1 and tab.run("document.images.length") == 0
    assert "<script>alert" in tab.run("document.body.textContent + document.title")
    tab.run("for (const e of document.querySelectorAll('details')) e.open = true")
    assert tab.console == []
    tab.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("<script>console.error('no')</script>", "Content Security Policy"),
        ('<img src="https://example.org/a.png">', "Content Security Policy"),
        ('<img src="missing.png" onerror="alert(1)">', "Content Security Policy"),
    ],
)
def test_the_check_detects_a_wrong_page(wrong: str, words: str, browser: Browser, tmp_path: Path) -> None:
    path = write_page(make_bare_run(), tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", wrong + "</body>"), encoding="utf-8")
    tab = browser.open(path)
    tab.pause()
    assert any(words in line for line in tab.console)
    tab.run("console.error('it broke')")
    assert tab.console[-1] == "it broke"
    tab.close()


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("kind", ["run", "simulation"])
def test_zoom_by_buttons_keys_and_wheel(kind: str, width: int, browser: Browser, tmp_path: Path) -> None:
    tab = browser.open(PAGES[kind](tmp_path), width=width)

    def zoom() -> float:
        return round(
            tab.run(
                "(() => { const p = document.querySelector('.pan'); return p.firstChild.getBoundingClientRect().width / p.clientWidth; })()"
            ),
            2,
        )

    names = (
        "[...document.querySelectorAll('.pan text.in')].filter((t) => t.getAttribute('visibility') !== 'hidden').length"
    )
    before = tab.run(names)
    assert zoom() == 1
    tab.click(*tab.middle("button[data-zoom='2']"))
    assert zoom() == 2
    tab.run("document.querySelector('.pan').focus()")
    tab.key("+")
    tab.key("+")
    assert zoom() == 8 and tab.run(names) > before
    tab.key("-")
    assert zoom() == 4
    tab.key("0")
    assert zoom() == 1
    x, y = tab.middle(".pan")
    tab.wheel(x, y, -100, ctrl=True)
    tab.pause()
    assert zoom() == 1.25
    assert tab.console == []
    tab.close()


def test_tooltips_and_the_cursor_of_a_chart(browser: Browser, tmp_path: Path) -> None:
    tab = browser.open(PAGES["run"](tmp_path))
    tip = "(() => { const t = document.getElementById('tip'); return t.hidden ? '' : t.textContent; })()"
    tab.point(*tab.middle(".s.k-backward"))
    assert tab.run(tip).startswith("backward head\n")
    tab.point(*tab.middle("#steps [data-points]"))
    assert re.match(r"step 2\d\nloss ", tab.run(tip))
    tab.point(*tab.middle("h2"))
    assert tab.run(tip) == ""
    tab.close()
    tab = browser.open(PAGES["plan"](tmp_path))
    tab.point(*tab.middle("rect.heat"))
    assert re.match(r"tp=\d+, pp=\d+: [\d.]+ ", tab.run(tip))
    tab.close()


@pytest.mark.parametrize("kind", ["run", "plan", "simulation", "comparison"])
def test_tables_open_and_copy_by_keyboard(kind: str, browser: Browser, tmp_path: Path) -> None:
    tab = browser.open(PAGES[kind](tmp_path), width=NARROW)
    tab.run("document.querySelector('.data > summary').focus()")
    tab.key("Enter")
    assert tab.run("document.querySelector('.data').open")
    copy = """(() => { let text = ""; Object.defineProperty(navigator, "clipboard", {configurable: true,
      value: {writeText: async (t) => { text = t; }}}); window.copied = () => text; })()"""
    tab.run(copy)
    tab.key("Tab")
    assert tab.run("document.activeElement.textContent") == "Copy"
    tab.key("Enter")
    assert tab.run("document.activeElement.textContent") == "Copied"
    rows = tab.run("copied()").split("\n")
    assert len(rows) > 2 and len({row.count("\t") for row in rows}) == 1 and rows[0].count("\t") >= 1
    # Every control can be reached, and shows where the focus is.
    reached = "[...document.querySelectorAll('a, button, summary, .scroll, .pan')].filter((e) => e.tabIndex < 0).length"
    assert tab.run(reached) == 0
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert widest(tab) <= 0.5
    tab.close()


@pytest.mark.parametrize("kind", ["run", "plan", "simulation"])
def test_printed(kind: str, browser: Browser, tmp_path: Path) -> None:
    """On white paper, without controls, with the tables opened, in colours even where the screen is dark."""
    path = PAGES[kind](tmp_path)
    tab = browser.open(path, dark=True, paper=True)
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("[...document.querySelectorAll('nav, button')].filter((e) => e.offsetParent).length") == 0
    assert tab.run("document.querySelector('details.data table').getBoundingClientRect().height") > 20
    tab.pdf(tmp_path / "page.pdf")
    data = (tmp_path / "page.pdf").read_bytes()
    assert data.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) < 40
    tab.close()


def test_ten_thousand_spans(browser: Browser, tmp_path: Path) -> None:
    """On both timelines."""
    many = dataclasses.replace(
        make_run(), predicted=make_spans("predicted", 10_000), measured=make_spans("measured", 10_000)
    )
    path = write_page(many, tmp_path)
    assert path.stat().st_size < 10**6
    tab = browser.open(path)
    assert tab.console == [] and tab.run("document.querySelectorAll('.pan .s').length") > 1000
    tab.run("document.querySelector('.pan').focus()")
    tab.key("+")
    assert tab.run("document.querySelector('.pan').style.getPropertyValue('--zoom')") == "2"
    tab.close()


@pytest.mark.alone
def test_ten_thousand_spans_open_in_two_seconds(browser: Browser, tmp_path: Path) -> None:
    spans = make_spans("predicted", 10_000)
    path = write_simulation_page(dataclasses.replace(make_simulation_report(), timeline=spans), tmp_path)
    assert quickest(browser, path) <= 2


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["run", "plan", "graph", "collective", "pipeline", "long pipeline"])
def test_every_kind_of_page_opens_in_two_seconds(kind: str, browser: Browser, tmp_path: Path) -> None:
    assert quickest(browser, PAGES[kind](tmp_path)) <= 2


def quickest(browser: Browser, path: Path) -> float:
    """Seconds until a page has been read and its script has run, the best of three."""
    seconds = []
    for _ in range(3):
        tab = browser.open(path)
        seconds.append(tab.seconds)
        tab.close()
    return min(seconds)


def test_an_empty_timeline(browser: Browser, tmp_path: Path) -> None:
    report = dataclasses.replace(make_simulation_report(), timeline=Timeline("predicted"), memory=(), path=())
    tab = browser.open(write_simulation_page(report, tmp_path))
    assert tab.console == []
    tab.close()
