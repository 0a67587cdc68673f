"""A torch.distributed process group in Python: every collective of torch, by a few backend operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...torchkit.process_groups import AllgatherOptions
from ..call_check import CallSignature, signature
from .buffers import (
    RefusedCall,
    as_contiguous,
    check_count,
    check_dense,
    check_same,
    copy_back,
    operator_name,
    split_rows,
)
from .runner import ProcessGroupRunner


class BackendProcessGroup(ProcessGroupRunner):
    """The collectives of a process group over a backend."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce on every rank."""
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_cuda:
            return self._nccl_call("allreduce", tensors, opts)
        op = operator_name(opts)
        if len(tensors) == 1:
            tensor = tensors[0]
            call = signature("all_reduce", tensor.dtype, (tensor.numel(),), op)
            if tensor.is_contiguous() and tensor.layout == torch.strided:
                move = partial(self._backend.all_reduce, tensor, op, call)
                return self._run("all_reduce", move, tensors, opts, raw=True)

        def several() -> None:
            for tensor in tensors:
                self._reduce_one(tensor, op, -1)

        return self._run("all_reduce", several, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Run several at once."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce on the root alone."""
        opts = opts or dist.ReduceOptions()
        if tensors[0].is_cuda:
            return self._nccl_call("reduce", tensors, opts)
        op, root = operator_name(opts), opts.rootRank

        def move() -> None:
            for tensor in tensors:
                self._reduce_one(tensor, op, root)

        return self._run("reduce", move, tensors, opts)

    def _reduce_one(self, tensor: Tensor, op: str, root: int) -> None:
        if tensor.is_sparse and root < 0:
            return self._backend.all_reduce_sparse(tensor, op, self._size)
        check_dense(tensor)
        flat = as_contiguous(tensor)
        name = "all_reduce" if root < 0 else "reduce"
        call = signature(name, tensor.dtype, (tensor.numel(),), op, None if root < 0 else root)
        self._backend.all_reduce(flat, op, call, root=root)
        return copy_back(flat, tensor) if root in (-1, self._number) else None

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Copy the root's tensors to all ranks."""
        opts = opts or dist.BroadcastOptions()
        if tensors[0].is_cuda:
            return self._nccl_call("broadcast", tensors, opts)
        root = opts.rootRank

        def move() -> None:
            for tensor in tensors:
                check_dense(tensor)
                flat = as_contiguous(tensor)
                call = signature("broadcast", tensor.dtype, (tensor.numel(),), "", root)
                self._backend.broadcast(flat, root, call)
                copy_back(flat, tensor)

        return self._run("broadcast", move, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank's tensor on every rank, in a list."""
        opts = opts or AllgatherOptions()
        if inputs[0].is_cuda:
            return self._nccl_call("allgather", outputs, inputs, opts)

        def move() -> None:
            for outs, mine in zip(outputs, inputs, strict=True):
                self._gather_all(outs, mine)

        return self._run("all_gather", move, [t for outs in outputs for t in outs], opts)

    def _gather_all(self, outs: Sequence[Tensor], mine: Tensor) -> None:
        check_dense(mine, *outs)
        check_count(outs, self._size, "all_gather")
        for out in outs:
            check_same(out, mine, "all_gather")
        flats = [as_contiguous(out, fill=False) for out in outs]
        self._backend.all_gather(as_contiguous(mine), flats, signature("all_gather", mine.dtype, (mine.numel(),)))
        for flat, out in zip(flats, outs, strict=True):
            copy_back(flat, out)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather several tensors: `outputs[s][i]` becomes the i-th tensor of rank s."""
        opts = opts or AllgatherOptions()

        def move() -> None:
            for i, mine in enumerate(inputs):
                self._gather_all([outs[i] for outs in outputs], mine)

        return self._run("all_gather", move, [t for outs in outputs for t in outs], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Every rank's tensor on every rank, in one tensor."""
        opts = opts or AllgatherOptions()
        if input.is_cuda:
            return self._nccl_call("_allgather_base", output, input, opts)
        return self._run("all_gather_into_tensor", lambda: self._gather_single(output, input), [output], opts)

    def _gather_single(self, output: Tensor, mine: Tensor) -> None:
        check_dense(output, mine)
        if output.numel() != mine.numel() * self._size or output.dtype != mine.dtype:
            raise RefusedCall(
                f"all_gather of {mine.numel()} elements of {mine.dtype} into {output.numel()} of {output.dtype}",
                rule=f"the output has {self._size} times as many, of the same type",
            )
        flat = as_contiguous(output, fill=False)
        outs = list(flat.view(-1).chunk(self._size)) if mine.numel() else [flat.view(-1)] * self._size
        self._backend.all_gather(
            as_contiguous(mine).view(-1), outs, signature("all_gather", mine.dtype, (mine.numel(),))
        )
        copy_back(flat, output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Run several at once."""
        opts = opts or AllgatherOptions()
        if inputs and inputs[0].is_cuda:
            return self._nccl_call("allgather_into_tensor_coalesced", outputs, inputs, opts)

        def move() -> None:
            for out, mine in zip(outputs, inputs, strict=True):
                self._gather_single(out, mine)

        return self._run("all_gather_into_tensor", move, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank's tensor on the root, in a list."""
        opts = opts or dist.GatherOptions()
        if inputs[0].is_cuda:
            return self._nccl_call("gather", outputs, inputs, opts)
        root, mine = opts.rootRank, inputs[0]

        def move() -> None:
            check_dense(mine)
            call = signature("gather", mine.dtype, (mine.numel(),), "", root)
            nothing: list[Tensor | None] = [None] * self._size
            if self._number != root:
                out = [*nothing[:root], as_contiguous(mine), *nothing[root + 1 :]]
                return self._backend.exchange(out, nothing, call)
            outs = outputs[0]
            check_count(outs, self._size, "gather")
            for o in outs:
                check_same(o, mine, "gather")
            flats = [as_contiguous(o, fill=False) for o in outs]
            self._backend.exchange(nothing, [None if s == root else f for s, f in enumerate(flats)], call)
            flats[root].view(-1).copy_(mine.reshape(-1))
            for flat, o in zip(flats, outs, strict=True):
                copy_back(flat, o)
            return None

        return self._run("gather", move, [t for outs in outputs for t in outs], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """The root's list, one tensor to each rank."""
        opts = opts or dist.ScatterOptions()
        if outputs[0].is_cuda:
            return self._nccl_call("scatter", outputs, inputs, opts)
        root, out = opts.rootRank, outputs[0]

        def move() -> None:
            check_dense(out)
            call = signature("scatter", out.dtype, (out.numel(),), "", root)
            nothing: list[Tensor | None] = [None] * self._size
            if self._number != root:
                flat = as_contiguous(out, fill=False)
                self._backend.exchange(nothing, [*nothing[:root], flat, *nothing[root + 1 :]], call)
                return copy_back(flat, out)
            parts = inputs[0]
            check_count(parts, self._size, "scatter")
            for part in parts:
                check_same(part, out, "scatter")
            self._backend.exchange(
                [None if s == root else as_contiguous(t) for s, t in enumerate(parts)], nothing, call
            )
            out.copy_(parts[root].view_as(out))
            return None

        return self._run("scatter", move, outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Rank r gets the reduction of all ranks' r-th tensors."""
        opts = opts or dist.ReduceScatterOptions()
        if outputs[0].is_cuda:
            return self._nccl_call("reduce_scatter", outputs, inputs, opts)
        op = operator_name(opts)

        def move() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                self._scatter_blocks(out, parts, op)

        return self._run("reduce_scatter", move, outputs, opts)

    def _scatter_blocks(self, out: Tensor, parts: Sequence[Tensor], op: str) -> None:
        check_dense(out, *parts)
        check_count(parts, self._size, "reduce_scatter")
        if any(part.numel() != parts[0].numel() for part in parts):
            # blocks of different sizes: reduce all of them everywhere, and take this rank's
            return self._scatter_uneven(out, parts, op)
        for part in parts:
            check_same(part, out, "reduce_scatter")
        flat = as_contiguous(out, fill=False)
        call = signature("reduce_scatter", out.dtype, (out.numel(),), op)
        self._backend.reduce_scatter([as_contiguous(part) for part in parts], flat, op, call)
        return copy_back(flat, out)

    def _scatter_uneven(self, out: Tensor, parts: Sequence[Tensor], op: str) -> None:
        whole = torch.cat([part.reshape(-1) for part in parts])
        call = signature("reduce_scatter", out.dtype, tuple(part.numel() for part in parts), op)
        self._backend.all_reduce(whole, op, call)
        start = sum(part.numel() for part in parts[: self._number])
        out.copy_(whole[start : start + out.numel()].view_as(out))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Rank r gets the r-th part of the reduction."""
        opts = opts or dist.ReduceScatterOptions()
        if output.is_cuda:
            return self._nccl_call("_reduce_scatter_base", output, input, opts)
        op = operator_name(opts)
        return self._run("reduce_scatter_tensor", lambda: self._scatter_single(output, input, op), [output], opts)

    def _scatter_single(self, output: Tensor, whole: Tensor, op: str) -> None:
        check_dense(output, whole)
        if whole.numel() != output.numel() * self._size or output.dtype != whole.dtype:
            raise RefusedCall(
                f"reduce_scatter of {whole.numel()} elements of {whole.dtype} into {output.numel()} of {output.dtype}",
                rule=f"the input has {self._size} times as many, of the same type",
            )
        if output.numel():
            self._scatter_blocks(output, as_contiguous(whole).view(-1).chunk(self._size), op)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Run several at once."""
        opts = opts or dist.ReduceScatterOptions()
        if outputs and outputs[0].is_cuda:
            return self._nccl_call("reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        op = operator_name(opts)

        def move() -> None:
            for out, whole in zip(outputs, inputs, strict=True):
                self._scatter_single(out, whole, op)

        return self._run("reduce_scatter_tensor", move, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`inputs[s]` to rank s, `outputs[s]` from it."""
        opts = opts or dist.AllToAllOptions()
        if outputs[0].is_cuda:
            return self._nccl_call("alltoall", outputs, inputs, opts)
        return self._run("all_to_all", lambda: self._exchange(outputs, inputs), outputs, opts)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        check_dense(*outputs, *inputs)
        check_count(outputs, self._size, "all_to_all")
        check_count(inputs, self._size, "all_to_all")
        flats, r = [as_contiguous(o, fill=False) for o in outputs], self._number
        check_same(outputs[r], inputs[r], "all_to_all")
        self._backend.exchange(
            [None if s == r else as_contiguous(t) for s, t in enumerate(inputs)],
            [None if s == r else f for s, f in enumerate(flats)],
            self._exchange_call(outputs, inputs),
        )
        flats[r].view(-1).copy_(inputs[r].reshape(-1))
        for flat, out in zip(flats, outputs, strict=True):
            copy_back(flat, out)

    @staticmethod
    def _exchange_call(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> CallSignature:
        """Sizes differ by rank: the backend compares them pair by pair; here they are only for the error text."""
        call = signature("all_to_all", outputs[0].dtype)
        gives, takes = (",".join(str(t.numel()) for t in tensors) for tensors in (inputs, outputs))
        return CallSignature(f"{call.text} gives={gives} takes={takes}", call.hash)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, takes: list[int], gives: list[int], opts: Any = None
    ) -> dist.Work:
        """All-to-all of parts of one tensor, split along the first dimension: evenly, or by the two lists."""
        opts = opts or dist.AllToAllOptions()
        if output.is_cuda:
            return self._nccl_call("alltoall_base", output, input, takes, gives, opts)

        def move() -> None:
            check_dense(output, input)
            if output.dtype != input.dtype:
                raise RefusedCall(f"all_to_all from {input.dtype} to {output.dtype}", rule="one type")
            flat = as_contiguous(output, fill=False)
            self._exchange(split_rows(flat, takes, self._size), split_rows(as_contiguous(input), gives, self._size))
            copy_back(flat, output)

        return self._run("all_to_all", move, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have called it."""
        opts = opts or dist.BarrierOptions()
        limit = opts.timeout.total_seconds()  # negative: not given
        call = signature("barrier")
        return self._run("barrier", lambda: self._backend.barrier(call, None if limit < 0 else limit), [], opts)
