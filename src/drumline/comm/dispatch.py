"""The way that every collective goes: refuse what is wrong, agree with the other ranks, find the program, move data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.errors import InputError, nearest
from ..schedules import ALGORITHMS, Schedule, Traffic
from .buffers import Landing, check_dense, check_out, check_tensor, contiguous, written_back
from .calls import Calls, Signature, signature
from .choose import NATIVE, Choice, Chooser
from .executor import Layout, Program, execute, layout, program, whole_layout
from .ops import Function, Operator, Reduction, reduction
from .transport import Transport

Op = str | Operator | Function
"""A name of OPERATORS, an `Operator`, or a function of two tensors."""
_CALLS = 4096
"""How many different calls are remembered."""
_LAYOUTS = 256
"""How many sizes of buffers are remembered for one schedule."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a caller wants a collective to be done."""

    algorithm: str
    segments: int | None = None
    op: Op | None = None
    root: int | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """A collective that ranks agree on."""

    collective: str
    call: Signature
    choice: Choice
    reduction: Reduction | None
    root: int
    elements: int
    """Of the whole buffer."""
    itemsize: int
    auto: bool


@dataclass(slots=True)
class _Prepared:
    """A schedule compiled for this rank, and where its chunks lie in buffers of the sizes that were used."""

    program: Program
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)

    def layout(self, elements: int, unit: int) -> Layout:
        found = self.layouts.get((elements, unit))
        if found is None:
            if len(self.layouts) >= _LAYOUTS:
                self.layouts.clear()
            found = self.layouts[elements, unit] = layout(self.program, elements, unit=unit)
        return found


class Dispatcher:
    """Does the collectives of one communicator."""

    def __init__(self, transport: Transport, chooser: Chooser, calls: Calls, next_tag: Callable[[], int]) -> None:
        self._transport, self._chooser, self._calls, self._next_tag = transport, chooser, calls, next_tag
        self._p, self._rank = transport.size, transport.rank
        self._prepared: dict[tuple[str, str, int, int, tuple[int, ...] | None], _Prepared] = {}
        self._known: dict[tuple[str, torch.dtype, torch.Size, Asked], Agreed] = {}
        self.traffic = Traffic()

    def in_place(self, collective: str, tensor: Tensor, asked: Asked) -> Tensor:
        """A collective that changes its tensor."""
        try:
            check_dense(tensor)
            agreed = self._ready(collective, tensor, 1, asked)
        except InputError as e:
            raise self._calls.refuse(e) from None
        self._calls.enter(agreed.call)
        with torch.no_grad():
            buffer = contiguous(tensor)
            self._move(agreed, buffer, buffer, buffer)
            written_back(buffer, tensor)
        return tensor

    def new(
        self,
        collective: str,
        tensor: Tensor | None,
        shape: tuple[int, ...] | None,
        asked: Asked,
        out: Tensor | None,
        *,
        like: Tensor | None = None,
        rows: bool = False,
        parts: int = 1,
    ) -> Tensor | None:
        """A collective that makes a tensor of `shape`, or none where that is None.

        `rows`: the tensor has one for each rank. `parts` tensors make the whole buffer. `like` has the shape and type
        that ranks compare, where the tensor itself is only on one of them.
        """
        try:
            some = like if like is not None else tensor
            assert some is not None
            check_tensor(some)
            if rows and tensor is not None and (tensor.dim() == 0 or len(tensor) != self._p):
                raise InputError(
                    f"{collective} of a tensor of shape {tuple(tensor.shape)}",
                    rule=f"shape (p, ...): {self._p} rows, one for each rank",
                )
            if shape is not None:
                check_out(out, some, shape)
            agreed = self._ready(collective, some, parts, asked)
        except InputError as e:
            raise self._calls.refuse(e) from None
        self._calls.enter(agreed.call)
        with torch.no_grad():
            source = None if tensor is None else contiguous(tensor)
            end = None if shape is None else Landing.of(out, some, shape)
            self._move(agreed, source, None if end is None else end.buffer, some)
            return None if end is None else end.result()

    def run(self, schedule: Schedule, tensor: Tensor, op: Op) -> Traffic:
        """Any schedule, in place on the whole buffer."""
        try:
            if schedule.p != self._p:
                raise InputError(
                    f"{schedule.name} for {schedule.p} ranks on {self._p}", rule="p is the number of ranks"
                )
            check_dense(tensor)
            how = reduction(op, tensor.dtype)
            call = signature(schedule.name, tensor.dtype, tuple(tensor.shape), how.name, schedule.root)
        except InputError as e:
            raise self._calls.refuse(e) from None
        self._calls.enter(call)
        part = program(schedule, self._rank)
        pairs = schedule.contract.chunk_names == "pairs"  # what comes would lie where what goes still lies
        with torch.no_grad():
            buffer = contiguous(tensor)
            target = torch.empty_like(buffer) if pairs else buffer
            places = (layout if pairs else whole_layout)(part, buffer.numel(), unit=how.unit)
            sent = self._execute(part, places, buffer, target, how, buffer)
            written_back(target, tensor)
        return sent

    def _ready(self, collective: str, tensor: Tensor, parts: int, asked: Asked) -> Agreed:
        """What to run; looked up, because training makes the same calls every step."""
        key = (collective, tensor.dtype, tensor.shape, asked)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _CALLS:
                self._known.clear()
            found = self._known[key] = self._prepare(collective, tensor, parts, asked)
        return found

    def _prepare(self, collective: str, tensor: Tensor, parts: int, asked: Asked) -> Agreed:
        """What to run, from what the caller said; refuses what cannot be."""
        root, how = asked.root, None if asked.op is None else reduction(asked.op, tensor.dtype)
        if root is not None and not 0 <= root < self._p:
            raise InputError(f"{collective}: root {root}", rule=f"0 <= root < p = {self._p}")
        if how is not None:
            share = tensor.numel() // (self._p if collective == "reduce_scatter" else 1)
            if share % how.unit:
                raise InputError(f"{share} elements for {how.name}", rule=f"a multiple of its unit, {how.unit}")
            if how.mean and collective in ("scan", "exscan"):
                raise InputError(f"avg in {collective}", rule="ranks have different numbers of operands")
        elements, itemsize = tensor.numel() * parts, tensor.element_size()
        choice = self._choice(collective, elements * itemsize, itemsize, how, asked)
        op = "" if how is None else how.name
        call = signature(collective, tensor.dtype, tuple(tensor.shape), op, root, choice.algorithm, choice.segments)
        return Agreed(collective, call, choice, how, root or 0, elements, itemsize, asked.algorithm == "auto")

    def _choice(self, collective: str, m: int, itemsize: int, how: Reduction | None, asked: Asked) -> Choice:
        algorithm, segments, root = asked.algorithm, asked.segments, asked.root or 0
        if segments is not None and segments < 1:
            raise InputError(f"{collective} in {segments} segments", rule="at least one segment")
        in_order = how is not None and not how.commutes
        named = how is None or how.named
        if algorithm == "auto":
            found = self._chooser.choose(collective, m, itemsize=itemsize, root=root, in_order=in_order, native=named)
            return found if segments is None or found.algorithm == NATIVE else replace(found, segments=segments)
        if algorithm == NATIVE:
            if self._transport.native(collective) is None or not named:
                raise self._no_native(collective, how)
            return Choice(NATIVE)
        known = ALGORITHMS[collective]
        if algorithm not in known:
            raise InputError(
                f"unknown algorithm {algorithm!r} for {collective}",
                rule=f"known: auto, native, {', '.join(known)}",
                fix=nearest(algorithm, known),
            )
        if how is not None and in_order and not self._chooser.keeps_order(collective, algorithm, root):
            raise InputError(
                f"{collective} with {how.name} by {algorithm}",
                rule=f"{how.name} does not commute, and {algorithm} changes the order of ranks",
                fix=f"algorithm='auto', or one of: {', '.join(self._chooser.ordered(collective, root))}",
            )
        return self._chooser.given(collective, algorithm, segments or 1, in_order=in_order)

    def _no_native(self, collective: str, how: Reduction | None) -> InputError:
        of = "" if how is None else f" with {how.name}"
        return InputError(
            f"native {collective}{of} over {self._transport.name or type(self._transport).__name__}",
            rule="the transport has no such collective of its own, or not for this operator and type",
            fix=f"algorithm='auto', or one of: {', '.join(ALGORITHMS[collective])}",
        )

    def _move(self, agreed: Agreed, source: Tensor | None, target: Tensor | None, like: Tensor) -> None:
        collective, how, root = agreed.collective, agreed.reduction, agreed.root
        if agreed.choice.algorithm == NATIVE:
            native = self._transport.native(collective)
            assert native is not None
            if native(source, target, op="" if how is None else how.name, root=root):
                self._transport.doing = None
                return
            # All ranks are told the same: the answer depends on operator and type alone.
            if not agreed.auto:
                raise self._no_native(collective, how)
            m = agreed.elements * agreed.itemsize
            choice = self._chooser.choose(collective, m, itemsize=agreed.itemsize, root=root, native=False)
            agreed = replace(agreed, choice=choice)
        choice = agreed.choice
        key = (collective, choice.algorithm, choice.segments, root, choice.order)
        prepared = self._prepared.get(key)
        if prepared is None:
            schedule = self._chooser.schedule(collective, choice, root=root)
            prepared = self._prepared[key] = _Prepared(program(schedule, self._rank))
        places = prepared.layout(agreed.elements, 1 if how is None else how.unit)
        self._execute(prepared.program, places, source, target, how, like)

    def _execute(
        self,
        part: Program,
        places: Layout,
        source: Tensor | None,
        target: Tensor | None,
        how: Reduction | None,
        like: Tensor,
    ) -> Traffic:
        sent = execute(
            part,
            places,
            source,
            target,
            transport=self._transport,
            next_tag=self._next_tag,
            into=None if how is None else how.into,
            like=like,
        )
        self.traffic += sent
        self._transport.doing = None
        if how is not None and how.mean and target is not None:
            target.div_(self._p)
        return sent
