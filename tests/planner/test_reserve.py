"""The reserve: memory that a proposed plan leaves free, on GPUs by default."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from command import here

import drumline as dl
from drumline.clusters import Cluster, load
from drumline.core.errors import DoesNotFit, InputError
from drumline.core.units import format_bytes
from drumline.models import zoo
from drumline.planner import Answer, price, search
from drumline.planner.objectives import pareto
from drumline.planner.reserve import GPU_RESERVE, Reserve, reserve_bytes

GPT = zoo.profile("gpt:7b", batch_size=512)
H100 = load("dgx-h100").with_devices(64)
LIMIT = H100.device.memory - H100.device.context


def on_cpus(cluster: Cluster) -> Cluster:
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, kind="cpu"))


@pytest.mark.parametrize(
    ("reserve", "size"),
    [
        (None, GPU_RESERVE * LIMIT),
        ("10%", 0.1 * LIMIT),
        (0.25, 0.25 * LIMIT),
        ("8GB", 8e9),
        (8e9, 8e9),
        ("0", 0),
        (0, 0),
    ],
)
def test_shares_and_sizes(reserve: Reserve, size: float) -> None:
    assert reserve_bytes(reserve, H100) == pytest.approx(size)


def test_cpus_have_none_by_default() -> None:
    assert reserve_bytes(None, on_cpus(H100)) == 0 and reserve_bytes("10%", on_cpus(H100)) > 0


@pytest.mark.parametrize("bad", ["100%", "-1%", "-8GB", "many", "%", "nan", "nan%", "inf", "", True, -0.1])
def test_bad_values_are_refused(bad: Reserve) -> None:
    with pytest.raises(InputError, match=r"--reserve .*\n.*such as 10%"):
        dl.plan("gpt:125m", "dgx-h100", devices=1, reserve=bad)


def test_a_reserve_is_smaller_than_the_memory() -> None:
    with pytest.raises(InputError, match=r"--reserve 90GB\n.*less than the 78.1 GiB"):
        dl.plan("gpt:125m", "dgx-h100", devices=1, reserve="90GB")


def test_the_reserve_stays_free() -> None:
    answer, estimates = search(GPT, H100)
    whole, _ = search(GPT, H100, reserve=0)
    best = estimates[str(answer.best.plan)]
    assert whole.best.memory_bytes > 0.9 * LIMIT >= answer.best.memory_bytes and not whole.reserve_bytes
    assert answer.reserve_bytes == best.reserve_bytes == pytest.approx(0.1 * LIMIT) and best.memory_limit == LIMIT
    tight = [c for c in answer.candidates if c.in_reserve]
    assert tight and all(c.fits and c.memory_bytes > 0.9 * LIMIT for c in tight)
    left = format_bytes(LIMIT - best.memory_bytes)
    assert best.memory_text == f"{format_bytes(best.memory_bytes)} of 78.1 GiB, {left} left; 7.81 GiB are kept free"
    assert best.memory_text in answer.explanation
    assert not any(e.in_reserve for _, e in pareto([(c.plan, estimates[str(c.plan)]) for c in answer.candidates]))


def test_a_plan_that_is_priced_alone_has_the_whole_memory() -> None:
    tight = search(GPT, H100, reserve=0)[0].best
    e = price(GPT, H100, tight.plan)
    assert e.fits and not e.in_reserve and not e.reserve_bytes


def test_where_nothing_else_fits_the_reserve_is_used_and_the_answer_says_so() -> None:
    profile, machines = zoo.profile("gpt:1.3b", batch_size=1), load("one-a100").with_devices(1)
    machines = dataclasses.replace(machines, device=dataclasses.replace(machines.device, host=None))
    needed = min(c.memory_bytes for c in search(profile, machines, objective="memory")[0].candidates)
    machines = machines.with_memory(needed * 1.02 + machines.device.context)
    answer, estimates = search(profile, machines)
    best = estimates[str(answer.best.plan)]
    assert answer.best.in_reserve and best.in_reserve and best.fits
    assert answer.best.reason == "fastest plan that fits; fits only into the reserve"
    assert "No plan leaves " in answer.explanation and "should be kept free" in answer.explanation
    with pytest.raises(DoesNotFit):
        search(profile, machines.with_memory(needed * 0.98 + machines.device.context))


def test_old_answers_load(tmp_path: Path) -> None:
    answer, _ = search(zoo.profile("gpt:125m"), load("dgx-h100").with_devices(2))
    answer.save(tmp_path / "new.json")
    assert Answer.load(tmp_path / "new.json") == answer
    table = json.loads((tmp_path / "new.json").read_text())
    del table["reserve_bytes"]
    for row in table["candidates"]:
        row.pop("tie", None)
        row.pop("in_reserve", None)
    (tmp_path / "old.json").write_text(json.dumps(table))
    assert [c.plan for c in Answer.load(tmp_path / "old.json").candidates] == [c.plan for c in answer.candidates]


def test_the_command_says_what_is_left() -> None:
    question = ("plan", "gpt:7b", "--cluster", "dgx-h100", "--devices", "64", "--batch", "512", "--top", "1")
    done = here(*question)
    assert "left; 7.81 GiB are kept free" in done.stdout
    values = json.loads(here(*question, "--json", "--reserve", "8GB").stdout)
    assert values["reserve_bytes"] == 8e9 <= values["memory_left"]
    assert values["memory_left"] == values["memory_limit"] - values["plans"][0]["memory_bytes"]
    full = json.loads(here(*question, "--json", "--reserve", "0").stdout)
    assert full["reserve_bytes"] == 0 and full["memory_left"] < 0.1 * full["memory_limit"]
    assert here(*question, "--reserve", "lots").returncode == 2
