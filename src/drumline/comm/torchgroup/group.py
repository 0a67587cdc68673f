"""A torch.distributed process group in Python: every collective of torch, made of a few moves of contiguous tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from ..calls import Signature, signature
from .buffers import Refused, back, count, cut, dense, operator, plain, same
from .monitored import monitored_barrier
from .runner import GroupRunner
from .sparse import all_reduce_sparse


class EngineGroup(GroupRunner):
    """A process group over an engine."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum, or another operator, on every rank."""
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_cuda:
            return self._inner("allreduce", tensors, opts)
        op = operator(opts)
        if len(tensors) == 1:
            tensor = tensors[0]
            call = signature("all_reduce", tensor.dtype, (tensor.numel(),), op)
            if tensor.is_contiguous() and tensor.layout == torch.strided:
                move = partial(self._engine.all_reduce, tensor, op, call)
                return self._run("all_reduce", move, tensors, opts, raw=True)

        def several() -> None:
            for tensor in tensors:
                self._reduce_one(tensor, op, -1)

        return self._run("all_reduce", several, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Several at once."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """The result on the root alone."""
        opts = opts or dist.ReduceOptions()
        if tensors[0].is_cuda:
            return self._inner("reduce", tensors, opts)
        op, root = operator(opts), opts.rootRank

        def move() -> None:
            for tensor in tensors:
                self._reduce_one(tensor, op, root)

        return self._run("reduce", move, tensors, opts)

    def _reduce_one(self, tensor: Tensor, op: str, root: int) -> None:
        if tensor.is_sparse and root < 0:
            return all_reduce_sparse(self._engine, tensor, op, self._size)
        dense(tensor)
        flat = plain(tensor)
        word = "all_reduce" if root < 0 else "reduce"
        call = signature(word, tensor.dtype, (tensor.numel(),), op, None if root < 0 else root)
        self._engine.all_reduce(flat, op, call, root=root)
        return back(flat, tensor) if root in (-1, self._number) else None

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Everybody ends with what the root has."""
        opts = opts or dist.BroadcastOptions()
        if tensors[0].is_cuda:
            return self._inner("broadcast", tensors, opts)
        root = opts.rootRank

        def move() -> None:
            for tensor in tensors:
                dense(tensor)
                flat = plain(tensor)
                call = signature("broadcast", tensor.dtype, (tensor.numel(),), "", root)
                self._engine.broadcast(flat, root, call)
                back(flat, tensor)

        return self._run("broadcast", move, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank's tensor on every rank, in a list."""
        opts = opts or AllgatherOptions()
        if inputs[0].is_cuda:
            return self._inner("allgather", outputs, inputs, opts)

        def move() -> None:
            for outs, mine in zip(outputs, inputs, strict=True):
                self._gather_all(outs, mine)

        return self._run("all_gather", move, [t for outs in outputs for t in outs], opts)

    def _gather_all(self, outs: Sequence[Tensor], mine: Tensor) -> None:
        dense(mine, *outs)
        count(outs, self._size, "all_gather")
        for out in outs:
            same(out, mine, "all_gather")
        flats = [plain(out, fill=False) for out in outs]
        self._engine.all_gather(plain(mine), flats, signature("all_gather", mine.dtype, (mine.numel(),)))
        for flat, out in zip(flats, outs, strict=True):
            back(flat, out)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Several lists at once: `outputs[s][i]` becomes the i-th tensor of rank s."""
        opts = opts or AllgatherOptions()

        def move() -> None:
            for i, mine in enumerate(inputs):
                self._gather_all([outs[i] for outs in outputs], mine)

        return self._run("all_gather", move, [t for outs in outputs for t in outs], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Every rank's tensor on every rank, in one tensor."""
        opts = opts or AllgatherOptions()
        if input.is_cuda:
            return self._inner("_allgather_base", output, input, opts)
        return self._run("all_gather_into_tensor", lambda: self._gather_single(output, input), [output], opts)

    def _gather_single(self, output: Tensor, mine: Tensor) -> None:
        dense(output, mine)
        if output.numel() != mine.numel() * self._size or output.dtype != mine.dtype:
            raise Refused(
                f"all_gather of {mine.numel()} elements of {mine.dtype} into {output.numel()} of {output.dtype}",
                rule=f"the output has {self._size} times as many, of the same type",
            )
        flat = plain(output, fill=False)
        outs = list(flat.view(-1).chunk(self._size)) if mine.numel() else [flat.view(-1)] * self._size
        self._engine.all_gather(plain(mine).view(-1), outs, signature("all_gather", mine.dtype, (mine.numel(),)))
        back(flat, output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Several at once."""
        opts = opts or AllgatherOptions()
        if inputs and inputs[0].is_cuda:
            return self._inner("allgather_into_tensor_coalesced", outputs, inputs, opts)

        def move() -> None:
            for out, mine in zip(outputs, inputs, strict=True):
                self._gather_single(out, mine)

        return self._run("all_gather_into_tensor", move, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank's tensor on the root, in a list."""
        opts = opts or dist.GatherOptions()
        if inputs[0].is_cuda:
            return self._inner("gather", outputs, inputs, opts)
        root, mine = opts.rootRank, inputs[0]

        def move() -> None:
            dense(mine)
            call = signature("gather", mine.dtype, (mine.numel(),), "", root)
            nothing: list[Tensor | None] = [None] * self._size
            if self._number != root:
                out = [*nothing[:root], plain(mine), *nothing[root + 1 :]]
                return self._engine.exchange(out, nothing, call)
            outs = outputs[0]
            count(outs, self._size, "gather")
            for o in outs:
                same(o, mine, "gather")
            flats = [plain(o, fill=False) for o in outs]
            self._engine.exchange(nothing, [None if s == root else f for s, f in enumerate(flats)], call)
            flats[root].view(-1).copy_(mine.reshape(-1))
            for flat, o in zip(flats, outs, strict=True):
                back(flat, o)
            return None

        return self._run("gather", move, [t for outs in outputs for t in outs], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """The root's list, one tensor to each rank."""
        opts = opts or dist.ScatterOptions()
        if outputs[0].is_cuda:
            return self._inner("scatter", outputs, inputs, opts)
        root, out = opts.rootRank, outputs[0]

        def move() -> None:
            dense(out)
            call = signature("scatter", out.dtype, (out.numel(),), "", root)
            nothing: list[Tensor | None] = [None] * self._size
            if self._number != root:
                flat = plain(out, fill=False)
                self._engine.exchange(nothing, [*nothing[:root], flat, *nothing[root + 1 :]], call)
                return back(flat, out)
            parts = inputs[0]
            count(parts, self._size, "scatter")
            for part in parts:
                same(part, out, "scatter")
            self._engine.exchange([None if s == root else plain(t) for s, t in enumerate(parts)], nothing, call)
            out.copy_(parts[root].view_as(out))
            return None

        return self._run("scatter", move, outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Rank r gets the reduction of everybody's r-th tensor."""
        opts = opts or dist.ReduceScatterOptions()
        if outputs[0].is_cuda:
            return self._inner("reduce_scatter", outputs, inputs, opts)
        op = operator(opts)

        def move() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                self._scatter_blocks(out, parts, op)

        return self._run("reduce_scatter", move, outputs, opts)

    def _scatter_blocks(self, out: Tensor, parts: Sequence[Tensor], op: str) -> None:
        dense(out, *parts)
        count(parts, self._size, "reduce_scatter")
        if any(part.numel() != parts[0].numel() for part in parts):
            # blocks of different sizes, such as all_to_all has them: send them, and add up in the order of ranks
            return self._scatter_uneven(out, parts, op)
        for part in parts:
            same(part, out, "reduce_scatter")
        flat = plain(out, fill=False)
        call = signature("reduce_scatter", out.dtype, (out.numel(),), op)
        self._engine.reduce_scatter([plain(part) for part in parts], flat, op, call)
        return back(flat, out)

    def _scatter_uneven(self, out: Tensor, parts: Sequence[Tensor], op: str) -> None:
        whole = torch.cat([part.reshape(-1) for part in parts])
        call = signature("reduce_scatter", out.dtype, tuple(part.numel() for part in parts), op)
        self._engine.all_reduce(whole, op, call)
        start = sum(part.numel() for part in parts[: self._number])
        out.copy_(whole[start : start + out.numel()].view_as(out))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Rank r gets the r-th part of the reduction."""
        opts = opts or dist.ReduceScatterOptions()
        if output.is_cuda:
            return self._inner("_reduce_scatter_base", output, input, opts)
        op = operator(opts)
        return self._run("reduce_scatter_tensor", lambda: self._scatter_single(output, input, op), [output], opts)

    def _scatter_single(self, output: Tensor, whole: Tensor, op: str) -> None:
        dense(output, whole)
        if whole.numel() != output.numel() * self._size or output.dtype != whole.dtype:
            raise Refused(
                f"reduce_scatter of {whole.numel()} elements of {whole.dtype} into {output.numel()} of {output.dtype}",
                rule=f"the input has {self._size} times as many, of the same type",
            )
        if output.numel():
            self._scatter_blocks(output, plain(whole).view(-1).chunk(self._size), op)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several at once."""
        opts = opts or dist.ReduceScatterOptions()
        if outputs and outputs[0].is_cuda:
            return self._inner("reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        op = operator(opts)

        def move() -> None:
            for out, whole in zip(outputs, inputs, strict=True):
                self._scatter_single(out, whole, op)

        return self._run("reduce_scatter_tensor", move, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`inputs[s]` to rank s, `outputs[s]` from it."""
        opts = opts or dist.AllToAllOptions()
        if outputs[0].is_cuda:
            return self._inner("alltoall", outputs, inputs, opts)
        return self._run("all_to_all", lambda: self._exchange(outputs, inputs), outputs, opts)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        dense(*outputs, *inputs)
        count(outputs, self._size, "all_to_all")
        count(inputs, self._size, "all_to_all")
        flats, r = [plain(o, fill=False) for o in outputs], self._number
        same(outputs[r], inputs[r], "all_to_all")
        self._engine.exchange(
            [None if s == r else plain(t) for s, t in enumerate(inputs)],
            [None if s == r else f for s, f in enumerate(flats)],
            self._exchange_call(outputs, inputs),
        )
        flats[r].view(-1).copy_(inputs[r].reshape(-1))
        for flat, out in zip(flats, outputs, strict=True):
            back(flat, out)

    @staticmethod
    def _exchange_call(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Signature:
        """Ranks give and take different amounts: these are compared pair by pair, and here only told."""
        call = signature("all_to_all", outputs[0].dtype)
        gives, takes = (",".join(str(t.numel()) for t in tensors) for tensors in (inputs, outputs))
        return Signature(f"{call.text} gives={gives} takes={takes}", call.hash)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, takes: list[int], gives: list[int], opts: Any = None
    ) -> dist.Work:
        """The same on parts of one tensor, cut along the first dimension: evenly, or as the two lists say."""
        opts = opts or dist.AllToAllOptions()
        if output.is_cuda:
            return self._inner("alltoall_base", output, input, takes, gives, opts)

        def move() -> None:
            dense(output, input)
            if output.dtype != input.dtype:
                raise Refused(f"all_to_all from {input.dtype} to {output.dtype}", rule="one type")
            flat = plain(output, fill=False)
            self._exchange(cut(flat, takes, self._size), cut(plain(input), gives, self._size))
            back(flat, output)

        return self._run("all_to_all", move, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have come."""
        opts = opts or dist.BarrierOptions()
        limit = opts.timeout.total_seconds()  # negative: not given
        call = signature("barrier")
        return self._run("barrier", lambda: self._engine.barrier(call, None if limit < 0 else limit), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error on rank 0 names the ranks that did not come."""
        self._monitored += 1
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        key = f"monitored/{self._monitored}"
        monitored_barrier(self._store, key, self._number, self._size, seconds, wait_all_ranks=wait_all_ranks)
