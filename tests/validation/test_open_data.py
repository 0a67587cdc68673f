"""How far off on the published runs that are open to all: bounds that a change may not cross unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from drumline.costs.fitted.profiles import load_profiles

from drumline.validation import Outcome, validate
from drumline.validation.result import fit_profiles

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the published tables are not beside this checkout")


@pytest.fixture(scope="module")
def here() -> Outcome:
    return validate(DATA / "published_runs.csv")


def test_enough_rows_are_read_and_the_others_say_why(here: Outcome) -> None:
    assert len(here.runs) >= 600 and len(here.runs) + len(here.skipped) == 772
    assert all(s.reason for s in here.skipped)


def test_errors_with_the_profiles_that_ship(here: Outcome) -> None:
    time, memory = here.here.time, here.here.memory
    assert time is not None and memory is not None
    assert time.mean <= 0.08 and time.median <= 0.05 and time.p90 <= 0.15 and abs(time.bias) <= 0.03
    assert memory.mean <= 0.06 and memory.median <= 0.03


def test_ranking_of_layouts(here: Outcome) -> None:
    ranked = here.ranked()
    assert len(ranked) >= 8
    assert sum(g.spearman for g in ranked) / len(ranked) > 0.8
    assert sum(g.regret <= 0.02 for g in ranked) >= len(ranked) - 1


@pytest.mark.slow
def test_errors_without_the_source() -> None:
    outcome = validate(DATA / "published_runs.csv", loso=True)
    found = outcome.loso
    assert sum(g.spearman >= 0.9 for g in outcome.ranked(loso=True)) >= 5
    assert found is not None and found.time is not None and found.memory is not None
    assert (
        found.time.median <= 0.08
        and found.time.mean <= 0.12
        and found.time.p90 <= 0.25
        and abs(found.time.bias) <= 0.03
    )
    assert found.memory.mean <= 0.06


@pytest.mark.slow
def test_the_profiles_that_ship_are_what_the_command_in_their_header_fits() -> None:
    shipped, fitted = load_profiles(), fit_profiles(DATA / "published_runs.csv")
    assert fitted.origin == shipped.origin and fitted.device.keys() == shipped.device.keys()
    assert fitted.shared == pytest.approx(shipped.shared, rel=0.02) and fitted.error == pytest.approx(
        shipped.error, rel=0.02
    )
    for name, device in fitted.device.items():
        assert device.constants == pytest.approx(shipped.device[name].constants, rel=0.02), name


def test_every_row_of_the_bulk_is_read() -> None:
    found = validate(DATA / "published_runs_bulk.csv")
    assert len(found.runs) == 2514 and not found.skipped
    single = next(s for name, s in found.here.times.items() if "ground_truth_single" in name)
    assert (
        single.median <= 0.12
    )  # one node, small models: no row of them is in the fit, some priors were set with them in view
