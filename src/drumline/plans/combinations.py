"""Supported combinations of plan keys. Only combinations covered by a parity test are supported: the parity tests are
generated from this table, the planner offers only what is in it, and the engine refuses the rest.
"""

from __future__ import annotations

from dataclasses import fields, replace

from ..core.errors import PlanError
from ..schedules import ASYNCHRONOUS, NATIVE, PIPEDREAM
from .conflict import Conflict
from .plan import KEYS, Plan
from .precision_conflicts import PRECISION_CONFLICTS

TESTED_VALUES: dict[str, tuple[object, ...]] = {name: key.tested for name, key in KEYS.items() if key.tested}
"""Keys with some values covered by parity tests, in all pairs."""

UNRESTRICTED_KEYS = frozenset(name for name, key in KEYS.items() if key.tested is None)
"""Keys of which any value is supported."""


BACKENDS_OWN = ("auto", NATIVE)
"""Values of `allreduce` that name no schedule."""


WORKER_KEYS = ("dp", "micro", "recompute", "precision", "compile", "backend")
"""Keys that may be set where replicas do not meet in every step."""
_SYNC_KEYS = ("sync", "servers", "backup", "damping", "outer", "sync_first", "across")


def _needs_meeting(plan: Plan) -> dict[str, object]:
    """The keys of a plan that need replicas to meet in every step."""
    return {k: v for k, v in plan.table().items() if k not in (*WORKER_KEYS, *_SYNC_KEYS)}


def _why_meeting(plan: Plan) -> str:
    keys = ", ".join(f"{key}={value}" for key, value in _needs_meeting(plan).items())
    return (
        f"{keys} needs replicas that meet in every step, and those of sync={plan.sync} do not; "
        f"besides sync, only {', '.join(WORKER_KEYS)} apply"
    )


def _without_meeting(plan: Plan) -> str:
    """The nearest plan whose replicas need not meet."""
    kept = {k: v for k, v in plan.table().items() if k not in _needs_meeting(plan)}
    return str(Plan.from_table(kept, where=f"plan {plan}"))


def _uncaptured(plan: Plan) -> str:
    """The keys of a plan whose steps cannot be captured as CUDA graphs."""
    kept = ("zero", "micro", "precision", "compile", "graph", "bucket", "allreduce", "compress", "static")
    keys = {k: v for k, v in plan.table().items() if k not in kept and (k, v) != ("dp", 1)}
    return ", ".join(f"{k}={v}" for k, v in (keys | ({"zero": 3} if plan.zero == 3 else {})).items())


CONFLICTS = (
    Conflict(
        "graph with keys that are not captured",
        lambda p: p.graph and bool(_uncaptured(p)),
        lambda p: f"{_uncaptured(p)}: a CUDA graph repeats the kernels of one GPU, without messages and host memory",
        lambda p: str(replace(p, graph=False)),
    ),
    Conflict(
        "servers with a sync that has none",
        lambda p: p.servers > 1 and p.sync_mode not in ("server", "async", "stale"),
        "parameter servers belong to sync=server, async and stale:k",
        "servers=1, or one of these",
    ),
    Conflict(
        "more servers than workers",
        lambda p: p.servers > p.dp,
        "each server holds a share of the parameters for the workers: at most one server per worker, servers <= dp",
        lambda p: str(replace(p, servers=p.dp)),
    ),
    Conflict(
        "backup without sync=server",
        lambda p: p.backup > 0 and p.sync != "server",
        "only sync=server waits for all gradients of a step and can stop waiting for the slowest",
        lambda p: str(replace(p, sync="server", damping="none")),
    ),
    Conflict(
        "backup for all workers",
        lambda p: p.backup >= p.dp,
        "a step needs at least one gradient: backup < dp",
        lambda p: str(replace(p, backup=p.dp - 1)),
    ),
    Conflict(
        "damping without stale gradients",
        lambda p: p.damping != "none" and p.sync_mode not in ("async", "stale"),
        "only sync=async and stale:k apply gradients of older weights",
        lambda p: str(replace(p, damping="none")),
    ),
    Conflict(
        "outer, sync_first or across without sync=local:k",
        lambda p: (p.outer != "none" or p.sync_first > 0 or p.across > 0) and p.sync_mode != "local",
        "they configure local steps",
        lambda p: str(replace(p, outer="none", sync_first=0, across=0)),
    ),
    Conflict(
        "an outer optimizer that stands still or grows without limit",
        lambda p: p.outer_rates is not None and not (p.outer_rates[0] > 0 and p.outer_rates[1] < 1),
        "outer=nesterov:RATE:MOMENTUM has a rate above 0 and a momentum below 1",
        lambda p: str(replace(p, outer="nesterov")),
    ),
    Conflict(
        "across that is no multiple of k",
        lambda p: p.across > 0 and p.sync_mode == "local" and p.across % p.sync_steps > 0,
        "hosts average among themselves when their ranks do: across is a multiple of k in sync=local:k",
        lambda p: str(replace(p, across=-(-p.across // p.sync_steps) * p.sync_steps)),
    ),
    Conflict(
        "keys that need replicas to meet, and sync without allreduce",
        lambda p: p.sync_mode != "allreduce" and bool(_needs_meeting(p)),
        _why_meeting,
        _without_meeting,
    ),
    Conflict(
        "sync without allreduce, and backend=threads",
        lambda p: p.sync_mode != "allreduce" and p.backend == "threads",
        "replicas that are threads always compute one step together",
        lambda p: str(replace(p, backend="auto")),
    ),
    Conflict(
        "sync without allreduce, and precision=fp16",
        lambda p: p.sync_mode != "allreduce" and p.precision == "fp16",
        "the loss scale is one number for all replicas, and these do not agree on it",
        lambda p: str(replace(p, precision="bf16")),
    ),
    Conflict(
        "shard without zero",
        lambda p: p.shard > 0 and not p.zero,
        "shard is the number of replicas that share a sharded copy; zero=0 shards nothing",
        "zero=1, 2 or 3",
    ),
    Conflict(
        "offload=all below zero=3",
        lambda p: p.offload == "all" and p.zero < 3,
        "parameters are gathered layer by layer only if they are sharded",
        "zero=3, or offload=optimizer",
    ),
    Conflict(
        "compress with zero",
        lambda p: p.compress != "none" and p.zero > 0,
        "compression applies to the all-reduce of replicas",
        "zero=0",
    ),
    Conflict(
        "compress=powersgd with precision=fp16",
        lambda p: p.compress == "powersgd" and p.precision == "fp16",
        "an overflow would stay in the error feedback of PowerSGD",
        "precision=bf16",
    ),
    Conflict("static with zero", lambda p: p.static and p.zero > 0, "a static graph is an option of DDP", "zero=0"),
    Conflict(
        "static with micro-batches",
        lambda p: p.static and p.micro > 1,
        "torch records the static graph in its first backward, which must send; with micro-batches it does not",
        "micro=1, or static=false",
    ),
    Conflict(
        "compress with static",
        lambda p: p.compress != "none" and p.static,
        "torch's hooks and its static graph order the buckets differently in the first step",
        "one of the two",
    ),
    Conflict(
        "backend=threads with zero",
        lambda p: p.backend == "threads" and p.zero > 0,
        "threads share one copy of the weights: there is nothing to shard",
        "zero=0, or processes",
    ),
    Conflict(
        "backend=threads with compress or static",
        lambda p: p.backend == "threads" and (p.compress != "none" or p.static),
        "threads send no messages",
        "processes instead of threads",
    ),
    Conflict(
        "backend=threads with recompute",
        lambda p: p.backend == "threads" and p.recompute != "none",
        "the backward runs in one thread, where a norm would wait forever for the others",
        "processes",
    ),
    Conflict(
        "recompute=selective with compile",
        lambda p: p.recompute == "selective" and p.compile,
        "a compiled layer is one operator, inside which the compiler chooses",
        "recompute=full, or compile=false",
    ),
    Conflict(
        "zero=3 with a split model",
        lambda p: p.zero == 3 and p.splits_model,
        "a captured graph needs all its parameters while it runs; zero=3 gathers them module by module",
        "zero=1 or 2, or more pp or tp",
    ),
    Conflict(
        "zero=2 with pp",
        lambda p: p.zero == 2 and p.pp > 1,
        "a pipeline keeps gradients until its last micro-batch and sends them once",
        "zero=1",
    ),
    Conflict(
        "a split model with backend=threads",
        lambda p: p.splits_model and p.backend == "threads",
        "threads share one copy of the model",
        "processes instead of threads",
    ),
    Conflict(
        "a split model with compress, static, chunk or compile",
        lambda p: p.splits_model and (p.compress != "none" or p.static or p.chunk > 1 or p.compile),
        "these change the user's modules, but a captured graph runs instead",
        "leave it out",
    ),
    Conflict(
        "a split model with recompute=selective or offload",
        lambda p: p.splits_model and (p.recompute == "selective" or p.offload != "none"),
        "these change the user's modules, but a captured graph runs instead",
        "recompute=full, offload=none",
    ),
    Conflict(
        "zero-bubble with recompute",
        lambda p: p.schedule == "zero-bubble" and p.recompute != "none",
        "the gradients of inputs and of weights are computed separately, and each would recompute the layer",
        "schedule=1f1b or interleaved",
    ),
    Conflict(
        "virtual, split or schedule without pp",
        lambda p: p.pp == 1 and (p.virtual > 1 or bool(p.split) or p.schedule not in ("1f1b", *ASYNCHRONOUS)),
        "they configure a pipeline",
        "pp=2 or more",
    ),
    Conflict(
        "pipedream with micro-batches",
        lambda p: p.schedule == PIPEDREAM and p.micro > 1,
        "whole batches follow each other through its stages, and each is applied by itself",
        lambda p: str(replace(p, micro=1)),
    ),
    Conflict(
        "pipedream-2bw with fewer micro-batches than stages",
        lambda p: p.schedule in ASYNCHRONOUS and p.schedule != PIPEDREAM and p.micro < p.pp,
        "a batch begins on weights that the last but one has updated on every stage: micro >= pp",
        lambda p: str(replace(p, micro=p.pp)),
    ),
    Conflict(
        "pipedream with zero",
        lambda p: p.schedule in ASYNCHRONOUS and p.zero > 0,
        "a stage stores whole older weights for the batches in flight, which sharding would not make smaller",
        lambda p: str(replace(p, zero=0, shard=0)),
    ),
    Conflict(
        "pipedream with virtual, tp, cp, tile or ep",
        lambda p: p.schedule in ASYNCHRONOUS and p.virtual * p.tp * p.cp * p.tile[0] * p.tile[1] * p.ep > 1,
        "only pp and dp are tested with a pipeline that does not drain",
        lambda p: str(replace(p, virtual=1, tp=1, cp=1, tile=(1, 1), halo=True, ep=1, split=())),
    ),
    Conflict(
        "pipedream with precision=fp16",
        lambda p: p.schedule in ASYNCHRONOUS and p.precision == "fp16",
        "a batch whose gradients overflow is repeated with a smaller loss scale, but later batches are in flight",
        lambda p: str(replace(p, precision="bf16")),
    ),
    Conflict(
        "halo=false without tile",
        lambda p: not p.halo and p.tile == (1, 1),
        "only tiles exchange halos",
        "tile=1x2 or more, or halo=true",
    ),
    Conflict(
        "ep with a split model",
        lambda p: p.ep > 1 and p.splits_model,
        "routing depends on the values of tokens, which a captured graph does not have",
        "ep without tp, cp, pp and tile",
    ),
    Conflict(
        "ep with zero=3",
        lambda p: p.ep > 1 and p.zero == 3,
        "zero=3 gathers parameters over all replicas, which have different experts",
        "zero=2, or more ep",
    ),
    Conflict(
        "ep with compress or static",
        lambda p: p.ep > 1 and (p.compress != "none" or p.static),
        "these are options of DDP, and ranks with different experts are not replicas",
        "leave it out",
    ),
    Conflict(
        "ep with backend=threads",
        lambda p: p.ep > 1 and p.backend == "threads",
        "threads share one copy of the model",
        "processes instead of threads",
    ),
    Conflict(
        "ep with chunk",
        lambda p: p.ep > 1 and p.chunk > 1,
        "experts are not split, and tiled layers would have other names",
        "more ep",
    ),
    Conflict(
        "ep with compile",
        lambda p: p.ep > 1 and p.compile,
        "the number of tokens per expert changes with every batch, and with it the compiled shapes",
        "compile=false",
    ),
    Conflict(
        "allreduce with zero=3",
        lambda p: p.allreduce not in BACKENDS_OWN and p.zero == 3,
        "torch's FSDP2 sends its own collectives, by the backend's own algorithm",
        "allreduce=auto, or zero=1 or 2",
    ),
    Conflict(
        "allreduce with compress",
        lambda p: p.allreduce not in BACKENDS_OWN and p.compress != "none",
        "torch's compression hooks send by the backend's own all-reduce",
        "allreduce=auto, or compress=none",
    ),
    Conflict(
        "allreduce with backend=threads",
        lambda p: p.allreduce not in BACKENDS_OWN and p.backend == "threads",
        "threads send no messages",
        "processes instead of threads",
    ),
    Conflict(
        "allreduce with backend=nccl",
        lambda p: p.allreduce not in BACKENDS_OWN and p.backend == "nccl",
        "NCCL chooses its algorithm itself; the variable NCCL_ALGO selects one",
        "allreduce=auto",
    ),
    Conflict(
        "allreduce with a split model or ep",
        lambda p: p.allreduce not in BACKENDS_OWN and (p.splits_model or p.ep > 1),
        "only the gradients of replicas and flat shards travel by schedules; these plans use the backend's collectives",
        "allreduce=auto",
    ),
    Conflict(
        "backend=threads with compile",
        lambda p: p.backend == "threads" and p.compile,
        "torch compiles in one thread at a time",
        "processes instead of threads",
    ),
    *PRECISION_CONFLICTS,
)
"""Pairs that are refused although each value alone is supported."""


def refusal(plan: Plan) -> str:
    """The reason why the engine refuses a plan, `key=value` or the name of a conflict; empty if it runs."""
    for f in fields(plan):
        value = getattr(plan, f.name)
        if f.name in UNRESTRICTED_KEYS or value in TESTED_VALUES.get(f.name, ()) or value == f.default:
            continue
        return f"{f.name}={plan.table().get(f.name, value)}"
    first = conflict(plan)
    return first.choices if first else ""


def conflict(plan: Plan) -> Conflict | None:
    """The first conflict between choices of the plan."""
    return next((c for c in CONFLICTS if c.applies(plan)), None)


def check(plan: Plan) -> None:
    """Refuse a plan that no parity test covers, with the reason."""
    first = conflict(plan)
    if first:
        raise PlanError(
            f"the engine does not run {first.choices}",
            where=f"plan {plan}",
            rule=first.reason_for(plan),
            fix=first.fix_for(plan),
        )
    reason = refusal(plan)
    if reason:
        tested = "; ".join(f"{key}: {', '.join(map(str, values))}" for key, values in TESTED_VALUES.items())
        raise PlanError(
            f"the engine does not run {reason}",
            where=f"plan {plan}",
            rule=f"only tested values are supported: any {', '.join(sorted(UNRESTRICTED_KEYS))}; {tested}",
        )
