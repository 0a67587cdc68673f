"""The benchmark of chosen plans: which offered plans it measures, its table, and its long-lived ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drumline.plans import Plan

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_every_mesh_is_measured_with_its_cheapest_choices() -> None:
    import regret

    texts = ["dp=2", "dp=2,micro=2", "dp=2,micro=4", "dp=2,recompute=full", "dp=2,zero=1", "dp=1", "dp=1,micro=2"]
    offers = [regret.Offer(Plan.parse(text), 1.0 + i / 10) for i, text in enumerate(texts)]
    kept_plans = [str(o.plan) for o in regret.cheapest_of_each(offers[::-1])]
    assert kept_plans == [str(Plan.parse(t)) for t in ("dp=2", "dp=2,micro=2", "dp=2,zero=1", "dp=1")]


def contest(name: str, middle: float) -> object:
    import regret
    from engine_peers.ratios import Ratio

    chosen, fastest = (regret.Offer(Plan.parse(t), 0.1) for t in ("dp=2", "dp=2,zero=1"))
    first = {"dp=2": 0.1, "dp=2,zero=1": 0.09}
    return regret.Contest(
        name, 2, 40, chosen, fastest, 0.1, 0.1 / middle, Ratio(middle, 0.9 * middle, 1.1 * middle), first
    )


def test_the_table_says_what_was_kept() -> None:
    import regret

    lines = regret.page([contest("gpt", 1.02), contest("cnn", 1.31)])  # type: ignore[list-item]  # made by hand
    assert lines[2].endswith("| 1.020 (0.918 to 1.122) | kept |") and lines[3].endswith("| missed |")
    assert "1 of 2 kept it; the worst is cnn with 2 ranks" in lines[-1]


def test_the_page_has_its_marks() -> None:
    import regret

    text = regret.PAGE.read_text(encoding="utf-8")
    assert text.index("<!-- regret -->") < text.index("<!-- /regret -->")


def test_ranks_are_kept_between_calls() -> None:
    from regret_plans.served import Worlds

    with Worlds(1) as worlds:
        first, again = worlds.call(2, os.getpid), worlds.call(2, os.getpid)
        assert len(set(first)) == 2 and first == again
        assert worlds.call(1, os.getpid)[0] not in first
        with pytest.raises(RuntimeError, match="ValueError"):
            worlds.call(2, int, "no number")
        assert worlds.call(2, os.getpid) == first
