"""A rank's contribution to a checkpoint, as ranges of elements: parameters, buffers, optimizer and random state.

The rest of the package knows no plan and no strategy. A name in a checkpoint is `model/NAME`, `buffer/NAME`,
`optimizer/KEY/NAME`, `ema/NAME` (averaged weights), `outer/NAME` (the momentum of an outer optimizer) or
`random/KIND/RANK`, with the names of the user's own model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import InputError
from ...torchkit.modules import is_persistent
from ..core.engine_core import EngineCore
from ..state.optimizer import is_scalar
from ..state.pieces import Piece
from ..state.weights import meta_model
from .boxes import Box, location_of
from .codec import encode

_PARAMETER_KEYS = ("params", "param_names")
"""Keys of a parameter group that list its parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorRun:
    """Elements of the flattened tensor `entry`, or of a box of it, from `start` on; `tensor` has the values."""

    entry: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    tensor: torch.Tensor
    persistent: bool = True
    box: Box | None = None

    @property
    def first_index(self) -> int:
        """Index of its first element in the whole tensor."""
        return self.start if self.box is None else self.box.tensor_index(self.shape, self.start)


@dataclass(frozen=True, slots=True)
class ReplicaIndex:
    """Number of ranks with the same tensors, and the index of this one among them."""

    count: int
    index: int


def replica_index(engine: EngineCore) -> ReplicaIndex:
    """This rank among those with the same pieces, one per copy of the model. All ranks call it together."""
    group = engine.strategy.group
    if group is None or engine.ranks == 1:
        return ReplicaIndex(engine.ranks, engine.rank)
    first = min(dist.get_process_group_ranks(group))
    mine = torch.tensor([first], dtype=torch.int64, device=engine.device)
    table = [torch.empty_like(mine) for _ in range(engine.ranks)]
    dist.all_gather(table, mine, group=engine.group)
    copies = sorted({int(n) for n in table})
    assert len(copies) * dist.get_world_size(group) == engine.ranks, f"copies that start at the ranks {copies}"
    return ReplicaIndex(len(copies), copies.index(first))


def sharded(engine: EngineCore) -> list[TensorRun]:
    """Sharded parameters and their optimizer state that this rank writes."""
    return [run for run in _piece_runs(engine, everywhere=False) if run.tensor.numel()]


def replicated(engine: EngineCore) -> list[TensorRun]:
    """Replicated parameters and their optimizer state, and what else the strategy saves: the same on every rank."""
    more = [TensorRun(name, tuple(t.shape), 0, t) for name, t in engine.strategy.saved_tensors().items()]
    return [run for run in [*_piece_runs(engine, everywhere=True), *more] if run.tensor.numel()]


def _piece_runs(engine: EngineCore, *, everywhere: bool) -> list[TensorRun]:
    chosen = [p for p in [*engine.pieces, *engine.frozen] if p.replicated == everywhere and (everywhere or p.owned)]
    runs = [_piece_run(f"model/{p.name}", p, p.value) for p in chosen]
    average = getattr(engine, "average", None)
    if average is not None:
        runs += [_piece_run(f"ema/{p.name}", p, average.of(p)) for p in chosen if average.has(p)]
    for piece in chosen:
        for key, value in state_of(engine, piece).items():
            if isinstance(value, torch.Tensor) and not is_scalar(key, value, piece.value):
                runs.append(_state_run(piece, key, value))
    return runs


def _piece_run(entry: str, piece: Piece, tensor: torch.Tensor) -> TensorRun:
    start, box = location_of(piece)
    return TensorRun(entry, piece.shape, start, tensor, box=box)


def own(engine: EngineCore, outline: ModelOutline) -> list[TensorRun]:
    """Runs that only this rank writes: its random state, and the buffers that it owns."""
    runs = [TensorRun(f"random/{kind}/{engine.rank}", (t.numel(),), 0, t) for kind, t in random_state().items()]
    return runs + [run for run in _buffer_runs(engine, outline) if run.tensor.numel()]


def empty(engine: EngineCore, outline: ModelOutline) -> list[TensorRun]:
    """Tensors of this rank without elements."""
    runs = [
        *_piece_runs(engine, everywhere=False),
        *_piece_runs(engine, everywhere=True),
        *_buffer_runs(engine, outline),
    ]
    return [run for run in runs if 0 in run.shape]


def _buffer_runs(engine: EngineCore, outline: ModelOutline) -> Iterator[TensorRun]:
    """The buffers that this rank owns. If every rank has all of them, the first rank's count, as in torch's DDP: a
    buffer may differ between ranks.
    """
    for name, buffer, _ in buffers(engine.model):
        if engine.owns_buffer(name):
            yield TensorRun(f"buffer/{name}", tuple(buffer.shape), 0, buffer, outline.buffers[name].persistent)


def state_of(engine: EngineCore, piece: Piece) -> dict[str, Any]:
    """The optimizer's state of a piece; empty before the first step."""
    state: dict[str, Any] = engine.optimizer.state.get(piece.value, {})
    return state


def _state_run(piece: Piece, key: str, value: torch.Tensor) -> TensorRun:
    if "/" in key:
        raise InputError(f"the optimizer state {key!r} has a '/' in its name", rule="names of states have no '/'")
    entry = f"optimizer/{key}/{piece.name}"
    if value.shape == piece.value.shape:
        return _piece_run(entry, piece, value)
    if piece.is_whole:
        return TensorRun(entry, tuple(value.shape), 0, value)
    raise InputError(
        f"the optimizer state {key!r} of {piece.name!r} has the shape {tuple(value.shape)}",
        rule=f"the state of a sharded parameter has the shard's shape, {tuple(piece.value.shape)}",
    )


def scalars(engine: EngineCore) -> dict[str, dict[str, Any]]:
    """Encoded scalars of the optimizer's state, by parameter and key."""
    encoded: dict[str, dict[str, Any]] = {}
    for piece in engine.pieces:
        for key, value in state_of(engine, piece).items():
            if not isinstance(value, torch.Tensor) or is_scalar(key, value, piece.value):
                where = f"the optimizer state {key!r} of {piece.name!r}"
                encoded.setdefault(piece.name, {})[key] = encode(value, where)
    return encoded


def groups(engine: EngineCore) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, with the names of this rank's parameters."""
    names = group_names(engine)
    encoded = []
    for i, group in enumerate(engine.optimizer.param_groups):
        values = {k: encode(v, f"{k!r} of parameter group {i}") for k, v in group.items() if k not in _PARAMETER_KEYS}
        encoded.append({"names": names[i], "values": values})
    return encoded


def group_names(engine: EngineCore) -> list[list[str]]:
    """The parameters of each group of which this rank has elements."""
    names = {id(p.value): p.name for p in engine.pieces}
    groups = engine.optimizer.param_groups
    return [list(dict.fromkeys(names[id(p)] for p in g["params"] if id(p) in names)) for g in groups]


def buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, buffer, and whether it is persistent (in the state dict)."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                persistent = is_persistent(module, name)
                yield f"{prefix}.{name}" if prefix else name, buffer, persistent


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """A buffer of the user's model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool
    """Whether it is in the state dict."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The user's whole model besides its parameters; the same on every rank, whatever part it has."""

    buffers: dict[str, BufferInfo]
    tied: dict[str, str]
    """Other names of tied parameters and buffers -> the first name."""
    extra: tuple[str, ...]
    """Modules with `get_extra_state()`."""


def outline(engine: EngineCore) -> ModelOutline:
    """The outline of the user's model, of which this rank may have only parts."""
    model = engine.template
    # tiled layers have other names; then the model is built again, without memory
    named = meta_model(engine.job) if engine.plan.chunk > 1 else model
    extra = [name for name, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    infos = {name: BufferInfo(tuple(b.shape), b.dtype, persistent) for name, b, persistent in buffers(model)}
    return ModelOutline(infos, _tied(named), tuple(extra))


def required_names(engine: EngineCore, outline: ModelOutline) -> frozenset[str]:
    """Names that a checkpoint of the model must have."""
    return frozenset(
        [*(f"model/{name}" for name in engine.parameter_specs), *(f"buffer/{name}" for name in outline.buffers)]
    )


def extra_modules(engine: EngineCore, outline: ModelOutline) -> dict[str, nn.Module]:
    """The modules with extra state; refused if the engine runs the model without its modules."""
    modules = dict(engine.model.named_modules())
    for name in outline.extra:
        if name not in modules or type(modules[name]).get_extra_state is nn.Module.get_extra_state:
            raise InputError(
                f"module {name!r} has extra state (get_extra_state())",
                where=f"plan {engine.plan}",
                rule="a plan that splits the model runs operators without modules, and would lose the state",
                fix="move it to a buffer, or use a plan without tp, cp, tile and pp",
            )
    return {name: modules[name] for name in outline.extra}


def _tied(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for items in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in items:
            if first.setdefault(id(tensor), name) != name:
                others[name] = first[id(tensor)]
    return others


def random_state() -> dict[str, torch.Tensor]:
    """The states of all random generators that a training step may use, as bytes."""
    import numpy

    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    states["python"] = _bytes(random.getstate())
    name, keys, *rest = numpy.random.get_state(legacy=True)
    states["numpy"] = _bytes([name, [int(k) for k in keys], *rest])
    return states


def set_random_state(kind: str, state: torch.Tensor) -> None:
    """Restore the state of one generator."""
    if kind == "torch":
        torch.set_rng_state(state)
    elif kind == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    elif kind == "python":
        version, words, gauss = json.loads(bytes(state.tolist()))
        random.setstate((version, tuple(words), gauss))
    elif kind == "numpy":
        import numpy

        name, keys, position, has_gauss, cached = json.loads(bytes(state.tolist()))
        numpy.random.set_state((name, keys, position, has_gauss, cached))


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
