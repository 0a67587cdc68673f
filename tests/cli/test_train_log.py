"""`drumline train`: the log of its steps, and steps that are not finite."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import here

JOB = """
import torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return (x * float("nan") if i == BAD else x), i % 3

def made(bad):
    global BAD
    BAD = bad
    return dl.Job(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), loss=nn.functional.cross_entropy,
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=Data, batch_size=8, steps=5)

def job(): return made(-1)
def spoiled(): return made(11)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "j.py").write_text(JOB)
    return tmp_path


def train(folder: Path, *arguments: str, name: str = "job", plan: str = "dp=2") -> subprocess.CompletedProcess[str]:
    return here("train", f"j.py:{name}", "--plan", plan, "--cluster", "dgx-h100", "-o", "run", *arguments, cwd=folder)


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]


def test_json_lines_and_a_trace(folder: Path) -> None:
    done = train(folder, "--log-format", "jsonl", "--trace", "t.json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {"loss", "grad_norm", "memory_bytes", "samples_per_second", "tflops", "mfu", "drift", "eta_seconds"} <= set(
        lines[0]
    )
    assert (
        "step time: predicted" in done.stderr
        and "time by part: data" in done.stderr
        and "memory by part: parameters" in done.stderr
    )
    assert [s["loss"] for s in steps(folder)] == [line["loss"] for line in lines]
    names = {e["name"] for e in json.loads((folder / "t.json").read_text())["traceEvents"]}
    assert names >= {"data", "forward", "backward", "optimizer", "all_reduce"}


@pytest.mark.slow
def test_stop_names_the_sample(folder: Path) -> None:
    done = train(folder, name="spoiled")
    assert done.returncode == 5 and "Traceback" not in done.stderr
    assert "the loss is nan at step" in done.stderr and "the input of sample 11 is non-finite" in done.stderr
    assert "--on-nonfinite skip" in done.stderr
    assert (folder / "run" / "run.json").exists(), "a failed run has a record, too"
    bad = len(steps(folder))  # what was there until then stays
    done = train(folder, "--on-nonfinite", "skip", name="spoiled")
    assert done.returncode == 0, done.stderr
    assert [bool(s.get("skipped")) for s in steps(folder)] == [i >= bad for i in range(5)]
    assert (
        "skipped: the loss is nan" in done.stdout
        and "sample 11" in done.stdout
        and "skipped: 1 of 5 steps" in done.stdout
    )
    assert steps(folder)[bad]["loss"] == "nan"


@pytest.mark.slow
def test_a_vote_with_nothing_to_compare(folder: Path) -> None:
    done = train(folder, "--vote", "2", plan="dp=2,zero=3")
    assert done.returncode == 0, done.stderr
    assert "--vote: under dp=2,zero=3 every parameter element is on one rank only" in done.stdout
    done = train(folder, "--vote", "2", "-o", "other")
    assert done.returncode == 0 and "--vote" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--on-nonfinite", "ignore"), "nonfinite is stop or skip"),
        (("--vote", "-1"), "vote=-1"),
        (("--log-format", "xml"), "--log-format is text or jsonl"),
        (("--log-every", "0"), "--log-every 0"),
    ],
)
def test_bad_options_are_refused(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    done = here("train", "j.py:job", "--plan", "dp=2", "--cluster", "dgx-h100", "-o", "run", *arguments, cwd=folder)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_threads_are_one_process(folder: Path) -> None:
    """`backend=threads` runs as one process."""
    from drumline.loop.verify import verify

    example = Path(__file__).parents[2] / "examples" / "gpt.py"
    assert verify(example, "dp=2,backend=threads", steps=2).passed
