"""A split backward, inputs first and weights later, compared with plain autograd: same gradients, same work."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pipeline_functions as on
import pytest
import torch
import torch.nn.functional as F
from pipeline_models import MODELS, squares, vectors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.core.errors import PlanError
from drumline.partition.stage import BatchInput, Port, Stage, StagedGraph, StageInput
from drumline.runtime.pipeline.stage_pass import StagePass


class Count(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def through(cut: StagedGraph, leaves: list[torch.Tensor], *, split: bool) -> float:
    """All stages here: every forward, then every backward, then every backward for weights."""
    values: dict[tuple[int, int], torch.Tensor] = {}
    kept, inputs = [], []
    for stage in cut.stages:
        given = [
            values[s.stage, s.output].detach() if isinstance(s, StageInput) else leaves[int(s.name)]
            for s in stage.inputs
        ]
        for x, s in zip(given, stage.inputs, strict=True):
            if isinstance(s, StageInput):
                x.requires_grad_(cut.stages[s.stage].outputs[s.output].grad)
        kept.append(StagePass(stage, given, split=split))
        inputs.append(given)
        outputs = kept[-1].forward()
        values.update({(stage.index, k): v for k, v in enumerate(outputs)})
    back: dict[tuple[int, int], torch.Tensor] = {}
    for stage in reversed(cut.stages):
        last = stage.index == len(cut.stages) - 1
        ones = {0: torch.ones_like(values[stage.index, 0])}
        gradients = ones if last else {k: back[stage.index, k] for k, p in enumerate(stage.outputs) if p.grad}
        for s, g in zip(stage.inputs, kept[stage.index].backward(gradients), strict=True):
            if isinstance(s, StageInput) and cut.stages[s.stage].outputs[s.output].grad:
                key, port = (s.stage, s.output), cut.stages[s.stage].outputs[s.output]
                g = torch.zeros(port.shape, dtype=port.dtype) if g is None else g
                back[key] = back[key] + g if key in back else g
    if split:
        for h in kept:
            h.weight_gradients()
    return values[len(cut.stages) - 1, 0].item()


def compare(model: nn.Module, run: Any, leaves: list[torch.Tensor], stages: int = 3) -> None:
    """Loss and gradients of the stages, backward whole and in two parts, against the model's own."""
    torch.manual_seed(1)
    model = model.double()
    total = run(model, leaves)[0]
    total.backward()
    graph = on.graph_of(copy.deepcopy(model), run, leaves)
    for split in (False, True):
        other = copy.deepcopy(model)
        other.zero_grad()
        bound = on.even_cut(graph, stages).bind(range(stages), other, graph.constants)
        assert through(bound, leaves, split=split) == pytest.approx(total.item(), rel=1e-12)
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert on.error(p.grad, q.grad) < 1e-12, (name, split)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "dropping"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_models(name: str, stages: int) -> None:
    model, run, batches = MODELS[name]
    compare(model(), run, batches(3, 0), stages)


class Around(nn.Module):
    """A layer between others, so that it stands in a stage with inputs and outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(6, 6), layer, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.layer(torch.tanh(self.before(x)))))


class Images(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(-1, 2, 3, 1)).reshape(x.shape)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Looks(nn.Module):
    """An embedding amid the stages; its indices come from a value without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.embed((x.sum(-1) > 0).long())


class NoDerivative(nn.Module):
    """An operator that no gradient flows through, though its result might have one, and weights behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = torch.special.bessel_j0(x)  # has no derivative in torch
        return x + torch.tanh(wave * self.a * self.b)


class InPlace(nn.Module):
    """A weight that is multiplied in place, and one that is made from another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        y.mul_(self.a)
        return F.linear(y, self.b / self.b.norm()) @ self.b


LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "bilinear": lambda: Twin(nn.Bilinear(6, 6, 6)),
    "layer norm": lambda: nn.LayerNorm(6),
    "rms norm": lambda: nn.RMSNorm(6),
    "convolution": lambda: Images(nn.Conv2d(2, 4, (3, 1), padding=(1, 0)), nn.ConvTranspose2d(4, 2, 1)),
    "batch norm": lambda: Images(nn.BatchNorm2d(2), nn.GroupNorm(2, 2)),
    "slope": lambda: nn.PReLU(),
    "attention": Attends,
    "recurrent": Recurs,
    "embedding": Looks,
    "no derivative": lambda: nn.Sequential(*(nn.Tanh() for _ in range(5)), NoDerivative()),  # in the second stage
    "in place": InPlace,
}


class Twin(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers(name: str) -> None:
    compare(Around(LAYERS[name]()), squares, vectors(3, 0))


def test_nothing_is_computed_twice() -> None:
    """A parameter that is used eight times: as many products as in a plain backward."""
    model, _, batches = MODELS["twice"]
    graph, leaves, counts = on.captured("twice", 3), batches(3, 0), []
    for split in (False, True):
        bound = on.even_cut(graph, 3).bind(range(3), model().double(), graph.constants)
        with Count() as count:
            through(bound, leaves, split=split)
        counts.append({k: n for k, n in count.calls.items() if "mm" in k or "tanh" in k})
    assert counts[0] == counts[1] and counts[0]["aten.mm.default"] > 20


def test_tensors_unneeded_by_weight_gradients_are_freed() -> None:
    """Between its two parts a backward keeps the inputs of layers with weights, not what tanh or attention saved."""
    model, _, batches = MODELS["lm"]
    graph = on.captured("lm", 3)
    bound = on.even_cut(graph, 3).bind(range(3), model().double(), graph.constants)
    first = bound.stages[0]
    assert first.module is not None
    given = first.module(batches(3, 0)[0])
    values = [x.detach().requires_grad_(p.grad) for x, p in zip(given, first.outputs, strict=True)]
    kept = StagePass(bound.stages[1], values, split=True)
    outputs = kept.forward()
    assert kept._deferred is not None
    cells = list(kept._deferred._cells)
    assert len(cells) > 10 and all(cell[0] is not None for cell in cells)
    kept.backward({k: torch.ones_like(y) for k, y in enumerate(outputs)})
    assert all(cell[0] is None for cell in cells)
    kept.weight_gradients()


def test_parameter_hooks_run() -> None:
    """Hooks that wait for a gradient, to reduce it, run in both modes."""
    model, _, batches = MODELS["mlp"]
    graph, seen = on.captured("mlp", 3), Counter[str]()
    here = model().double()
    for name, p in here.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    bound = on.even_cut(graph, 3).bind(range(3), here, graph.constants)
    through(bound, batches(3, 0), split=True)
    assert seen == Counter(name for name, _ in here.named_parameters())


def test_uncut_module_is_refused() -> None:
    port = Port((1,), torch.float64, True, (), (0,))
    stage = Stage(1, (BatchInput("0"),), (port,), module=nn.Linear(1, 1))
    with pytest.raises(PlanError, match="an order with W actions needs stages that were cut from a graph"):
        StagePass(stage, [torch.ones(1)], split=True)
    StagePass(stage, [torch.ones(1)], split=False)
