"""Tiled layers equal whole layers, and take less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import engine_functions
import parity
import pytest
import small_jobs
import tiling_cases as cases
import tiling_memory as memory
import torch
from torch import nn
from world import World

from drumline.core.errors import PlanError
from drumline.plans import Plan
from drumline.runtime.memory.tiled_layers import LayerTile
from drumline.runtime.memory.tiling import choose_layers, tile, tiles_of
from drumline.runtime.state.pieces import ParameterPart

Worlds = Callable[[int], World]
EQUAL = {"rtol": 1e-12, "atol": 1e-12}


def equal(
    result: tuple[torch.Tensor, dict[str, torch.Tensor]], wanted: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    torch.testing.assert_close(result[0], wanted[0], **EQUAL)
    assert set(result[1]) == set(wanted[1])
    for name, g in wanted[1].items():
        torch.testing.assert_close(result[1][name], g, **EQUAL, msg=lambda m, name=name: f"{name}: {m}")


# -- the contract: what comes out is what came out


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("case", cases.CASES)
def test_tiled_equals_untiled(case: str, n: int) -> None:
    model = cases.build(case)
    names = dict(model.named_parameters())
    parts = tile(model, n)
    value, target = cases.CASES[case][1]()
    loss = cases.CASES[case][2](model, value, target)
    loss.backward()
    equal((loss.detach(), cases.assembled(parts, cases.gradients(model))), cases.plain(case))
    whole = cases.assembled(parts, dict(model.named_parameters()))
    assert set(whole) == set(names)
    for name, p in names.items():
        assert torch.equal(whole[name], p)


@pytest.mark.parametrize("case", cases.CASES)
def test_evaluation(case: str) -> None:
    """Without gradients, in evaluation: torch's transformer takes its fast path, which reads weights."""
    value, _ = cases.CASES[case][1]()
    model = cases.build(case).eval()
    cutted = copy.deepcopy(model)
    tile(cutted, 3)
    with torch.no_grad():
        a, b = cases.call_model(model, value), cases.call_model(cutted, value)
    a, b = (x["logits"] if isinstance(x, dict) else x for x in (a, b))
    assert a.shape == b.shape and a.dtype == b.dtype and not b.requires_grad
    torch.testing.assert_close(b + 0, a, **EQUAL)


RANKS = [
    ("gpt", "ddp"),
    ("gpt", "unused"),
    ("gpt", "shard"),
    ("gpt", "meta"),
    ("gpt whole", "shard"),
    ("gpt whole", "unused"),
    ("gpt checkpointed", "ddp"),
    ("gpt checkpointed", "shard"),
    ("named", "unused"),
    ("named", "shard"),
    ("frozen", "unused"),
    ("frozen", "shard"),
    ("lstm", "shard"),
    ("reader", "shard"),
    ("encoder", "shard"),
    ("mlp", "shard"),
]


@pytest.mark.parametrize(("case", "how"), RANKS)
def test_on_ranks(world: Worlds, case: str, how: str) -> None:
    """Under DDP and FSDP, two steps, compared with the same ranks without tiles."""
    wanted = world(2).run(cases.on_ranks, case, "ddp", 1)[0][0]
    for rounds in world(2).run(cases.on_ranks, case, how, 3):
        for result in rounds:
            equal(result, wanted)


@pytest.mark.parametrize("case", ["gpt", "lstm", "mlp"])
def test_one_tile_is_gathered_at_a_time(world: Worlds, case: str) -> None:
    assert world(2).run(cases.gathered, case) == [1, 1]


@pytest.mark.parametrize("how", ["plain", "shard"])
def test_half_precision(world: Worlds, how: str) -> None:
    wanted = world(1).run(cases.in_half, "plain", 1)
    assert world(1).run(cases.in_half, how, 3) == pytest.approx(wanted, rel=3e-3)


# -- memory


def test_memory_of_a_sharded_tiled_layer(world: Worlds) -> None:
    """Without parts: the layer, its gradient, and both on their way. With them, half of the gradient (the shard's) and
    some parts: how many messages are on their way at once is a matter of time."""
    layer = 4 * 256 * 16384
    for whole, parts in zip(
        world(2).run(memory.peak_of_shards, 1), world(2).run(memory.peak_of_shards, 16), strict=True
    ):
        assert whole > 2.5 * layer
        assert parts < 1.75 * layer


def test_logits_are_never_materialized() -> None:
    """Without parts: the logits, their logarithms and a gradient."""
    logits = 4 * 1024 * 4096
    assert memory.peak_of_logits(1) > 2.5 * logits
    assert memory.peak_of_logits(8) < 0.5 * logits


# -- what is cut


def test_layer_choice() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    class Same(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "large": nn.Linear(8, 8),
            "medium": nn.Linear(4, 8),
            "less": nn.Linear(4, 7),
            "same": Same(8, 8),
            "own": Own(8, 8),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "words": nn.Embedding(9, 7),
            "bounded": nn.Embedding(8, 8, max_norm=1.0),
            "often": nn.Embedding(8, 8, scale_grad_by_freq=True),
            "sparse": nn.Embedding(8, 8, sparse=True),
            "attention": nn.MultiheadAttention(8, 2),
            "conv": nn.Conv2d(8, 8, 3),
            "lazy": nn.LazyLinear(8),
            "hooked": nn.Linear(8, 8),
            "tied": nn.Linear(8, 8),
            "one": nn.Linear(8, 8),
            "two": nn.Linear(8, 8),
        }
    )
    model["hooked"].weight.register_hook(lambda g: g)
    model["tied"].weight = model["own"].weight
    model["two"].weight = model["one"].weight
    choice = choose_layers(model)
    assert set(choice.cut) == {"large", "medium", "same", "words"}
    assert choice.left == {
        "own": "its forward is not torch's",
        "normed": "its weight is computed, or not initialized yet",
        "bounded": "max_norm looks at all rows at once",
        "often": "scale_grad_by_freq looks at all rows at once",
        "sparse": "sparse looks at all rows at once",
        "attention.out_proj": "nn.MultiheadAttention reads its weight",
        "hooked": "a hook is on its parameter",
        "tied": "its weight is also that of own, which stays whole",
        "one": "two layers share its weight and have a bias each",
        "two": "its weight is also that of one, which stays whole",
    }


def test_names_and_rows() -> None:
    model = cases.build("named")
    before = model.head
    parts = tile(model, 5)
    assert model.head is before and isinstance(before, nn.Linear) and isinstance(model.words, nn.Embedding)
    assert parts["words.parts.0.weight"] == ParameterPart("words.weight", (12, 5), 0)
    assert parts["words.parts.1.weight"] == ParameterPart("words.weight", (12, 5), 15)
    assert parts["words.parts.4.bias"] == ParameterPart("head.bias", (12,), 10)
    assert parts["block.up.parts.4.bias"] == ParameterPart("block.up.bias", (10,), 8)
    assert set(parts) == {name for name, _ in model.named_parameters() if ".parts." in name}
    assert model.words.parts[0] is model.head.parts[0]
    assert len(tiles_of(model)) == 3 * 5


@pytest.mark.parametrize("case", ["named", "gpt", "lstm", "mlp", "frozen", "encoder"])
def test_state_dict_names(case: str) -> None:
    """Out of a model in parts and strictly into a plain one, and back."""
    plain, parted = cases.build(case), cases.build(case)
    tile(parted, 3)
    with torch.no_grad():
        for p in parted.parameters():
            p.add_(torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    state = parted.state_dict()
    assert set(state) == set(plain.state_dict())
    plain.load_state_dict(state)
    value, _ = cases.CASES[case][1]()
    same = [cases.call_model(m, value) for m in (plain, parted)]
    same = [x["logits"] if isinstance(x, dict) else x for x in same]
    torch.testing.assert_close(same[1] + 0, same[0], **EQUAL)
    other = cases.build(case)
    parted.load_state_dict(other.state_dict())
    for name, t in parted.state_dict().items():
        assert torch.equal(t, other.state_dict()[name]), name
    state.pop(next(iter(state)))
    with pytest.raises(RuntimeError, match="Missing key"):
        parted.load_state_dict(state)


def test_one_of_two_tied_layers_has_a_bias() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, bias=False)])
    model[1].weight = model[0].weight
    wanted, x = copy.deepcopy(model), torch.ones(2, 3)
    tile(model, 2)
    for new, old in zip(model, wanted, strict=True):
        torch.testing.assert_close(new(x), old(x))


def test_ticket_is_on_the_compute_device() -> None:
    """Not on the device of an offloaded weight: on a GPU another thread would end a tile's backward."""
    tickets: list[torch.Tensor] = []

    class Stop(Exception):
        pass

    def look(module: nn.Module, args: Any) -> None:
        tickets.append(args[2])
        raise Stop

    part = LayerTile(range(2), nn.Parameter(torch.ones(2, 3)), None)
    part.register_forward_pre_hook(look)
    for x in (torch.ones(1, 3, device="meta"), None):
        with pytest.raises(Stop):
            part.call("linear", x, False)
    assert [t.device.type for t in tickets] == ["meta", "cpu"]


def test_hooks_and_deep_copies_survive() -> None:
    model = small_jobs.MLP()
    seen: list[torch.Size] = []
    model.blocks[0].up.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    tile(model, 2)
    again = copy.deepcopy(model)
    x = torch.ones(2, 6)
    torch.testing.assert_close(model(x), again(x))
    assert seen == [torch.Size([2, 12])] * 2
    assert tile(small_jobs.MLP(), 1) == {}


def test_model_without_large_layers_is_refused() -> None:
    with pytest.raises(PlanError) as messages:
        tile(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Embedding(3, 2, sparse=True)), 4)
    text = str(messages.value)
    assert "chunk=4 cuts nothing in Sequential" in text and "1: sparse looks at all rows at once" in text
    assert "chunk=1" in text


# -- under the engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "dp=1,chunk=3"),
        ("gpt", "dp=2,chunk=2"),
        ("gpt", "dp=2,zero=1,chunk=3,micro=2"),
        ("gpt", "dp=2,zero=2,chunk=64"),
        ("gpt", "dp=2,zero=3,chunk=4"),
        ("gpt", "dp=4,zero=3,shard=2,chunk=3,micro=2"),
        ("masked", "dp=3,zero=3,chunk=3,micro=3"),
        ("gpt", "dp=2,zero=3,chunk=3,recompute=full"),
        ("dropout", "dp=2,chunk=3,recompute=full"),
        ("gpt", "dp=1,zero=3,chunk=3"),
        ("gpt", "dp=2,zero=3,chunk=3,precision=bf16"),
        ("gpt", "dp=2,chunk=3,precision=fp16"),
        ("masked", "dp=2,chunk=3,static=true"),
        ("partial", "dp=2,zero=3,chunk=2"),
        ("partial", "dp=2,chunk=2"),
        ("named", "dp=2,zero=3,chunk=2,offload=all"),
    ],
)
def test_under_the_engine(world: Worlds, job: str, plan: str) -> None:
    """With a vocabulary large enough that embedding and head are what is cut."""
    p = Plan.parse(plan)
    changes = (
        {"model": cases.GPT} if job in ("gpt", "masked") else {"model": cases.Forgetful} if job == "dropout" else {}
    )
    parity.check(world(p.processes).run(parity.run_verify, job, plan, 3, changes)[0])


@pytest.mark.parametrize("plan", ["dp=2,chunk=2", "dp=2,zero=3,chunk=3"])
def test_evaluation_under_the_engine(world: Worlds, plan: str) -> None:
    """Metrics need all of the output, the loss does not."""
    [wanted] = world(1).run(engine_functions.evaluate, "mlp", "dp=1", 11)
    for result in world(2).run(engine_functions.evaluate, "mlp", plan, 11):
        assert result == pytest.approx(wanted, rel=1e-12)


def test_untiled_layers_are_reported_once(world: Worlds) -> None:
    words = "chunk=2 leaves whole: layers.1, layers.2, layers.3 and 2 more (its forward is not torch's)"
    for plan in ("dp=2,chunk=2", "dp=2,zero=3,chunk=2"):
        assert world(2).run(engine_functions.said_in_training, plan, engine_functions.OwnLayers) == [[words], []]
    for plan, model in (("dp=2", engine_functions.OwnLayers), ("dp=2,chunk=2", engine_functions.Flat)):
        assert world(2).run(engine_functions.said_in_training, plan, model) == [[], []]


def test_non_elementwise_optimizer_is_refused(world: Worlds) -> None:
    with pytest.raises(PlanError, match="Lamb cannot be sharded"):
        world(1).run(engine_functions.with_optimizer, "lamb", "dp=1,chunk=2")
