"""`drumline simulate JOB` as a user types it: the screen, the JSON document, the picture, bad options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import here

import drumline as dl
from drumline.core.errors import InputError
from drumline.core.units import format_seconds

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


def test_the_screen_has_the_step_of_the_simulation() -> None:
    """Where messages share links, that is more than the estimate."""
    shown = here("simulate", "gpt:1.3b", "--plan", "dp=2,pp=4,micro=8,precision=bf16", "--cluster", "dgx-h100").stdout
    document = asked("simulate", "gpt:1.3b", "--plan", "dp=2,pp=4,micro=8,precision=bf16", "--cluster", "dgx-h100")
    assert f"step {format_seconds(document['step_seconds'])} " in shown
    assert f"link contention {format_seconds(document['parts']['link contention'])}" in shown


def test_the_document() -> None:
    document = asked(*GPT, "--mtbf", "1000h", "--days", 10)
    shared = document["parts"]["link contention"]
    assert 0 < shared < 1e-3 * document["planned_seconds"]
    assert document["step_seconds"] == pytest.approx(document["planned_seconds"] + shared, rel=1e-9)
    assert any(note.startswith("Link contention: ") for note in document["notes"])
    assert document["ranks"] == 16 and document["rank_counts"] == {"0": 4, "4": 4, "8": 4, "12": 4}
    assert all(isinstance(name, str) for name in document["critical_path"])
    assert sum(document["critical_path_seconds"]) == pytest.approx(document["step_seconds"])
    assert len(document["critical_path_ranks"]) == len(document["critical_path"])
    assert max(m["peak"] for m in document["memory"]) == pytest.approx(document["memory_bytes"])
    assert [x["level"] for x in document["links"]] == ["node", "network"] and 0 < document["links"][0]["busy"] < 1
    assert 0 < document["failures"]["goodput"] < 1 and document["failures"]["seconds"] == 10 * 86400
    planned = asked("plan", "gpt:1.3b", "--cluster", "dgx-h100", "--devices", 16, "--plan", GPT[-1])
    assert planned["given"]["step_seconds"] == pytest.approx(document["planned_seconds"], rel=1e-9)


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


COLLECTIVE, ORDER = "all_reduce:ring", "pipeline:1f1b"
SCHEDULES = (COLLECTIVE, ORDER, "all_reduce", "pipeline")
REFUSED = [
    *(
        (target, option, "it is for a job or a zoo model")
        for target in SCHEDULES
        for option in (
            ("--slow", "0:4"),
            ("--jitter", "0.3"),
            ("--seed", "1"),
            ("--plan", "dp=4"),
            ("--batch", "8"),
            ("--sequence", "8"),
            ("--devices", "4"),
            ("--slow-link", "node:0.5"),
            ("--mtbf", "9h"),
            ("--restart", "5min"),
            ("--days", "3"),
            ("--sweep", "8,16"),
            ("--no-corrections",),
        )
    ),
    *(
        (target, option, "it is for ")
        for target in (ORDER, "all_reduce", "pipeline")
        for option in (
            ("--cluster", "nonsense"),
            ("--bytes", "64MB"),
            ("--set", "node.devices=4"),
        )
    ),
    *((target, ("--micro", "4"), "it is for a pipeline order") for target in (COLLECTIVE, "all_reduce", "gpt:1.3b")),
    *((target, ("--virtual", "2"), "it is for a pipeline order") for target in (COLLECTIVE, "pipeline", "gpt:1.3b")),
    ("gpt:1.3b", ("--ranks", "4"), "it is for a collective or a pipeline order"),
    ("gpt:1.3b", ("--bytes", "4MB"), "it is for a collective"),
    ("all_reduce", ("--scaling", "weak"), "it is for a job or a zoo model"),
]


@pytest.mark.parametrize(("target", "option", "rule"), REFUSED)
def test_options_that_a_target_does_not_take_are_refused(target: str, option: tuple[str, ...], rule: str) -> None:
    done = here("simulate", target, *option)
    assert done.returncode == 2 and f"{option[0]} for {target}" in done.stderr and rule in done.stderr, done.stderr


def test_the_library_refuses_them_too() -> None:
    with pytest.raises(InputError, match="--slow for all_reduce:ring"):
        dl.simulate("all_reduce:ring", cluster="dgx-a100", slow={0: 4.0})
    with pytest.raises(InputError, match="--plan for pipeline:1f1b"):
        dl.simulate("pipeline:1f1b", "dp=4")
    with pytest.raises(InputError, match="--micro for gpt:1.3b"):
        dl.simulate("gpt:1.3b", "dp=4", "dgx-a100", micro=4)


@pytest.mark.parametrize(("target", "ranks", "micro"), [("pipeline:1f1b", 1000, 10_000), ("pipeline", 200, 100)])
def test_pipelines_with_too_many_passes_are_refused(target: str, ranks: int, micro: int) -> None:
    done = here("simulate", target, "--ranks", ranks, "--micro", micro)
    assert done.returncode == 2 and f"{2 * ranks * micro:,} forwards and backwards" in done.stderr
    assert "at most " in done.stderr and "--micro " in done.stderr
    with pytest.raises(InputError, match="fewer --ranks"):
        dl.simulate("pipeline:1f1b", ranks=200_000, micro=1)
    with pytest.raises(InputError, match="--ranks|rank"):
        dl.simulate("pipeline:1f1b", ranks=0)


def test_a_collective_without_an_algorithm() -> None:
    done = here("simulate", "all_to_all")
    assert done.returncode == 2 and "all_to_all without an algorithm" in done.stderr
    assert "pairwise" in done.stderr and "''" not in done.stderr


def test_sequence_and_devices() -> None:
    plan = ("--plan", "dp=4,tp=2,precision=bf16", "--cluster", "dgx-h100", "--batch", 8)
    short, usual = (asked("simulate", "gpt:1.3b", *plan, *more) for more in (("--sequence", 512), ()))
    assert short["step_seconds"] < 0.8 * usual["step_seconds"]
    planned = asked("plan", "gpt:1.3b", *plan, "--devices", 8, "--sequence", 512)
    assert planned["given"]["step_seconds"] == pytest.approx(short["step_seconds"], rel=1e-9)
    assert asked("simulate", "gpt:1.3b", *plan, "--devices", 8)["step_seconds"] == usual["step_seconds"]
    done = here("simulate", "gpt:1.3b", *plan, "--devices", 16)
    assert done.returncode == 2 and "the plan takes 8" in done.stderr and "--sweep 16" in done.stderr
    points = asked("simulate", "gpt:1.3b", *plan, "--sweep", "8,16", "--sequence", 512)["points"]
    assert points[0]["step_seconds"] == pytest.approx(short["step_seconds"], rel=1e-9)


def test_one_of_something_has_no_plural() -> None:
    text = here(*GPT, "--mtbf", "1h/run", "--days", 1).stdout
    assert "(1 steps" not in text and " steps, Young/Daly)" in text
    often = here(*GPT, "--mtbf", "1min/run", "--restart", "1s", "--days", 1, "--batch", 4096).stdout
    assert re.search(r"\((1 step|\d+ steps), Young/Daly\)", often), often
    same = here(*GPT, "--slow-link", "node:1").stdout
    assert "-0.0%" not in same and "(+0.0%)" in same


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
        (("--sweep", "16", "--restart", "5min", "--days", "3"), "--sweep with --restart"),
        (("--sweep", "16", "--devices", "16"), "--sweep with --devices"),
        (("--batch", "-1"), "at least one sample"),
    ],
)
def test_bad_options(options: tuple[str, ...], words: str) -> None:
    done = here(*GPT, *options)
    assert done.returncode == 2 and words in done.stderr and "rule:" in done.stderr
