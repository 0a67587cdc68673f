"""The captured graph: whole operators, no in-place ones where possible, and a refusal that names what reads values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_contract import Case, captured_of
from torch import nn

from drumline.core.errors import TraceError
from drumline.partition.capture import capture
from drumline.tracing.fake import fake_mode

aten = torch.ops.aten


def targets(case: Case) -> list[Any]:
    captured, _, _ = captured_of(case)
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


def test_layers_stay_whole() -> None:
    case = Case("layers", lambda a, b, c: F.layer_norm(F.linear(a, b, c), (6,)), ((3, 4), (6, 4), (6,)))
    assert targets(case) == [aten.linear.default, aten.layer_norm.default]


def test_in_place_operators_are_replaced() -> None:
    assert targets(Case("relu", lambda a: F.relu(a + 1, inplace=True), ((3, 4),))) == [
        aten.add.Tensor,
        aten.relu.default,
    ]


def test_writes_through_a_view_stay() -> None:
    def run(a: torch.Tensor) -> torch.Tensor:
        x = a.clone()
        x[:, 1:] = 0.0
        return x

    assert any(t._schema.is_mutable for t in targets(Case("rows", run, ((3, 4),))))


def test_dead_nodes_are_removed() -> None:
    def run(a: torch.Tensor) -> torch.Tensor:
        a.exp().sum()
        return a * 2

    assert targets(Case("dead", run, ((3, 4),))) == [aten.mul.Tensor]


def test_placeholders_have_roles_and_names() -> None:
    model = nn.BatchNorm1d(4)
    model.bias.requires_grad_(False)
    mode = fake_mode()
    captured = capture(model, lambda m, leaves: m(leaves[0]).sum(), [mode.from_tensor(torch.ones(3, 4))], mode)
    parameters = captured.placeholders("parameter")
    assert {k: n.meta["trained"] for k, n in parameters.items()} == {"weight": True, "bias": False}
    assert list(captured.placeholders("buffer")) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(captured.placeholders("batch")) == ["0"]


def test_capturing_a_model_that_reads_values_is_refused() -> None:
    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    mode = fake_mode()
    with pytest.raises(TraceError, match="Asks cannot be traced") as caught:
        capture(Asks(4, 4), lambda m, leaves: m(leaves[0]), [mode.from_tensor(torch.ones(3, 4))], mode)
    assert "torch.where" in str(caught.value)
