"""What another tool's configuration says beside the plan: the batch, the optimizer, the sizes of the model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from .common import is_job

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..models import Profile
    from ..plans import Plan
    from ..plans.emit import Setting, Transformer
    from ..plans.imported import Imported, Named


def setting_of(target: str, profile: Profile, plan: Plan, machines: Cluster | None, asked: Imported | None) -> Setting:
    """What stands beside the plan: from the profile, the job, the cluster and the config that was read."""
    from ..plans.emit import Setting

    kinds: Counter[str] = Counter()
    for layer in profile.layers:
        if layer.composite:
            kinds[layer.kind] += layer.repeats
    block, blocks = kinds.most_common(1)[0] if kinds else ("", 0)
    nodes = 1 if machines is None else -(-plan.ranks // machines.node.devices)
    setting = Setting(
        profile.batch_size,
        name=target if not is_job(target) else profile.name,
        nodes=nodes,
        device="cuda" if machines is None else machines.device.kind,
        blocks=blocks,
        block=block if profile.origin == "traced" else "",
        shape=_shape(target),
    )
    if is_job(target):
        setting = _of_job(target, setting)
    if asked is None:
        return setting
    return dataclasses.replace(setting, clip=asked.clip or setting.clip, optimizer=asked.optimizer or setting.optimizer)


def _shape(target: str) -> Transformer | None:
    """The sizes of a transformer of the zoo."""
    from ..models.zoo import transformer
    from ..plans.emit import Transformer

    family, _, size = target.partition(":")
    found = {"gpt": transformer.GPT, "llama": transformer.LLAMA}.get(family, {}).get(size.lower())
    if found is None:
        return None
    return Transformer(
        found.layers, found.hidden, found.heads, found.kv_heads, found.inner, found.vocabulary, found.sequence
    )


def _of_job(target: str, setting: Setting) -> Setting:
    from ..core.job import Job

    job = Job.load(target)
    return dataclasses.replace(setting, clip=job.clip, seed=job.seed, steps=job.steps, optimizer=_optimizer(job))


def _optimizer(job: Any) -> Named | None:
    """The optimizer by its name and numbers, where one number of a kind holds for all parameters."""
    import torch

    from ..plans.imported import Named

    try:
        made = job.optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
    except Exception:  # it wants the model's own parameters: then it stands in the script, and the emitter says so
        return None
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    if type(made).__module__.partition(".")[0] != "torch" or len(made.param_groups) != 1:
        return None
    group = {key: value for key in names if (value := made.param_groups[0].get(key)) is not None}
    return Named(type(made).__name__, {k: list(v) if isinstance(v, tuple) else float(v) for k, v in group.items()})
