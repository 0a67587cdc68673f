"""Completing a config: fixed keys stay, "auto" is chosen by cost, contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.clusters import load
from drumline.core.errors import InputError, PlanError
from drumline.interop import deepspeed
from drumline.models import zoo
from drumline.planner.config_completion import allowed_plans, batch_size_of, complete
from drumline.plans import Plan
from drumline.plans.combinations import refusal

EIGHT = load("dgx-h100").with_devices(8)
GPT = zoo.profile("gpt:1.3b", batch_size=64)
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
}


def test_a_config_without_open_keys_is_one_plan() -> None:
    config = deepspeed.read({"train_batch_size": 32, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, 8)
    completed = complete(GPT, EIGHT, config)
    assert [str(plan) for plan, _ in completed.ranked] == ["dp=8,zero=1,precision=bf16"]
    assert completed.profile.batch_size == 32  # the config's, not the model's
    assert completed.ranked[0][1].fits


def test_open_keys_are_chosen_by_cost() -> None:
    config = deepspeed.read(
        {**AUTO, "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "none"}}}, 8
    )
    completed = complete(GPT, EIGHT, config)
    plans = [plan for plan, _ in completed.ranked]
    assert {p.zero for p in plans} == {0, 1, 2, 3} and {p.micro for p in plans} == {1, 2, 4, 8}
    assert (
        {p.precision for p in plans} == {"bf16"}
        and {p.offload for p in plans} == {"none"}
        and {p.dp for p in plans} == {8}
    )
    fitting = [e.step_seconds for _, e in completed.ranked if e.fits]
    assert fitting and fitting == sorted(fitting) and completed.ranked[0][1].fits
    assert completed.plan == plans[0] and not any(map(refusal, plans))


def test_open_axes_keep_the_number_of_ranks() -> None:
    config = deepspeed.read({**AUTO, "tensor_parallel": {"autotp_size": "auto"}}, 8)
    plans = list(allowed_plans(GPT, EIGHT, config))
    assert {(p.dp, p.tp) for p in plans} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    assert all(p.ranks == 8 for p in plans)


def test_samples_per_rank_determine_the_micro_batches() -> None:
    config = deepspeed.read({**AUTO, "train_micro_batch_size_per_gpu": 2}, 8)
    assert {p.micro for p in allowed_plans(GPT, EIGHT, config)} == {4}  # 64 = 2 x 4 x 8
    with pytest.raises(
        InputError, match=r"batch\(60\) != micro-batch\(2\) x a whole number x dp\(8\)\n  try:   --batch 64"
    ):
        complete(GPT, EIGHT, config, batch=60)


def test_batch_size() -> None:
    stated = deepspeed.read({"train_batch_size": 32}, 8)
    assert batch_size_of(stated, 64, None) == batch_size_of(stated, 64, 32) == 32
    with pytest.raises(InputError, match=r"--batch\(48\) != config\(32\)"):
        batch_size_of(stated, 64, 48)
    follows = deepspeed.read({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 8)
    assert batch_size_of(follows, 64, None) == 48
    for left_open in (AUTO, {**AUTO, "train_micro_batch_size_per_gpu": 2}, {}):
        assert batch_size_of(deepspeed.read(left_open, 8), 64, None) == 64
        assert batch_size_of(deepspeed.read(left_open, 8), 64, 16) == 16


def test_precision() -> None:
    half = deepspeed.read({"fp16": {"enabled": "auto"}}, 8)
    assert {p.precision for p in allowed_plans(GPT, EIGHT, half)} == {"fp16"}
    assert {p.precision for p in allowed_plans(GPT, EIGHT, half, "fp32")} == {"fp32"}
    with pytest.raises(InputError, match="the config leaves open fp32, fp16"):
        list(allowed_plans(GPT, EIGHT, half, "bf16"))
    with pytest.raises(InputError, match="--precision bf16 with a config in fp32"):
        list(allowed_plans(GPT, EIGHT, deepspeed.read({}, 8), "bf16"))


def test_plans_that_the_engine_refuses_are_named() -> None:
    config = deepspeed.read(
        {"train_batch_size": 64, "zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}, 8
    )
    with pytest.raises(PlanError, match="the engine does not run zero=3 with a split model"):
        complete(GPT, EIGHT, config)
    assert (
        complete(
            GPT,
            EIGHT,
            deepspeed.read({**AUTO, "zero_optimization": {"stage": "auto"}, "tensor_parallel": {"autotp_size": 2}}, 8),
        ).plan.zero
        < 3
    )


def test_batches_smaller_than_the_replicas_are_refused() -> None:
    with pytest.raises(PlanError, match="a batch of 4 on 8 ranks"):
        complete(GPT, EIGHT, deepspeed.read(AUTO, 8), batch=4)


def test_plans_that_do_not_fit_come_last() -> None:
    large = zoo.profile("gpt:30b", batch_size=64)
    completed = complete(large, EIGHT, deepspeed.read({**AUTO, "zero_optimization": {"stage": "auto"}}, 8))
    assert not completed.ranked[-1][1].fits
    assert completed.plan == Plan.parse(completed.ranked[0][1].plan)
