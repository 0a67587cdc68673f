"""The benchmarks of split models: what they compute by themselves, and that they run. Nothing here is timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_formula_of_the_halo_by_hand() -> None:
    import tiles

    # 8 x 8 in four tiles. Convolution by convolution, channels * (columns sent down + rows sent across), rank 0 and 3:
    # 1 * (4 + 6), 4 * (4 + 5) down to stride 2, 8 * (2 + 4) on 4 x 4, 8 * (4 + 6)
    assert tiles.halo_bytes(8, 0, 1) == {"halo": 10 + 36 + 48 + 80, "halo back": 48 + 80}
    assert tiles.halo_bytes(8, 3, 1) == {"halo": 10 + 48 + 80, "halo back": 36 + 48 + 80}


def test_predictions_are_those_of_equal_stages() -> None:
    import pipelines
    from sleeping import Sleeps

    from drumline.costs.pipeline_clock import pipeline_seconds

    one = Sleeps(1.0, 1.0, 1.0)
    for case in pipelines.CASES:
        # a rank has two layers, of one unit for each part
        wanted = pipeline_seconds(case.schedule, pipelines.RANKS, 8, case.virtual, 2.0, 2.0, 2.0)
        seconds = pipelines.predicted(case, 8, one, 0.0)
        assert seconds == pytest.approx(wanted, rel=1e-12), str(case)


def test_marks_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from split_contest import page

    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("# Numbers\n<!-- a -->\nold\n<!-- /a -->\nend\n", encoding="utf-8")
    page.paste("a", ["new"], "by hand")
    text = page.PAGE.read_text(encoding="utf-8")
    assert "new" in text and "old" not in text and text.endswith("<!-- /a -->\nend\n")
    with pytest.raises(SystemExit, match="page.md has no <!-- b -->"):
        page.paste("b", ["new"], "by hand")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pipelines.py", "--blocks", "1", "--sleep", "1", "--micro", "4"], "are those of theory, to the byte"),
        (["split_peers.py", "--blocks", "1", "--minutes", "0.1", "--samples", "4"], "of the step by hand"),
        (["tiles.py", "--size", "1024", "--cap", "400", "--small", "32"], "those of the formula: kept"),
    ],
    ids=["pipelines", "split_peers", "tiles"],
)
def test_benchmark_runs(arguments: list[str], says: str) -> None:
    command = [sys.executable, str(BENCHMARKS / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert says in done.stdout and "NOT THE SAME" not in done.stdout, done.stdout
