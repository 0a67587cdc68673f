"""Tensor-parallel splits: by architecture, given by the plan, and refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from tensor_split_models import ARCHITECTURES, Encoder, batch, build, captured_of, loss, parity
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from world import World

from drumline.core.errors import PlanError
from drumline.partition.sharding.layout import Split, even_split
from drumline.partition.sharding.redistribution import Axis
from drumline.partition.sharding_pass import ShardingPass
from drumline.partition.tensor_splits import TensorSplits, choose_tensor_splits

Worlds = Callable[[int], World]

LEFT = {
    "gpt2": {"transformer.wpe.weight"},
    "bert": {"bert.embeddings.token_type_embeddings.weight"},
    "roberta": {"roberta.embeddings.token_type_embeddings.weight"},
    "vit": {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"},
}
"""Parameters that are not worth splitting."""
ALONE = {"vit": 1, "convolutions": 1}
"""Number of weights without a partner: the patch embedding, the first convolution."""
KINDS = [(name, kind) for name in ARCHITECTURES for kind in ("sdpa", "eager") if (name, kind) != ("bloom", "sdpa")]
QUICK = {("llama", "eager"), ("phi3", "sdpa"), ("encoder", "sdpa"), ("convolutions", "sdpa")}


def chosen(
    model: nn.Module, leaves: list[torch.Tensor], n: int = 2, given: Mapping[str, str] | None = None
) -> TensorSplits:
    return choose_tensor_splits(captured_of(model, leaves), n, given)


@pytest.mark.parametrize(
    ("name", "attention"),
    [p if p[1] == "sdpa" or p[0] == "bloom" else pytest.param(*p, marks=pytest.mark.slow) for p in KINDS],
)
def test_all_layers_are_split_and_nothing_is_gathered(name: str, attention: str) -> None:
    model = build(name, attention)
    captured = captured_of(model, batch(name))
    choice = choose_tensor_splits(captured, 2)
    done = ShardingPass(captured.graph, Axis("tp", 2, 0), captured.mode, choice.splits)
    done.run()
    parameters = dict(model.named_parameters())
    assert {k for k in choice.unsplit if parameters[k].dim() > 1} == LEFT.get(name, set())
    assert sum(row == "its output is gathered" for _, row in choice.groups) == ALONE.get(name, 0)
    assert done.gathered == {} and choice.uneven_heads == []


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        p if p in QUICK else pytest.param(*p, marks=pytest.mark.slow)
        for p in [*KINDS, ("encoder", "sdpa"), ("convolutions", "sdpa")]
    ],
)
def test_two_ranks_match_one(world: Worlds, name: str, attention: str) -> None:
    assert world(2).run(parity, name, attention) == [[], []]


def test_a_fused_projection_is_split_by_heads() -> None:
    choice = chosen(Encoder(), batch("encoder"))
    fused = next(s for s in choice.splits.values() if len(s.cuts) > 1)
    assert fused == Split(0, ((0, 16, 32),) * 3)


def test_uneven_heads_are_reported() -> None:
    choice = chosen(Encoder(heads=2), batch("encoder"), 4)
    assert choice.uneven_heads == [("layers.layers.0.self_attn", 2, 4), ("layers.layers.1.self_attn", 2, 4)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_uneven_key_heads_are_reported(attention: str) -> None:
    choice = chosen(build("llama", attention), batch("llama"), 4)
    assert choice.uneven_heads == [(f"model.layers.{i}.self_attn", 2, 4) for i in (0, 1)]


def test_splits_given_by_the_plan() -> None:
    given = {
        "layers.layers.*.linear1.weight": "whole",
        "layers.layers.0.self_attn.in_proj_weight": "column 3",
        "words.weight": "rows",
        "layers.layers.1.linear2.weight": "row",
    }
    captured = captured_of(Encoder(), batch("encoder"))
    choice, names = (
        choose_tensor_splits(captured, 2, given),
        {k: n.name for k, n in captured.placeholders("parameter").items()},
    )
    assert choice.splits[names["layers.layers.0.self_attn.in_proj_weight"]] == even_split(0, 96, 2, 3)
    assert choice.splits[names["layers.layers.0.self_attn.in_proj_bias"]] == even_split(0, 96, 2, 3)
    assert choice.splits[names["layers.layers.1.linear2.weight"]] == even_split(1, 64, 2)
    assert choice.splits[names["words.weight"]] == even_split(0, 64, 2)
    assert choice.unsplit["layers.layers.0.linear1.weight"] == "the plan keeps it whole"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"layers.layers.0.linear1.weigt": "row"}, "Did you mean 'layers.layers.0.linear1.weight'?"),
        ({"head.weight": "colum"}, "Did you mean 'column'?"),
        ({"head.weight": "row 2"}, "column, column N, row, rows or whole"),
        ({"words.weight": "column"}, "words.weight cannot be split as a column"),
        ({"head.weight": "column 5"}, "64 % (5 * 2) == 0"),
    ],
)
def test_wrong_splits_of_the_plan_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        chosen(Encoder(), batch("encoder"), 2, given)
    assert says in str(caught.value)


def test_probes_do_not_walk_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(layers: int) -> int:
        captured = captured_of(Encoder(layers=layers), batch("encoder"))
        calls: list[object] = []
        plain = FakeTensorMode.dispatch
        with monkeypatch.context() as m:
            m.setattr(FakeTensorMode, "dispatch", lambda *a, **k: (calls.append(0), plain(*a, **k))[1])
            choose_tensor_splits(captured, 2)
        return len(calls)

    two, four, eight = work(2), work(4), work(8)
    assert eight - four <= 2 * (four - two) * 1.1, (two, four, eight)


def test_the_loss_is_one_number() -> None:
    assert loss(Encoder().double(), batch("encoder")).shape == ()
