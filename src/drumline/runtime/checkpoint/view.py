"""What a rank holds of the whole, as runs of numbers: parameters, buffers, optimizer state, random state.

Nothing behind this file knows a plan or a strategy. A name in a checkpoint is `model/NAME`, `buffer/NAME`,
`optimizer/KEY/NAME` or `random/KIND/RANK`, with the names of the user's own model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError
from ..strategies.pieces import Piece
from ..weights import shape_of_model
from .codec import encode

if TYPE_CHECKING:
    from ..engine import Engine


_NAMES = ("params", "param_names")
"""Keys of a parameter group that say which parameters, not how they are updated."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Numbers `start` and on of the flattened tensor `entry`; `tensor` is the rank's own memory of them."""

    entry: str
    shape: tuple[int, ...]
    """Of the whole."""
    start: int
    tensor: torch.Tensor
    kept: bool = True

    @property
    def stop(self) -> int:
        """One past its last number."""
        return self.start + self.tensor.numel()


@dataclass(frozen=True, slots=True)
class Copies:
    """How many ranks hold the same numbers, and which of them this one is."""

    count: int
    index: int


def copies_of_pieces(engine: Engine) -> Copies:
    """The ranks that hold the same shards: one in each sharded copy."""
    group = engine.strategy.group
    if group is None or engine.ranks == 1:
        return Copies(engine.ranks, engine.rank)
    members = dist.get_process_group_ranks(group)
    # the mesh has the shards innermost: copies lie side by side, 0 1 | 2 3
    assert members[-1] - members[0] == len(members) - 1, f"a sharded copy lies on the ranks {members}"
    return Copies(engine.ranks // len(members), members[0] // len(members))


def sharded(engine: Engine) -> list[Held]:
    """What lies over the ranks of one copy: parameters and their optimizer state."""
    return _of_pieces(engine, everywhere=False)


def common(engine: Engine) -> list[Held]:
    """What every rank has alike: replicated parameters and their optimizer state."""
    return _of_pieces(engine, everywhere=True)


def _of_pieces(engine: Engine, *, everywhere: bool) -> list[Held]:
    chosen = [p for p in [*engine.pieces, *engine.frozen] if p.everywhere == everywhere]
    found = [Held(f"model/{p.name}", p.shape, p.start, p.value) for p in chosen]
    for piece in chosen:
        for key, value in states_of(engine, piece).items():
            if isinstance(value, torch.Tensor) and not is_number(key, value, piece):
                found.append(_state(piece, key, value))
    return [h for h in found if h.tensor.numel()]


def own(engine: Engine) -> list[Held]:
    """What this rank alone writes: the state of its random generators; the first rank also the buffers.

    A model may keep a buffer that is not the same on every rank; the first rank's counts, as it does for torch's DDP.
    """
    found = [Held(f"random/{kind}/{engine.rank}", (t.numel(),), 0, t) for kind, t in random_state().items()]
    for name, buffer, kept in buffers(engine.model) if engine.rank == 0 else ():
        if buffer.numel():
            found.append(Held(f"buffer/{name}", tuple(buffer.shape), 0, buffer, kept))
    return found


def states_of(engine: Engine, piece: Piece) -> dict[str, Any]:
    """The optimizer's state of a piece; empty before its first step."""
    state: dict[str, Any] = engine.optimizer.state.get(piece.value, {})
    return state


def is_number(key: str, value: Any, piece: Piece) -> bool:
    """Whether a state is one number of the whole parameter, not a number per number of it."""
    return value.numel() == 1 and (key == "step" or value.shape != piece.value.shape)


def _state(piece: Piece, key: str, value: torch.Tensor) -> Held:
    if "/" in key:
        raise InputError(f"the optimizer's state {key!r} has a '/' in its name", rule="names of states are plain")
    entry = f"optimizer/{key}/{piece.name}"
    if value.shape == piece.value.shape:
        return Held(entry, piece.shape, piece.start, value)
    if piece.is_whole:
        return Held(entry, tuple(value.shape), 0, value)
    raise InputError(
        f"the optimizer's state {key!r} of {piece.name!r} has the shape {tuple(value.shape)}",
        rule=f"of a part of a parameter the state has the part's shape, {tuple(piece.value.shape)}",
    )


def numbers(engine: Engine) -> dict[str, dict[str, Any]]:
    """Encoded single numbers of the optimizer's state, by parameter and key."""
    found: dict[str, dict[str, Any]] = {}
    for piece in engine.pieces:
        for key, value in states_of(engine, piece).items():
            if not isinstance(value, torch.Tensor) or is_number(key, value, piece):
                where = f"the optimizer's state {key!r} of {piece.name!r}"
                found.setdefault(piece.name, {})[key] = encode(value, where)
    return found


def groups(engine: Engine) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, by the names of what this rank has of them."""
    names = groups_names(engine)
    found = []
    for i, group in enumerate(engine.optimizer.param_groups):
        values = {k: encode(v, f"{k!r} of parameter group {i}") for k, v in group.items() if k not in _NAMES}
        found.append({"names": names[i], "values": values})
    return found


def groups_names(engine: Engine) -> list[list[str]]:
    """The names in each parameter group of which this rank has something."""
    names = {id(p.value): p.name for p in engine.pieces}
    groups = engine.optimizer.param_groups
    return [list(dict.fromkeys(names[id(p)] for p in g["params"] if id(p) in names)) for g in groups]


def buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, buffer, and whether a state dict has it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                kept = name not in module._non_persistent_buffers_set
                yield f"{prefix}.{name}" if prefix else name, buffer, kept


def tied(engine: Engine) -> dict[str, str]:
    """Other names of parameters and buffers, and the first name of each, in the user's own model."""
    # layers in parts have other names; then the model is built once more, without memory
    model = shape_of_model(engine.job) if engine.plan.chunk > 1 else engine.model
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for items in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in items:
            if first.setdefault(id(tensor), name) != name:
                others[name] = first[id(tensor)]
    return others


def random_state() -> dict[str, torch.Tensor]:
    """The state of every generator that a training step may draw from, as bytes."""
    import numpy

    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    found["python"] = _bytes(random.getstate())
    name, keys, *rest = numpy.random.get_state(legacy=True)
    found["numpy"] = _bytes([name, [int(k) for k in keys], *rest])
    return found


def set_random_state(kind: str, state: torch.Tensor) -> None:
    """Give a generator back the state that it had."""
    if kind == "torch":
        torch.set_rng_state(state)
    elif kind == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    elif kind == "python":
        version, numbers_, gauss = json.loads(bytes(state.tolist()))
        random.setstate((version, tuple(numbers_), gauss))
    elif kind == "numpy":
        import numpy

        name, keys, position, has_gauss, cached = json.loads(bytes(state.tolist()))
        numpy.random.set_state((name, keys, position, has_gauss, cached))


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
