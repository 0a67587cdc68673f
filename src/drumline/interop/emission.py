"""Input and output of the config writers, and `KeyCoverage`, which tracks every key of a plan: set in the file, set in
the script, or refused with the reason. No key is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.errors import PlanError
from ..plans.combinations import CONFLICTS
from ..plans.plan import KEYS, Plan
from .imported import NamedComponent

MEANINGLESS_CONFLICTS = ("shard without zero", "virtual, split or schedule without pp")
"""Conflicts that are meaningless in any tool; the others are limits of our own engine."""

DEFAULT_REASONS = {name: key.elsewhere for name, key in KEYS.items() if key.elsewhere}
"""Reasons why a tool cannot express a key, unless its writer gives a better one."""


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The sizes of a transformer, for tools that build the model from numbers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    sequence: int


@dataclass(frozen=True, slots=True)
class EmitSettings:
    """Settings of a config besides the plan."""

    batch_size: int
    """Samples per step, over all ranks."""
    name: str = "job"
    nodes: int = 1
    """Number of nodes."""
    device: str = "cuda"
    """`cuda` or `cpu`."""
    clip: float | None = None
    optimizer: NamedComponent | None = None
    """None if it is set in the script."""
    steps: int | None = None
    seed: int | None = None
    blocks: int = 0
    """Number of composite layers: the units of recomputation and sharding."""
    block: str = ""
    """The class of the most frequent of them."""
    shape: TransformerShape | None = None
    """Sizes of a model from the zoo."""


@dataclass(frozen=True, slots=True)
class EmittedConfig:
    """A configuration of another tool."""

    tool: str
    text: str
    script: Mapping[str, str] = field(default_factory=dict)
    """Plan keys that are set in the script, each with its line."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Plan keys without effect under this plan in any tool, each with the reason."""
    notes: tuple[str, ...] = ()
    """Further hints for the user."""

    def __str__(self) -> str:
        lines = [f"in the script, {key}: {line}" for key, line in self.script.items()]
        lines += [f"no effect, {key}: {reason}" for key, reason in self.unused.items()]
        return "\n".join([*lines, *self.notes])


class KeyCoverage:
    """Tracks how a tool's config expresses each key of one plan."""

    def __init__(self, tool: str, plan: Plan, setting: EmitSettings) -> None:
        self.tool, self.plan, self.setting = tool, plan, setting
        self.script: dict[str, str] = {}
        self.notes: list[str] = []
        self._covered = {"dp"}
        self._refused: dict[str, str] = {}
        for conflict in CONFLICTS:
            if conflict.choices in MEANINGLESS_CONFLICTS and conflict.applies(plan):
                why, fix = conflict.reason_for(plan), conflict.fix_for(plan)
                raise PlanError(conflict.choices, where=f"plan {plan}", rule=why, fix=fix)

    @property
    def samples_per_rank(self) -> int:
        """Samples of one rank in one micro-batch; equal for all ranks, as other tools require."""
        batch, plan = self.setting.batch_size, self.plan
        share, rest = divmod(batch, plan.dp * plan.micro)
        if rest or not share:
            raise PlanError(
                f"a batch of {batch} under {plan}",
                where=f"{self.tool}'s batch per rank",
                rule=f"all ranks have equally many samples: {batch} % (dp({plan.dp}) x micro({plan.micro})) != 0",
                fix=f"--batch {max(1, round(batch / (plan.dp * plan.micro))) * plan.dp * plan.micro}",
            )
        return share

    def covers(self, *keys: str) -> None:
        """Mark keys as set in the file."""
        self._covered.update(keys)

    def set_in_script(self, key: str, line: str) -> None:
        """Mark a key as set by a line of the script."""
        self._covered.add(key)
        self.script[key] = line

    def cannot_express(self, key: str, reason: str) -> None:
        """Refuse a key that the tool has no equivalent for."""
        self._refused[key] = reason

    def finish(self, text: str) -> EmittedConfig:
        """The config, if it expresses every key of the plan; otherwise an error that lists the others with reasons."""
        unused: dict[str, str] = {}
        for key in self.plan.table():
            if key in self._covered or key in self._refused:
                continue
            if key == "bucket" and self.plan.zero == 3:
                unused[key] = "under zero=3 a unit is sent at once"
            else:
                self._refused[key] = DEFAULT_REASONS.get(key, "it has no key for it")
        if self._refused:
            words = dict(part.split("=", 1) for part in str(self.plan).split(","))
            parts = {f"{key}={words.get(key, getattr(self.plan, key))}": why for key, why in self._refused.items()}
            raise PlanError(
                f"{self.tool} cannot express {', '.join(parts)}",
                where=f"plan {self.plan}",
                rule="; ".join(f"{part}: {why}" for part, why in parts.items()),
            )
        return EmittedConfig(self.tool, text, self.script, unused, tuple(self.notes))


def comment(text: str, mark: str = "#") -> str:
    """Text as comment lines."""
    return "".join(f"{mark} {line}\n" for line in text.splitlines() if line.strip())
