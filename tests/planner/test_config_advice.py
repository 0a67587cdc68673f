"""Every plan that `plan --from` proposes is accepted by the engine and keeps the values that the config fixes."""

from __future__ import annotations

import json
import re
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from drumline.clusters import load
from drumline.core.errors import InputError, PlanError
from drumline.interop import deepspeed
from drumline.interop.emission import EmitSettings
from drumline.interop.imported import ImportedConfig
from drumline.interop.tools import emit
from drumline.loop.other_tools import config_lines
from drumline.models import zoo
from drumline.planner.config_completion import CompletedConfig, complete
from drumline.plans import Plan, check

CLUSTER = load("dgx-h100").with_devices(8)
GPT = zoo.profile("gpt:125m", batch_size=16)
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def either(*values: Any) -> st.SearchStrategy[Any]:
    """One of these, or "auto", or nothing."""
    return st.sampled_from([*values, "auto", None])


def table(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(keys).map(lambda t: {k: v for k, v in t.items() if v is not None})


configs = table(
    train_batch_size=either(8, 16, 24, 64),
    train_micro_batch_size_per_gpu=either(1, 2, 3, 8),
    gradient_accumulation_steps=either(1, 2, 4, 32),
    zero_optimization=table(
        stage=either(0, 1, 2, 3),
        offload_optimizer=table(device=either("none", "cpu")),
        offload_param=table(device=either("none", "cpu")),
        mics_shard_size=either(-1, 2),
    ),
    bf16=table(enabled=either(True, False)),
    fp16=table(enabled=either(False)),
    tensor_parallel=table(autotp_size=either(1, 2)),
    pipeline=table(stages=either(1, 2)),
    sequence_parallel_size=either(1, 2),
    communication_data_type=either("fp16", "fp32"),
    activation_checkpointing=table(partition_activations=st.sampled_from([True, False, None])),
    compile=table(deepcompile=st.sampled_from([True, False, None])),
)


def keeps(config: ImportedConfig, table: dict[str, Any], plan: Plan, batch: int) -> None:
    """Keys that the config fixes, and the samples that it counts."""
    open_keys = {*config.open_keys, "dp"}
    fixed = {k: v for k, v in config.plan.table().items() if k not in open_keys}
    own = plan.table()
    derived = "" if "gradient_accumulation_steps" in _given(table) else "micro"
    assert {k: own.get(k) for k in fixed if k != derived} == {k: v for k, v in fixed.items() if k != derived}
    assert plan.ranks == 8
    sizes = {key: table[key] for key in _given(table)}
    counted = 2 if any("counts the tp" in note for note in config.notes) else 1  # DeepSpeed counts tp ranks, too
    assert batch * counted == sizes.get("train_batch_size", batch * counted)
    micro, steps = sizes.get("train_micro_batch_size_per_gpu"), sizes.get("gradient_accumulation_steps")
    assert steps in (None, plan.micro)
    assert micro is None or batch == micro * plan.micro * plan.dp


def _given(table: dict[str, Any]) -> set[str]:
    return {key for key in SIZES if isinstance(table.get(key), int)}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs)
def test_whatever_is_proposed_runs(table: dict[str, Any]) -> None:
    try:
        config = deepspeed.read(table, 8)
        completed = complete(GPT, CLUSTER, config)
    except InputError as e:
        follow(table, e)
        return
    accept(table, config, completed)


def accept(table: dict[str, Any], config: ImportedConfig, completed: CompletedConfig) -> None:
    batch = completed.profile.batch_size
    for plan, _ in completed.ranked:
        check(plan)
        assert plan.micro <= batch, f"{plan} for {batch} samples"
        keeps(config, table, plan, batch)
    plan = completed.plan
    if plan.splits_model or plan.offload == "all":
        return  # DeepSpeed counts these ranks otherwise, or its file has more than the plan
    try:
        written = emit("deepspeed", plan, EmitSettings(batch, name="gpt", device="cuda"))
    except PlanError:  # --emit says what DeepSpeed has no key for; the plan itself runs
        return
    again = complete(GPT, CLUSTER, deepspeed.read(_parsed(written.text), 8))
    assert again.plan == plan and again.profile.batch_size == batch


def _parsed(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    return value


def follow(table: dict[str, Any], error: InputError) -> None:
    """The plan that a refusal suggests is not refused for the same reason."""
    advised = re.search(r"--batch (\d+)", error.fix)
    if advised:
        config = deepspeed.read(table, 8)
        try:
            complete(GPT, CLUSTER, config, batch=int(advised[1]))
        except InputError as again:
            assert "--batch" not in again.fix and "batch" not in again.what, f"{error}\nthen {again}"
    nearest = re.search(r"the nearest plan that runs: (\S+)", error.fix)
    if nearest:
        check(Plan.parse(nearest[1]))


def test_a_proposal_that_splits_the_model_says_where_it_runs() -> None:
    """A DeepSpeed loop cannot run it, and initialize() would refuse the written config."""
    table = {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}
    completed = complete(GPT, CLUSTER, deepspeed.read(table, 8))
    assert completed.plan.tp == 2
    text = config_lines(deepspeed.read(table, 8), completed.plan)
    assert "tp=2" in text and "a Job" in text


@pytest.mark.parametrize("steps", [32, 64])
def test_more_micro_batches_than_samples_are_refused(steps: int) -> None:
    with pytest.raises(InputError, match="samples"):
        complete(GPT, CLUSTER, deepspeed.read({"gradient_accumulation_steps": steps}, 8))
