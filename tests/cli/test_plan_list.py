"""`drumline plan --list` and `--sequence`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import here

from drumline.clusters.catalogue import catalogue
from drumline.models import zoo

JOB = str(Path(__file__).parents[2] / "examples" / "gpt.py")


def test_all_names_in_40_columns() -> None:
    done = here("plan", "--list", COLUMNS="40")
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 40
    words = {line.split()[0] for line in lines if line.strip()}
    assert words >= {*zoo.names(), *catalogue()}


def test_the_same_as_json() -> None:
    values = json.loads(here("plan", "--list", "--json").stdout)
    assert [m["name"] for m in values["models"]] == list(zoo.names())
    assert [c["name"] for c in values["clusters"]] == list(catalogue())
    models = {m["name"]: m for m in values["models"]}
    assert models["gpt:7b"]["sequence"] and not models["resnet50"]["sequence"]
    assert models["resnet50"]["parameters"] == 25_557_032


def test_without_a_job() -> None:
    done = here("plan", "--cluster", "dgx-h100")
    assert done.returncode == 2 and "plan without JOB" in done.stderr and "--list" in done.stderr


def test_longer_sequences_need_more_memory() -> None:
    question = (
        "plan",
        "gpt:1.3b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--batch",
        "8",
        "--json",
        "--plan",
        "dp=8",
    )
    short, long = (json.loads(here(*question, "--sequence", n).stdout)["given"] for n in ("1024", "4096"))
    assert long["memory_bytes"] > short["memory_bytes"] and long["step_seconds"] > 3 * short["step_seconds"]


@pytest.mark.parametrize(
    ("job", "sequence", "words"),
    [
        ("resnet50", "128", "only gpt, llama, llama4,"),
        (JOB, "128", "only zoo models have a sequence length to choose"),
        ("gpt:7b", "0", "sequence is a whole number above 0"),
    ],
)
def test_refused(job: str, sequence: str, words: str) -> None:
    done = here("plan", job, "--cluster", "dgx-h100", "--sequence", sequence)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
