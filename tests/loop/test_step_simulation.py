"""`dl.simulate` of a job and `dl.simulate_scaling`: what if links are slow, ranks differ, devices fail or are more."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import drumline as dl
from drumline.clusters import Cluster, DeviceSpec, Link, Node, load
from drumline.clusters.slow_links import SlowLink
from drumline.core.errors import ClusterError, InputError, PlanError
from drumline.core.units import format_seconds
from drumline.loop.step_simulation import FailureOptions
from drumline.reports.simulation_text import failure_lines

GPT = ("gpt:1.3b", "dp=4,tp=8,precision=bf16", "dgx-h100")


def test_a_slow_link() -> None:
    usual = dl.simulate(*GPT)
    slow = dl.simulate(*GPT, slow_links=["network:0.25"])
    one = dl.simulate(*GPT, slow_links=["network@2:0.25"])
    inside = dl.simulate(*GPT, slow_links=["node:0.25"])
    assert usual.step_seconds < slow.step_seconds == one.step_seconds < inside.step_seconds
    assert slow.step_seconds == slow.planned_seconds
    assert f"instead of {format_seconds(usual.step_seconds)}" in slow.notes[-1]
    assert "All ranks wait for the node" in one.notes[-1] and "wait" not in slow.notes[-1]
    both = dl.simulate(*GPT, slow_links=["network:0.25", "node:0.25"])
    assert both.step_seconds > max(slow.step_seconds, inside.step_seconds)
    change = [f"network.link.bandwidth={0.25 * 400e9}"]
    assert dl.simulate(*GPT, changes=change).step_seconds == pytest.approx(slow.step_seconds)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", "LEVEL:SHARE"),
        ("network:0", "from 0.0001 to 1"),
        ("network:2", "from 0.0001 to 1"),
        ("network:x", "LEVEL:SHARE"),
        ("netwrk:0.5", "Did you mean 'network'"),
        ("node@x:0.5", "LEVEL:SHARE"),
        ("node@4:0.5", "there are 4 nodes"),
    ],
)
def test_a_slow_link_that_does_not_exist(text: str, words: str) -> None:
    with pytest.raises(InputError, match="slow link") as caught:
        dl.simulate(*GPT, slow_links=[text])
    assert words in str(caught.value)


def test_slow_links_and_plans_that_they_do_not_fit() -> None:
    with pytest.raises(InputError, match="needs no network"):
        dl.simulate("gpt:1.3b", "dp=8", "dgx-h100", slow_links=["network:0.5"])
    with pytest.raises(InputError, match="only where replicas meet"):
        dl.simulate("resnet50", "dp=16,sync=async", "dgx-h100", slow_links=["network@1:0.5"])
    assert dl.simulate("resnet50", "dp=16,sync=async", "dgx-h100", slow_links=["network:0.5"]).notes
    assert str(SlowLink.parse("node@3:0.5")) == "node@3:0.5"


def test_ranks_that_differ() -> None:
    """The replay draws, the plan expects: one sentence has both numbers."""
    even = dl.simulate(*GPT)
    jitter = dl.simulate(*GPT, jitter=0.1, seed=3)
    assert jitter == dl.simulate(*GPT, jitter=0.1, seed=3) and jitter.workers is not None
    assert jitter.planned_seconds == pytest.approx(jitter.step_seconds, rel=0.03)
    assert "drawn with seed 3" in jitter.notes[0] and "`plan` expects" in jitter.notes[0]
    assert [m.bytes for m in jitter.memory] == [m.bytes for m in even.memory] and jitter.timeline.all_ranks == 32
    assert jitter.memory[0].times[-1] == pytest.approx(jitter.step_seconds) == jitter.timeline.seconds
    assert even.memory[0].times[-1] == pytest.approx(even.step_seconds)
    slow = dl.simulate(*GPT, slow={3: 2.0})
    assert slow.step_seconds == pytest.approx(slow.planned_seconds, rel=1e-6) and slow.step_seconds > even.step_seconds


def test_many_ranks_that_differ_are_drawn_by_a_few() -> None:
    many = ("gpt:1.3b", "dp=512,tp=8,precision=bf16", "dgx-h100")
    slow = dl.simulate(*many, batch=512, slow={100: 2.0})
    assert slow.timeline.all_ranks == 4096 and slow.timeline.ranks == (0, 100)
    assert slow.timeline.rank_counts == {0: 4095} and "waiting for the slowest rank" in {
        s.name for s in slow.timeline.spans
    }
    jitter = dl.simulate(*many, batch=512, jitter=0.1)
    assert jitter.timeline.all_ranks == 4096 and len(jitter.timeline.ranks) == 3
    assert "fastest, its median and its slowest" in jitter.timeline.notes[0]


# -- failures


def test_days_with_failures() -> None:
    question = ("gpt:7b", "dp=64,zero=1,micro=8,precision=bf16", "dgx-h100")
    run = dl.simulate(*question, mtbf="2000h", days=60)
    f, worse = run.failures, dl.simulate(*question, mtbf="200h", restart="1h", days=60).failures
    assert f is not None and worse is not None
    assert f == dl.simulate(*question, mtbf=2000 * 3600.0, days=60).failures
    assert f != dl.simulate(*question, mtbf="2000h", days=60, seed=1).failures
    assert f.mtbf == pytest.approx(2000 * 3600 / 64) and f.restart == 300 and f.seconds == 60 * 86400
    assert f.interval / run.step_seconds == pytest.approx(round(f.interval / run.step_seconds))
    assert 0.9 < f.goodput < 1 and f.goodput == pytest.approx(f.expected, abs=0.01)
    assert worse.goodput < f.goodput - 0.1 and worse.failures > 5 * f.failures


def test_checkpoints_wait_for_the_storage() -> None:
    question = ("gpt:7b", "dp=64,zero=1,micro=8,precision=bf16", "dgx-h100")
    usual = dl.simulate(*question, mtbf="200h")
    slow = dl.simulate(*question, mtbf="200h", changes=["node.storage=20MB/s"])
    f, late = usual.failures, slow.failures
    assert f is not None and late is not None and f.storage == pytest.approx(8e9)
    assert f.write < f.interval < late.write <= late.interval < late.write + slow.step_seconds
    assert late.goodput < f.goodput
    assert "as often as the storage takes them" in failure_lines(late, slow.step_seconds)[1]
    one = dataclasses.replace(f, interval=usual.step_seconds, write=0.1)
    text = failure_lines(one, usual.step_seconds)[1]
    assert "(1 step, Young/Daly)" in text and "is stored 100 ms later at 8.00 GB/s" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mtbf": "often"}, "--mtbf often"),
        ({"mtbf": "0h"}, "more than no time"),
        ({"mtbf": "1h", "restart": "-1s"}, "--restart -1s"),
        ({"mtbf": "1h", "days": 0.0}, "--days 0"),
        ({"mtbf": "1h", "days": 1e9}, "at most 3650"),
        ({"days": 3.0}, "--days without --mtbf"),
        ({"restart": "3s"}, "--restart without --mtbf"),
        ({"batch": 0}, "--batch 0"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        dl.simulate(*GPT, **options)  # type: ignore[arg-type]  # wrong on purpose
    assert words in str(caught.value)
    with pytest.raises(InputError, match="for all_reduce:ring"):
        dl.simulate("all_reduce:ring", cluster="dgx-h100", **options)  # type: ignore[arg-type]  # not for a collective


def test_failure_options_have_defaults() -> None:
    assert FailureOptions.of(None, None, None) is None
    assert FailureOptions.of("10h", None, None) == FailureOptions("10h", "5min", 30.0)


# -- the same question as `plan`


def test_a_job_is_traced_as_plan_traces_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import torch, drumline\n"
        "def job():\n"
        "    return drumline.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), "
        "torch.nn.Linear(256, 4)), loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.AdamW, "
        "data=lambda: [(torch.zeros(64), 0)] * 64, batch_size=64)\n"
    )
    target = str(tmp_path / "job.py")
    gpu = load("dgx-h100").with_devices(2)
    for text in ("dp=2,precision=bf16", "dp=2,zero=3"):
        planned = dl.plan(target, gpu, precision=dl.Plan.parse(text).precision)
        own = next(c for c in planned.candidates if str(c.plan) == str(dl.Plan.parse(text)))
        assert dl.simulate(target, text, gpu).step_seconds == pytest.approx(own.step_seconds, rel=1e-9)


def test_nodes_of_several_kinds_are_refused(tmp_path: Path) -> None:
    cluster = Cluster("cpu", DeviceSpec("core", "cpu", 8e9, 1e10, {"fp32": 5e10}, 5e-6), Node(4, Link(2e-5, 3e9)))
    cluster.save(tmp_path / "c.toml")
    text = (tmp_path / "c.toml").read_text().replace("[device]", "[[device]]")
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ClusterError, match="1 kinds of device") as caught:
        dl.simulate("resnet50", "dp=4", tmp_path / "c.toml")
    assert "--slow" in str(caught.value)


# -- numbers of devices


def test_strong_and_weak_scaling() -> None:
    question = ("gpt:7b", "dp=2,tp=8,micro=4,precision=bf16", "dgx-h100")
    strong = dl.simulate_scaling(*question, [64, 16, 32])
    assert [p.devices for p in strong] == [16, 32, 64] and [p.plan for p in strong] == [
        f"dp={dp},tp=8,micro=4,precision=bf16" for dp in (2, 4, 8)
    ]
    assert strong[0].efficiency == 1.0 > strong[1].efficiency > strong[2].efficiency > 0.5
    assert len({p.batch_size for p in strong}) == 1
    alone = dl.simulate("gpt:7b", "dp=4,tp=8,micro=4,precision=bf16", "dgx-h100")
    assert strong[1].step_seconds == alone.step_seconds
    weak = dl.simulate_scaling(*question, [16, 32, 64], scaling="weak")
    assert [p.batch_size for p in weak] == [512, 1024, 2048]
    assert all(w.efficiency > s.efficiency for w, s in zip(weak[1:], strong[1:], strict=True))
    assert "needs" in strong[0].lacks and strong[0].step_seconds  # activations do not fit; the time is still known


def test_a_batch_that_is_too_small_for_many_replicas() -> None:
    points = dl.simulate_scaling("resnet50", "dp=2,micro=2", "dgx-h100", [1, 8, 64], batch=16)
    assert points[2].lacks.startswith("2 micro-batches x 64 replicas need 128 samples, the batch has 16")
    assert points[2].samples_per_second == 0 and points[0].efficiency == 1.0


@pytest.mark.parametrize(
    ("counts", "options", "words"),
    [
        ([], {}, "different numbers"),
        ([8, 8], {}, "different numbers"),
        ([0], {}, "different numbers"),
        ([12], {}, "12 % 8 = 4"),
        ([8], {"scaling": "medium"}, "strong (the same batch)"),
        ([8], {"slow_links": ["x"]}, "slow link"),
    ],
)
def test_a_bad_sweep(counts: list[int], options: dict[str, object], words: str) -> None:
    with pytest.raises((InputError, PlanError)) as caught:
        dl.simulate_scaling("gpt:1.3b", "tp=8", "dgx-h100", counts, **options)  # type: ignore[arg-type]  # wrong on purpose
    assert words in str(caught.value)
    with pytest.raises(ClusterError, match="12 devices do not fill nodes") as unfilled:
        dl.simulate_scaling("gpt:1.3b", "dp=4", "dgx-h100", [12])
    assert "--sweep" in unfilled.value.fix


def test_a_simulation_is_a_value() -> None:
    one = dl.simulate(*GPT)
    assert dataclasses.replace(one) == one == dl.simulate(*GPT)
