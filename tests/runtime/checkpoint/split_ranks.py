"""A model whose parameters are laid out over the ranks by hand, in every way a plan may do it, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drumline.core.job import Job
from drumline.partition.sharding.layout import Split, even_bounds
from drumline.plans import Plan
from drumline.runtime.checkpoint import Saver, load
from drumline.runtime.checkpoint.weights import load_weights
from drumline.runtime.state import process_groups as kept_groups
from drumline.runtime.state.optimizer import make_optimizer
from drumline.runtime.state.pieces import ParameterSlice, ParameterSpec, Piece

PLANS = {
    "one": "dp=1",
    "tp": "tp=2",
    "tp=3": "tp=3",
    "pp": "pp=2",
    "tp and shards": "dp=2,zero=1,tp=2",
    "tp and copies": "dp=2,tp=2",
    "pp and copies": "dp=2,pp=2",
    "shards": "dp=3,zero=1",
    "copies": "dp=2",
}
SECOND = ("out", "narrow", "pixels", "late")
"""Parameters and buffers of the second stage; `token` is on both."""


class Model(nn.Module):
    """Parameters split by rows, columns, segments and unevenly; whole, frozen and empty ones; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(7, 4))
        self.fused = nn.Parameter(torch.randn(18, 4))
        self.fused_bias = nn.Parameter(torch.randn(18))
        self.out = nn.Parameter(torch.randn(4, 6))
        self.narrow = nn.Parameter(torch.randn(3, 7), requires_grad=False)
        self.pixels = nn.Parameter(torch.randn(2, 5, 3, 3))
        self.norm = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.also = self.token
        self.register_buffer("early", torch.randn(3))
        self.register_buffer("late", torch.randn(2, 2))
        self.register_buffer("temporary", torch.randn(2), persistent=False)


def cuts(n: int) -> dict[str, Split]:
    """A split of the parameters over n ranks."""
    uneven = {2: (0, 2, 5), 3: (0, 1, 1, 5)}[n]
    return {
        "token": Split(0, (even_bounds(7, n),)),
        "fused": Split(0, (even_bounds(6, n),) * 3),
        "fused_bias": Split(0, (even_bounds(6, n),) * 3),
        "out": Split(1, (even_bounds(6, n),)),
        "narrow": Split(1, (even_bounds(4, n), even_bounds(3, n))),
        "pixels": Split(1, (uneven,)),
    }


def whole(seed: int) -> tuple[Model, dict[str, dict[str, torch.Tensor]]]:
    """The model on one device, and its optimizer's state."""
    g = torch.manual_seed(seed)
    model = Model()
    shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    return model, {n: {k: torch.rand(s, generator=g) for k in ("exp_avg", "exp_avg_sq")} for n, s in shapes.items()}


def pieces(layout: str, rank: int, model: Model) -> list[Piece]:
    """The pieces of a rank."""
    plan = Plan.parse(PLANS[layout])
    at = plan.mesh.coordinate(rank)
    tp, stage, (shard, shards) = at.get("tp", 0), at.get("pp"), (at.get("shard", 0), plan.shards)
    result = []
    for name, p in model.named_parameters():
        if stage is not None and name != "token" and (name in SECOND) != bool(stage):
            continue
        shape, cut = (
            tuple(p.shape),
            ParameterSlice(cuts(plan.tp)[name], tp) if plan.tp > 1 and name in cuts(plan.tp) else None,
        )
        counts = (cut is not None or tp == 0) and not (name == "token" and stage)
        part = p.detach() if cut is None else elements_of(cut, p).view(cut.shape(shape))
        start, everywhere = 0, layout in ("one", "copies")
        if shards > 1 and p.requires_grad:
            start, stop = even_bounds(part.numel(), shards)[shard : shard + 2]
            part = part.reshape(-1)[start:stop]
        elif shards > 1:  # frozen ones are not sharded
            everywhere, counts = plan.tp == 1, counts and (plan.tp == 1 or shard == 0)
        value = nn.Parameter(part.clone(), p.requires_grad)
        result.append(Piece(name, shape, start, value, everywhere, slice=cut, owned=counts))
    return result


def elements_of(cut: ParameterSlice, tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a slice, by plain indexing."""
    index = [i for run in cut.split.ranges(cut.index) for i in run]
    return tensor.detach().index_select(cut.split.dim, torch.tensor(index, dtype=torch.int64)).reshape(-1)


def group_of(plan: Plan, rank: int) -> dist.ProcessGroup | None:
    """The group over which the pieces are spread; created on all ranks."""
    mesh = plan.mesh
    keys = {
        r: tuple(v for k, v in mesh.coordinate(r).items() if k not in ("pp", "shard", "tp")) for r in range(mesh.size)
    }
    if len(set(keys.values())) == mesh.size:
        return None
    groups = {key: kept_groups.process_group([r for r in keys if keys[r] == key]) for key in sorted(set(keys.values()))}
    return groups[keys[rank]]


def engine(layout: str, seed: int) -> Any:
    """A fake engine of a split model."""
    plan, rank = Plan.parse(PLANS[layout]), dist.get_rank()
    model, states = whole(seed)
    own = pieces(layout, rank, model)
    kinds = {n: ParameterSpec(tuple(p.shape), p.dtype) for n, p in model.named_parameters()}
    trained = [p for p in own if p.value.requires_grad]
    job = Job(
        batch_size=8,
        model=Model,
        loss=nn.functional.mse_loss,
        data=list,
        optimizer=lambda params: torch.optim.AdamW(
            [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2], "lr": 0.5}]
        ),
    )
    optimizer = make_optimizer(job, trained, {n: k for n, k in kinds.items() if n in states})
    for piece in trained:
        parts = {k: piece.take(v).clone().view(piece.value.shape) for k, v in states[piece.name].items()}
        optimizer.state[piece.value] = {"step": torch.tensor(3.0), **parts}
    stage = plan.mesh.coordinate(rank).get("pp")
    local = {n: b for n, b in model.named_buffers() if stage is None or (n in SECOND) == bool(stage)}
    holder = nn.Module()
    for name, b in local.items():
        holder.register_buffer(name, b)  # a stage does not know which are persistent
    group = group_of(plan, rank)
    replica = all(v == 0 for k, v in plan.mesh.coordinate(rank).items() if k not in ("pp", "shard", "tp"))
    owned = set(local) if (rank == 0 if stage is None else replica) else set()
    return SimpleNamespace(
        drain=lambda: None,
        model=model if layout in ("one", "copies", "shards") else holder,
        optimizer=optimizer,
        schedule=None,
        pieces=trained,
        frozen=[p for p in own if not p.value.requires_grad],
        parameter_specs=kinds,
        strategy=SimpleNamespace(group=group, values_loaded=lambda: None, saved_tensors=dict),
        average_replicas=lambda: None,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        rank=rank,
        ranks=plan.ranks,
        steps=3,
        position=4,
        plan=plan,
        stream=SimpleNamespace(dataset=range(9)),
        scaler=None,
        template=model if layout in ("one", "copies", "shards") else Model(),
        job=job,
        owned=owned,
        owns_buffer=owned.__contains__,
        saver=None,
    )


def save(layout: str, folder: str, lost: str | None = None) -> list[str]:
    """Save the state of seed 1; returns the file names. `lost` is a buffer that no rank owns."""
    fake = engine(layout, 1)
    if lost is not None and fake.plan.pp > 1:
        fake.owned.discard(lost)
    with Saver(fake, folder) as saver:
        path = saver.save()
    assert path is not None
    return sorted(p.name for p in Path(path).iterdir())


def wrong(layout: str, folder: str, *, weights: bool = False) -> list[str]:
    """Load into the state of seed 2; returns what is not bitwise equal to what was saved."""
    fake = engine(layout, 2)
    if weights:
        load_weights(fake, folder)
    else:
        load(fake, folder)
    model, states = whole(1)
    values, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    different = []
    for piece in [*fake.pieces, *fake.frozen]:
        if not torch.equal(piece.value.detach().reshape(-1), piece.take(values[piece.name])):
            different.append(piece.name)
        state = fake.optimizer.state.get(piece.value, {})
        for key, value in states.get(piece.name, {}).items() if not weights else ():
            if (
                not torch.equal(state[key].reshape(-1), piece.take(value))
                or state[key].shape != piece.value.shape
                or float(state["step"]) != 3.0
            ):
                different.append(f"{key} of {piece.name}")
    for name, b in fake.model.named_buffers():
        if not torch.equal(b, buffers[name]) and not (weights and name == "temporary"):
            different.append(name)
    if not weights and (fake.steps, fake.position) != (3, 4):
        different.append("position")
    return different
