"""Write a plan as torchtitan's TOML, with the keys of releases 0.2, the last that read files. From 0.3 on the same keys
are command-line options, which the file gives in a comment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..plans.plan import Plan
from .emission import EmitSettings, EmittedConfig, KeyCoverage, comment

MODELS = {"llama:8b": ("llama3", "8B"), "llama:70b": ("llama3", "70B"), "llama:405b": ("llama3", "405B")}
"""The models of the zoo that torchtitan has too."""

ORDERS = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}

OPTION_TABLES = ("training", "parallelism", "compile")
"""The tables that release 0.3 takes as options of the same names."""


def emit(plan: Plan, setting: EmitSettings) -> EmittedConfig:
    """The file."""
    import tomli_w

    coverage = KeyCoverage("torchtitan", plan, setting)
    table = {
        "model": _model(coverage),
        "training": _training(coverage),
        "parallelism": _parallelism(coverage),
        "activation_checkpoint": _recompute(coverage),
        "compile": {"enable": plan.compile},
    }
    coverage.covers("compile")
    if setting.optimizer is not None:
        table["optimizer"] = _optimizer(coverage)
    if plan.precision == "fp8":
        table["model"]["converters"] = ["quantize.linear.float8"]
    done = coverage.finish("")
    flags = " ".join(_flag(key, value) for key, value in _flat(table) if key.split(".")[0] in OPTION_TABLES)
    head = f"{plan}: a batch of {setting.batch_size}, from `drumline plan --emit torchtitan`\n{done}"
    text = comment(f"{head}\nfrom release 0.3 on: --module ... --config ... {flags}") + "\n" + tomli_w.dumps(table)
    return replace(done, text=text)


def _flat(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{part}.{key}", value) for part, values in table.items() for key, value in values.items()]


def _flag(key: str, value: Any) -> str:
    part, _, name = key.partition(".")
    return f"--{key} {value}" if not isinstance(value, bool) else f"--{key}" if value else f"--{part}.no-{name}"


def _model(coverage: KeyCoverage) -> dict[str, Any]:
    name, flavor = MODELS.get(coverage.setting.name, ("", ""))
    if not name:
        coverage.notes.append("model: torchtitan trains models that were registered with a TrainSpec; this is its name")
    return {"name": name or coverage.setting.name.replace(":", "_"), "flavor": flavor or "default"}


def _training(coverage: KeyCoverage) -> dict[str, Any]:
    plan, setting = coverage.plan, coverage.setting
    local = coverage.samples_per_rank * (plan.micro if plan.pp > 1 else 1)  # a pipeline cuts its input itself
    coverage.covers("micro", "offload", "precision")
    if plan.offload == "optimizer" or (plan.offload == "all" and plan.zero < 2):
        coverage.cannot_express("offload", "its FSDP offloads all states or none")
    if plan.precision in ("fp16", "tf32"):
        coverage.cannot_express("precision", "it computes in bfloat16, float32 or float8")
    if not setting.clip:
        coverage.notes.append("clipping: torchtitan always clips; a norm of 1e9 turns it off")
    table: dict[str, Any] = {
        "local_batch_size": local,
        "global_batch_size": setting.batch_size,
        "max_norm": setting.clip or 1e9,
        "enable_cpu_offload": plan.offload == "all",
        "dtype": "bfloat16" if plan.precision == "bf16-pure" else "float32",
        "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
    }
    if setting.shape is not None:
        table["seq_len"] = setting.shape.sequence
    if setting.steps:
        table["steps"] = setting.steps
    return table


def _parallelism(coverage: KeyCoverage) -> dict[str, Any]:
    plan = coverage.plan
    coverage.covers("zero", "shard", "tp", "cp", "ep", "pp")
    if plan.zero == 1:
        coverage.cannot_express("zero", "its FSDP shards gradients with the optimizer state (zero=2), or all (zero=3)")
    if not plan.zero and plan.dp > 1 and plan.ranks > plan.dp:
        coverage.cannot_express("zero", "with other axes it always shards: zero=2 or 3")
    if plan.cp > 1 and not plan.zero:
        coverage.cannot_express("cp", "it shards over the context-parallel ranks: zero=3")
    if plan.ep > 1 and plan.zero < 2:
        coverage.cannot_express("ep", "its experts are split over the ranks of a sharded copy: zero=2 or 3")
    shards = plan.shards if plan.zero else 1
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.zero:
        table["fsdp_reshard_after_forward"] = "always" if plan.zero == 3 else "never"
    if plan.pp > 1:
        table |= _pipeline(coverage)
    return table


def _pipeline(coverage: KeyCoverage) -> dict[str, Any]:
    plan = coverage.plan
    order = ORDERS.get(plan.schedule)
    if plan.schedule == "zero-bubble" and plan.virtual == 2:
        order = "ZBVZeroBubble"
    if order is None:
        coverage.cannot_express("schedule", "torch has gpipe, 1f1b, interleaved, and zero-bubble with virtual=2")
    elif (plan.virtual > 1) != (order in ("Interleaved1F1B", "ZBVZeroBubble")) or plan.virtual > 2:
        coverage.cannot_express(
            "virtual", f"{order} has {'two stages' if plan.schedule != '1f1b' else 'one stage'} a rank"
        )
    if plan.micro < plan.pp * plan.virtual:
        coverage.notes.append(f"micro: with fewer micro-batches ({plan.micro}) than stages it warns of its bubble")
    coverage.covers("schedule", "virtual")
    return {"pipeline_parallel_schedule": order, "pipeline_parallel_microbatch_size": coverage.samples_per_rank}


def _recompute(coverage: KeyCoverage) -> dict[str, Any]:
    coverage.covers("recompute")
    if coverage.plan.recompute != "selective":
        return {"mode": coverage.plan.recompute}
    coverage.notes.append("recompute: torchtitan chooses which operators to keep")
    return {"mode": "selective", "selective_ac_option": "op"}


def _optimizer(coverage: KeyCoverage) -> dict[str, Any]:
    optimizer = coverage.setting.optimizer
    assert optimizer is not None
    table: dict[str, Any] = {"name": optimizer.kind}
    for key, value in optimizer.params.items():
        if key == "betas":
            table |= {"beta1": value[0], "beta2": value[1]}
        elif key in ("lr", "eps", "weight_decay"):
            table[key] = value
    if optimizer.kind not in ("Adam", "AdamW"):
        coverage.notes.append(f"optimizer: torchtitan has Adam and AdamW; {optimizer.kind} needs its own container")
    return table
