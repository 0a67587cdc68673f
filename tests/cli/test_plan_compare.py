"""`drumline plan --cluster a --cluster b`: side by side, the fastest first."""

from __future__ import annotations

import json

from command import here

QUESTION = ("plan", "gpt:1.3b", "--devices", "8", "--batch", "16")


def test_the_fastest_first_in_40_columns() -> None:
    done = here(*QUESTION, "--cluster", "dgx-v100", "--cluster", "dgx-h100", COLUMNS="40")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.index("dgx-h100") < done.stdout.index("dgx-v100")
    assert "the fastest" in done.stdout and "times as long" in done.stdout


def test_as_json_also_where_it_fits_on_one_alone() -> None:
    done = here(
        "plan", "gpt:175b", "--devices", "8", "--batch", "8", "--cluster", "l4", "--cluster", "mi355x", "--json"
    )
    rows = json.loads(done.stdout)["clusters"] if done.returncode == 0 else []
    assert done.returncode == 3 or [("plan" in r) for r in rows] == [True, False]


def test_refused() -> None:
    two = ("--cluster", "dgx-v100", "--cluster", "dgx-h100")
    for words, text in ((("--pareto",), "several clusters"), (("--emit", "deepspeed"), "one cluster")):
        done = here(*QUESTION, *two, *words)
        assert done.returncode == 2 and text in done.stderr
