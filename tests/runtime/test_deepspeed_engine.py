"""DeepSpeed's loop (forward, backward, step): the same weights as a plain loop, under every zero stage, on 1-3 ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed_functions as on_ranks
import parity
import pytest
import torch
from world import World

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.core.errors import GaveUp, InputError, JobError, PlanError
from drumline.interop.imported import NamedComponent
from drumline.runtime.deepspeed.optimizers import named_optimizer
from drumline.runtime.state.prebuilt import PrebuiltModel
from drumline.runtime.strategies.parameter_usage import has_unused_parameters

Worlds = Callable[[int], World]
ZEROS = [0, 1, 2, 3]


def check(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Weights, losses and norms of every rank against the plain loop's, to 1e-10."""
    for rank, mine in enumerate(results):
        assert mine["losses"] == pytest.approx(expected["losses"][rank], rel=1e-10)
        assert mine["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        assert set(mine["weights"]) == set(expected["weights"])
        for name, w in expected["weights"].items():
            torch.testing.assert_close(mine["weights"][name], w, rtol=1e-10, atol=1e-12, msg=f"rank {rank}: {name}")


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
@pytest.mark.parametrize(
    ("name", "micro", "clip", "optimizer"),
    [("mlp", 1, 0.5, "two"), ("mlp", 2, 0.0, "one"), ("gpt", 2, 0.1, "two"), ("partial", 2, 0.5, "two")],
)
def test_same_weights_as_a_plain_loop(
    world: Worlds, ranks: int, zero: int, name: str, micro: int, clip: float, optimizer: str
) -> None:
    """Two epochs, each with a ragged last batch; the ranks' models were initialized differently."""
    results = world(ranks).run(on_ranks.train_deepspeed, name, zero, micro, clip, optimizer)
    check(results, on_ranks.plain(name, ranks, micro, clip, optimizer))
    for mine in results:
        assert mine["boundaries"] == ([False] * (micro - 1) + [True]) * 4
        assert (mine["steps"], mine["length"], mine["scheduler"]) == (4, 2 * micro, "CurveLR")
        assert mine["sizes"] == (12, 12 // (ranks * micro), micro)
        assert mine["rates"][-1] == pytest.approx(
            [r * 0.9**4 for r in ([0.01, 0.003] if optimizer == "two" else [0.1])]
        )


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimizer", ["one", "two"])
def test_adapters_on_a_frozen_model(world: Worlds, ranks: int, zero: int, optimizer: str) -> None:
    """Only the adapters train and have optimizer state; under zero=3 frozen weights are sharded too."""
    results = world(ranks).run(on_ranks.train_deepspeed, "lora", zero, 2, 0.5, optimizer)
    expected = on_ranks.plain("lora", ranks, 2, 0.5, optimizer)
    check(results, expected)
    start = on_ranks.model_of("lora").state_dict()
    adapters = {name for name in start if name.endswith((".down", ".up"))}
    for name, w in start.items():
        assert torch.equal(results[0]["weights"][name], w) == (name not in adapters), name
    assert set().union(*(mine["state"] for mine in results)) == adapters
    frozen = {name: w.numel() for name, w in start.items() if name not in adapters}
    shards = [{name: mine["shares"][name] for name in frozen} for mine in results]
    if zero == 3 and ranks == 2:
        assert {n: shards[0][n] + shards[1][n] for n in frozen} == frozen
        assert sum(shards[0].values()) < 0.6 * sum(frozen.values())
    else:
        assert shards == [frozen] * ranks


@pytest.mark.parametrize("zero", ZEROS)
def test_own_batches(world: Worlds, zero: int) -> None:
    [one] = world(1).run(on_ranks.own_batches, 0)
    assert len(one) == 4
    two = world(2).run(on_ranks.own_batches, zero)
    assert two[0] == pytest.approx(world(2).run(on_ranks.own_batches, 0)[0], rel=1e-10)
    assert two[0] == two[1]


@pytest.mark.parametrize("zero", ZEROS)
def test_deepspeed_loop_equals_engine_step(world: Worlds, zero: int) -> None:
    for separate, whole in world(2).run(on_ranks.both_loops, zero):
        assert separate == pytest.approx(whole, rel=1e-10)


@pytest.mark.parametrize("zero", ZEROS)
def test_an_overflow_in_fp16_skips_the_step(world: Worlds, zero: int) -> None:
    assert world(2).run(on_ranks.overflowing, zero) == [(1, 1, 8.0, True)] * 2


@pytest.mark.parametrize("zero", [0, 3])
def test_dropout_masks_differ_and_random_state_is_preserved(world: Worlds, zero: int) -> None:
    results = world(2).run(on_ranks.dropout_masks, zero)
    assert len({mask for masks, _ in results for mask in masks}) == 4
    assert all(same for _, same in results)


@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,recompute=full,bucket=1MiB"]
)
def test_optimizer_with_state(world: Worlds, plan: str) -> None:
    """A plan instead of a config."""
    [expected] = world(1).run(on_ranks.resumed_optimizer, "dp=1")
    model = on_ranks.model_of("mlp")
    optimizer = on_ranks.optimizer_of("two", model)
    data = on_ranks.samples_of("mlp")
    for _ in range(4):
        torch.nn.functional.cross_entropy(model(data.x.double()), data.label).backward()
        optimizer.step()
        optimizer.zero_grad()
    for results in (expected, *world(2).run(on_ranks.resumed_optimizer, plan)):
        for name, w in model.state_dict().items():
            torch.testing.assert_close(results[name], w, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("first", "second"), [(0, 3), (1, 2), (3, 1)])
def test_resumed_under_another_zero_stage(world: Worlds, tmp_path: Path, first: int, second: int) -> None:
    """Weights, optimizer state, rates and the position in the data are restored."""
    for whole, again, _ in world(2).run(on_ranks.saved_and_resumed, str(tmp_path), first, second):
        assert set(whole) == set(again)
        for name, w in whole.items():
            torch.testing.assert_close(again[name], w, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("name", "unused"), [("mlp", False), ("gpt", False), ("partial", True)])
def test_detecting_unused_parameters_does_not_change_a_given_model(name: str, unused: bool) -> None:
    model = on_ranks.model_of(name)
    data = on_ranks.samples_of(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    job = dl.Job(
        model=PrebuiltModel(model),
        loss=partial(on_ranks.loss_of, name),
        optimizer=list,
        data=lambda: data,
        batch_size=2,
    )
    if name != "gpt":  # the samples have another dtype than the model
        model.float()
    assert has_unused_parameters(job) is unused
    model.double()
    assert all(p.grad is None and type(p) is torch.nn.Parameter for p in model.parameters())
    for k, v in model.state_dict().items():
        torch.testing.assert_close(v, before[k], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("step", r"step\(\) without a backward\n  rule:  call forward, backward, step in this order"),
        ("backward", r"backward\(\) without a forward"),
        ("forward", r"forward between backward\(\) and step\(\)"),
        ("loss", r"the loss is \(2, 3\)\n  rule:  the loss is a scalar"),
        ("number", "the loss is float"),
    ],
)
def test_wrong_order(world: Worlds, which: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        world(1).run(on_ranks.wrong_order, which)


@pytest.mark.parametrize("zero", ZEROS)
def test_failed_forward(world: Worlds, zero: int) -> None:
    expected = world(2).run(on_ranks.failed_forward, zero, False)
    assert world(2).run(on_ranks.failed_forward, zero, True) == pytest.approx(expected, rel=1e-12)


def test_weight_read_outside_its_layer(world: Worlds) -> None:
    """Without data it cannot be detected before the forward; torch's own error would be about DTensors."""
    with pytest.raises(
        PlanError, match="reads a weight while the layer that holds it does not run\n.*deepspeed_functions.py, line"
    ):
        world(2).run(on_ranks.reading_outside)


@pytest.mark.parametrize("zero", ZEROS)
def test_non_finite_loss(world: Worlds, zero: int) -> None:
    for steps, skipped, loss, same in world(2).run(on_ranks.not_finite, zero, "skip"):
        assert (steps, skipped, same) == (2, 1, "[False, True, False]")
        assert math.isfinite(loss)
    with pytest.raises(
        GaveUp, match=r"loss nan, gradient norm nan at step 1\n  where: rank \d, .*\n.*\n  try:   Guards"
    ):
        world(2).run(on_ranks.not_finite, zero, "stop")


@pytest.mark.parametrize("zero", [0, 2])
def test_scheduler_instance(world: Worlds, zero: int) -> None:
    for rates in world(2).run(on_ranks.scheduled, zero):
        assert rates == pytest.approx([0.05, 0.05, 0.1, 0.05, 0.025])


def test_schedule_without_length(world: Worlds) -> None:
    [rates] = world(1).run(on_ranks.left_open)
    assert rates == pytest.approx([0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])


def test_scheduler_that_needs_a_metric(world: Worlds) -> None:
    with pytest.raises(JobError, match="ReduceLROnPlateau cannot be stepped by the engine"):
        world(1).run(on_ranks.refused, {"plateau": True})


SGD = {"type": "SGD", "params": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({}, JobError, r"no optimizer given\n  where: the config\n  try:   initialize\(optimizer=...\)"),
        ({"frozen": True, "config": {"optimizer": {"type": "SGD"}}}, JobError, "MLP has no trainable parameter"),
        ({"foreign": True}, JobError, "SGD has parameters that the model does not have"),
        (
            {"few": True},
            JobError,
            r"SGD lacks the parameter 'blocks.0.up.weight' \(8 missing\)\n.*\n  try:   call requires_grad_\(False\)",
        ),
        ({"model": 3}, JobError, r"initialize\(model=int\)\n  rule:  model is a torch.nn.Module"),
        (
            {"config": {"pipeline": {"stages": 1}, "optimizer": SGD}, "data": [1, 2]},
            JobError,
            "the batch size is unknown",
        ),
        ({"config": {"optimizer": SGD, "train_batch_size": 4}, "data": []}, JobError, "the dataset is empty"),
        (
            {"config": {"optimizer": SGD, "train_batch_size": 4, "dataloader_drop_last": True}, "data": [1, 2]},
            JobError,
            "2 samples for batches of 4",
        ),
        ({"config": {"optimizer": SGD}, "plan": "dp=1"}, JobError, "a config and a plan"),
        ({"config": {"optimizer": {"type": "Lamb"}}}, JobError, "the optimizer Lamb is DeepSpeed's own"),
        (
            {
                "config": {
                    "optimizer": SGD,
                    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
                }
            },
            JobError,
            "lacks 'total_num_steps'\n  where: the config: scheduler",
        ),
        ({"config": {"optimizer": SGD, "sequence_parallel_size": 2}}, InputError, "1 ranks for tp=1, pp=1, cp=2"),
    ],
)
def test_invalid_arguments(world: Worlds, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        world(1).run(on_ranks.refused, changes)


def test_pipelines_are_refused_with_a_fix(world: Worlds) -> None:
    with pytest.raises(
        PlanError,
        match=r"separate forward, backward and step calls with pp=2\n.*\n.*interleaves.*\n  try:   write a Job and call engine.step\(batch\)",
    ):
        world(2).run(on_ranks.refused, {"config": {"pipeline": {"stages": 2}, "optimizer": SGD}})


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ("tp=2", "tp=2"),
        ("cp=2", "cp=2"),
        ("tile=2x1", "tile=2x1"),
        ("tp=2,cp=2", "tp=2, cp=2"),
        ("dp=2,pp=2", "pp=2"),
        ("dp=2,ep=2", "ep=2"),
    ],
)
def test_split_models_are_refused_with_a_fix(plan: str, what: str) -> None:
    """Also without ranks: refused before anything is set up."""
    with pytest.raises(
        PlanError,
        match=rf"separate forward, backward and step calls with {what}\n  where: plan .*\n  rule: .*\n  try:   write a Job and call engine.step\(batch\)",
    ):
        on_ranks.refused({"config": None, "plan": plan})


def test_job_or_parts_but_not_both() -> None:
    job = dl.Job(model=list, loss=max, optimizer=list, data=list, batch_size=1)
    with pytest.raises(JobError, match="with parts of a job as well\n  rule:  either"):
        dl.initialize(job, model=torch.nn.Linear(1, 1))  # type: ignore[call-overload]
    with pytest.raises(JobError, match=r"initialize\(\) got a Linear instead of a job"):
        dl.initialize(torch.nn.Linear(1, 1))  # type: ignore[call-overload]


@pytest.mark.parametrize("drop", [False, True])
def test_the_loader(world: Worlds, drop: bool) -> None:
    """The same with and without workers; all ranks have equally many micro-batches, and no sample repeats in an epoch."""
    data = on_ranks.samples_of("mlp").x[:, 0].tolist()
    for ranks in (1, 2):
        plain = world(ranks).run(on_ranks.loaded, 1, 0, drop)
        assert world(ranks).run(on_ranks.loaded, 1, 1, drop) == plain
        for length, seen in plain:
            assert length == (2 if drop else 4)
            assert len(seen) == 2 * length
        for epoch in range(2):
            rows = [x for length, seen in plain for part in seen[epoch * length : (epoch + 1) * length] for x in part]
            assert len(rows) == (12 if drop else 17)
            assert set(rows) <= set(data)
            assert len(set(rows)) == len(rows)


def test_keys_without_effect_are_logged(world: Worlds, caplog: pytest.LogCaptureFixture) -> None:
    from drumline.interop.deepspeed import read
    from drumline.runtime.deepspeed.initialize import _log_config

    with caplog.at_level(logging.INFO, logger="drumline"):
        _log_config(read({"steps_per_print": 5, "sparse_attention": {"mode": "fixed"}, "zero_optimisation": {}}, 1))
    disconnect()  # it connected to find its rank
    logged = {(r.levelname, r.getMessage()) for r in caplog.records}
    assert ("WARNING", "config: unknown key zero_optimisation. Did you mean 'zero_optimization'?") in logged
    assert any(
        level == "WARNING" and "sparse_attention has no effect: it changes the computation" in text
        for level, text in logged
    )
    assert any(level == "INFO" and "steps_per_print has no effect" in text for level, text in logged)


@pytest.mark.parametrize(
    ("named", "cls", "values"),
    [
        (NamedComponent("Adam", {"lr": 0.1}), torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
        (NamedComponent("adam", {"adam_w_mode": False, "weight_decay": 0.1}), torch.optim.Adam, {"weight_decay": 0.1}),
        (
            NamedComponent("AdamW", {"betas": [0.8, 0.9], "torch_adam": True}),
            torch.optim.AdamW,
            {"betas": (0.8, 0.9), "weight_decay": 0.01},
        ),
        (NamedComponent("SGD", {"lr": 0.1, "momentum": 0.5}), torch.optim.SGD, {"momentum": 0.5}),
        (NamedComponent("Adagrad"), torch.optim.Adagrad, {"lr": 0.01}),
    ],
)
def test_optimizers_by_name(named: NamedComponent, cls: type, values: dict[str, Any]) -> None:
    optimizer = named_optimizer(named, "c.json")([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in values} == values


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (
            NamedComponent("AdamV"),
            r"unknown optimizer 'AdamV'\n  where: c.json: optimizer.type\n.*\n  try:   Did you mean 'Adam",
        ),
        (NamedComponent("OneBitAdam"), "the optimizer OneBitAdam is DeepSpeed's own"),
        (NamedComponent("os.system"), "unknown optimizer 'os.system'"),
        (
            NamedComponent("Adam", {"lrr": 1}),
            r"unknown key 'lrr' of the optimizer Adam\n  where: c.json: optimizer.params.lrr\n  try:   Did you mean 'lr'\?",
        ),
        (NamedComponent("Adam", {"lr": -1.0}), "Invalid learning rate"),
        (NamedComponent("Adam", {"bias_correction": False}), "without bias correction"),
    ],
)
def test_invalid_optimizers(named: NamedComponent, words: str) -> None:
    with pytest.raises(JobError, match=words):
        named_optimizer(named, "c.json")


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,zero=2,micro=2"])
def test_workers_change_nothing(world: Worlds, plan: str) -> None:
    """A job with workers has the same losses, also on daemon ranks."""
    ranks = dl.Plan.parse(plan).ranks
    plain = world(ranks).run(parity.run_losses, "mlp", plan, 4, {"workers": 0})
    ahead = world(ranks).run(parity.run_losses, "mlp", plan, 4, {"workers": 1})
    assert [r["losses"] for r in ahead] == [r["losses"] for r in plain]
