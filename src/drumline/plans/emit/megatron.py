"""Megatron-LM's arguments for a plan: words for its training scripts, such as `pretrain_gpt.py $(cat FILE)`."""

from __future__ import annotations

from ..plan import Plan
from .value import Emitted, Setting, Sheet, Transformer

SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
"""What Megatron's FSDP calls the stages; the first is its distributed optimizer."""


def emit(plan: Plan, setting: Setting) -> Emitted:
    """The arguments, a line for each matter."""
    sheet = Sheet("Megatron-LM", plan, setting)
    sheet.says("micro", "tp", "cp", "ep", "pp")
    lines = [
        f"--tensor-model-parallel-size {plan.tp}" + (" --sequence-parallel" if plan.tp > 1 else ""),
        f"--pipeline-model-parallel-size {plan.pp}{_order(sheet)}",
        f"--context-parallel-size {plan.cp}" if plan.cp > 1 else "",
        f"--expert-model-parallel-size {plan.ep}" if plan.ep > 1 else "",
        f"--micro-batch-size {sheet.share} --global-batch-size {setting.batch_size}",
        _sharding(sheet),
        _messages(sheet),
        _precision(sheet),
        _recompute(sheet),
        _training(sheet),
        _model(sheet),
    ]
    if plan.tp > 1 or plan.cp > 1:
        sheet.notes.append("environment: before Blackwell GPUs, tp and cp want CUDA_DEVICE_MAX_CONNECTIONS=1")
    if setting.device == "cpu":
        sheet.cannot("dp", "it trains on GPUs")
    return sheet.close("\n".join(filter(None, lines)) + "\n")


def _order(sheet: Sheet) -> str:
    plan = sheet.plan
    if plan.pp == 1:
        return ""
    if plan.schedule not in ("1f1b", "interleaved"):
        sheet.cannot("schedule", "its pipelines are 1f1b, or interleaved where a rank has several stages")
    elif (plan.virtual > 1) != (plan.schedule == "interleaved"):
        sheet.cannot("virtual", "several stages a rank are interleaved, and one is 1f1b")
    sheet.says("schedule", "virtual")
    blocks = sheet.setting.blocks
    if blocks and blocks % (plan.pp * plan.virtual):
        sheet.cannot("pp", f"every stage has as many layers: {blocks} % (pp({plan.pp}) x virtual({plan.virtual})) != 0")
    return f" --num-virtual-stages-per-pipeline-rank {plan.virtual}" if plan.virtual > 1 else ""


def _sharding(sheet: Sheet) -> str:
    plan = sheet.plan
    sheet.says("zero", "shard", "offload")
    words = []
    if plan.zero:
        words.append("--use-distributed-optimizer")
    if plan.zero >= 2:
        words.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {SHARDED[plan.zero]}")
        words.append("--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion")
        if plan.pp > 1:
            sheet.cannot("zero", "its pipelines send gradients once a step: zero=1")
    if plan.shards not in (1, plan.dp):
        words.append(f"--num-distributed-optimizer-instances {plan.dp // plan.shards}")
    if plan.offload == "optimizer":
        words.append("--optimizer-cpu-offload --use-precision-aware-optimizer")
        if not plan.zero:
            sheet.cannot("offload", "it offloads what its distributed optimizer holds: zero=1")
    elif plan.offload == "all":
        sheet.cannot("offload", "it offloads the optimizer, and no parameters")
    return " ".join(words)


def _messages(sheet: Sheet) -> str:
    """Gradients that travel while the backward runs, in buckets counted in numbers of 4 bytes."""
    plan = sheet.plan
    words = []
    if plan.backend in ("nccl", "gloo"):
        sheet.says("backend")
        words.append(f"--distributed-backend {plan.backend}")
    if plan.dp > 1 and plan.zero < 2:
        sheet.says("bucket")
        words.append(f"--overlap-grad-reduce --ddp-bucket-size {plan.bucket // 4}")
        if plan.bucket % 4:
            sheet.cannot("bucket", "its buckets are counted in numbers of 4 bytes")
    return " ".join(words)


def _precision(sheet: Sheet) -> str:
    sheet.says("precision")
    if sheet.plan.precision in ("tf32", "bf16-pure"):
        sheet.cannot("precision", "it has fp32, bf16 and fp16 with an fp32 master, and fp8")
    return {"bf16": "--bf16", "fp16": "--fp16", "fp8": "--bf16 --fp8-format hybrid"}.get(sheet.plan.precision, "")


def _recompute(sheet: Sheet) -> str:
    sheet.says("recompute")
    if sheet.plan.recompute == "full":
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if sheet.plan.recompute == "selective":
        sheet.notes.append("recompute: Megatron's selective computes attention again, and nothing else")
        return "--recompute-granularity selective"
    return ""


def _training(sheet: Sheet) -> str:
    setting = sheet.setting
    words = [f"--clip-grad {setting.clip or 0.0:g}"]  # 1.0 where nothing is said
    if setting.steps:
        words.append(f"--train-iters {setting.steps}")
    if setting.seed:
        words.append(f"--seed {setting.seed}")
    found = setting.optimizer
    if found is None:
        sheet.notes.append("optimizer: --optimizer, --lr and its other numbers stand in the script")
        return " ".join(words)
    if found.kind not in ("Adam", "AdamW", "SGD"):
        sheet.notes.append(f"optimizer: Megatron-LM has no {found.kind}")
        return " ".join(words)
    words.append(f"--optimizer {'sgd' if found.kind == 'SGD' else 'adam'}")
    names = {"lr": "--lr", "weight_decay": "--weight-decay", "eps": "--adam-eps", "momentum": "--sgd-momentum"}
    words += [f"{names[key]} {value:g}" for key, value in found.params.items() if key in names]
    if "betas" in found.params:
        words.append("--adam-beta1 {:g} --adam-beta2 {:g}".format(*found.params["betas"]))
    return " ".join(words)


def _model(sheet: Sheet) -> str:
    shape = sheet.setting.shape
    if shape is None:
        sheet.notes.append("model: its sizes (--num-layers, --hidden-size, ...) stand in the script")
        return ""
    return _sizes(shape, llama=sheet.setting.name.startswith("llama"))


def _sizes(shape: Transformer, llama: bool) -> str:
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
