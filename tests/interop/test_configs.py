"""Configs as users write them, one file each: the resulting plan, and the outcome of every key.

All of them were written for these tests, in the style of tutorials, of Hugging Face, of `accelerate config`, and of old
releases. A key is followed, left open, listed as one without effect, off, or unknown; nothing else can happen to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import InputError
from drumline.interop import deepspeed
from drumline.interop.config_reader import read_table
from drumline.interop.imported import LossScaleSettings, NamedComponent
from drumline.interop.tools import config_ranks, read_config

FOLDER = Path(__file__).parent / "configs"

EXPECTED: dict[str, tuple[int, str, int | None, str]] = {
    # file: ranks, plan, batch size, keys of the plan that are open
    "ds_smallest.json": (2, "dp=2", 8, ""),
    "ds_first_steps.json": (4, "dp=4", 32, ""),
    "ds_comments.json": (4, "dp=4,zero=2,precision=bf16", 64, ""),
    "ds_fp16_scaler.json": (2, "dp=2,micro=8,precision=fp16", 64, ""),
    "ds_fp16_fixed_scale.json": (8, "dp=8,precision=fp16", 16, ""),
    "ds_zero1_bf16.json": (8, "dp=8,zero=1,micro=4,precision=bf16,bucket=2000000000", 256, ""),
    "ds_zero2_finetune.json": (8, "dp=8,zero=2,micro=8,precision=bf16,bucket=800000000", 256, ""),
    "ds_zero2_offload.json": (8, "dp=8,zero=2,offload=optimizer,precision=fp16", 16, ""),
    "ds_zero2_old_offload.json": (8, "dp=8,zero=2,offload=optimizer,precision=fp16", 8, ""),
    "ds_zero3_old_offload.json": (8, "dp=8,zero=3,offload=all", 8, ""),
    "ds_zero3_offload.json": (4, "dp=4,zero=3,micro=16,offload=all,precision=bf16", 64, ""),
    "ds_zero3_nvme.json": (8, "dp=8,zero=3,offload=all,precision=bf16", 16, ""),
    "ds_zero3_param_only.json": (8, "dp=8,zero=3,offload=all", 16, ""),
    "ds_zero2_param_offload.json": (8, "dp=8,zero=2", 16, ""),
    "hf_zero2.json": (8, "dp=8,zero=2,offload=optimizer,bucket=800000000", None, "micro precision"),
    "hf_zero3.json": (8, "dp=8,zero=3", None, "micro precision bucket"),
    "hf_everything_auto.json": (8, "dp=8", None, "tp micro precision zero bucket offload"),
    "hf_micro_given.json": (8, "dp=8,zero=1,precision=bf16", 16, "micro"),
    "hf_batch_and_micro.json": (8, "dp=8,zero=1,micro=4,precision=bf16", 64, ""),
    "hf_lora_zero0.json": (8, "dp=8,micro=4,precision=bf16", None, ""),
    "ds_autotp.json": (8, "dp=2,zero=1,tp=4,micro=2,precision=bf16", 4, ""),
    "ds_pipeline.json": (8, "dp=2,pp=4,micro=16,recompute=full,precision=fp16", 64, ""),
    "ds_ulysses.json": (8, "dp=2,zero=3,cp=4,precision=bf16", 2, ""),
    "ds_moe.json": (8, "dp=8,zero=2,ep=4,precision=bf16", 64, ""),
    "ds_moe_off.json": (8, "dp=8", 64, ""),
    "ds_mics.json": (8, "dp=8,shard=4,zero=3,precision=bf16", 32, ""),
    "ds_zeropp.json": (8, "dp=8,zero=3,precision=bf16", 32, ""),
    "ds_checkpointing.json": (8, "dp=8,recompute=full", 16, ""),
    "ds_autotuning.json": (8, "dp=8,precision=fp16", None, "zero"),
    "ds_profiler.json": (8, "dp=8", 8, ""),
    "ds_monitor.json": (8, "dp=8", 8, ""),
    "ds_compression.json": (8, "dp=8", 8, ""),
    "ds_curriculum.json": (8, "dp=8", 8, ""),
    "ds_elastic.json": (8, "dp=8", 16, ""),
    "ds_onebit.json": (8, "dp=8,precision=fp16", 64, ""),
    "ds_compile.json": (8, "dp=8,zero=1,precision=bf16,compile=true", 16, ""),
    "ds_autocast.json": (8, "dp=8,zero=2,precision=bf16", 16, ""),
    "ds_amp.json": (8, "dp=8", 16, ""),
    "ds_fp16_messages.json": (8, "dp=8,compress=fp16", 16, ""),
    "ds_first_releases.json": (2, "dp=2,zero=1", 4, ""),
    "ds_old_bf16.json": (2, "dp=2,precision=bf16", 4, ""),
    "ds_typos.json": (8, "dp=8,zero=1", 16, ""),
    "ds_checkpoint_engine.json": (8, "dp=8", 8, ""),
    "acc_single.yaml": (1, "dp=1,precision=bf16", None, "micro"),
    "acc_bare_no.yaml": (1, "dp=1", None, "micro"),
    "acc_multi_gpu.yaml": (4, "dp=4,precision=fp16", None, "micro"),
    "acc_multi_gpu.json": (2, "dp=2,precision=fp16", None, "micro"),
    "acc_multi_node.yaml": (16, "dp=16,precision=bf16", None, "micro"),
    "acc_multi_cpu.yaml": (16, "dp=16", None, "micro"),
    "acc_tpu.yaml": (8, "dp=8,precision=bf16", None, "micro"),
    "acc_mps.yaml": (1, "dp=1", None, "micro"),
    "acc_xpu.yaml": (2, "dp=2,precision=bf16", None, "micro"),
    "acc_fsdp1_full.yaml": (8, "dp=8,zero=3,precision=bf16", None, "micro"),
    "acc_fsdp1_grad_op.yaml": (2, "dp=2,zero=2,offload=optimizer", None, "micro"),
    "acc_fsdp1_numbers.yaml": (2, "dp=2,zero=3,precision=fp16", None, "micro"),
    "acc_fsdp1_oldest.yaml": (2, "dp=2,zero=2,precision=fp16", None, "micro"),
    "acc_fsdp1_hybrid.yaml": (16, "dp=16,shard=8,zero=3,recompute=full,precision=bf16", None, "micro"),
    "acc_fsdp1_hybrid_zero2.yaml": (8, "dp=8,shard=4,zero=2", None, "micro"),
    "acc_fsdp1_no_shard.yaml": (2, "dp=2", None, "micro"),
    "acc_fsdp2.yaml": (4, "dp=4,zero=3,recompute=full,offload=all,precision=bf16", None, "micro"),
    "acc_fsdp2_kept.yaml": (4, "dp=4,zero=2,precision=bf16", None, "micro"),
    "acc_fsdp2_hsdp_tp.yaml": (8, "dp=4,shard=2,zero=3,tp=2,precision=bf16", None, "micro"),
    "acc_fsdp2_cp.yaml": (8, "dp=2,zero=3,cp=4,precision=bf16", None, "micro"),
    "acc_deepspeed_zero2.yaml": (8, "dp=8,zero=2,micro=4,offload=optimizer,precision=bf16", None, ""),
    "acc_deepspeed_zero3.yaml": (16, "dp=16,zero=3,offload=all,precision=fp16", None, ""),
    "acc_deepspeed_auto.yaml": (4, "dp=4,zero=1,precision=bf16", None, "micro"),
    "acc_deepspeed_file.yaml": (8, "dp=8,zero=2,micro=8,precision=bf16,bucket=800000000", 256, ""),
    "acc_megatron.yaml": (8, "dp=2,zero=1,tp=2,pp=2,micro=8,recompute=selective,precision=bf16", None, ""),
    "acc_tp.yaml": (4, "dp=1,tp=4,precision=bf16", None, "micro"),
    "acc_dynamo.yaml": (2, "dp=2,precision=bf16,compile=true", None, "micro"),
    "acc_dynamo_old.yaml": (2, "dp=2,compile=true", None, "micro"),
    "acc_fp8.yaml": (2, "dp=2,precision=fp8", None, "micro"),
    "acc_sagemaker.yaml": (8, "dp=8,precision=fp16", None, "micro"),
    "acc_slurm.yaml": (8, "dp=8,zero=3,precision=bf16", None, "micro"),
    "acc_typos.yaml": (2, "dp=2,zero=3", None, "micro"),
}

FOLLOWED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "dataloader_drop_last",
    "fp16.enabled",
    "fp16.loss_scale",
    "fp16.loss_scale_window",
    "fp16.initial_scale_power",
    "fp16.hysteresis",
    "fp16.min_loss_scale",
    "bf16.enabled",
    "bfloat16.enabled",
    "torch_autocast.enabled",
    "torch_autocast.dtype",
    "communication_data_type",
    "compile.deepcompile",
    "zero_optimization",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.mics_shard_size",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "tensor_parallel.autotp_size",
    "pipeline.stages",
    "pipeline.activation_checkpoint_interval",
    "sequence_parallel_size",
    "expert_parallel.enabled",
    "expert_parallel.autoep_size",
    "activation_checkpointing.number_checkpoints",
    "distributed_type",
    "num_processes",
    "num_machines",
    "mixed_precision",
    "fp16",
    "dynamo_backend",
    "dynamo_config.dynamo_backend",
    "fsdp_config.fsdp_version",
    "fsdp_config.fsdp_reshard_after_forward",
    "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_activation_checkpointing",
    "tp_config.tp_size",
    "deepspeed_config.zero_stage",
    "deepspeed_config.gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping",
    "deepspeed_config.offload_optimizer_device",
    "deepspeed_config.offload_param_device",
    "deepspeed_config.deepspeed_config_file",
    *(f"parallelism_config.parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
    *(
        f"megatron_lm_config.megatron_lm_{word}"
        for word in (
            "tp_degree",
            "pp_degree",
            "num_micro_batches",
            "recompute_activations",
            "use_distributed_optimizer",
            "gradient_clipping",
        )
    ),
}
"""The keys that a plan follows."""


def leaves(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The values by the full names of their keys."""
    config: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{path}{key}"
        config |= leaves(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return config


def test_all_files_are_listed_and_there_are_many() -> None:
    assert {p.name for p in FOLDER.iterdir()} == set(EXPECTED)
    assert len(EXPECTED) >= 70
    assert sum(name.startswith("acc") for name in EXPECTED) >= 25


@pytest.mark.parametrize("name", EXPECTED)
def test_config_gives_the_expected_plan(name: str) -> None:
    ranks, plan, batch, free = EXPECTED[name]
    config = read_config(FOLDER / name, ranks)
    assert str(config.plan) == plan
    assert config.plan.ranks == ranks
    assert config.batch_size == batch
    assert config.open_keys == tuple(free.split())
    assert config_ranks(FOLDER / name) in (None, ranks)
    assert str(config).startswith(f"plan {plan}")


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_is_followed_or_reported(name: str) -> None:
    config = read_config(FOLDER / name, EXPECTED[name][0])
    listed = {*config.ignored, *config.auto, *config.unknown}
    for key, value in leaves(dict(read_table(FOLDER / name)[0])).items():
        if "oldest" in name:  # old keys are reported by their current names
            key = key.replace("fsdp_config.", "fsdp_config.fsdp_")
        above = [key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)]
        of_optimizer = key.split(".")[0] in ("optimizer", "scheduler")
        off = value in (False, None, "none", "", {}) or any(_off(name, part) for part in above)
        assert key in FOLLOWED or key in listed or {*above} & listed or of_optimizer or off, key


def _off(name: str, key: str) -> bool:
    table: Any = read_table(FOLDER / name)[0]
    for part in key.split("."):
        table = table[part]
    return isinstance(table, dict) and table.get("enabled") is False


@pytest.mark.parametrize("name", EXPECTED)
def test_only_the_files_with_typos_have_unknown_keys(name: str) -> None:
    config = read_config(FOLDER / name, EXPECTED[name][0])
    assert bool(config.unknown) == ("typos" in name)
    assert all(near.startswith("Did you mean '") for near in config.unknown.values())


def test_unknown_keys_are_reported_with_the_nearest() -> None:
    config = read_config(FOLDER / "ds_typos.json", 8)
    assert config.unknown == {
        "train_batchsize": "Did you mean 'train_batch_size'?",
        "zero_optimisation": "Did you mean 'zero_optimization'?",
        "zero_optimization.overlap_com": "Did you mean 'overlap_comm'?",
        "zero_optimization.offload_optimiser": "Did you mean 'offload_optimizer'?",
        "bf16.enable": "Did you mean 'enabled'?",
        "gradient_clippping": "Did you mean 'gradient_clipping'?",
    }
    assert set(read_config(FOLDER / "acc_typos.yaml", 2).unknown) == {
        "fsdp_config.fsdp_sharding_stratgy",
        "fsdp_config.fsdp_offload_param",
        "mixed_precison",
    }


def test_unsupported_features_that_change_training_are_reported() -> None:
    for name, keys in {
        "ds_zeropp.json": ["zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients"],
        "ds_compression.json": ["compression_training"],
        "ds_curriculum.json": ["curriculum_learning", "data_efficiency"],
    }.items():
        ignored = read_config(FOLDER / name, 8).ignored
        assert all("the result will differ" in ignored[key] for key in keys)


def test_settings_besides_the_plan() -> None:
    assert read_config(FOLDER / "ds_fp16_fixed_scale.json", 8).loss_scale == LossScaleSettings(fixed=128.0)
    assert (
        read_config(FOLDER / "acc_deepspeed_zero2.yaml", 8).clip
        == read_config(FOLDER / "acc_megatron.yaml", 8).clip
        == 1.0
    )
    assert read_config(FOLDER / "ds_zero2_finetune.json", 8).optimizer == NamedComponent(
        "AdamW", {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
    )
    assert read_config(FOLDER / "acc_deepspeed_file.yaml", 8).optimizer is not None  # from the file that it names
    assert read_config(FOLDER / "ds_checkpoint_engine.json", 8).drop_last


def test_more_devices_than_ranks_are_allowed() -> None:
    assert read_config(FOLDER / "acc_multi_gpu.yaml", 8).plan.ranks == 4
    with pytest.raises(
        InputError, match=r"is for 16 ranks\n.*\n  rule:  a rank needs a device: num_processes\(16\) > devices\(8\)"
    ):
        read_config(FOLDER / "acc_multi_node.yaml", 8)


@pytest.mark.parametrize(
    ("table", "ranks", "words"),
    [
        (
            {"distributed_type": "FSPD", "num_processes": 2},
            2,
            r"distributed_type is 'FSPD'\n.*\n.*\n  try:   Did you mean 'fsdp'\?",
        ),
        ({"distributed_type": "MULTI_GPU", "num_processes": 0}, 2, "num_processes is a whole number of at least 1"),
        ({"distributed_type": "MULTI_GPU", "num_processes": "four"}, 4, "num_processes is 'four'"),
        (
            {
                "distributed_type": "FSDP",
                "num_processes": 6,
                "parallelism_config": {"parallelism_config_tp_size": 4, "parallelism_config_dp_shard_size": 2},
            },
            6,
            r"dp_replicate\(1\) x dp_shard\(2\) x tp\(4\) x cp\(1\) x sp\(1\) != num_processes\(6\)",
        ),
        (
            {
                "distributed_type": "FSDP",
                "num_machines": 3,
                "num_processes": 8,
                "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
            },
            8,
            r"num_processes\(8\) % num_machines\(3\) != 0",
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_sharding_strategy": 7}},
            2,
            "a number from 1 to 5, or a word",
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_offload_params": "maybe"}},
            2,
            "fsdp_offload_params is true or false",
        ),
        (
            {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 4}},
            2,
            "zero_stage is 0, 1, 2 or 3",
        ),
        ({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": "x.json"}, 2, "a table of keys"),
        (
            {"distributed_type": "MEGATRON_LM", "num_processes": 6, "megatron_lm_config": {"megatron_lm_tp_degree": 4}},
            6,
            "6 % 4 != 0",
        ),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp17"}, 2, r"Did you mean 'fp16'\?"),
        (
            {
                "distributed_type": "DEEPSPEED",
                "num_processes": 2,
                "deepspeed_config": {"deepspeed_config_file": "not_there.json"},
            },
            2,
            "no file not_there.json",
        ),
    ],
)
def test_refused(table: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_config(table, ranks)


def test_tables_of_another_distributed_type_are_reported() -> None:
    config = read_config({"distributed_type": "MULTI_GPU", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}, 2)
    assert config.ignored["fsdp_config"] == "distributed_type is MULTI_GPU"
    config = read_config({"distributed_type": "NO", "num_processes": 4}, 4)
    assert (config.plan.ranks, config.ignored["num_processes"]) == (1, "distributed_type NO is one rank")


def test_deepspeed_batch_counts_tensor_parallel_ranks() -> None:
    """DeepSpeed's batch counts tensor-parallel ranks, which run the same samples."""
    table = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "tensor_parallel": {"autotp_size": 2},
    }
    config = deepspeed.read(table, 8)
    assert (config.batch_size, config.plan.dp) == (8, 4)
    assert "a batch of 8: DeepSpeed's train_batch_size(16) counts the tp(2) ranks" in config.notes
    assert deepspeed.read({**table, "train_batch_size": 8}, 8).batch_size == 8
    with pytest.raises(InputError, match=r"train_batch_size\(32\) !="):
        deepspeed.read({**table, "train_batch_size": 32}, 8)


def test_expert_parallelism_without_enabled() -> None:
    config = deepspeed.read({"expert_parallel": {"autoep_size": 2}}, 4)
    assert config.plan.ep == 2
    assert "ep=2: DeepSpeed itself also needs expert_parallel.enabled" in config.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "a": 1,\n  "b": True\n}', r"JSON: line 3: Expecting value, at 'True' \(JSON has true\)"),
        ("{\n  'a': 1\n}", r"line 2: .*double quotes, at .* \(JSON has strings in \"double quotes\"\)"),
        ('{"a": 1,, }', "line 1: "),
        ('{"a": 1', "line 1: Expecting ',' delimiter, at the end of the file"),
        ('{\n"a": {"b": 1, "b": 2}\n}', "the key 'b' is given twice"),
        ('{"a": -Infinity}', "-Infinity is not a finite number"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ('{"a": "x\n}', "line 1: Invalid control character|line 1: "),
    ],
)
def test_invalid_json_is_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_config(path, 1)
    assert str(path) in str(caught.value)


def test_comment_marks_inside_strings_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "tensorboard": {"output_path": "s3://a/b # c /* d */ ,}"},}')
    assert read_table(path)[0]["tensorboard"] == {"output_path": "s3://a/b # c /* d */ ,}"}
    for p in FOLDER.glob("*.json"):
        if "comments" not in p.name:
            assert read_table(p)[0] == json.loads(p.read_text())
