"""Sharded experts compute the same as the serial layer, forward and backward."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import expert_functions as functions
import pytest
import torch
from expert_functions import Case, Expert
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from world import World

from drumline.core.errors import JobError, PlanError
from drumline.partition.experts import AbsentParameter, ExpertRows, Experts, shard_experts
from drumline.partition.sharding.redistribution import Axis

Worlds = Callable[[int], World]

TOKENS = {2: (7, 4), 4: (3, 6, 1, 5)}
NONE = {2: (0, 9), 4: (0, 6, 0, 5)}
IMPORTS = 200.0
"""Seconds: every rank imports transformers first."""
needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="transformers is not installed: pip install drumline[hf]"
)


def close(results: list[list[dict[str, float]]], grid: list[Case], bound: float = 1e-12) -> None:
    for rank, answers in enumerate(results):
        for case, errors in zip(grid, answers, strict=True):
            assert max(errors.values()) < bound, f"rank {rank}, {case}: {errors}"


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_the_serial_layer(world: Worlds, n: int) -> None:
    few, none = TOKENS[n], NONE[n]
    grid = [
        Case(few),
        Case(few, experts=5),
        Case(few, experts=n, k=1),
        Case(few, experts=4, k=4),
        Case(none),
        Case(none, k=1, only=(6,)),
        Case(few, k=1, only=(0,)),
        Case(few, only=(1, 7)),
        Case(few, k=1, only=(0,), frozen=True),
        Case(few, frozen=True),
        Case(few, recompute=True),
        Case(few, k=1, only=(3,), recompute=True),
        Case(few, k=1, only=(0,), frozen=True, recompute=True),
    ]
    close(world(n).run(functions.all_errors, grid), grid)


@needs_transformers
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_transformers(world: Worlds, n: int) -> None:
    kinds = [("eager", torch.float64, 1e-12), ("batched_mm", torch.float64, 1e-12), ("grouped_mm", torch.float32, 5e-6)]
    for implementation, dtype, bound in kinds:  # torch's grouped_mm has no float64
        grid = [
            Case(TOKENS[n], family=family, implementation=implementation, only=only, experts=6, dtype=dtype)
            for family in ("mixtral", "qwen3", "deepseek", "gpt-oss")
            for only in (None, (0, 1))
        ]
        close(world(n).run(functions.all_errors, grid, timeout=IMPORTS), grid, bound)


@needs_transformers
def test_a_mixtral_model(world: Worlds) -> None:
    """Its norms and its router compute in float32, so the bound is that of float32."""
    for loss, gradients in world(2).run(functions.language_model, timeout=IMPORTS):
        assert loss < 1e-6
        assert max(gradients.values()) < 2e-5, gradients


def test_over_shared_memory(world: Callable[..., World]) -> None:
    grid = [Case(TOKENS[2]), Case(NONE[2], k=1, only=(6,))]
    close(world(2, "shm").run(functions.all_errors, grid), grid)


def test_in_lower_precision(world: Worlds) -> None:
    grid = [Case(TOKENS[2], dtype=torch.float32)]
    close(world(2).run(functions.all_errors, grid), grid, 5e-6)


def test_parameters_of_a_rank(world: Worlds) -> None:
    results = world(2).run(functions.described, Case((1, 1), experts=3))
    (first, shapes), (second, _) = results
    assert first.modules == ("experts",) and first.unrecognised == ()
    assert set(first.parts) == {"experts.0.up.weight", "experts.0.up.bias", "experts.0.down.weight"}
    assert first.parts["experts.0.up.weight"] == ExpertRows("experts.0.up.weight", (9, 8), 0)
    assert first.absent["experts.2.up.bias"] == AbsentParameter((9,), torch.float64)
    assert set(first.parts) | set(first.absent) == set(second.parts) | set(second.absent)
    assert set(second.parts) == set(first.absent), "every expert has one owner"
    assert "experts.1.up.weight" not in shapes and shapes["router.weight"] == (3, 8)


@needs_transformers
def test_batched_parameters_of_a_rank(world: Worlds) -> None:
    results = world(2).run(functions.described, Case((1, 1), experts=3, family="mixtral"), timeout=IMPORTS)
    for rank, (sharded, shapes) in enumerate(results):
        assert sharded.absent == {}
        assert sharded.parts["experts.gate_up_proj"] == ExpertRows("experts.gate_up_proj", (3, 8, 8), rank * 64)
        assert shapes["experts.gate_up_proj"] == (rank + 1, 8, 8)


def test_a_token_goes_once_to_a_rank(world: Worlds) -> None:
    """All four experts of a token, on two ranks: two rows are sent for it, not four."""
    for recorded in world(2).run(functions.sent_rows, Case((3, 3), experts=4, k=4)):
        assert recorded == [(2,), (6, 4), (6, 4), (6, 8), (6, 8)]


# -- the layer alone


def test_the_layer_is_the_weighted_sum() -> None:
    torch.manual_seed(0)
    experts = Experts(Expert() for _ in range(4)).double()
    x, weight = torch.randn(2, 3, 8, dtype=torch.float64), torch.rand(2, 3, 2, dtype=torch.float64)
    index = torch.tensor([[[0, 1], [1, 3], [3, 3]], [[0, 3], [1, 0], [3, 1]]])
    want = torch.stack(
        [
            torch.stack(
                [
                    sum(w * experts[int(e)](row[None])[0] for e, w in zip(i, ws, strict=True))
                    for row, i, ws in zip(*rows, strict=True)
                ]
            )
            for rows in zip(x, index, weight, strict=True)
        ]
    )
    out = experts(x, index, weight)
    torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)
    out.sum().backward()
    idle = experts[2].up.weight.grad
    assert idle is not None and not idle.any(), "an expert without tokens has gradients of 0"


def test_a_batch_without_tokens() -> None:
    experts = Experts(Expert() for _ in range(2))
    out = experts(torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    assert out.shape == (0, 8)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_shapes_without_values() -> None:
    with FakeTensorMode():
        experts = Experts(Expert() for _ in range(3))
        x = torch.empty(7, 8, requires_grad=True)
        out = experts(x, torch.zeros(7, 2, dtype=torch.long), torch.empty(7, 2))
        out.sum().backward()
        assert out.shape == (7, 8) and x.grad is not None and x.grad.shape == (7, 8)


@pytest.mark.parametrize("expert", [-1, 2])
def test_a_missing_expert_is_refused(expert: int) -> None:
    experts = Experts(Expert() for _ in range(2))
    with pytest.raises(JobError, match=f"the router chose expert {expert}\n.*there are 2 experts: 0 to 1"):
        experts(torch.zeros(1, 8), torch.tensor([[expert]]), torch.ones(1, 1))


def test_an_expert_that_changes_the_width_is_refused() -> None:
    experts = Experts(nn.Linear(8, 3) for _ in range(2))
    with pytest.raises(JobError, match=r"an expert returned \(1, 3\) for \(1, 8\)"):
        experts(torch.zeros(1, 8), torch.tensor([[0]]), torch.ones(1, 1))


# -- refusals


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([e(x) for e in self.experts]).sum(0)


def test_a_model_without_known_experts_is_refused() -> None:
    with pytest.raises(PlanError, match="no experts that can be sharded\n.*look like experts: experts\n.*known are"):
        shard_experts(Unknown(), Axis("ep", 2, 0))


def test_unrecognised_experts_are_named() -> None:
    model = nn.ModuleDict({"known": Experts(Expert() for _ in range(2)), "other": Unknown()})
    sharded = shard_experts(model, Axis("ep", 2, 1))
    assert sharded.modules == ("known",) and sharded.unrecognised == ("other.experts",)
    assert len(list(model["other"].parameters())) == 6


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(
        PlanError, match="2 experts cannot be sharded over 3 ranks\n.*where: *moe\n.*2 < 3\n.*ep=2 or less"
    ):
        shard_experts(nn.ModuleDict({"moe": Experts(Expert() for _ in range(2))}), Axis("ep", 3, 0))


def test_an_expert_that_shares_a_parameter_is_refused() -> None:
    shared = Expert()
    with pytest.raises(PlanError, match="shares a parameter with another module\n.*where: *0.up.weight"):
        shard_experts(Experts([shared, shared]), Axis("ep", 2, 0))
