"""The whole space scored on arrays by the fitted model: its layouts, their scores, the finalists, and what it covers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from command import here

from drumline.clusters import Cluster, CollectiveTable, load
from drumline.clusters.corrections import CorrectionFactor, Corrections
from drumline.costs import OperatorCostModel, cost_model
from drumline.costs.fitted import FittedCostModel, fitted_model, load_constants
from drumline.costs.fitted.engine_layouts import covered_part
from drumline.costs.fitted.transformer import transformer_of
from drumline.costs.plan_columns import PlanColumns
from drumline.models import Profile, zoo
from drumline.models.zoo import transformer
from drumline.planner import price, search
from drumline.planner.finalists import SLACK, layout_columns, score_space
from drumline.planner.fit_report import fit_report
from drumline.planner.formula import formula
from drumline.planner.objectives import TIE
from drumline.planner.reserve import GPU_RESERVE, reserve_bytes
from drumline.planner.scaling_curve import scaling_curve
from drumline.planner.space import Layout, SearchSpace, candidates, multiples_of_powers
from drumline.planner.what_if import compare
from drumline.plans import Plan, check

BASE = Plan(precision="bf16")
H100, A100 = load("dgx-h100"), load("dgx-a100")
GPT = zoo.profile("gpt:7b", batch_size=64)
EIGHT = H100.with_devices(8)


def fitted(profile: Profile = GPT, cluster: Cluster = EIGHT) -> FittedCostModel:
    model = fitted_model(profile, cluster, "bf16")
    assert model is not None
    return model


def layouts(profile: Profile = GPT, cluster: Cluster = EIGHT) -> list[Layout]:
    return list(SearchSpace(profile, cluster, BASE, fitted(profile, cluster), exhaustive=True).layouts())


class TestCoverage:
    @pytest.mark.parametrize(
        ("name", "numbers"),
        [
            ("gpt:175b", (96, 12288, 96, 96, 4 * 12288, 0, 50257, 1, 2048)),
            ("llama:70b", (80, 8192, 64, 8, 28672, 1, 128256, 0, 8192)),
        ],
    )
    def test_model_sizes_are_recognised_from_operators(self, name: str, numbers: tuple[int, ...]) -> None:
        model = transformer_of(zoo.profile(name))
        assert model is not None
        keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "gated", "vocabulary", "tied", "sequence")
        assert tuple(int(getattr(model, k)[0]) for k in keys) == numbers

    @pytest.mark.parametrize("name", ["bert:large", "vit:base", "resnet50", "lstm:2x1024", "mlp:4x4096", "unet"])
    def test_other_models_are_not_covered(self, name: str) -> None:
        assert transformer_of(zoo.profile(name)) is None and isinstance(
            cost_model(zoo.profile(name), EIGHT, "bf16"), OperatorCostModel
        )

    def test_a_model_with_further_layers_is_not_covered(self) -> None:
        embedding, block, head = GPT.layers
        wider = replace(block, ops=(*block.ops, next(op for op in block.ops if op.kind == "matmul")))
        assert transformer_of(replace(GPT, layers=(embedding, wider, head))) is None
        assert transformer_of(replace(GPT, layers=(embedding, block, wider, head))) is None  # blocks that differ
        assert transformer_of(replace(GPT, layers=(embedding, block, head, head))) is None  # another matmul at the end
        assert transformer_of(replace(GPT, layers=(embedding, head))) is None

    @pytest.mark.parametrize(
        "change",
        [
            lambda c: replace(c, origin={"device.peak": "measured here"}),
            lambda c: replace(c, collective=(CollectiveTable("all_reduce", "nccl", 8, (1e3, 1e9), (1e-5, 1e-2)),)),
            lambda c: replace(c, corrections=Corrections((CorrectionFactor("forward", 1.1, "bf16"),))),
            lambda c: load("mi300x").with_devices(8),
            lambda c: replace(c, device=replace(c.device, name="X999")),
        ],
    )
    def test_measured_and_unknown_machines_are_not_covered(self, change: Callable[[Cluster], Cluster]) -> None:
        assert fitted_model(GPT, change(EIGHT), "bf16") is None and fitted_model(GPT, EIGHT, "bf16") is not None
        assert fitted_model(GPT, EIGHT, "fp32") is None


class TestSpace:
    @pytest.mark.parametrize(
        ("name", "cluster", "devices", "batch"),
        [
            ("gpt:1.3b", "dgx-h100", 8, 24),
            ("llama:8b", "dgx-a100", 16, 32),
            ("gpt:125m", "dgx-a100", 7, 12),
        ],
    )
    def test_the_engine_runs_every_layout(self, name: str, cluster: str, devices: int, batch: int) -> None:
        profile, machines = zoo.profile(name, batch_size=batch), load(cluster).with_devices(devices)
        plans = [layout.plan(BASE) for layout in layouts(profile, machines)]
        assert len(plans) == len(set(plans)) > 400
        for plan in plans:
            check(plan)
            assert plan.ranks <= devices and plan.dp * plan.micro <= batch
        coarse = {p for p in candidates(profile, machines, BASE) if p.offload == "none" and p.chunk == 1}
        blocks = profile.layers[1].repeats  # unequal virtual stages have no closed form
        missing = {p for p in coarse - set(plans) if blocks % (p.pp * p.virtual) == 0}
        assert not missing, sorted(map(str, missing))[:5]

    def test_columns_and_plans_are_inverse(self) -> None:
        every = layouts()
        columns = layout_columns(every)
        some = np.arange(0, len(every), 37)
        plans = [every[int(i)].plan(BASE) for i in some]
        assert plans == [columns.plan(int(i), BASE) for i in some]
        again = PlanColumns.from_plans(plans)
        for name in ("dp", "shard", "zero", "tp", "cp", "pp", "virtual", "schedule", "micro", "recompute"):
            assert getattr(again, name).tolist() == getattr(columns, name)[some].tolist(), name

    def test_multiples_of_powers(self) -> None:
        assert multiples_of_powers(12) == [1, 2, 3, 4, 6, 8, 12] and multiples_of_powers(1) == [1]

    @pytest.mark.parametrize(
        ("name", "cluster"), [("gpt:7b", EIGHT), ("gpt:13b", A100.with_devices(64)), ("llama:8b", EIGHT)]
    )
    def test_the_approximate_memory_is_close(self, name: str, cluster: Cluster) -> None:
        """Never further off than the finalists allow for."""
        profile = zoo.profile(name, batch_size=64)
        steps = fitted(profile, cluster)
        space = score_space(profile, cluster, BASE, steps)
        some = np.random.default_rng(0).choice(np.flatnonzero(space.bytes < 2 * space.limit), 150, replace=False)
        off = [space.bytes[i] / steps.memory(space.layouts[int(i)].plan(BASE)).total for i in some]
        assert max(off) < SLACK and min(off) > 0.6 and 0.93 < float(np.median(off)) < 1.07


class TestLargeModels:
    @pytest.mark.parametrize(
        ("name", "devices"), [("gpt:175b", 1024), pytest.param("gpt:1t", 3072, marks=pytest.mark.slow)]
    )
    def test_100_000_candidates_in_few_calls(self, name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Speed, counted: all rows are scored in large blocks, and few plans are estimated one by one."""
        blocks: list[int] = []
        whole = FittedCostModel.times

        def times(self: FittedCostModel, rows: Any) -> Any:
            blocks.append(len(rows.dp))
            return whole(self, rows)

        monkeypatch.setattr(FittedCostModel, "times", times)
        answer, estimates = search(zoo.profile(name), A100.with_devices(devices), break_even=True)
        assert answer.scored >= 100_000 and sum(n for n in blocks if n > 1000) == answer.scored
        assert len(blocks) < 1000 and len(answer.candidates) < 400
        best = answer.best.plan
        assert estimates[str(best)].fits and best.pp > 1 and best.tp > 1 and best.ranks == devices
        assert "90% within" in answer.scored_by and f"{answer.scored:,} candidates do not fit" in answer.explanation

    def test_on_the_command_line(self) -> None:
        done = here("plan", "gpt:175b", "--cluster", "dgx-a100", "--devices", 1024, "--top", 3, "--json")
        document = json.loads(done.stdout)
        assert document["candidates"] >= 100_000 and document["finalists"] >= 40
        assert "published" in document["scored_by"]
        assert {f["name"] for f in document["families"] if f["plan"]} >= {"sharded", "tensor", "pipeline", "data"}


class TestConsistentPrices:
    def test_every_question_gets_the_same_price(self) -> None:
        answer, estimates = search(GPT, EIGHT)
        best = answer.candidates[0]
        plan = best.plan
        kept = reserve_bytes(None, EIGHT)
        assert replace(price(GPT, EIGHT, plan), reserve_bytes=kept) == estimates[str(plan)]
        alone = cost_model(GPT, EIGHT, "bf16").estimate(plan)
        assert replace(alone, reserve_bytes=kept) == estimates[str(best.plan)]
        assert compare(GPT, EIGHT, H100, ["batch=128"]).before.step_seconds == best.step_seconds
        assert scaling_curve(GPT, EIGHT)[-1].step_seconds == best.step_seconds
        assert formula(GPT, plan, estimates[str(best.plan)], EIGHT)[0].value == best.step_seconds
        assert fit_report(GPT, EIGHT, plan).fits and fit_report(GPT, EIGHT, plan).memory_bytes == best.memory_bytes
        assert estimates[str(best.plan)].error == load_constants().error < 0.25

    def test_rows_cost_the_same_as_their_plans(self) -> None:
        steps = fitted()
        space = score_space(GPT, EIGHT, BASE, steps)
        some = list(range(0, len(space.seconds), 101))
        plans = [space.layouts[i].plan(BASE) for i in some]
        assert steps.seconds(plans) == pytest.approx(space.seconds[some].tolist())
        for plan, seconds in zip(plans[:20], space.seconds[some], strict=False):
            e = steps.estimate(plan)
            assert e.step_seconds == pytest.approx(seconds) == pytest.approx(sum(e.parts.values()))
            assert ("bubble" in e.parts) == (plan.pp > 1) and min(e.parts.values()) >= 0 <= e.hidden_seconds

    def test_uncovered_keys_cost_what_the_operator_model_adds(self) -> None:
        steps, by_sheet = fitted(), OperatorCostModel(GPT, EIGHT, "bf16")
        for text in (
            "dp=8,zero=3,offload=all",
            "dp=8,zero=3,chunk=4",
            "zero=3,offload=all",
            "dp=2,pp=4,micro=8,schedule=naive",
        ):
            plan = Plan.parse(text + ",precision=bf16")
            covered = covered_part(plan)
            added = by_sheet.estimate(plan).step_seconds - by_sheet.estimate(covered).step_seconds
            e = steps.estimate(plan)
            assert added > 0 and e.step_seconds == pytest.approx(steps.estimate(covered).step_seconds + added)
            assert any("priced from the data sheet" in note for note in e.notes)
            assert steps.seconds([plan]) == pytest.approx([e.step_seconds])

    def test_memory_is_that_of_the_operator_model(self) -> None:
        """Also where fewer micro-batches are played than the plan has."""
        profile, machines = replace(GPT, batch_size=512), H100.with_devices(32)
        steps, whole = fitted(profile, machines), OperatorCostModel(profile, machines, "bf16")
        for text in (
            "dp=4,tp=2,pp=4,micro=32",
            "dp=4,pp=8,zero=1,virtual=4,schedule=interleaved,micro=64,recompute=full",
            "dp=4,pp=8,schedule=zero-bubble,micro=96",
            "dp=3,pp=7,micro=100,zero=1",
            "dp=2,pp=4,schedule=gpipe,micro=64",
            "dp=32,zero=3",
        ):
            plan = Plan.parse(text + ",precision=bf16")
            assert steps.memory(plan) == whole.memory(plan) and steps.fits(plan) == whole.fits(plan), text

    def test_link_latency_counts(self) -> None:
        """--set node.link.alpha and --what-if must change the price, although the fit has latencies of its own."""
        link = replace(EIGHT.node.link, alpha=5e-3)
        slow = replace(EIGHT, node=replace(EIGHT.node, link=link))
        plan = Plan.parse("dp=1,tp=8,micro=8,precision=bf16")
        assert fitted(GPT, slow).estimate(plan).step_seconds > 1.5 * fitted().estimate(plan).step_seconds


@pytest.mark.parametrize(
    ("name", "cluster", "devices", "batch", "memory"),
    [
        ("gpt:1.3b", "dgx-h100", 8, 32, 80),
        ("gpt:7b", "dgx-a100", 8, 32, 80),
        ("llama:8b", "dgx-h100", 8, 16, 80),
        ("gpt:7b", "dgx-a100", 4, 16, 40),
        ("gpt:1.3b", "dgx-a100", 2, 16, 20),
    ],
)
def test_no_better_plan_is_missed(name: str, cluster: str, devices: int, batch: int, memory: float) -> None:
    """Against every layout with exact memory, and every candidate of the coarse space."""
    profile, machines = (
        zoo.profile(name, batch_size=batch),
        load(cluster).with_devices(devices).with_memory(memory * 2**30),
    )
    steps = fitted(profile, machines)
    space = score_space(profile, machines, BASE, steps)
    order = np.argsort(space.seconds, kind="stable").tolist()
    for reserve in (0.0, GPU_RESERVE):
        spare = reserve_bytes(reserve, machines)

        def fits(plan: Plan, spare: float = spare) -> bool:
            return steps.excess(plan) + spare <= 0

        first = next((float(space.seconds[i]) for i in order if fits(space.layouts[i].plan(BASE))), np.inf)
        coarse = [p for p in candidates(profile, machines, BASE) if fits(p)]
        best = min([first, *steps.seconds(coarse)])
        answer, _ = search(profile, machines, reserve=reserve)
        offered = [c.step_seconds for c in answer.candidates if c.fits and not c.in_reserve]
        assert min(offered) <= best * (1 + 1e-9) and offered[0] <= best * (1 + TIE)


TABLE = [
    # layers, hidden, heads, devices, batch, published layout, seconds that were published
    (24, 2304, 24, 32, 512, "dp=32", 3.528),
    (30, 3072, 32, 64, 512, "dp=32,tp=2", 3.697),
    (36, 4096, 32, 128, 512, "dp=32,tp=4", 3.696),
    (40, 6144, 48, 256, 1024, "dp=32,tp=8,micro=4", 9.399),
    (48, 8192, 64, 512, 1536, "dp=32,tp=8,pp=2,micro=12", 14.45),
    (60, 10240, 80, 1024, 1792, "dp=32,tp=8,pp=4,virtual=3,schedule=interleaved,micro=28", 16.06),
    (80, 12288, 96, 1536, 2304, "dp=24,tp=8,pp=8,virtual=2,schedule=interleaved,micro=48", 24.82),
    (96, 16384, 128, 1920, 2160, "dp=15,tp=8,pp=16,virtual=2,schedule=interleaved,micro=144", 37.61),
    (105, 20480, 128, 2520, 2520, "dp=9,tp=8,pp=35,virtual=3,schedule=interleaved,micro=280", 54.09),
    (128, 25600, 160, 3072, 3072, "dp=6,tp=8,pp=64,micro=512", 102.6),
]
"""Table 1 of Narayanan et al. 2021: GPTs on A100 of 80 GB, everything recomputed."""


@pytest.mark.parametrize(
    "row",
    [
        TABLE[0],
        TABLE[4],
        TABLE[9],
        *(pytest.param(TABLE[i], marks=pytest.mark.slow) for i in (1, 2, 3, 5, 6, 7, 8)),
    ],
    ids=lambda row: f"{row[0]}x{row[1]}",
)
def test_the_best_plan_beats_the_published_layout(row: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both priced as `drumline plan` does; and the price of the published layout is close to its measurement."""
    layers, hidden, heads, devices, batch, layout, seconds = row
    shape = transformer.TransformerSize(layers, hidden, heads, heads, 4 * hidden, 51200, 2048, batch)
    monkeypatch.setitem(transformer.GPT, "table", shape)
    profile, machines = transformer.gpt("table", batch, 2048), A100.with_devices(devices)
    published = Plan.parse(f"{layout},recompute=full,precision=bf16")
    check(published)
    answer, _ = search(profile, machines, brief=True)
    theirs = cost_model(profile, machines, "bf16").estimate(published)
    assert answer.scored_by and answer.candidates[0].fits
    assert answer.candidates[0].step_seconds <= theirs.step_seconds
    assert theirs.step_seconds == pytest.approx(seconds, rel=0.35), (
        "this engine has no hand-fused kernels, and accumulates in fp32"
    )


def test_an_interrupted_search_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []
    whole = FittedCostModel.estimate

    def estimate(self: FittedCostModel, plan: Plan) -> Any:
        if len(seen) == 10:
            raise KeyboardInterrupt
        seen.append(plan)
        return whole(self, plan)

    monkeypatch.setattr(FittedCostModel, "estimate", estimate)
    answer, _ = search(GPT, EIGHT)
    assert answer.interrupted and {c.plan for c in answer.candidates} == set(seen) and answer.candidates[0].fits
    monkeypatch.setattr(FittedCostModel, "estimate", whole)
    blocks = 0

    def times(self: FittedCostModel, rows: Any) -> Any:
        nonlocal blocks
        blocks += 1
        if blocks == 2:
            raise KeyboardInterrupt
        return priced(self, rows)

    priced = FittedCostModel.times
    monkeypatch.setattr(FittedCostModel, "times", times)
    monkeypatch.setattr("drumline.planner.finalists.BLOCK", 500)
    some = score_space(GPT, EIGHT, BASE, fitted())
    assert some.interrupted and 0 < len(some.seconds) <= 500


def test_micro_batches_of_one_sample_are_in_the_space() -> None:
    """240 samples a replica: MT-NLG runs as published, on all 2,240 devices, where only 192 left 80 of them idle."""
    machines = load("dgx-a100").with_devices(2240)
    answer, _ = search(zoo.profile("gpt:530b", batch_size=1920, sequence=2048), machines, brief=True)
    best = answer.best.plan
    assert (best.tp, best.pp, best.dp, best.micro) == (8, 35, 8, 240) and not answer.idle


def test_zero3_costs_its_host_and_copies() -> None:
    """A model that waits for its host gains nothing from sharding its parameters."""
    profile = zoo.profile("resnet50", batch_size=128)
    model = cost_model(profile, EIGHT, "bf16")
    plain, sharded = model.seconds([Plan.parse(f"dp=8,precision=bf16{more}") for more in ("", ",zero=3")])
    assert sharded > 1.2 * plain
