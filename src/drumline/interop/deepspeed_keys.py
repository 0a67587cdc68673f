"""Keys of DeepSpeed's configs without effect, each with the reason, by table of the config."""

from __future__ import annotations

_BUFFERS = "a buffer of DeepSpeed's; Drumline sizes its own"
_PRINT = "use the options of `drumline train` and `drumline report`"
_MONITOR = "a run records itself; see `drumline report`"
CHANGES = "it changes the computation and is not supported: the result will differ"
"""Reported only for a key that is on."""

TOP = {
    "communication_data_type": "gradients of half precision are summed in fp32; `compress=fp16` is the plan's key",
    "seq_parallel_comm_data_type": "gradients are summed in fp32",
    "seq_parallel_communication_data_type": "gradients are summed in fp32",
    "disable_python_gc": "garbage collection is left to Python",
    "log_level": _PRINT,
    "use_node_local_storage": "Drumline writes its own checkpoints",
    "prescale_gradients": "gradients are summed in fp32, which does not overflow",
    "gradient_predivide_factor": "gradients are summed in fp32, which does not overflow",
    "gradient_allreduce_op": "the mean over the samples, always",
    "sparse_gradients": "gradients are sent dense",
    "disable_allgather": "of DeepSpeed's first ZeRO",
    "allgather_size": _BUFFERS,
    "zero_allow_untested_optimizer": "an optimizer is tried before it is sharded",
    "zero_force_ds_cpu_optimizer": "the optimizer stays the one that was asked for",
    "steps_per_print": _PRINT,
    "wall_clock_breakdown": _PRINT,
    "memory_breakdown": _PRINT,
    "dump_state": _PRINT,
    "timers": _PRINT,
    "flops_profiler": "`drumline profile` counts the work",
    "comms_logger": "`drumline report` shows the messages",
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "monitor_config": _MONITOR,
    "autotuning": "use `drumline plan`",
    "elasticity": "the batch stays as it is, and any number of ranks may run it",
    "checkpoint": "Drumline's checkpoints fit any plan",
    "nebula": "Drumline writes its own checkpoints",
    "datastates_ckpt": "Drumline writes its own checkpoints",
    "aio": "nothing is swapped to disk",
    "vocabulary_size": "the model knows it",
    "graph_harvesting": "`compile=true` is the plan's key",
    "use_data_before_expert_parallelism": "the mesh has one order",
    "managed_gradient_accumulation": "accumulation is always counted by the engine",
    "progressive_layer_drop": CHANGES,
    "curriculum_learning": CHANGES,
    "data_efficiency": CHANGES,
    "compression_training": CHANGES,
    "quantize_training": CHANGES,
    "weight_quantization": CHANGES,
    "sparse_attention": CHANGES,
    "eigenvalue": CHANGES,
    "amp": "apex is not used; write bf16 or fp16",
    "hybrid_engine": "it is for inference",
    "data_types": "gradients are kept in the type of the parameters",
}

ZERO = {
    "overlap_comm": "gradients are always sent during the backward",
    "contiguous_gradients": "gradients are always in buckets",
    "reduce_scatter": "the plan's stage decides the collective",
    "allgather_partitions": "one all-gather, always",
    "use_multi_rank_bucket_allreduce": "the plan's stage decides the collective",
    "allgather_bucket_size": _BUFFERS,
    "sub_group_size": _BUFFERS,
    "stage3_max_live_parameters": "one unit is gathered at a time, and the next while it runs",
    "stage3_max_reuse_distance": "a unit is dropped after its use",
    "stage3_prefetch_bucket_size": "the next unit is fetched while one runs",
    "stage3_param_persistence_threshold": "small parameters are sharded with their unit",
    "stage3_model_persistence_threshold": "small parameters are sharded with their unit",
    "stage3_module_granularity_threshold": "units are chosen by size",
    "stage3_use_all_reduce_for_fetch_params": "units are gathered by all-gather",
    "stage3_allgather_sequential": "units are gathered one by one",
    "stage3_partition_stream_chunk_size": _BUFFERS,
    "stage3_gather_16bit_weights_on_model_save": "checkpoints do not depend on the plan",
    "stage3_gather_fp16_weights_on_model_save": "checkpoints do not depend on the plan",
    "prefetch_bucket_size": "the next unit is fetched while one runs",
    "param_persistence_threshold": "small parameters are sharded with their unit",
    "max_live_parameters": "one unit is gathered at a time",
    "max_reuse_distance": "a unit is dropped after its use",
    "round_robin_gradients": "shares are even already",
    "ignore_unused_parameters": "unused parameters are detected automatically",
    "load_from_fp32_weights": "checkpoints contain the fp32 weights",
    "elastic_checkpoint": "checkpoints fit any number of ranks",
    "pipeline_loading_checkpoint": "checkpoints fit any plan",
    "legacy_stage1": "there is one implementation",
    "memory_efficient_linear": "`chunk` is the plan's key",
    "override_module_apply": "models are built as one device would",
    "log_trace_cache_warnings": _PRINT,
    "enable_sanity_checks": "`drumline verify` checks the numbers",
    "cpu_offload_use_pin_memory": "pinned where CUDA is",
    "zero_hpz_partition_size": "`shard` is the plan's key: how many ranks share one copy",
    "zero_quantized_weights": CHANGES,
    "zero_quantized_gradients": CHANGES,
    "zero_quantized_nontrainable_weights": CHANGES,
    "zeropp_loco_param": CHANGES,
    "mics_hierarchical_params_gather": "the backend chooses the algorithm",
    "zenflow": CHANGES,
    "compute_grad_norm": "the norm is computed where something needs it",
    "parameter_alignment": _BUFFERS,
    "leaf_module": "units are chosen by size",
    "save_muon_momentum_buffer_in_memory": "nothing is swapped to disk",
}

OFFLOAD = {
    "pin_memory": "pinned where CUDA is",
    "nvme_path": "nothing is swapped to disk",
    "buffer_count": _BUFFERS,
    "buffer_size": _BUFFERS,
    "max_in_cpu": _BUFFERS,
    "fast_init": "nothing is swapped to disk",
    "pipeline": "updates run behind the transfers",
    "pipeline_read": "nothing is swapped to disk",
    "pipeline_write": "nothing is swapped to disk",
    "ratio": "all of it is offloaded",
    "super_offload": _BUFFERS,
    "cpuadam_cores_perc": _BUFFERS,
}

FP16 = {
    "auto_cast": "autocast decides which operators run in fp16",
    "fused_mode": "fused where torch can",
    "consecutive_hysteresis": "the scale falls at each overflow",
    "fp16_master_weights_and_grads": "master weights stay fp32",
}

BF16 = {
    "immediate_grad_update": "gradients are summed in fp32 as they come",
    "check_grad_overflow": "gradients are watched",
    "bf16_master_weights_and_grads": "master weights stay fp32; `precision=bf16-pure` is the plan's key",
    "bf16_optimizer_states": "optimizer state stays fp32",
}

ACTIVATIONS = {
    "contiguous_memory_optimization": _BUFFERS,
    "synchronize_checkpoint_boundary": _PRINT,
    "profile": _PRINT,
    "number_checkpoints": "every layer is recomputed",
    "partition_activations": "activations are not replicated",
    "cpu_checkpointing": "kept activations stay on the device",
}

TENSOR = {
    "tp": "the mesh makes the groups",
    "tp_overlap_comm": "the backend decides",
    "preset_model": "layers are detected automatically",
    "partition_config": "layers are detected automatically",
    "use_default_specs": "layers are detected automatically",
    "tensor_parallel": "the mesh makes the groups",
    "injection_policy_tuple": "layers are detected automatically",
    "keep_module_on_host": "`offload` is the plan's key",
    "replace_with_kernel_inject": "it is for inference",
    "dtype": "`precision` is the plan's key",
    "tp_size": "the mesh makes the groups",
    "tp_grain_size": "layers are detected automatically",
    "vocab_parallel_lm_head": "layers are detected automatically",
    "vocab_parallel_ce_backend": "layers are detected automatically",
    "kernel_inject": "it is for inference",
}

PIPELINE = {
    "partition": "`split` is the plan's key",
    "seed_layers": "the seed is the job's",
    "pipe_partitioned": _BUFFERS,
    "grad_partitioned": _BUFFERS,
    "use_reentrant": "recomputation is not re-entrant",
    "pipe_schedule": "`schedule` is the plan's key",
}

OPTIMIZER = {"legacy_fusion": "fused where torch can"}
"""Keys besides `type` and `params`."""
