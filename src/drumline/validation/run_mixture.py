"""The experts and the attention of a published mixture of experts, from the columns of its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LATENT_FAMILIES = ("deepseek-v2", "deepseek-v3")
"""Families whose keys and values are expanded from a latent width."""
HEAD_WIDTH, VALUE_WIDTH, QUERY_LATENT, KV_LATENT = 192, 128, 1536, 512
"""Their published attention: heads of 128 with 64 rotated values besides, and latent widths of queries and keys."""
ROUTED_NODES = {"deepseek-v2": 3, "deepseek-v3": 4}
"""Nodes (devices, in V2) that the experts of a token are on at most, as published."""


@dataclass(frozen=True, slots=True)
class RunMixture:
    """Experts per mixture layer; fields as in `ModelColumns`."""

    experts: int
    active_experts: int
    expert_ffn: int
    shared_experts: int
    routed_nodes: int
    dense_layers: int

    @property
    def equal_ffn(self) -> int:
        """Width of a dense layer that is as wide as what a token visits; the published models have it."""
        return self.expert_ffn * (self.active_experts + self.shared_experts)


class CountRow(Protocol):
    """A row of which cells can be read as text and as whole numbers."""

    def text(self, key: str) -> str:
        """A cell."""

    def count(self, key: str, default: int | None = None) -> int:
        """A cell as a whole number, at least 1."""


def parse_mixture(row: CountRow, layers: int) -> RunMixture | None:
    """The experts of a row; None for a dense model."""
    if not row.text("experts"):
        return None
    dense = 0 if row.text("dense_layers") in ("", "0") else row.count("dense_layers")
    shared = 0 if row.text("experts_shared") in ("", "0") else row.count("experts_shared")
    active, family = row.count("experts_active"), row.text("model_family").lower()
    nodes = next((n for name, n in ROUTED_NODES.items() if family.startswith(name)), active)
    ffn = row.count("expert_ffn")
    return RunMixture(row.count("experts"), active, ffn, shared, min(active, nodes), min(dense, layers))


def is_latent(row: CountRow) -> bool:
    """Whether the model's keys and values are expanded from a latent width."""
    return row.text("model_family").lower().startswith(LATENT_FAMILIES)
