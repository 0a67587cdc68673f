"""torchtitan's TOML for a plan, with the keys of its releases 0.2, the last that read files. From 0.3 on the same keys
are words of its command line, which stand in the file as a comment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..plan import Plan
from .value import Emitted, Setting, Sheet, comment

MODELS = {"llama:8b": ("llama3", "8B"), "llama:70b": ("llama3", "70B"), "llama:405b": ("llama3", "405B")}
"""The models of the zoo that torchtitan has too."""

ORDERS = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}

WORDS = ("training", "parallelism", "compile")
"""The tables that release 0.3 takes from its command line under the same names."""


def emit(plan: Plan, setting: Setting) -> Emitted:
    """The file."""
    import tomli_w

    sheet = Sheet("torchtitan", plan, setting)
    table = {
        "model": _model(sheet),
        "training": _training(sheet),
        "parallelism": _parallelism(sheet),
        "activation_checkpoint": _recompute(sheet),
        "compile": {"enable": plan.compile},
    }
    sheet.says("compile")
    if setting.optimizer is not None:
        table["optimizer"] = _optimizer(sheet)
    if plan.precision == "fp8":
        table["model"]["converters"] = ["quantize.linear.float8"]
    done = sheet.close("")
    flags = " ".join(_flag(key, value) for key, value in _flat(table) if key.split(".")[0] in WORDS)
    head = f"{plan}: a batch of {setting.batch_size}, from `drumline plan --emit torchtitan`\n{done}"
    text = comment(f"{head}\nfrom release 0.3 on: --module ... --config ... {flags}") + "\n" + tomli_w.dumps(table)
    return replace(done, text=text)


def _flat(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{part}.{key}", value) for part, values in table.items() for key, value in values.items()]


def _flag(key: str, value: Any) -> str:
    part, _, name = key.partition(".")
    return f"--{key} {value}" if not isinstance(value, bool) else f"--{key}" if value else f"--{part}.no-{name}"


def _model(sheet: Sheet) -> dict[str, Any]:
    name, flavor = MODELS.get(sheet.setting.name, ("", ""))
    if not name:
        sheet.notes.append("model: torchtitan trains models that were registered with a TrainSpec; this is its name")
    return {"name": name or sheet.setting.name.replace(":", "_"), "flavor": flavor or "default"}


def _training(sheet: Sheet) -> dict[str, Any]:
    plan, setting = sheet.plan, sheet.setting
    local = sheet.share * (plan.micro if plan.pp > 1 else 1)  # a pipeline cuts what it is given
    sheet.says("micro", "offload", "precision")
    if plan.offload == "optimizer" or (plan.offload == "all" and plan.zero < 2):
        sheet.cannot("offload", "its FSDP offloads all states or none")
    if plan.precision in ("fp16", "tf32"):
        sheet.cannot("precision", "it computes in bfloat16, float32 or float8")
    if not setting.clip:
        sheet.notes.append("clipping: torchtitan clips always; no gradient reaches a norm of 1e9")
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


def _parallelism(sheet: Sheet) -> dict[str, Any]:
    plan = sheet.plan
    sheet.says("zero", "shard", "tp", "cp", "ep", "pp")
    if plan.zero == 1:
        sheet.cannot("zero", "its FSDP shards gradients with the optimizer state (zero=2), or all (zero=3)")
    if not plan.zero and plan.dp > 1 and plan.ranks > plan.dp:
        sheet.cannot("zero", "its replication stands alone, and beside other axes it shards: zero=2 or 3")
    if plan.cp > 1 and not plan.zero:
        sheet.cannot("cp", "it shards over the ranks that share the tokens: zero=3")
    if plan.ep > 1 and plan.zero < 2:
        sheet.cannot("ep", "its experts lie over the ranks that share a sharded copy: zero=2 or 3")
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
        table |= _pipeline(sheet)
    return table


def _pipeline(sheet: Sheet) -> dict[str, Any]:
    plan = sheet.plan
    order = ORDERS.get(plan.schedule)
    if plan.schedule == "zero-bubble" and plan.virtual == 2:
        order = "ZBVZeroBubble"
    if order is None:
        sheet.cannot("schedule", "torch has gpipe, 1f1b, interleaved, and zero-bubble with virtual=2")
    elif (plan.virtual > 1) != (order in ("Interleaved1F1B", "ZBVZeroBubble")) or plan.virtual > 2:
        sheet.cannot("virtual", f"{order} has {'two stages' if plan.schedule != '1f1b' else 'one stage'} a rank")
    if plan.micro < plan.pp * plan.virtual:
        sheet.notes.append(f"micro: with fewer micro-batches ({plan.micro}) than stages it warns of its bubble")
    sheet.says("schedule", "virtual")
    return {"pipeline_parallel_schedule": order, "pipeline_parallel_microbatch_size": sheet.share}


def _recompute(sheet: Sheet) -> dict[str, Any]:
    sheet.says("recompute")
    if sheet.plan.recompute != "selective":
        return {"mode": sheet.plan.recompute}
    sheet.notes.append("recompute: which operators are kept is torchtitan's own choice")
    return {"mode": "selective", "selective_ac_option": "op"}


def _optimizer(sheet: Sheet) -> dict[str, Any]:
    found = sheet.setting.optimizer
    assert found is not None
    table: dict[str, Any] = {"name": found.kind}
    for key, value in found.params.items():
        if key == "betas":
            table |= {"beta1": value[0], "beta2": value[1]}
        elif key in ("lr", "eps", "weight_decay"):
            table[key] = value
    if found.kind not in ("Adam", "AdamW"):
        sheet.notes.append(f"optimizer: torchtitan has Adam and AdamW; {found.kind} needs a container of its own")
    return table
