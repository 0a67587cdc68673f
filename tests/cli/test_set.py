"""`--set` on `plan` and `simulate`, and the table of all-reduces."""

from __future__ import annotations

import json

import pytest
from command import here

RING = ("simulate", "all_reduce:ring", "--ranks", "8", "--bytes", "64MB", "--cluster", "dgx-a100", "--json")


def seconds(*more: str) -> float:
    done = here(*RING, *more)
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout)["step_seconds"])


def test_set_changes_a_link() -> None:
    assert seconds("--set", "node.link.bandwidth=600GB/s", "--set", "node.link.alpha=0us") == pytest.approx(
        1.75 * 64e6 / 600e9
    )
    assert seconds() > seconds("--set", "node.link.bandwidth=600GB/s")


def test_a_plan_follows_the_change() -> None:
    words = ("plan", "gpt:1.3b", "--cluster", "a800", "--devices", "8", "--json")
    plain, slow = here(*words), here(*words, "--set", "node.link.bandwidth=1GB/s")
    assert plain.returncode == slow.returncode == 0, slow.stderr
    best = [json.loads(done.stdout)["plans"][0]["step_seconds"] for done in (plain, slow)]
    assert best[1] > best[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("node.link.bandwith=1GB/s", "Did you mean 'node.link.bandwidth'?"),
        ("node.link.bandwidth=3us", "'3us' is not a rate"),
        ("node.link.bandwidth", "KEY=VALUE"),
    ],
)
def test_unknown_keys_and_bad_values_are_refused(change: str, says: str) -> None:
    for words in (RING, ("plan", "gpt:1.3b", "--cluster", "a800", "--devices", "8")):
        done = here(*words, "--set", change)
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_the_table_of_all_reduces() -> None:
    done = here("simulate", "all_reduce", "--ranks", "8")
    assert done.returncode == 0
    assert "O(N P): (P - 1) N = 7 N" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 60
    rows = json.loads(here("simulate", "all_reduce", "--ranks", "8", "--json").stdout)["all_reduce"]
    assert {row["algorithm"]: (row["rounds"], row["fan_in"], row["all_share"]) for row in rows} == {
        "server": (2, 7, 7),
        "naive": (14, 1, 2),
        "exchange_by_pairs": (56, 1, 7),
        "exchange_in_turns": (7, 1, 7),
        "partitioned_exchange": (14, 1, 1.75),
        "direct": (2, 7, 1.75),
        "ring": (14, 1, 1.75),
    }
    assert here("simulate", "all_reduce", "--ranks", "1").returncode == 2
