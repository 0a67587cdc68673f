"""Keys of Accelerate's configs without effect on a plan, each with the reason, by table of the config."""

from __future__ import annotations

_LAUNCH = "launching is done by `drumline run`, torchrun or srun"
_WHERE = "the cluster file describes the hardware"
_TPU = "TPUs are not supported"
_CLOUD = "cloud launching is not supported"
_UNITS = "units are chosen by size"
_SAVED = "checkpoints do not depend on the plan"
_GATHER = "the next unit is fetched while one runs"
_COMPILER = "torch.compile's own choices are kept"
_FP8 = "`precision=fp8` has one recipe: dynamic scaling, e4m3 forward and e5m2 backward"
_DISK = "nothing is swapped to disk"
_MODEL = "a size of the model, which the job knows"

TOP = {
    "debug": _LAUNCH,
    "machine_rank": _LAUNCH,
    "main_process_ip": _LAUNCH,
    "main_process_port": _LAUNCH,
    "main_training_function": _LAUNCH,
    "rdzv_backend": _LAUNCH,
    "same_network": _LAUNCH,
    "gpu_ids": _LAUNCH,
    "enable_cpu_affinity": _LAUNCH,
    "mpirun_config": _LAUNCH,
    "num_cpu_threads_per_process": _LAUNCH,
    "max_restarts": _LAUNCH,
    "monitor_interval": _LAUNCH,
    "log_dir": _LAUNCH,
    "tee": _LAUNCH,
    "rdzv_conf": _LAUNCH,
    "use_cpu": _WHERE,
    "use_mps_device": _WHERE,
    "ipex_config": _WHERE,
    "compute_environment": _LAUNCH,
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_env": _TPU,
    "tpu_vm": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    "tpu_project": _TPU,
    "fp8_config": _FP8,
    "aws_accelerator_type": _CLOUD,
    "ec2_instance_type": _CLOUD,
    "iam_role_name": _CLOUD,
    "image_uri": _CLOUD,
    "profile": _CLOUD,
    "region": _CLOUD,
    "base_job_name": _CLOUD,
    "pytorch_version": _CLOUD,
    "transformers_version": _CLOUD,
    "py_version": _CLOUD,
    "sagemaker_inputs_file": _CLOUD,
    "sagemaker_metrics_file": _CLOUD,
    "additional_args": _CLOUD,
    "use_parallelism_config": "the table itself decides",
}

FSDP = {
    "fsdp_auto_wrap_policy": _UNITS,
    "fsdp_transformer_layer_cls_to_wrap": _UNITS,
    "fsdp_min_num_params": _UNITS,
    "fsdp_state_dict_type": _SAVED,
    "fsdp_cpu_ram_efficient_loading": "weights are read without a full copy on a rank",
    "fsdp_sync_module_states": "ranks start from equal weights, always",
    "fsdp_backward_prefetch": _GATHER,
    "fsdp_backward_prefetch_policy": _GATHER,
    "fsdp_forward_prefetch": _GATHER,
    "fsdp_use_orig_params": "optimizers see the user's own parameters, always",
    "fsdp_ignored_modules": "every parameter is sharded",
    "fsdp_limit_all_gathers": _GATHER,
    "fsdp_activation_checkpointing_offload": "kept activations stay on the device",
}

DEEPSPEED = {
    "zero3_init_flag": "models are built without a full copy on a rank",
    "zero3_save_16bit_model": _SAVED,
    "deepspeed_hostfile": _LAUNCH,
    "deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_exclusion_filter": _LAUNCH,
    "deepspeed_inclusion_filter": _LAUNCH,
    "offload_optimizer_nvme_path": _DISK,
    "offload_param_nvme_path": _DISK,
    "deepspeed_moe_layer_cls_names": "experts are detected automatically",
    "fused_type": _COMPILER,
}

PARALLEL = {
    "parallelism_config_cp_comm_strategy": "keys and values go round a ring",
    "parallelism_config_cp_backend": "keys and values go round a ring",
    "parallelism_config_sp_backend": "the tokens of a sample are divided as by cp",
    "parallelism_config_sp_seq_length": _MODEL,
    "parallelism_config_sp_seq_length_is_variable": _MODEL,
    "parallelism_config_sp_attn_implementation": "the model has its own",
    "parallelism_config_cp_handler": "keys and values go round a ring",
}

MEGATRON = {
    "megatron_lm_sequence_parallelism": "norms are divided with the tensors where that pays",
    "megatron_lm_recompute_method": "every layer is recomputed",
    "megatron_lm_no_load_optim": _SAVED,
    "megatron_lm_recompute_num_layers": "every layer is recomputed",
    "megatron_lm_no_save_optim": _SAVED,
    "megatron_lm_attention_backend": "the model has its own",
    "megatron_lm_attention_dropout": _MODEL,
    "megatron_lm_attention_softmax_in_fp32": _MODEL,
    "megatron_lm_hidden_dropout": _MODEL,
    "megatron_lm_use_rotary_position_embeddings": _MODEL,
    "megatron_lm_eod_mask_loss": "the loss is the job's",
    "megatron_lm_calculate_per_token_loss": "the loss is the job's",
    "megatron_lm_decoder_last_pipeline_num_layers": "`split` is the plan's key",
    "megatron_lm_expert_tensor_parallel_size": "an expert is not split over ranks",
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": "updates run behind the transfers",
    "megatron_lm_use_precision_aware_optimizer": "optimizer state stays fp32",
    "megatron_lm_use_custom_fsdp": "`zero` is the plan's key",
}

DYNAMO = {
    "dynamo_mode": _COMPILER,
    "dynamo_use_fullgraph": _COMPILER,
    "dynamo_use_dynamic": _COMPILER,
    "dynamo_use_regional_compilation": "layers are compiled one by one",
}
