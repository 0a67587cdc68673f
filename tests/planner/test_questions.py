"""Further questions: fit, what-if, scaling, duration and price, checkpoint interval, learning rate."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.clusters import Cluster, CollectiveTable, load
from drumline.core import files
from drumline.core.errors import ClusterError, InputError
from drumline.costs import OperatorCostModel, estimate
from drumline.models import zoo
from drumline.planner import search
from drumline.planner.break_even import thresholds, with_slower_messages
from drumline.planner.fit_report import first_plan, fit_report, largest_batch, most_at_once
from drumline.planner.scaling_curve import device_counts, scaling_curve
from drumline.planner.training import checkpoint_interval, scale_learning_rate, training_cost
from drumline.planner.what_if import compare, with_changes
from drumline.plans import Plan
from drumline.plans.combinations import refusal
from drumline.reports.plan_text import saving_lines
from drumline.theory.checkpoint_interval import FailureRate, save_interval

H100 = load("dgx-h100")
GPT = zoo.profile("gpt:1.3b", batch_size=64)


class TestFit:
    def test_a_plan_that_fits_needs_no_change(self) -> None:
        four = H100.with_devices(4)
        plan = first_plan(zoo.profile("gpt:125m", batch_size=16), four, "bf16")
        result = fit_report(zoo.profile("gpt:125m", batch_size=16), four, plan)
        assert (
            result.fits and not result.changes and result.plan == "dp=4,precision=bf16" and result.largest_batch >= 16
        )

    def test_the_largest_batch(self) -> None:
        four = H100.with_devices(4)
        for text in ("dp=4", "dp=4,zero=3,recompute=full", "dp=2,tp=2,micro=2"):
            plan = Plan.parse(text + ",precision=bf16")
            most = largest_batch(GPT, four, plan)
            assert most > plan.dp * plan.micro
            for batch, fits in ((most, True), (most + 1, False)):
                assert OperatorCostModel(replace(GPT, batch_size=batch), four, "bf16").fits(plan) is fits

    def test_the_largest_single_micro_batch(self) -> None:
        four = H100.with_devices(4)
        most, plan = most_at_once(GPT, four, "bf16")
        assert largest_batch(GPT, four, Plan.parse(plan)) == most
        assert most >= largest_batch(GPT, four, Plan.parse("dp=4,zero=3,recompute=full,precision=bf16"))

    def test_every_single_change_is_tried(self) -> None:
        tight = H100.with_devices(4).with_memory(48 * 2**30)
        plan = first_plan(GPT, tight, "bf16")
        result = fit_report(
            GPT,
            tight,
            plan,
            fleet=H100.with_memory(48 * 2**30),
            tokens=2048,
            shorten=lambda n: zoo.profile("gpt:1.3b", batch_size=64, sequence=n),
        )
        assert not result.fits and result.lacks_bytes > 0
        tried = {c.change.partition("=")[0].split()[0] for c in result.changes}
        assert {"recompute", "zero", "offload", "micro", "tp", "pp", "--devices"} <= tried
        assert any("tokens per sample" in c.change for c in result.changes)
        assert any("chunk=" in c.change for c in result.changes)
        helped = [c for c in result.changes if c.fits]
        assert helped and result.changes[: len(helped)] == tuple(helped), "changes that help come first"
        assert [c.step_seconds for c in helped] == sorted(c.step_seconds for c in helped)
        for c in helped:
            assert not refusal(Plan.parse(c.plan)) and c.memory_bytes <= c.memory_limit

    def test_a_change_has_the_smallest_size_that_fits(self) -> None:
        tight = H100.with_devices(4).with_memory(40 * 2**30)
        plan = Plan.parse("dp=4,zero=3,precision=bf16")
        result = fit_report(GPT, tight, plan)
        micro = next(c for c in result.changes if c.change.startswith("micro="))
        assert micro.fits
        steps, chosen = OperatorCostModel(GPT, tight, "bf16"), Plan.parse(micro.plan)
        assert steps.fits(chosen) and not steps.fits(replace(chosen, micro=chosen.micro // 2))
        batch = next(c for c in result.changes if c.change.startswith("batch "))
        assert batch.fits and batch.change == f"batch {result.largest_batch}"


class TestWhatIf:
    def test_before_and_after(self) -> None:
        four = H100.with_devices(4)
        result = compare(GPT, four, H100, ["link=10GB/s"])
        assert result.before.step_seconds < result.after.step_seconds
        assert result.after.parts and result.before.plan
        assert result.old_plan_after >= result.after.step_seconds, "the new plan is no worse than the old one"

    def test_each_key(self) -> None:
        four = H100.with_devices(4)
        profile, machines = with_changes(GPT, four, H100, ["batch=128", "devices=16", "memory=40GB"])
        assert (profile.batch_size, machines.devices, machines.device.memory) == (128, 16, 40e9)
        _, machines = with_changes(GPT, four, H100, ["node.link.alpha=9us", "device.peak.bf16=500TFLOP/s"])
        assert machines.node.link.alpha == pytest.approx(9e-6) and machines.device.peak["bf16"] == 5e14
        _, machines = with_changes(GPT, H100.with_devices(16), H100, ["network=50GB/s"])
        assert machines.network is not None and machines.network.link.bandwidth == 50e9

    def test_what_no_longer_fits_is_reported(self) -> None:
        result = compare(zoo.profile("gpt:7b", batch_size=8), load("one-a100"), load("one-a100"), ["memory=2GB"])
        assert result.before.plan and not result.after.plan and " > " in result.after.explanation

    @pytest.mark.parametrize(
        ("text", "error", "words"),
        [
            ("link", InputError, "KEY=VALUE"),
            ("batch=0", InputError, "whole number"),
            ("devices=x", InputError, "whole"),
            ("memory=4parsec", InputError, "no known unit"),
            ("lnik=4GB/s", ClusterError, "no such number"),
            ("devices=12", ClusterError, "do not fill nodes of 8"),
            ("link=3us", ClusterError, "is not a rate"),
        ],
    )
    def test_bad_changes(self, text: str, error: type[InputError], words: str) -> None:
        with pytest.raises(error) as caught:
            with_changes(GPT, H100.with_devices(4), H100, [text])
        assert words in str(caught.value)


@pytest.mark.parametrize("key", ["device", "node"])
def test_mixed_clusters_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "two.toml"
    H100.save(path)
    table = files.read_toml(path, ClusterError)
    table[key] = [table[key], table[key]]
    files.write_toml(path, table, "two kinds")
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert f"2 kinds of {key}" in str(caught.value) and "identical nodes" in str(caught.value)


def test_measured_messages_are_scaled() -> None:
    """A measured table would hide a changed link, so it is scaled as well."""
    table = CollectiveTable("all_reduce", "nccl", 4, (1e3, 1e9), (1e-5, 1e-2))
    measured = replace(H100.with_devices(4), collective=(table,))
    slow = with_slower_messages(measured, 2.0)
    assert slow.table("all_reduce", 4) == replace(table, seconds=(2e-5, 2e-2))
    profile = zoo.profile("gpt:125m", batch_size=8)
    answer, estimates = search(profile, measured)
    ranked = [(c.plan, estimates[str(c.plan)]) for c in answer.candidates]
    result = [c for c in thresholds(profile, measured, ranked) if c.key != "device.memory"]
    assert {c.key for c in result} <= {"messages", "batch"}
    messages = [c for c in result if c.key == "messages"]
    assert messages and all("times as long as measured" in str(c) and c.value > 0 for c in messages)


class TestScaling:
    def test_device_counts(self) -> None:
        assert device_counts(H100.with_devices(6)) == [1, 2, 4, 6]
        assert device_counts(H100.with_devices(48)) == [1, 2, 4, 8, 16, 32, 48]

    def test_curve(self) -> None:
        points = scaling_curve(zoo.profile("gpt:1.3b", batch_size=16), H100.with_devices(16))
        assert [p.devices for p in points] == [1, 2, 4, 8, 16]
        assert points[0].efficiency == 1 and all(p.plan for p in points)
        rate = [p.samples_per_second for p in points]
        assert rate == sorted(rate), "a plan may leave devices idle, so more devices are never slower"
        for p in points:
            assert p.efficiency == pytest.approx(p.samples_per_second / p.devices / rate[0])
        assert points[-1].efficiency < 1

    def test_points_where_nothing_fits(self) -> None:
        machines = H100.with_devices(4)
        machines = replace(machines, device=replace(machines.device, host=None))
        points = scaling_curve(zoo.profile("gpt:7b", batch_size=8), machines)
        assert not points[0].plan and " > " in points[0].lacks
        first = next(p for p in points if p.plan)
        assert first.efficiency == 1 and first.devices > 1

    def test_weak_scaling(self) -> None:
        points = scaling_curve(zoo.profile("resnet50", batch_size=256), H100.with_devices(4), grow=True)
        assert [p.batch_size for p in points] == [64, 128, 256]
        assert all(p.efficiency > 0.7 for p in points)


class TestTraining:
    PLAN = Plan.parse("dp=8,zero=3,micro=2,precision=bf16")

    def test_tokens(self) -> None:
        e = estimate(GPT, self.PLAN, H100.with_devices(8))
        result = training_cost(GPT, self.PLAN, e, tokens=1e12, price=2.5)
        assert result.steps == math.ceil(1e12 / 2048 / 64) and result.tokens == pytest.approx(1e12)
        assert result.device_hours == pytest.approx(result.steps * e.step_seconds * 8 / 3600)
        assert result.price == pytest.approx(2.5 * result.device_hours)

    def test_epochs(self) -> None:
        net = zoo.profile("resnet50", batch_size=256)
        plan = Plan.parse("dp=8,precision=bf16")
        result = training_cost(net, plan, estimate(net, plan, H100.with_devices(8)), epochs=90, samples=1_281_167)
        assert (
            result.steps == math.ceil(90 * 1_281_167 / 256) and result.epochs == pytest.approx(90) and result.price == 0
        )
        with pytest.raises(InputError, match="not sequences of tokens"):
            training_cost(net, plan, estimate(net, plan, H100.with_devices(8)), tokens=1e9)
        with pytest.raises(InputError, match="number of samples"):
            training_cost(net, plan, estimate(net, plan, H100.with_devices(8)), epochs=9)

    def test_checkpoint_interval(self) -> None:
        machines = H100.with_devices(8)
        e = estimate(GPT, self.PLAN, machines)
        result = checkpoint_interval(GPT, self.PLAN, e, machines, FailureRate(6 * 3600, whole_run=True))
        assert result.bytes == pytest.approx(12 * GPT.parameters)
        assert machines.device.host is not None
        assert result.stall == pytest.approx(result.bytes / 8 / machines.device.host.copy)
        assert result.interval == pytest.approx(save_interval(result.stall, 6 * 3600))
        assert result.every == round(result.interval / e.step_seconds)
        assert result.lost == pytest.approx(2 * result.stall / result.interval), (
            "saves and repeated steps cost the same"
        )

    def test_the_storage_bounds_how_often_checkpoints_are_saved(self) -> None:
        machines, rate = H100.with_devices(16), FailureRate(3600, whole_run=True)
        plan = Plan.parse("dp=16,precision=bf16")
        e = estimate(GPT, plan, machines)
        usual = checkpoint_interval(GPT, plan, e, machines, rate)
        assert machines.node.storage == 1e9 and usual.write == pytest.approx(usual.bytes / 2e9)
        assert usual.write < usual.interval and not usual.waits_for_storage
        slow = replace(machines, node=replace(machines.node, storage=1e7))
        late = checkpoint_interval(GPT, plan, e, slow, rate)
        assert late.interval == late.write == pytest.approx(100 * usual.write) and late.waits_for_storage
        assert late.every * e.step_seconds >= late.write > (late.every - 1) * e.step_seconds
        assert "as often as the storage takes them" in saving_lines(late)
        assert "Young/Daly" in saving_lines(usual) and "node.storage" in saving_lines(usual)

    def test_learning_rate_scaling(self) -> None:
        result = scale_learning_rate(zoo.profile("resnet50", batch_size=16384), 256, 1_281_167)
        assert result.linear == 64 and result.root == 8 and result.warmup == math.ceil(5 * 1_281_167 / 16384)
        assert (
            "beyond 8192" in result.warnings[0] and "rate x 64 with SGD" in str(result) and "391 steps" in str(result)
        )
        assert str(scale_learning_rate(zoo.profile("resnet50", batch_size=256), 256)) == ""
        assert "tokens a batch is beyond" in str(scale_learning_rate(zoo.profile("gpt:7b", batch_size=4096), 4096))
        assert "beyond 32768" in str(scale_learning_rate(zoo.profile("bert:base", batch_size=65536), 65536))
