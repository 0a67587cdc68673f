"""Plans written for other tools: the text, the refusals, and that no key of a plan is lost."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from drumline.core.errors import PlanError
from drumline.interop import accelerate, deepspeed
from drumline.interop.emission import (
    DEFAULT_REASONS,
    MEANINGLESS_CONFLICTS,
    EmitSettings,
    EmittedConfig,
    TransformerShape,
)
from drumline.interop.imported import NamedComponent
from drumline.interop.tools import TOOLS, emit
from drumline.plans import Plan
from drumline.plans.combinations import CONFLICTS
from drumline.plans.plan import CHOICES

ADAMW = NamedComponent("AdamW", {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1})
SETTING = EmitSettings(64, name="gpt", clip=1.0, optimizer=ADAMW, blocks=12, block="Block", steps=100, seed=7)
ASKED = Plan.parse("dp=4,zero=3,micro=2,recompute=full,precision=bf16")


def made(tool: str, plan: str, setting: EmitSettings = SETTING) -> EmittedConfig:
    return emit(tool, Plan.parse(plan), setting)


def test_deepspeed() -> None:
    assert json.loads(made("deepspeed", str(ASKED)).text) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 6553600,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "bf16": {"enabled": True},
        "activation_checkpointing": {"number_checkpoints": 12},
    }


def test_deepspeed_with_axes_and_offload() -> None:
    done = made("deepspeed", "dp=2,tp=2,pp=2,zero=1,micro=8,precision=fp16")
    table = json.loads(done.text)
    assert (table["tensor_parallel"], table["pipeline"], table["fp16"]) == (
        {"autotp_size": 2},
        {"stages": 2},
        {"enabled": True},
    )
    assert "PipelineModule(layers, num_stages=2)" in str(done)
    alone = made("deepspeed", "dp=2,tp=2")
    assert "train_batch_size" not in json.loads(alone.text) and "would count the tp ranks too" in str(alone)
    table = json.loads(made("deepspeed", "dp=2,zero=3,offload=all", replace(SETTING, optimizer=None)).text)
    assert (
        table["zero_optimization"]["offload_param"]
        == table["zero_optimization"]["offload_optimizer"]
        == {"device": "cpu", "pin_memory": True}
    )
    assert table["zero_allow_untested_optimizer"] is True
    assert table["zero_force_ds_cpu_optimizer"] is False  # the script's own optimizer stays
    adam = json.loads(made("deepspeed", "dp=2", replace(SETTING, optimizer=NamedComponent("Adam", {"lr": 0.1}))).text)
    assert adam["optimizer"]["params"] == {"lr": 0.1, "adam_w_mode": False}


def test_accelerate_shards_by_fsdp2() -> None:
    done = made("accelerate", str(ASKED))
    table = yaml.safe_load(done.text)
    assert (table["distributed_type"], table["num_processes"], table["mixed_precision"]) == ("FSDP", 4, "bf16")
    assert table["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
    }
    assert "# in the script, micro: Accelerator(gradient_accumulation_steps=2)" in done.text
    assert done.script.keys() == {"micro"}
    mesh = yaml.safe_load(made("accelerate", "dp=4,shard=2,zero=3,tp=2").text)["parallelism_config"]
    assert mesh == {
        f"parallelism_config_{key}_size": n for key, n in {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 1}.items()
    }


def test_accelerate_shards_states_by_deepspeed_and_replicates_by_ddp() -> None:
    table = yaml.safe_load(made("accelerate", "dp=4,zero=2,micro=2,offload=optimizer").text)
    assert table["distributed_type"] == "DEEPSPEED"
    assert table["deepspeed_config"] == {
        "zero_stage": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": False,
    }
    done = made("accelerate", "dp=4,static=true,compile=true,backend=gloo", replace(SETTING, device="cpu", nodes=2))
    table = yaml.safe_load(done.text)
    assert (table["distributed_type"], table["use_cpu"], table["num_machines"], table["rdzv_backend"]) == (
        "MULTI_CPU",
        True,
        2,
        "c10d",
    )
    assert table["dynamo_config"]["dynamo_backend"] == "INDUCTOR"
    assert done.script.keys() == {"static", "backend"}
    assert yaml.safe_load(made("accelerate", "dp=1").text)["distributed_type"] == "NO"


def test_torchtitan() -> None:
    shape = TransformerShape(32, 4096, 32, 8, 14336, 128256, 8192)
    done = made(
        "torchtitan",
        "dp=4,shard=2,zero=3,tp=2,pp=2,micro=4,precision=bf16,recompute=selective",
        replace(SETTING, name="llama:8b", shape=shape),
    )
    table = tomllib.loads(done.text)
    assert table["model"] == {"name": "llama3", "flavor": "8B"}
    assert table["parallelism"] == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "expert_parallel_degree": 1,
        "fsdp_reshard_after_forward": "always",
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 4,
    }
    assert table["training"]["local_batch_size"] == 16 and table["training"]["seq_len"] == 8192
    assert table["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert table["optimizer"] == {
        "name": "AdamW",
        "lr": 3e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert "--parallelism.tensor_parallel_degree 2" in done.text and "--compile.no-enable" in done.text


def test_fabric_writes_a_program() -> None:
    names = {
        "dp=4": "DDPStrategy()",
        str(ASKED): "FSDPStrategy(",
        "dp=4,zero=2": "DeepSpeedStrategy(config=DEEPSPEED)",
        "dp=2,tp=2": "ModelParallelStrategy(",
        "dp=1": '"auto"',
    }
    for plan, words in names.items():
        text = made("fabric", plan).text
        compile(text, "fabric.py", "exec")
        assert f"strategy={words}" in text
    text = made("fabric", "dp=8,shard=4,zero=3,offload=all,precision=bf16", replace(SETTING, nodes=2)).text
    assert (
        'FSDPStrategy(auto_wrap_policy={block}, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4), cpu_offload=True)'
        in text
    )
    assert 'devices=4,\n        num_nodes=2,\n        precision="bf16-mixed"' in text


def test_megatron() -> None:
    shape = TransformerShape(32, 4096, 32, 8, 14336, 128256, 8192)
    done = made(
        "megatron",
        "dp=2,tp=2,pp=2,virtual=2,schedule=interleaved,zero=1,micro=8,precision=bf16,recompute=full",
        replace(SETTING, shape=shape, name="llama:8b", blocks=32),
    )
    words = shlex.split(done.text)
    for part in (
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--micro-batch-size 4 --global-batch-size 64",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce --ddp-bucket-size 6553600",
        "--bf16",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--clip-grad 1",
        "--train-iters 100",
        "--num-query-groups 8",
        "--optimizer adam --lr 0.0003 --adam-eps 1e-08 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95",
        "--num-layers 32 --hidden-size 4096",
        "--swiglu",
    ):
        assert " ".join(shlex.split(part)) in " ".join(words), part
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in str(done)
    assert "optim_grads_params" in made("megatron", "dp=8,zero=3").text


@pytest.mark.parametrize(
    ("tool", "plan", "parts"),
    [
        ("deepspeed", "dp=4,chunk=2,tile=2x2", {"chunk=2": "tile layers", "tile=2x2": "spatial"}),
        ("deepspeed", "dp=4,zero=3,shard=2", {"shard=2": "MiCS was removed"}),
        ("deepspeed", "dp=2,pp=2,zero=2,schedule=gpipe", {"zero=2": "stages 0 and 1", "schedule=gpipe": "1f1b"}),
        (
            "deepspeed",
            "dp=2,offload=optimizer,recompute=selective",
            {"offload=optimizer": "stage 1, 2 or 3", "recompute=selective": "whole layers"},
        ),
        (
            "deepspeed",
            "dp=2,backend=gloo,static=true,bucket=1024",
            {"backend=gloo": "transport", "static=true": "DDP", "bucket=1024": "bucket"},
        ),
        (
            "deepspeed",
            "dp=2,sync=local:4,compress=powersgd",
            {"sync=local:4": "every step", "compress=powersgd": "compress"},
        ),
        ("accelerate", "dp=2,pp=2,tp=2", {"pp=2": "no pipelines", "tp=2": "zero=3"}),
        (
            "accelerate",
            "dp=2,ep=2,precision=bf16-pure",
            {"ep=2": "expert parallelism", "precision=bf16-pure": "fp32 weights"},
        ),
        ("accelerate", "dp=4,zero=1,shard=2", {"shard=2": "over all replicas"}),
        ("torchtitan", "dp=4,zero=1", {"zero=1": "zero=2"}),
        ("torchtitan", "dp=2,tp=2", {"zero=0": "always shards"}),
        (
            "torchtitan",
            "dp=2,zero=3,offload=optimizer,precision=fp16",
            {"offload=optimizer": "all states or none", "precision=fp16": "float8"},
        ),
        ("torchtitan", "dp=1,pp=2,micro=4,schedule=zero-bubble", {"schedule=zero-bubble": "virtual=2"}),
        ("fabric", "dp=2,pp=2,cp=2", {"pp=2": "no pipelines", "cp=2": "context parallelism"}),
        ("fabric", "dp=2,tp=2,zero=1", {"zero=1": "zero=0 or 3"}),
        ("fabric", "dp=2,tp=2,precision=fp16", {"precision=fp16": "no loss scaling"}),
        ("fabric", "dp=2,cp=2,zero=2", {"cp=2": "context parallelism"}),
        (
            "megatron",
            "dp=2,zero=3,offload=all,precision=tf32",
            {"offload=all": "not parameters", "precision=tf32": "fp32 master"},
        ),
        (
            "megatron",
            "dp=1,pp=2,micro=4,schedule=gpipe,compile=true",
            {"schedule=gpipe": "1f1b", "compile=true": "no key"},
        ),
        ("megatron", "dp=1,pp=8,micro=8", {"pp=8": r"12 % \(pp\(8\) x virtual\(1\)\) != 0"}),
    ],
)
def test_all_inexpressible_parts_are_listed(tool: str, plan: str, parts: dict[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        made(tool, plan)
    assert caught.value.exit_code == 2
    assert caught.value.what.endswith(", ".join(sorted(parts, key=caught.value.what.index)))
    reasons = dict(part.split(": ", 1) for part in caught.value.rule.split("; "))
    assert reasons.keys() == parts.keys()
    for part, reason in parts.items():
        assert reason.replace("\\", "") in reasons[part]


@pytest.mark.parametrize("tool", TOOLS)
def test_indivisible_batches_are_refused(tool: str) -> None:
    with pytest.raises(PlanError, match=r"64 % \(dp\(3\) x micro\(2\)\) != 0\n  try:   --batch 66"):
        made(tool, "dp=3,micro=2")


@pytest.mark.parametrize("tool", TOOLS)
def test_meaningless_plans_are_refused(tool: str) -> None:
    assert set(MEANINGLESS_CONFLICTS) <= {c.choices for c in CONFLICTS}
    with pytest.raises(PlanError, match="zero=0 shards nothing"):
        made(tool, "dp=4,shard=2")
    with pytest.raises(PlanError, match="they configure a pipeline"):
        made(tool, "dp=4,schedule=gpipe")


def test_every_key_of_a_plan_has_a_reason() -> None:
    assert {f.name for f in fields(Plan)} - {"dp", "micro"} == DEFAULT_REASONS.keys()


counts = st.sampled_from([1, 2, 4])
plans = st.fixed_dictionaries(
    {"dp": counts, "micro": counts},
    optional={
        "zero": st.integers(0, 3),
        "shard": counts,
        "tp": counts,
        "cp": counts,
        "ep": counts,
        "pp": counts,
        "virtual": counts,
        "chunk": counts,
        **{key: st.sampled_from(words) for key, words in CHOICES.items()},
        "sync": st.sampled_from(["allreduce", "server", "local:3"]),
        "compile": st.booleans(),
        "static": st.booleans(),
        "bucket": st.sampled_from([4096, 25 * 2**20, 10**9, 1023]),
        "tile": st.just((1, 2)),
    },
)


def drawn(table: dict[str, Any]) -> Plan:
    try:
        return Plan(**table)
    except PlanError:
        assume(False)
        raise


def emitted(tool: str, plan: Plan) -> EmittedConfig | None:
    try:
        return emit(tool, plan, EmitSettings(plan.dp * plan.micro * 3, blocks=8, block="Block"))
    except PlanError as e:
        assert "cannot express" in e.what or e.what in MEANINGLESS_CONFLICTS
        return None


@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much], max_examples=300)
@given(plans)
def test_deepspeed_reads_back_as_the_same_plan(table: dict[str, Any]) -> None:
    plan = drawn(table)
    done = emitted("deepspeed", plan)
    if done is None:
        return
    config = deepspeed.read(json.loads(done.text), plan.ranks)
    expected = {key: value for key, value in plan.table().items() if key not in done.script and key not in done.unused}
    if plan.shard == plan.dp:
        expected.pop("shard", None)  # all of them is what the default says
    assert config.plan == Plan.from_table(expected, "test")
    assert (config.batch_size, config.micro_size) == (plan.dp * plan.micro * 3, 3)
    assert not config.unknown and not config.auto


@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much], max_examples=300)
@given(plans)
def test_accelerate_reads_back_as_the_same_plan(table: dict[str, Any]) -> None:
    plan = drawn(table)
    done = emitted("accelerate", plan)
    if done is None:
        return
    config = accelerate.read(yaml.safe_load(done.text), plan.ranks)
    expected = {key: value for key, value in plan.table().items() if key not in done.script and key not in done.unused}
    if plan.shard == plan.dp:
        expected.pop("shard", None)
    assert config.plan == Plan.from_table(expected, "test")
    assert not config.unknown


@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(plans, st.sampled_from(["torchtitan", "fabric", "megatron"]))
def test_any_plan_is_written_or_refused(table: dict[str, Any], tool: str) -> None:
    done = emitted(tool, drawn(table))
    if done is None:
        return
    if tool == "torchtitan":
        assert tomllib.loads(done.text)["parallelism"]
    elif tool == "fabric":
        compile(done.text, "fabric.py", "exec")
    else:
        assert shlex.split(done.text)[0] == "--tensor-model-parallel-size"
