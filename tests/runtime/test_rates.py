"""Learning-rate curves against torch's schedulers and hand-computed values; resuming at any step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from drumline.core.errors import JobError
from drumline.runtime.deepspeed import schedulers
from drumline.runtime.learning_rates import rates
from drumline.theory import batch_scaling as scaling

CURVES: list[rates.RateCurve] = [
    rates.Constant(warmup=3),
    rates.Cosine(steps=12, warmup=3, end=0.1),
    rates.Linear(steps=12, warmup=3),
    rates.Polynomial(steps=12, warmup=2, power=3.0),
    rates.InverseSquareRoot(warmup=4),
    rates.StepDecay(every=4, by=0.5),
    rates.StepDecay(at=(3, 7), by=0.1, warmup=2),
    rates.Exponential(by=0.9, warmup=1),
    rates.OneCycle(steps=12, warmup=4),
    rates.WSD(steps=12, warmup=2, decay=4),
    rates.WSD(steps=12, decay=4, shape="cosine"),
    rates.WSD(steps=12, decay=5, shape="sqrt"),
    schedulers.WarmupLR(warmup_num_steps=4),
    schedulers.WarmupDecayLR(total_num_steps=12, warmup_num_steps=3),
    schedulers.WarmupCosineLR(total_num_steps=12, warmup_num_steps=3),
    schedulers.DeepSpeedOneCycle(
        cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=4, decay_step_size=2, decay_lr_rate=0.5
    ),
    schedulers.LRRangeTest(lr_range_test_step_size=5),
]


def sgd(*rate: float, **changes: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": r} for r in rate or (2.0,)]
    return torch.optim.SGD(groups, momentum=0.9, **changes)


def adam(rate: float = 2.0) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate)


def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int, key: str = "lr") -> list[Any]:
    """Values of the first group at each step."""
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0][key])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("curve", "torchs"),
    [
        (rates.Exponential(by=0.8), lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
        (rates.StepDecay(every=3, by=0.2), lambda o: lr_scheduler.StepLR(o, 3, 0.2)),
        (rates.StepDecay(at=(2, 5), by=0.2), lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.2)),
        (rates.Cosine(steps=9), lambda o: lr_scheduler.CosineAnnealingLR(o, 9)),
        (rates.Linear(steps=9, end=0.25), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 9)),
        (rates.Polynomial(steps=9, power=2.5), lambda o: lr_scheduler.PolynomialLR(o, 9, 2.5)),
        (rates.OneCycle(steps=9, warmup=3), lambda o: lr_scheduler.OneCycleLR(o, 2.0, 10, pct_start=0.4)),
    ],
)
def test_same_as_torch(curve: rates.RateCurve, torchs: Callable[[torch.optim.Optimizer], Any]) -> None:
    for key in ("lr", "momentum") if isinstance(curve, rates.OneCycle) else ("lr",):
        ours, theirs = sgd(), sgd()
        actual, expected = run(ours, curve(ours), 10, key), run(theirs, torchs(theirs), 10, key)
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (rates.Constant(warmup=3), [0.25, 0.5, 0.75, 1, 1, 1]),
        (rates.Linear(steps=6, warmup=2, end=0.5), [1 / 3, 2 / 3, 1, 0.875, 0.75, 0.625, 0.5, 0.5]),
        (rates.InverseSquareRoot(warmup=2), [1 / 3, 2 / 3, 1, math.sqrt(2 / 3), math.sqrt(1 / 2)]),
        (rates.InverseSquareRoot(), [1, math.sqrt(1 / 2), math.sqrt(1 / 3)]),
        (rates.WSD(steps=6, warmup=1, decay=2, end=0.2), [0.5, 1, 1, 1, 1, 0.6, 0.2, 0.2]),
        (rates.WSD(steps=6, decay=4, shape="sqrt"), [1, 1, 1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]),
    ],
)
def test_hand_computed_values(curve: rates.RateCurve, expected: list[float]) -> None:
    optimizer = sgd(2.0)
    assert run(optimizer, curve(optimizer), len(expected)) == pytest.approx([2 * e for e in expected])


LOG = [math.log(i) / math.log(4) for i in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("kind", "numbers", "expected"),
    [
        # step 0 comes before DeepSpeed's scheduler counts; step k has its iteration k - 1
        (
            "WarmupLR",
            {"warmup_min_lr": 0.1, "warmup_max_lr": 1.1, "warmup_num_steps": 4},
            [0.1, *(0.1 + g for g in LOG), 1.1, 1.1],
        ),
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.5, 1, 1.5, 2, 2]),
        ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 1.0}, [0, 0, 1, 1, 1]),
        (
            "WarmupDecayLR",
            {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 1.0, "warmup_type": "linear"},
            [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0],
        ),
        (
            "WarmupCosineLR",
            {
                "total_num_steps": 4,
                "warmup_num_steps": 2,
                "cos_min_ratio": 0.2,
                "warmup_type": "linear",
                "warmup_min_ratio": 0.5,
            },
            [0, 1, 1.5, 2 * 0.6, 2 * 0.2, 2 * 0.2],
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4},
            [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0],
        ),
        (
            "OneCycle",
            {
                "cycle_min_lr": 1.0,
                "cycle_max_lr": 2.0,
                "cycle_first_step_size": 2,
                "decay_step_size": 2,
                "decay_lr_rate": 1.0,
            },
            [1, 1.5, 2, 1.5, 1, 1 / 1.5, 1 / 2],
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
            [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
            [0.1, 0.1, 0.2, 0.2, 0.3],
        ),
    ],
)
def test_same_as_deepspeed(kind: str, numbers: dict[str, Any], expected: list[float]) -> None:
    optimizer = adam(2.0)
    curve = schedulers.named_scheduler(kind, numbers, "ds_config.json")
    assert run(optimizer, curve(optimizer), len(expected)) == pytest.approx(expected, abs=1e-12)


def test_betas_of_deepspeeds_one_cycle() -> None:
    optimizer = adam()
    curve = schedulers.DeepSpeedOneCycle(
        cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.1
    )
    betas = run(optimizer, curve(optimizer), 6, "betas")
    assert [b[1] for b in betas] == [0.99] * 6
    assert [b[0] for b in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.1])


def test_one_cycle_keeps_the_second_beta() -> None:
    optimizer = adam()
    run(optimizer, rates.OneCycle(steps=6, warmup=2)(optimizer), 2)
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.85, 0.999))
    optimizer = adam()
    run(optimizer, rates.OneCycle(steps=6, warmup=2, momentum=None)(optimizer), 2)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_rates_per_group() -> None:
    optimizer = sgd(1.0, 3.0)
    scheduler = rates.Constant(warmup=1)(optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 1.5]
    assert scheduler.get_last_lr() == [0.5, 1.5]
    optimizer = sgd(1.0, 3.0)
    schedulers.named_scheduler("WarmupLR", {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [1, 2]}, "")(optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("curve", CURVES, ids=lambda c: type(c).__name__)
@settings(deadline=None, max_examples=16)
@given(stop=st.integers(0, 15))
def test_resumed_at_any_step(curve: rates.RateCurve, stop: int) -> None:
    """The state survives JSON, and loads into a scheduler whose optimizer has another base rate."""
    whole = adam(2.0)
    scheduler = curve(whole)
    expected = [dict(g) for g in [whole.param_groups[0]]]
    for _ in range(20):
        whole.step()
        scheduler.step()
        expected.append({k: v for k, v in whole.param_groups[0].items() if k != "params"})
    first = adam(2.0)
    before = curve(first)
    run(first, before, stop)
    state = json.loads(json.dumps(before.state_dict()))
    second = adam(7.0)
    after = curve(second)
    after.load_state_dict(state)
    for k in range(stop, 20):
        group = second.param_groups[0]
        assert (group["lr"], group["betas"]) == (expected[k]["lr"], expected[k]["betas"])
        assert after.get_last_lr() == [expected[k]["lr"]]
        second.step()
        after.step()


def test_tensor_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(2.0))
    rate = optimizer.param_groups[0]["lr"]
    scheduler = rates.Constant(warmup=1)(optimizer)
    assert rate.item() == 1.0
    scheduler.load_state_dict({"step": 5, "base_rates": [3.0]})
    assert rate.item() == 3.0


def test_mismatched_state() -> None:
    scheduler = rates.Constant()(sgd(1.0, 2.0))
    with pytest.raises(JobError, match="the scheduler state has 1 parameter groups\n  rule:  the optimizer has 2"):
        scheduler.load_state_dict({"step": 1, "base_rates": [1.0]})
    with pytest.raises(JobError, match=r"step\(7\) of a scheduler"):
        scheduler.step(7)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: rates.Cosine(steps=3, warmup=3),
            r"Cosine\(warmup=3, steps=3, end=0.0\)\n  rule:  steps > warmup: 3 <= 3",
        ),
        (lambda: rates.Linear(steps=3, end=1.5), "0 <= end <= 1"),
        (lambda: rates.Constant(warmup=-1), "warmup >= 0"),
        (lambda: rates.Constant(warmup=1.5), "warmup is a whole number"),
        (lambda: rates.Cosine(steps="9"), "steps is a whole number"),
        (lambda: rates.StepDecay(), "set either every > 0 or at, not both"),
        (lambda: rates.StepDecay(at=(3, 3)), "the steps of at are increasing"),
        (lambda: rates.Exponential(by=math.nan), "by is a number"),
        (lambda: rates.Exponential(by=0.0), "by > 0"),
        (lambda: rates.Polynomial(steps=3, power=0), "power > 0"),
        (lambda: rates.OneCycle(steps=9), "0 < warmup < steps: 0, 9"),
        (lambda: rates.WSD(steps=5, warmup=3, decay=3), r"warmup \+ decay <= steps: 3 \+ 3 > 5"),
        (lambda: rates.WSD(steps=5, decay=3, shape="wave"), "shape is linear, cosine or sqrt"),
    ],
)
def test_invalid_curves(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        make()


@pytest.mark.parametrize(
    ("kind", "numbers", "words"),
    [
        ("WarmupLr", {}, r"unknown scheduler 'WarmupLr'\n  where: c.json\n.*\n  try:   Did you mean 'WarmupLR'\?"),
        (
            "WarmupLR",
            {"warmup_steps": 3},
            r"unknown key 'warmup_steps' of the scheduler WarmupLR\n  where: c.json\n  try:   Did you mean 'warmup_num_steps'\?",
        ),
        ("WarmupDecayLR", {}, "the scheduler WarmupDecayLR lacks 'total_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "where: c.json\n  rule:  warmup_num_steps > 0"),
        ("WarmupLR", {"warmup_num_steps": "many"}, "warmup_num_steps is a whole number"),
        ("WarmupLR", {"warmup_type": "exp"}, "warmup_type is log or linear"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_second_step_size": "a"}, "its values are numbers"),
    ],
)
def test_invalid_schedulers(kind: str, numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        schedulers.named_scheduler(kind, numbers, "c.json")


def test_scaling() -> None:
    scaled = scaling.scale_rate(0.1, base_batch=256, batch=8192, samples=1_281_167, kind="image")
    assert (scaled.rate, scaled.warmup) == (pytest.approx(3.2), math.ceil(5 * 1_281_167 / 8192))
    assert len(scaled.notes) == 1
    assert "k = 8192 / 256 = 32" in str(scaled)
    scaled = scaling.scale_rate(0.1, base_batch=256, batch=16384, samples=1_281_167, kind="image")
    assert scaled.notes[1].startswith("16384 samples is beyond 8192 (Goyal et al. 2017")
    scaled = scaling.scale_rate(1e-3, base_batch=512, batch=8192, rule="sqrt", base_warmup=3125)
    assert (scaled.rate, scaled.warmup) == (pytest.approx(4e-3), 3125)
    assert scaling.scale_rate(0.1, base_batch=8, batch=8, samples=80).warmup == 0  # nothing is scaled
    assert scaling.scale_rate(0.1, base_batch=8, batch=64, rule="none").rate == 0.1
    assert "cannot be counted: give samples" in scaling.scale_rate(0.1, base_batch=8, batch=64).notes[1]


def test_critical_tokens() -> None:
    assert scaling.critical_tokens(3.0) == pytest.approx(2e8 / 3 ** (1 / 0.21))
    assert scaling.token_warning(500_000, 3.0) == ""
    assert "4000000 tokens a batch is beyond about 1.1e+06 at a loss of 3 (Kaplan et al. 2020" in scaling.token_warning(
        4_000_000, 3.0
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rule": "square"}, "a rule is linear, sqrt, none\n  try:   Did you mean 'sqrt'"),
        ({"batch": 0}, "are positive"),
        ({"rate": math.inf}, "are positive"),
        ({"kind": "imge"}, "Did you mean 'image'"),
    ],
)
def test_invalid_scaling(changes: dict[str, Any], words: str) -> None:
    values = {"rate": 0.1, "base_batch": 8, "batch": 16, **changes}
    with pytest.raises(JobError, match=words):
        scaling.scale_rate(values.pop("rate"), **values)
    with pytest.raises(JobError, match="nats per token"):
        scaling.critical_tokens(0.0)
