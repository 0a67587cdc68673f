"""The report page in a real browser: no console errors, and a working script."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import make_bare_run, make_run
from report_browser import needs_browser, opened, visit

from drumline.reports import Run
from drumline.reports.page import write_page


@needs_browser
@pytest.mark.parametrize(
    ("make", "width", "dark"), [(make_run, 1280, False), (make_run, 375, True), (make_bare_run, 375, False)]
)
def test_the_console_has_no_errors(make: Callable[[], Run], width: int, dark: bool, tmp_path: Path) -> None:
    document, console = visit(write_page(make(), tmp_path), width=width, dark=dark)
    assert console == []
    assert 'data-ready="yes"' in document


@needs_browser
@pytest.mark.parametrize(
    "wrong",
    ["<script>console.error('no')</script>", '<img src="https://example.org/a.png">', "<script>alert(1)</script>"],
)
def test_the_check_detects_a_wrong_page(wrong: str, tmp_path: Path) -> None:
    path = write_page(make_run(), tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", wrong + "</body>"), encoding="utf-8")
    _, console = visit(path)
    assert any("Content Security Policy" in line for line in console)


@needs_browser
def test_the_check_detects_a_script_error(tmp_path: Path) -> None:
    _, console = visit(opened(write_page(make_run(), tmp_path), "console.error('it broke')"))
    assert len(console) == 1 and "it broke" in console[0]


@needs_browser
@pytest.mark.parametrize("width", [375, 1280])
def test_tooltips_zoom_and_width(width: int, tmp_path: Path) -> None:
    script = """
      const root = document.documentElement, tip = document.getElementById("tip");
      root.dataset.wide = root.scrollWidth - innerWidth;
      const at = (el, kind) => { const b = el.getBoundingClientRect(); el.dispatchEvent(new PointerEvent(kind,
        {bubbles: true, clientX: b.left + b.width / 2, clientY: b.top + 1})); };
      at(document.querySelector(".s.k-backward"), "pointermove");
      root.dataset.span = tip.hidden ? "" : tip.textContent;
      at(document.querySelector("[data-points]"), "pointermove");
      root.dataset.point = tip.hidden ? "" : tip.textContent;
      at(document.querySelector("h2"), "pointermove");
      root.dataset.gone = tip.hidden;
      const shown = () => [...document.querySelectorAll(".pan text.in")].filter(
        (t) => t.getAttribute("visibility") !== "hidden").length;
      const before = shown(), wide = document.querySelector(".pan svg").clientWidth;
      const plus = document.querySelector("button[data-zoom='2']");
      plus.click(); plus.click(); plus.click();
      root.dataset.more = shown() > before;
      root.dataset.zoom = Math.round(document.querySelector(".pan svg").clientWidth / wide);
    """
    document, console = visit(opened(write_page(make_run(), tmp_path), script), width=width)
    assert console == []
    data = dict(re.findall(r'data-(\w+)="([^"]*)"', document[: document.index("<head>")]))
    assert int(data["wide"]) <= 0
    assert data["span"].startswith("backward head\n")
    assert re.match(r"step 2\d\nloss ", data["point"])
    assert data["gone"] == "true" and data["more"] == "true" and data["zoom"] == "8"
