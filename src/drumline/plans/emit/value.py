"""What an emitter gets and gives, and the sheet on which it accounts for every key of a plan: said in the file, said
in the script, or refused with the reason. Nothing of a plan is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.errors import PlanError
from ..combinations import CONFLICTS
from ..imported import Named
from ..plan import Plan

MEANINGLESS = ("shard without zero", "virtual, split or schedule without pp")
"""Conflicts that have no meaning anywhere; the others are limits of our own engine, which another tool may not have."""

EVERYWHERE = {
    "tile": "it has no spatial parallelism",
    "halo": "it has no tiles",
    "chunk": "it does not run a layer in parts",
    "sync": "its replicas agree in every step",
    "allreduce": "the backend chooses the algorithm",
    "compress": "it does not compress gradients so",
    "backend": "it has no such transport",
    "static": "it has no replication by DDP whose graph could be static",
    "bucket": "it has no key for the size of a bucket under this strategy",
    "split": "it finds the boundaries of stages itself",
    "schedule": "it has one pipeline order, 1f1b",
    "virtual": "its pipelines have one stage a rank",
    "precision": "it does not compute in this type",
    "ep": "it does not divide experts",
    "cp": "it does not divide the tokens of a sample",
    "tp": "it does not divide layers",
    "pp": "it has no pipelines",
    "compile": "it has no key for it",
    "shard": "it shards over all replicas",
    "offload": "it does not offload so",
    "recompute": "it does not recompute so",
    "zero": "it does not shard so",
}
"""Why a key cannot be expressed, where an emitter says nothing more precise."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of a transformer, for tools that build the model from numbers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What a configuration says beside the plan."""

    batch_size: int
    """Samples per step, over all ranks."""
    name: str = "job"
    nodes: int = 1
    """Over how many nodes the ranks lie."""
    device: str = "cuda"
    """`cuda` or `cpu`."""
    clip: float | None = None
    optimizer: Named | None = None
    """None where it stands in the script."""
    steps: int | None = None
    seed: int | None = None
    blocks: int = 0
    """How many layers are made of others: what is recomputed, and sharded as units."""
    block: str = ""
    """The class of the most frequent of them."""
    shape: Transformer | None = None
    """Where the model is known by its numbers."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """A configuration of another tool."""

    tool: str
    text: str
    script: Mapping[str, str] = field(default_factory=dict)
    """Keys of the plan that this tool is told in the script, each with the line that does it."""
    idle: Mapping[str, str] = field(default_factory=dict)
    """Keys of the plan that decide nothing under this plan, here or there, each with the reason."""
    notes: tuple[str, ...] = ()
    """What else is to be known."""

    def __str__(self) -> str:
        lines = [f"in the script, {key}: {line}" for key, line in self.script.items()]
        lines += [f"no effect, {key}: {reason}" for key, reason in self.idle.items()]
        return "\n".join([*lines, *self.notes])


class Sheet:
    """Accounts for the keys of one plan."""

    def __init__(self, tool: str, plan: Plan, setting: Setting) -> None:
        self.tool, self.plan, self.setting = tool, plan, setting
        self.script: dict[str, str] = {}
        self.notes: list[str] = []
        self._said = {"dp"}
        self._lost: dict[str, str] = {}
        for conflict in CONFLICTS:
            if conflict.choices in MEANINGLESS and conflict.both(plan):
                raise PlanError(f"{conflict.choices}", where=f"plan {plan}", rule=conflict.reason, fix=conflict.fix)

    @property
    def share(self) -> int:
        """Samples of one rank in one micro-batch: the same for all, since other tools know no ragged ones."""
        batch, plan = self.setting.batch_size, self.plan
        share, rest = divmod(batch, plan.dp * plan.micro)
        if rest or not share:
            raise PlanError(
                f"a batch of {batch} under {plan}",
                where=f"{self.tool}'s batch per rank",
                rule=f"every rank has as many samples: {batch} % (dp({plan.dp}) x micro({plan.micro})) != 0",
                fix=f"--batch {max(1, round(batch / (plan.dp * plan.micro))) * plan.dp * plan.micro}",
            )
        return share

    def says(self, *keys: str) -> None:
        """These stand in the file."""
        self._said.update(keys)

    def in_script(self, key: str, line: str) -> None:
        """The tool has it, but is told in the script."""
        self._said.add(key)
        self.script[key] = line

    def cannot(self, key: str, reason: str) -> None:
        """The tool has nothing for it."""
        self._lost[key] = reason

    def close(self, text: str) -> Emitted:
        """The configuration, if every key of the plan is accounted for; else all that are not, each with the reason."""
        idle: dict[str, str] = {}
        for key in self.plan.table():
            if key in self._said or key in self._lost:
                continue
            if key == "bucket" and self.plan.zero == 3:
                idle[key] = "under zero=3 a unit travels at once"
            else:
                self._lost[key] = EVERYWHERE.get(key, "it has no key for it")
        if self._lost:
            words = dict(part.split("=", 1) for part in str(self.plan).split(","))
            parts = {f"{key}={words.get(key, getattr(self.plan, key))}": why for key, why in self._lost.items()}
            raise PlanError(
                f"{self.tool} cannot express {', '.join(parts)}",
                where=f"plan {self.plan}",
                rule="; ".join(f"{part}: {why}" for part, why in parts.items()),
            )
        return Emitted(self.tool, text, self.script, idle, tuple(self.notes))


def comment(text: str, mark: str = "#") -> str:
    """Lines of a comment, for formats that have them."""
    return "".join(f"{mark} {line}\n" for line in text.splitlines() if line.strip())
