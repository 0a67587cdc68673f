"""DeepSpeed configs as users write them: from scratch, from tutorials, through Hugging Face, from old releases.

Each is (ranks, config, the plan, the batch size). All of them were written for these tests.
"""

from __future__ import annotations

from typing import Any

ADAMW = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
AUTO = {
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}

CONFIGS: dict[str, tuple[int, dict[str, Any], str, int | None]] = {
    "smallest": (2, {"train_batch_size": 8}, "dp=2", 8),
    "empty": (4, {}, "dp=4", None),
    "first steps": (
        4,
        {"train_batch_size": 32, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "fp16": {"enabled": False}},
        "dp=4",
        32,
    ),
    "fp16 with scaler": (
        2,
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "initial_scale_power": 12,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "optimizer": ADAMW,
            "steps_per_print": 50,
            "wall_clock_breakdown": False,
        },
        "dp=2,micro=2,precision=fp16",
        16,
    ),
    "stage 1": (
        8,
        {
            "train_batch_size": 64,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
            "bf16": {"enabled": True},
        },
        "dp=8,zero=1,precision=bf16,bucket=2000000000",
        64,
    ),
    "stage 2 of a fine-tune": (
        8,
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": ADAMW,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "warmup_max_lr": 3e-4},
            },
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "contiguous_gradients": True,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 0.5,
        },
        "dp=8,zero=2,micro=8,precision=bf16",
        256,
    ),
    "stage 2 with offload": (
        1,
        {
            "train_batch_size": 16,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "fp16": {"enabled": True},
        },
        "dp=1,zero=2,offload=optimizer,precision=fp16",
        16,
    ),
    "stage 3 with everything outside": (
        4,
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "sub_group_size": 1e9,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_prefetch_bucket_size": 5e7,
                "stage3_param_persistence_threshold": 1e5,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        "dp=4,zero=3,offload=all",
        4,
    ),
    "hugging face, stage 3": (
        4,
        {
            **AUTO,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
            "wall_clock_breakdown": False,
            "steps_per_print": 2000,
        },
        "dp=4,zero=3",
        None,
    ),
    "hugging face, only the micro-batch": (2, {**AUTO, "train_micro_batch_size_per_gpu": 3}, "dp=2", 6),
    "accumulation from the two others": (
        4,
        {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3},
        "dp=4,micro=8",
        96,
    ),
    "micro-batch from the two others": (
        4,
        {"train_batch_size": 96, "gradient_accumulation_steps": 2},
        "dp=4,micro=2",
        96,
    ),
    "all three": (
        4,
        {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 12, "gradient_accumulation_steps": 2},
        "dp=4,micro=2",
        96,
    ),
    "recomputation": (
        2,
        {
            "train_batch_size": 8,
            "activation_checkpointing": {
                "partition_activations": True,
                "cpu_checkpointing": False,
                "number_checkpoints": 4,
                "profile": False,
            },
        },
        "dp=2,recompute=full",
        8,
    ),
    "tensor parallel": (
        8,
        {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}},
        "dp=4,zero=1,tp=2",
        16,
    ),
    "pipeline and tensor": (
        8,
        {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2, "partition": "best"}},
        "dp=2,tp=2,pp=2",
        16,
    ),
    "long sequences": (
        8,
        {"train_batch_size": 8, "sequence_parallel_size": 4, "zero_optimization": {"stage": 3}},
        "dp=2,zero=3,cp=4",
        8,
    ),
    "copies shared by some": (
        8,
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True},
        },
        "dp=8,shard=4,zero=3",
        8,
    ),
    "not shared": (
        8,
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": -1}},
        "dp=8,zero=3",
        8,
    ),
    "first releases": (
        2,
        {"train_batch_size": 4, "zero_optimization": True, "disable_allgather": True},
        "dp=2,zero=1",
        4,
    ),
    "second releases": (
        2,
        {"train_batch_size": 4, "zero_optimization": {"stage": 2, "cpu_offload": True}},
        "dp=2,zero=2,offload=optimizer",
        4,
    ),
    "to disk": (
        2,
        {
            "train_batch_size": 4,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "buffer_count": 4},
                "offload_param": {"device": "nvme"},
            },
            "aio": {"block_size": 262144},
        },
        "dp=2,zero=3,offload=all",
        4,
    ),
    "autocast": (
        2,
        {
            "train_batch_size": 4,
            "torch_autocast": {
                "enabled": True,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": ["torch.nn.Linear"],
            },
        },
        "dp=2,precision=bf16",
        4,
    ),
    "old name of bf16": (1, {"train_batch_size": 4, "bfloat16": {"enabled": True}}, "dp=1,precision=bf16", 4),
    "watched": (
        1,
        {
            "train_batch_size": 4,
            "tensorboard": {"enabled": True, "output_path": "logs"},
            "wandb": {"enabled": False},
            "flops_profiler": {"enabled": True, "profile_step": 5},
            "comms_logger": {"enabled": True},
        },
        "dp=1",
        4,
    ),
    "other training": (
        1,
        {
            "train_batch_size": 4,
            "progressive_layer_drop": {"enabled": True, "theta": 0.5},
            "curriculum_learning": {"enabled": False},
            "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": False},
        },
        "dp=1,zero=3",
        4,
    ),
    "one cycle": (
        2,
        {
            "train_batch_size": 4,
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 100}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}},
        },
        "dp=2",
        4,
    ),
    "elastic": (
        2,
        {
            "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]},
            "train_micro_batch_size_per_gpu": 2,
        },
        "dp=2",
        4,
    ),
    "mixture of experts": (
        4,
        {"train_batch_size": 8, "expert_parallel": {"autoep_size": 2}, "bf16": {"enabled": True}},
        "dp=4,ep=2,precision=bf16",
        8,
    ),
    "compiled": (
        2,
        {"train_batch_size": 8, "compile": {"deepcompile": True}, "zero_optimization": {"stage": 3}},
        "dp=2,zero=3,compile=true",
        8,
    ),
    "last batch dropped": (
        2,
        {
            "train_batch_size": 8,
            "dataloader_drop_last": True,
            "communication_data_type": "fp32",
            "prescale_gradients": True,
        },
        "dp=2",
        8,
    ),
}
