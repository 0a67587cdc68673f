"""Write a plan as Megatron-LM's arguments, for its training scripts: `pretrain_gpt.py $(cat FILE)`."""

from __future__ import annotations

from ..plans.plan import Plan
from .emission import EmitSettings, EmittedConfig, KeyCoverage, TransformerShape

SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO stages of Megatron's FSDP; stage 1 is its distributed optimizer."""


def emit(plan: Plan, setting: EmitSettings) -> EmittedConfig:
    """Write the arguments, one line per topic."""
    coverage = KeyCoverage("Megatron-LM", plan, setting)
    coverage.covers("micro", "tp", "cp", "ep", "pp")
    lines = [
        f"--tensor-model-parallel-size {plan.tp}" + (" --sequence-parallel" if plan.tp > 1 else ""),
        f"--pipeline-model-parallel-size {plan.pp}{_order(coverage)}",
        f"--context-parallel-size {plan.cp}" if plan.cp > 1 else "",
        f"--expert-model-parallel-size {plan.ep}" if plan.ep > 1 else "",
        f"--micro-batch-size {coverage.samples_per_rank} --global-batch-size {setting.batch_size}",
        _sharding(coverage),
        _messages(coverage),
        _precision(coverage),
        _recompute(coverage),
        _training(coverage),
        _model(coverage),
    ]
    if plan.tp > 1 or plan.cp > 1:
        coverage.notes.append("environment: before Blackwell GPUs, tp and cp want CUDA_DEVICE_MAX_CONNECTIONS=1")
    if setting.device == "cpu":
        coverage.cannot_express("dp", "it trains on GPUs")
    return coverage.finish("\n".join(filter(None, lines)) + "\n")


def _order(coverage: KeyCoverage) -> str:
    plan = coverage.plan
    if plan.pp == 1:
        return ""
    if plan.schedule not in ("1f1b", "interleaved"):
        coverage.cannot_express("schedule", "its pipelines are 1f1b, or interleaved with several stages per rank")
    elif (plan.virtual > 1) != (plan.schedule == "interleaved"):
        coverage.cannot_express("virtual", "several stages per rank need interleaved, one needs 1f1b")
    coverage.covers("schedule", "virtual")
    blocks = coverage.setting.blocks
    if blocks and blocks % (plan.pp * plan.virtual):
        coverage.cannot_express(
            "pp", f"all stages have equally many layers: {blocks} % (pp({plan.pp}) x virtual({plan.virtual})) != 0"
        )
    return f" --num-virtual-stages-per-pipeline-rank {plan.virtual}" if plan.virtual > 1 else ""


def _sharding(coverage: KeyCoverage) -> str:
    plan = coverage.plan
    coverage.covers("zero", "shard", "offload")
    words = []
    if plan.zero:
        words.append("--use-distributed-optimizer")
    if plan.zero >= 2:
        words.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {SHARDED[plan.zero]}")
        words.append("--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion")
        if plan.pp > 1:
            coverage.cannot_express("zero", "its pipelines send gradients once a step: zero=1")
    if plan.shards not in (1, plan.dp):
        words.append(f"--num-distributed-optimizer-instances {plan.dp // plan.shards}")
    if plan.offload == "optimizer":
        words.append("--optimizer-cpu-offload --use-precision-aware-optimizer")
        if not plan.zero:
            coverage.cannot_express("offload", "it offloads the state of its distributed optimizer: zero=1")
    elif plan.offload == "all":
        coverage.cannot_express("offload", "it offloads the optimizer, not parameters")
    return " ".join(words)


def _messages(coverage: KeyCoverage) -> str:
    """Send gradients during the backward, in buckets counted in numbers of 4 bytes."""
    plan = coverage.plan
    words = []
    if plan.backend in ("nccl", "gloo"):
        coverage.covers("backend")
        words.append(f"--distributed-backend {plan.backend}")
    if plan.dp > 1 and plan.zero < 2:
        coverage.covers("bucket")
        words.append(f"--overlap-grad-reduce --ddp-bucket-size {plan.bucket // 4}")
        if plan.bucket % 4:
            coverage.cannot_express("bucket", "its buckets are counted in numbers of 4 bytes")
    return " ".join(words)


def _precision(coverage: KeyCoverage) -> str:
    coverage.covers("precision")
    if coverage.plan.precision in ("tf32", "bf16-pure"):
        coverage.cannot_express("precision", "it has fp32, bf16 and fp16 with an fp32 master, and fp8")
    return {"bf16": "--bf16", "fp16": "--fp16", "fp8": "--bf16 --fp8-format hybrid"}.get(coverage.plan.precision, "")


def _recompute(coverage: KeyCoverage) -> str:
    coverage.covers("recompute")
    if coverage.plan.recompute == "full":
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if coverage.plan.recompute == "selective":
        coverage.notes.append("recompute: Megatron's selective mode recomputes attention only")
        return "--recompute-granularity selective"
    return ""


def _training(coverage: KeyCoverage) -> str:
    setting = coverage.setting
    words = [f"--clip-grad {setting.clip or 0.0:g}"]  # its default is 1.0
    if setting.steps:
        words.append(f"--train-iters {setting.steps}")
    if setting.seed:
        words.append(f"--seed {setting.seed}")
    optimizer = setting.optimizer
    if optimizer is None:
        coverage.notes.append("optimizer: set --optimizer, --lr and its other arguments in the script")
        return " ".join(words)
    if optimizer.kind not in ("Adam", "AdamW", "SGD"):
        coverage.notes.append(f"optimizer: Megatron-LM has no {optimizer.kind}")
        return " ".join(words)
    words.append(f"--optimizer {'sgd' if optimizer.kind == 'SGD' else 'adam'}")
    names = {"lr": "--lr", "weight_decay": "--weight-decay", "eps": "--adam-eps", "momentum": "--sgd-momentum"}
    words += [f"{names[key]} {value:g}" for key, value in optimizer.params.items() if key in names]
    if "betas" in optimizer.params:
        words.append("--adam-beta1 {:g} --adam-beta2 {:g}".format(*optimizer.params["betas"]))
    return " ".join(words)


def _model(coverage: KeyCoverage) -> str:
    shape = coverage.setting.shape
    if shape is None:
        coverage.notes.append("model: set its sizes (--num-layers, --hidden-size, ...) in the script")
        return ""
    return _sizes(shape, llama=coverage.setting.name.startswith("llama"))


def _sizes(shape: TransformerShape, llama: bool) -> str:
    words = [
        f"--num-layers {shape.layers} --hidden-size {shape.hidden} --ffn-hidden-size {shape.inner}",
        f"--num-attention-heads {shape.heads} --seq-length {shape.sequence}",
        f"--max-position-embeddings {shape.sequence} --vocab-size {shape.vocabulary}",
    ]
    if shape.kv_heads != shape.heads:
        words.append(f"--group-query-attention --num-query-groups {shape.kv_heads}")
    if llama:
        words.append("--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear")
        words.append("--untie-embeddings-and-output-weights")
    return " ".join(words)
