"""Plans for other tools: read another tool's config and complete it, or write the plan as another tool's config."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import DoesNotFit, InputError, PlanError, nearest
from .callbacks import Notify, Progress, ignore_progress, log_note
from .corrections import Machines, load_machines
from .inputs import describe, is_job, load_job, load_plan, load_profile
from .plan import check_plan_options

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.job import Job
    from ..costs import Estimate
    from ..interop.emission import EmitSettings, EmittedConfig, TransformerShape
    from ..interop.imported import ImportedConfig, NamedComponent
    from ..models import Profile
    from ..planner.reserve import Reserve
    from ..plans import Plan
    from .inputs import ClusterInput, ModelInput, PlanInput


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """A model, and where its plan comes from and goes to."""

    target: ModelInput
    source: str | None = None
    """Another tool's config to read."""
    given: PlanInput | None = None
    """A plan, instead of a search."""
    tool: str | None = None
    """The tool whose config is written."""
    cluster: ClusterInput = None
    devices: int | None = None
    memory: str | None = None
    changes: Sequence[str] = ()
    precision: str | None = None
    batch: int | None = None
    objective: str = "time"
    reserve: Reserve = None
    sequence: int | None = None
    corrections: bool = True
    notify: Notify = log_note
    progress: Progress = ignore_progress

    def check(self) -> None:
        """Refuse bad values before anything is traced or measured."""
        from ..interop.tools import TOOLS

        check_plan_options(batch=self.batch, precision=self.precision, objective=self.objective, reserve=self.reserve)
        if self.tool is not None and self.tool not in TOOLS:
            raise InputError(f"--emit {self.tool}", rule=f"one of {', '.join(TOOLS)}", fix=nearest(self.tool, TOOLS))
        if self.source is not None and self.given is not None:
            raise InputError("--from and --plan", rule="both set the plan", fix="use one of them")

    def machines(self, devices: int | None) -> Machines:
        """Load or measure the cluster."""
        return load_machines(
            self.cluster,
            devices,
            corrections=self.corrections,
            memory=self.memory,
            changes=self.changes,
            notify=self.notify,
            progress=self.progress,
        )


@dataclass(frozen=True, slots=True)
class ConvertedPlan:
    """A plan, what is known about it, and the config written for it."""

    plan: Plan
    profile: Profile
    cluster: Cluster | None = None
    """None where the plan was given and nothing had to be priced."""
    estimate: Estimate | None = None
    config: ImportedConfig | None = None
    """The config that was read."""
    candidates: int = 1
    alternatives: tuple[tuple[Plan, Estimate], ...] = ()
    """The other plans that fit, best first, after a search."""
    emitted: EmittedConfig | None = None


def convert_plan(request: ConversionRequest) -> ConvertedPlan:
    """Read or search for a plan, and write it for the tool that was asked for."""
    request.check()
    converted = _choose(request)
    if request.tool is None:
        return converted
    settings = emit_settings(request.target, converted.profile, converted.plan, converted.cluster, converted.config)
    return dataclasses.replace(converted, emitted=_emit(request.tool, converted, settings))


def _emit(tool: str, converted: ConvertedPlan, settings: EmitSettings) -> EmittedConfig:
    """The config. If the tool cannot express the plan, the error names the next best plan that it can."""
    from ..interop.tools import emit

    try:
        return emit(tool, converted.plan, settings)
    except PlanError as refused:
        fix = _next_best(tool, converted, settings)
        raise PlanError(refused.what, where=refused.where, rule=refused.rule, fix=fix or refused.fix) from None


def _next_best(tool: str, converted: ConvertedPlan, settings: EmitSettings) -> str:
    """The fastest other plan that the tool can express, and what it costs."""
    from ..interop.tools import emit

    for plan, e in converted.alternatives:
        try:
            emit(tool, plan, settings)
        except PlanError:
            continue
        assert converted.estimate is not None
        slower = 100 * (e.step_seconds / converted.estimate.step_seconds - 1)
        return f"--plan {plan}: the fastest that it can express, {slower:.1f}% slower"
    return ""


def _choose(request: ConversionRequest) -> ConvertedPlan:
    profile = load_profile(request.target, sequence=request.sequence)
    if request.source is not None:
        return _read(request, profile)
    sized = profile if request.batch is None else dataclasses.replace(profile, batch_size=request.batch)
    if request.given is None:
        return _search(request, sized)
    plan = load_plan(request.given)
    if request.precision is not None and request.precision != plan.precision:
        if "precision" in plan.table():
            raise InputError(
                f"--precision {request.precision} with --plan {plan}", rule="a step computes in one precision"
            )
        plan = dataclasses.replace(plan, precision=request.precision)
    cluster = request.machines(request.devices).cluster if request.cluster is not None else None
    return ConvertedPlan(plan, sized, cluster)


def _search(request: ConversionRequest, profile: Profile) -> ConvertedPlan:
    from ..planner import search

    m = request.machines(request.devices)
    answer, estimates = search(
        profile,
        m.cluster,
        precision=request.precision,
        fleet=m.fleet,
        objective=request.objective,
        reserve=request.reserve,
    )
    best, *others = answer.candidates
    alternatives = tuple((c.plan, estimates[str(c.plan)]) for c in others if c.fits)
    return ConvertedPlan(best.plan, profile, m.cluster, estimates[str(best.plan)], None, answer.scored, alternatives)


def _read(request: ConversionRequest, profile: Profile) -> ConvertedPlan:
    """The config's plan; keys that it leaves open are decided by price."""
    from ..interop.tools import config_ranks, read_config
    from ..planner.config_completion import batch_size_of, complete

    assert request.source is not None
    ranks = request.devices or config_ranks(request.source)
    if request.tool is not None and request.cluster is None and ranks:
        config = read_config(request.source, ranks)
        if not set(config.open_keys) - {"bucket", "shard"}:  # nothing to decide, so nothing to price
            batch = batch_size_of(config, profile.batch_size, request.batch)
            return ConvertedPlan(config.plan, dataclasses.replace(profile, batch_size=batch), config=config)
    cluster = request.machines(ranks).cluster
    config = read_config(request.source, cluster.devices)
    choice = complete(
        profile, cluster, config, batch=request.batch, precision=request.precision, reserve=request.reserve
    )
    plan, e = choice.ranked[0]
    if not e.fits:
        request.notify(config_lines(config, plan))
        raise DoesNotFit(
            f"the config's plan does not fit {cluster.devices} x {cluster.device.name}",
            where=f"plan {plan}",
            rule=_memory_rule(e),
            fix=f"`drumline plan {describe(request.target)}` for one that fits",
        )
    return ConvertedPlan(plan, choice.profile, cluster, e, config, len(choice.ranked))


def config_lines(config: ImportedConfig, plan: Plan) -> str:
    """The chosen plan, then what became of each key of the config."""
    split = [] if not (plan.splits_model or plan.ep > 1) else [_SPLIT]
    return "\n".join([f"plan {plan}", *split, *str(config).splitlines()[1:]])


_SPLIT = "this plan splits the model: it runs a Job (drumline train), not a loop of initialize(model=...)"


def _memory_rule(e: Estimate) -> str:
    from ..core.units import format_bytes

    if e.lacks[0] == "host":
        return f"host memory: {format_bytes(e.host_bytes)} > {format_bytes(e.host_limit)}"
    parts = ", ".join(f"{key} {format_bytes(n)}" for key, n in e.memory_parts.items() if n)
    return f"{format_bytes(e.memory_bytes)} > {format_bytes(e.memory_limit)} ({parts})"


# ---- settings that a config needs besides the plan


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
    from ..models.zoo import gated, transformer

    family, _, size = name.partition(":")
    shape: transformer.TransformerSize | gated.GatedSize | None = None
    if family == "gpt":
        shape = transformer.GPT.get(size.lower())
    elif family == "llama":
        shape = gated.LLAMA.get(size.lower())
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
        made = job.optimizer_on([("weight", torch.nn.Parameter(torch.zeros(2, 2)))])
    except Exception:  # it needs the model's own parameters: it stays in the script, and the emitter says so
        return None
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    if type(made).__module__.partition(".")[0] != "torch" or len(made.param_groups) != 1:
        return None
    group = {key: value for key in names if (value := made.param_groups[0].get(key)) is not None}
    values = {k: list(v) if isinstance(v, tuple) else float(v) for k, v in group.items()}
    return NamedComponent(type(made).__name__, values)
