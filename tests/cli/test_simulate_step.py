"""`drumline simulate JOB` as a user types it: the screen, the JSON document, the picture, bad options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import here

GPT = ("simulate", "gpt:1.3b", "--cluster", "dgx-h100", "--plan", "dp=2,tp=2,pp=4,micro=16,precision=bf16")


def asked(*arguments: object) -> dict[str, Any]:
    done = here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_screen() -> None:
    done = here(*GPT)
    text = done.stdout
    assert done.returncode == 0, done.stderr
    for words in (
        "critical path: backward of stages 0 to 3 ",
        "; forward of stages 0 to 3 ",
        "node link (450 GB/s) busy ",
        "network link (400 GB/s) busy ",
        "memory over the step, by stage (_ ",
        "  stage 3   ",
        "latency of one batch ",
        "MFU ",
        "tokens/s",
        "16 ranks: 4 drawn (x 4 ranks that do the same)",
        "prices: the cost model fitted on ",
    ):
        assert words in text, words


def test_the_screen_in_forty_columns() -> None:
    done = here(*GPT, COLUMNS="40")
    bars = [line for line in done.stdout.splitlines() if line.startswith("  stage ")]
    assert len(bars) == 4 and all(len(bar) <= 40 for bar in bars)
    done = here(*GPT, "--sweep", "16,32", COLUMNS="40")
    assert all(len(line) <= 40 for line in done.stdout.splitlines()[1:] if "needs" not in line), done.stdout


def test_the_document() -> None:
    document = asked(*GPT, "--mtbf", "1000h", "--days", 10)
    assert document["step_seconds"] == pytest.approx(document["planned_seconds"], rel=1e-9)
    assert document["ranks"] == 16 and document["rank_counts"] == {"0": 4, "4": 4, "8": 4, "12": 4}
    assert all(isinstance(name, str) for name in document["critical_path"])
    assert sum(document["critical_path_seconds"]) == pytest.approx(document["step_seconds"])
    assert len(document["critical_path_ranks"]) == len(document["critical_path"])
    assert max(m["peak"] for m in document["memory"]) == pytest.approx(document["memory_bytes"])
    assert [x["level"] for x in document["links"]] == ["node", "network"] and 0 < document["links"][0]["busy"] < 1
    assert 0 < document["failures"]["goodput"] < 1 and document["failures"]["seconds"] == 10 * 86400
    planned = asked("plan", "gpt:1.3b", "--cluster", "dgx-h100", "--devices", 16, "--plan", GPT[-1])
    assert planned["given"]["step_seconds"] == pytest.approx(document["step_seconds"], rel=1e-9)


def test_the_document_of_a_sweep() -> None:
    document = asked(*GPT, "--sweep", "16,32,64", "--scaling", "weak")
    assert document["scaling"] == "weak" and [p["devices"] for p in document["points"]] == [16, 32, 64]
    assert document["points"][0]["efficiency"] == 1.0
    text = here(*GPT, "--sweep", "16,32,64").stdout
    assert "strong scaling (the same batch)" in text and "100%" in text


def test_failures_on_the_screen() -> None:
    text = here(*GPT, "--mtbf", "1000h", "--restart", "10min", "--days", 10, "--seed", 4).stdout
    assert "10 days, a device fails every 62.5 h: " in text and "a restart takes 10.0 min" in text
    assert "Young/Daly" in text and "repeated work" in text
    assert text == here(*GPT, "--mtbf", "1000h", "--restart", "10min", "--days", 10, "--seed", 4).stdout


def test_a_picture_says_for_how_many_ranks(tmp_path: Path) -> None:
    here(*GPT, "--picture", tmp_path / "step.svg")
    assert "each rank drawn x 4 ranks" in (tmp_path / "step.svg").read_text()


def test_options_of_jobs_alone() -> None:
    for target in ("pipeline", "all_reduce", "pipeline:1f1b", "all_reduce:ring"):
        done = here("simulate", target, "--cluster", "dgx-h100", "--mtbf", "9h")
        assert done.returncode == 2 and f"--mtbf for {target}" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slow-link", "network"), "LEVEL:SHARE"),
        (("--slow-link", "network:7"), "from 0.0001 to 1"),
        (("--mtbf", "never"), "--mtbf never"),
        (("--days", "3"), "--days without --mtbf"),
        (("--mtbf", "9h", "--days", "-3"), "more than 0"),
        (("--sweep", "8;16"), "separated by commas"),
        (("--sweep", "9"), "9 % 8 = 1"),
        (("--sweep", "16", "--mtbf", "9h"), "--sweep with --mtbf"),
        (("--sweep", "16", "--picture", "x.svg"), "--sweep with --picture"),
        (("--batch", "-1"), "at least one sample"),
    ],
)
def test_bad_options(options: tuple[str, ...], words: str) -> None:
    done = here(*GPT, *options)
    assert done.returncode == 2 and words in done.stderr and "rule:" in done.stderr
