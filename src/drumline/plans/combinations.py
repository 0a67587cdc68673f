"""What composes with what: the one table that the planner offers from, the engine refuses by, and the parity tests
are generated from. A combination that is not here has no parity test, and so it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from ..core.errors import PlanError
from .plan import Plan

HELD: dict[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "all"),
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "backend": ("auto", "gloo", "nccl", "shm", "threads"),
    "compress": ("none", "fp16", "powersgd"),
    "compile": (False, True),
    "static": (False, True),
    "halo": (True, False),
    "schedule": ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble"),
}
"""Keys of which some values are held by parity tests, every pair of them among each other."""

FREE = frozenset({"dp", "shard", "micro", "bucket", "chunk", "pp", "virtual", "split", "tp", "cp", "ep", "tile"})
"""Keys of which any value is held."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two choices that do not go together."""

    choices: str
    both: Callable[[Plan], bool]
    reason: str
    fix: str


CONFLICTS = (
    Conflict(
        "shard without zero",
        lambda p: p.shard > 0 and not p.zero,
        "shard says over how many replicas a sharded copy lies; zero=0 shards nothing",
        "zero=1, 2 or 3",
    ),
    Conflict(
        "offload=all below zero=3",
        lambda p: p.offload == "all" and p.zero < 3,
        "parameters come to the device layer by layer only where they are sharded",
        "zero=3, or offload=optimizer",
    ),
    Conflict(
        "compress with zero",
        lambda p: p.compress != "none" and p.zero > 0,
        "gradients are compressed where replicas all-reduce them",
        "zero=0",
    ),
    Conflict(
        "compress=powersgd with precision=fp16",
        lambda p: p.compress == "powersgd" and p.precision == "fp16",
        "an overflow would stay in the error that PowerSGD carries from step to step",
        "precision=bf16",
    ),
    Conflict(
        "static with zero",
        lambda p: p.static and p.zero > 0,
        "a static graph is an option of replication",
        "zero=0",
    ),
    Conflict(
        "static with micro-batches",
        lambda p: p.static and p.micro > 1,
        "torch learns the static graph from its first backward, which must send; with micro-batches it does not",
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
        "the backward runs in one thread, where a norm would wait for the others for ever",
        "processes",
    ),
    Conflict(
        "recompute=selective with compile",
        lambda p: p.recompute == "selective" and p.compile,
        "a compiled layer is one operator: there is nothing to choose among, and the compiler chooses inside of it",
        "recompute=full, or compile=false",
    ),
    Conflict(
        "zero=3 with a split model",
        lambda p: p.zero == 3 and p.splits_model,
        "a captured graph holds its parameters whole while it runs; zero=3 gathers them unit by unit of the modules",
        "zero=1 or 2, or more pp or tp",
    ),
    Conflict(
        "zero=2 with pp",
        lambda p: p.zero == 2 and p.pp > 1,
        "a pipeline keeps a stage's gradients until its last micro-batch, so they are sent once",
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
        "these work on the user's modules, and what runs is a captured graph",
        "leave it out",
    ),
    Conflict(
        "a split model with recompute=selective or offload",
        lambda p: p.splits_model and (p.recompute == "selective" or p.offload != "none"),
        "these work on the user's modules, and what runs is a captured graph",
        "recompute=full, offload=none",
    ),
    Conflict(
        "zero-bubble with recompute",
        lambda p: p.schedule == "zero-bubble" and p.recompute != "none",
        "the gradients of inputs and of weights come apart, and each would compute the layer again",
        "schedule=1f1b or interleaved",
    ),
    Conflict(
        "virtual, split or schedule without pp",
        lambda p: p.pp == 1 and (p.virtual > 1 or bool(p.split) or p.schedule != "1f1b"),
        "they say how a pipeline runs",
        "pp=2 or more",
    ),
    Conflict(
        "halo=false without tile",
        lambda p: not p.halo and p.tile == (1, 1),
        "only tiles have neighbours whose rows they could do without",
        "tile=1x2 or more, or halo=true",
    ),
    Conflict(
        "ep with a split model",
        lambda p: p.ep > 1 and p.splits_model,
        "where a token goes depends on its values, and a captured graph has none",
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
        "these are options of replication, and the ranks are no replicas of each other",
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
        "an expert lies whole on its rank; layers in parts would have other names there",
        "more ep",
    ),
    Conflict(
        "ep with compile",
        lambda p: p.ep > 1 and p.compile,
        "how many tokens an expert gets changes with every batch, and with it the shapes that would be compiled",
        "compile=false",
    ),
    Conflict(
        "backend=threads with compile",
        lambda p: p.backend == "threads" and p.compile,
        "torch compiles in one thread at a time",
        "processes instead of threads",
    ),
)
"""What is refused although each of the two is held."""


def refusal(plan: Plan) -> str:
    """Why the engine will not run a plan, as `key=value` or the conflict's name, or nothing when it will."""
    for f in fields(plan):
        value = getattr(plan, f.name)
        if f.name in FREE or value in HELD.get(f.name, ()) or value == f.default:
            continue
        return f"{f.name}={Plan.table(plan).get(f.name, value)}"
    found = conflict(plan)
    return found.choices if found else ""


def conflict(plan: Plan) -> Conflict | None:
    """The first pair of choices that do not go together."""
    return next((c for c in CONFLICTS if c.both(plan)), None)


def check(plan: Plan) -> None:
    """Refuse, by name, a plan that no parity test holds."""
    found = conflict(plan)
    if found:
        raise PlanError(
            f"the engine does not run {found.choices}", where=f"plan {plan}", rule=found.reason, fix=found.fix
        )
    reason = refusal(plan)
    if reason:
        held = "; ".join(f"{key}: {', '.join(map(str, values))}" for key, values in HELD.items())
        raise PlanError(
            f"the engine does not run {reason}",
            where=f"plan {plan}",
            rule=f"only what a parity test holds is run: any {', '.join(sorted(FREE))}; {held}",
        )
