"""The steps of every collective: validate, compare with the other ranks, look up the program, move the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.errors import InputError, nearest
from ..schedules import ALGORITHMS, NATIVE, Schedule, Traffic
from .auto_algorithm import AlgorithmChooser, ChosenAlgorithm
from .buffers import OutputBuffer, check_dense, check_out, check_tensor, contiguous, copy_back
from .call_check import CallChecker, CallSignature, signature
from .executor import ChunkLayout, RankProgram, chunk_layout, compile_schedule, execute, whole_buffer_layout
from .operators import BinaryFunction, Operator, Reduction, reduction
from .transport import Transport

OperatorLike = str | Operator | BinaryFunction
"""A name of OPERATORS, an `Operator`, or a function of two tensors."""
_CACHED_CALLS = 4096
"""Different calls that are cached."""
_CACHED_LAYOUTS = 256
"""Buffer sizes that are cached for one schedule."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """A caller's options for a collective."""

    algorithm: str
    segments: int | None = None
    op: OperatorLike | None = None
    root: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedCollective:
    """A validated collective, ready to be compared and run."""

    collective: str
    call: CallSignature
    choice: ChosenAlgorithm
    reduction: Reduction | None
    root: int
    elements: int
    """Elements of the whole buffer."""
    itemsize: int
    auto: bool


@dataclass(slots=True)
class _CompiledSchedule:
    """A schedule compiled for this rank, with the chunk layouts of the buffer sizes used so far."""

    program: RankProgram
    layouts: dict[tuple[int, int], ChunkLayout] = field(default_factory=dict)

    def layout(self, elements: int, unit: int) -> ChunkLayout:
        chunks = self.layouts.get((elements, unit))
        if chunks is None:
            if len(self.layouts) >= _CACHED_LAYOUTS:
                self.layouts.clear()
            chunks = self.layouts[elements, unit] = chunk_layout(self.program, elements, unit=unit)
        return chunks


class CollectiveDispatcher:
    """Runs the collectives of one communicator."""

    def __init__(
        self, transport: Transport, chooser: AlgorithmChooser, calls: CallChecker, next_tag: Callable[[], int]
    ) -> None:
        self._transport, self._chooser, self._calls, self._next_tag = transport, chooser, calls, next_tag
        self._p, self._rank = transport.size, transport.rank
        self._compiled: dict[tuple[str, str, int, int, tuple[int, ...] | None], _CompiledSchedule] = {}
        self._known: dict[tuple[str, torch.dtype, torch.Size, CallOptions], PreparedCollective] = {}
        self.traffic = Traffic()

    def in_place(self, collective: str, tensor: Tensor, options: CallOptions) -> Tensor:
        """Run a collective that changes its tensor."""
        try:
            check_dense(tensor)
            prepared = self._prepared_call(collective, tensor, 1, options)
        except InputError as e:
            raise self._calls.refuse(e) from None
        self._calls.enter(prepared.call)
        with torch.no_grad():
            buffer = contiguous(tensor)
            self._move(prepared, buffer, buffer, buffer)
            copy_back(buffer, tensor)
        return tensor

    def out_of_place(
        self,
        collective: str,
        tensor: Tensor | None,
        shape: tuple[int, ...] | None,
        options: CallOptions,
        out: Tensor | None,
        *,
        like: Tensor | None = None,
        rows: bool = False,
        parts: int = 1,
    ) -> Tensor | None:
        """Run a collective that returns a tensor of `shape`, or None if that is None.

        `rows`: the tensor has one row per rank. `parts` tensors make the whole buffer. `like` has the shape and type to
        compare, if only one rank has the tensor itself.
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
            prepared = self._prepared_call(collective, some, parts, options)
        except InputError as e:
            raise self._calls.refuse(e) from None
        self._calls.enter(prepared.call)
        with torch.no_grad():
            source = None if tensor is None else contiguous(tensor)
            output = None if shape is None else OutputBuffer.of(out, some, shape)
            self._move(prepared, source, None if output is None else output.buffer, some)
            return None if output is None else output.result()

    def run(self, schedule: Schedule, tensor: Tensor, op: OperatorLike) -> Traffic:
        """Run any schedule in place on the whole buffer."""
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
        program = compile_schedule(schedule, self._rank)
        pairs = schedule.contract.chunk_names == "pairs"  # received chunks would overwrite chunks not yet sent
        with torch.no_grad():
            buffer = contiguous(tensor)
            target = torch.empty_like(buffer) if pairs else buffer
            make_layout = chunk_layout if pairs else whole_buffer_layout
            layout = make_layout(program, buffer.numel(), unit=how.unit)
            sent = self._execute(program, layout, buffer, target, how, buffer)
            copy_back(target, tensor)
        return sent

    def _prepared_call(self, collective: str, tensor: Tensor, parts: int, options: CallOptions) -> PreparedCollective:
        """The prepared call; cached, because training makes the same calls every step."""
        key = (collective, tensor.dtype, tensor.shape, options)
        prepared = self._known.get(key)
        if prepared is None:
            if len(self._known) >= _CACHED_CALLS:
                self._known.clear()
            prepared = self._known[key] = self._prepare(collective, tensor, parts, options)
        return prepared

    def _prepare(self, collective: str, tensor: Tensor, parts: int, options: CallOptions) -> PreparedCollective:
        """Validate the caller's options and choose the algorithm."""
        root, how = options.root, None if options.op is None else reduction(options.op, tensor.dtype)
        if root is not None and not 0 <= root < self._p:
            raise InputError(f"{collective}: root {root}", rule=f"0 <= root < p = {self._p}")
        if how is not None:
            share = tensor.numel() // (self._p if collective == "reduce_scatter" else 1)
            if share % how.unit:
                raise InputError(f"{share} elements for {how.name}", rule=f"a multiple of its unit, {how.unit}")
            if how.mean and collective in ("scan", "exscan"):
                raise InputError(f"avg in {collective}", rule="ranks have different numbers of operands")
        elements, itemsize = tensor.numel() * parts, tensor.element_size()
        choice = self._choice(collective, elements * itemsize, itemsize, how, options)
        op = "" if how is None else how.name
        call = signature(collective, tensor.dtype, tuple(tensor.shape), op, root, choice.algorithm, choice.segments)
        return PreparedCollective(
            collective, call, choice, how, root or 0, elements, itemsize, options.algorithm == "auto"
        )

    def _choice(
        self, collective: str, m: int, itemsize: int, how: Reduction | None, options: CallOptions
    ) -> ChosenAlgorithm:
        algorithm, segments, root = options.algorithm, options.segments, options.root or 0
        if segments is not None and segments < 1:
            raise InputError(f"{collective} in {segments} segments", rule="at least one segment")
        in_order = how is not None and not how.commutes
        named = how is None or how.named
        if algorithm == "auto":
            best = self._chooser.choose(collective, m, itemsize=itemsize, root=root, in_order=in_order, native=named)
            return best if segments is None or best.algorithm == NATIVE else replace(best, segments=segments)
        if algorithm == NATIVE:
            if self._transport.native(collective) is None or not named:
                raise self._no_native(collective, how)
            return ChosenAlgorithm(NATIVE)
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

    def _move(self, prepared: PreparedCollective, source: Tensor | None, target: Tensor | None, like: Tensor) -> None:
        collective, how, root = prepared.collective, prepared.reduction, prepared.root
        if prepared.choice.algorithm == NATIVE:
            native = self._transport.native(collective)
            assert native is not None
            if native(source, target, op="" if how is None else how.name, root=root):
                self._transport.current_call = None
                return
            # All ranks get the same answer: it depends on operator and type alone.
            if not prepared.auto:
                raise self._no_native(collective, how)
            m = prepared.elements * prepared.itemsize
            choice = self._chooser.choose(collective, m, itemsize=prepared.itemsize, root=root, native=False)
            prepared = replace(prepared, choice=choice)
        choice = prepared.choice
        key = (collective, choice.algorithm, choice.segments, root, choice.order)
        compiled = self._compiled.get(key)
        if compiled is None:
            schedule = self._chooser.schedule(collective, choice, root=root)
            compiled = self._compiled[key] = _CompiledSchedule(compile_schedule(schedule, self._rank))
        layout = compiled.layout(prepared.elements, 1 if how is None else how.unit)
        self._execute(compiled.program, layout, source, target, how, like)

    def _execute(
        self,
        program: RankProgram,
        layout: ChunkLayout,
        source: Tensor | None,
        target: Tensor | None,
        how: Reduction | None,
        like: Tensor,
    ) -> Traffic:
        sent = execute(
            program,
            layout,
            source,
            target,
            transport=self._transport,
            next_tag=self._next_tag,
            into=None if how is None else how.into,
            like=like,
        )
        self.traffic += sent
        self._transport.current_call = None
        if how is not None and how.mean and target is not None:
            target.div_(self._p)
        return sent
