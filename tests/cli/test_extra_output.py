"""Extra output of commands: threads and ranks, host memory, how often to save, selective recomputation."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drumline.cli import app
from drumline.cli.common import host_bytes
from drumline.cli.verify import workers
from drumline.core.errors import InputError
from drumline.costs import Estimate
from drumline.loop.checkpoints import CheckpointOptions, continues
from drumline.models.recompute_choice import choices
from drumline.models.zoo import profile as zoo_profile
from drumline.plans import Plan
from drumline.reports.plan_text import estimate_lines
from drumline.runtime.training.checkpoint_policy import CheckpointPolicy
from drumline.theory.checkpoint_interval import save_interval


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dp=1", "1 rank"),
        ("dp=2", "2 ranks"),
        ("dp=2,zero=3", "2 ranks"),
        ("dp=2,backend=threads", "2 threads"),
        ("dp=1,backend=threads", "1 thread"),
    ],
)
def test_workers_are_ranks_or_threads(plan: str, words: str) -> None:
    assert workers(Plan.parse(plan)) == words


# -- how often to save


def test_the_interval_loses_least() -> None:
    """Of all intervals: each save stalls, each failure loses half an interval."""
    stall, mtbf = 2.0, 3600.0
    best = save_interval(stall, mtbf)
    assert best == 120.0

    def lost(t: float) -> float:
        return stall / t + t / 2 / mtbf

    assert all(lost(best) < lost(best * k) for k in (0.1, 0.9, 0.99, 1.01, 1.1, 10.0))


def test_advice() -> None:
    words = CheckpointOptions(every=10, mtbf="1h/run").advice(2.0, 0.5, 4)
    assert words == (
        "a save stalls training for 2.00 s; if the run fails every 1.00 h (--mtbf), saving every 2.00 min loses the "
        "least time (Young/Daly): --save-every 240"
    )
    assert CheckpointOptions(every=10).advice(1e-9, 100.0, 4).endswith("--save-every 1")
    # n devices fail n times as often; unless told otherwise, each as often as those of Llama 3's training
    each = CheckpointOptions(every=10, mtbf="4h").advice(2.0, 0.5, 4)
    assert each == words.replace("the run fails every 1.00 h", "a device fails every 4.00 h, one of 4 every 1.00 h")
    assert "a device fails every 50000 h, one of 4 every 12500 h" in CheckpointOptions(every=10).advice(2.0, 0.5, 4)
    assert [CheckpointOptions(every=e).advice(stall, 0.5, 4) for e, stall in ((0, 2.0), (10, None), (10, 0.0))] == [
        "",
        "",
        "",
    ]


@pytest.mark.parametrize("mtbf", ["soon", "0", "-1h", "3 days", "24", "24h/node"])
def test_bad_mtbf_is_refused(mtbf: str) -> None:
    with pytest.raises(InputError, match=f"--mtbf {mtbf}"):
        CheckpointOptions(mtbf=mtbf).check()


def test_a_run_continues_its_own_folder_only(tmp_path: Path) -> None:
    """Resuming from the checkpoints of another run does not continue that run."""
    run, other = tmp_path / "run", tmp_path / "run-2"
    own = str(run / "checkpoints")
    assert continues(CheckpointPolicy(own, resume=own), run) and continues(
        CheckpointPolicy(own, resume=f"{own}/step-00000004"), run
    )
    assert continues(CheckpointPolicy(own, resume=str(run)), run)
    assert not continues(CheckpointPolicy(own, resume=str(other / "checkpoints")), run)
    assert not continues(CheckpointPolicy(own), run)


# -- host memory


def test_host_memory_is_shown_if_something_is_offloaded() -> None:
    e = Estimate("dp=1,offload=optimizer", 1.0, {"forward": 1.0}, 2.0**30, {"parameters": 2.0**30}, 2.0**31)
    there = dataclasses.replace(e, host_bytes=3 * 2.0**30, host_limit=2.0**36)
    assert "host" not in estimate_lines(e) and host_bytes(e) == {}
    assert estimate_lines(there) == estimate_lines(e) + "\nhost memory 3.00 GiB of 64.0 GiB a rank"
    assert host_bytes(there) == {"host_bytes": 3 * 2.0**30, "host_limit": 2.0**36}


def test_plan_json_has_host_bytes() -> None:
    document = json.loads(
        shown("plan", "gpt:175b", "--cluster", "dgx-a100", "--devices", "16", "--top", "1000", "--json")
    )
    offloads = {p["plan"]: "host_bytes" in p for p in document["plans"]}
    assert any(offloads.values()) and all(has == ("offload" in plan) for plan, has in offloads.items())
    assert document["host_bytes"] == document["plans"][0]["host_bytes"] <= document["host_limit"]


# -- selective recomputation


def test_profile_shows_what_is_recomputed() -> None:
    profile = zoo_profile("gpt:125m")
    rows = json.loads(shown("profile", "gpt:125m", "--samples", "3", "--recompute", "cuda", "--json"))["recompute"]
    block = next(x for x in profile.layers if x.kind == "Block")
    of_blocks = [r for r in rows if r["layer"].startswith("blocks")]
    wanted = [(c.name, c.verdict, c.count * c.bytes.at(3)) for c in choices(block, "cuda", profile.activation_bytes)]
    assert [(r["value"], r["verdict"], r["bytes"]) for r in of_blocks] == wanted and len(rows) > len(wanted)
    assert {r["verdict"] for r in rows} >= {"kept", "again"}
    text = shown("profile", "gpt:125m", "--samples", "3", "--recompute", "cuda")
    assert "recompute=selective on cuda, for 3 samples: " in text and "above 5 it is kept" in text
    for r in rows:
        if r["bytes"]:
            price = r["moved_bytes"] / r["bytes"]
            assert f"{price:.1f}" in text
            assert r["verdict"] != "kept" or price > 5 or math.isclose(price, 5)
    assert "recompute" not in json.loads(shown("profile", "gpt:125m", "--json"))


def test_profile_refuses_other_devices() -> None:
    with pytest.raises(InputError, match="--recompute gpu"):
        CliRunner().invoke(app, ["profile", "gpt:125m", "--recompute", "gpu"], catch_exceptions=False)
