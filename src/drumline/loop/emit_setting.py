"""Settings that another tool's configuration needs besides the plan: the batch, the optimizer, the model's sizes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from .inputs import describe, is_job, load_job

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.job import Job
    from ..interop.emission import EmitSettings, TransformerShape
    from ..interop.imported import ImportedConfig, NamedComponent
    from ..models import Profile
    from ..plans import Plan
    from .inputs import ModelInput


def emit_settings(
    target: ModelInput, profile: Profile, plan: Plan, cluster: Cluster | None, config: ImportedConfig | None
) -> EmitSettings:
    """Collect the settings from the profile, the job, the cluster and the config that was read."""
    from ..interop.emission import EmitSettings

    kinds: Counter[str] = Counter()
    for layer in profile.layers:
        if layer.composite:
            kinds[layer.kind] += layer.repeats
    block, blocks = kinds.most_common(1)[0] if kinds else ("", 0)
    settings = EmitSettings(
        profile.batch_size,
        name=profile.name if is_job(target) else describe(target),
        nodes=1 if cluster is None else -(-plan.ranks // cluster.node.devices),
        device="cuda" if cluster is None else cluster.device.kind,
        blocks=blocks,
        block=block if profile.origin == "traced" else "",
        shape=_zoo_shape(describe(target)),
    )
    if is_job(target):
        job = load_job(target)
        settings = dataclasses.replace(
            settings, clip=job.clip, seed=job.seed, steps=job.steps, optimizer=_named_optimizer(job)
        )
    if config is None:
        return settings
    clip, optimizer = config.clip or settings.clip, config.optimizer or settings.optimizer
    return dataclasses.replace(settings, clip=clip, optimizer=optimizer)


def _zoo_shape(name: str) -> TransformerShape | None:
    """The sizes of a transformer of the zoo."""
    from ..interop.emission import TransformerShape
    from ..models.zoo import transformer

    family, _, size = name.partition(":")
    shape = {"gpt": transformer.GPT, "llama": transformer.LLAMA}.get(family, {}).get(size.lower())
    if shape is None:
        return None
    return TransformerShape(
        shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.inner, shape.vocabulary, shape.sequence
    )


def _named_optimizer(job: Job) -> NamedComponent | None:
    """The optimizer by name and hyperparameters, if it is torch's and all parameters share them."""
    import torch

    from ..interop.imported import NamedComponent

    try:
        made = job.optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
    except Exception:  # it needs the model's own parameters: it stays in the script, and the emitter says so
        return None
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    if type(made).__module__.partition(".")[0] != "torch" or len(made.param_groups) != 1:
        return None
    group = {key: value for key in names if (value := made.param_groups[0].get(key)) is not None}
    values = {k: list(v) if isinstance(v, tuple) else float(v) for k, v in group.items()}
    return NamedComponent(type(made).__name__, values)
