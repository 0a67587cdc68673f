"""Horovod's DistributedOptimizer: gradients are averaged over the ranks before the optimizer's own step.

Communication: gradients are packed into buckets in reverse order of the parameters. A bucket is sent as soon as it and
all buckets before it are complete, during the backward, so every rank sends the same buckets in the same order, also
where ranks use different parameters. `step` sends what is left (parameters without a gradient count as zeros), waits,
and writes the averages back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import InputError, JobError
from ..torchkit.optimizers import mark_stepped
from .collectives import (
    Average,
    Compression,
    NoCompressor,
    Sum,
    broadcast_,
    broadcast_object,
    operator_of,
    refuse_process_set,
)
from .world import require_init

BUCKET = 25 * 2**20
"""Bytes of a bucket, as DDP has them by default."""


class GradientExchange:
    """The gradients of some parameters, averaged or summed over the ranks, each after `passes` backwards."""

    def __init__(
        self, parameters: list[nn.Parameter], op: str, compression: type[NoCompressor], passes: int, predivide: float
    ) -> None:
        self.ranks = dist.get_world_size()
        self._compression, self.passes = compression, passes
        self._before = 1.0 / predivide if op == Average else 1.0
        self._after = predivide / self.ranks if op == Average else 1.0
        self.buckets = list(_buckets(parameters))
        self._bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self._seen = dict.fromkeys(self._bucket_of, 0)
        self._sent: list[tuple[Any, torch.Tensor, torch.dtype]] = []
        self.done = False
        """Whether the gradients are those of all ranks."""
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._note)

    def _note(self, p: nn.Parameter) -> None:
        """A backward has reached a parameter."""
        if self.done or self._bucket_of[p] < len(self._sent) or self._seen[p] >= self.passes:
            raise JobError(
                f"more than {self.passes} backwards before a step",
                rule=f"backward_passes_per_step={self.passes}: backwards before a step, then zero_grad()",
                fix="DistributedOptimizer(..., backward_passes_per_step=n) for n backwards",
            )
        self._seen[p] += 1
        while len(self._sent) < len(self.buckets) and self._is_ready(self.buckets[len(self._sent)]):
            self._send()

    def _is_ready(self, bucket: list[nn.Parameter]) -> bool:
        return all(self._seen[p] >= self.passes for p in bucket)

    @torch.no_grad()
    def _send(self) -> None:
        """Send the next bucket."""
        bucket = self.buckets[len(self._sent)]
        for p in bucket:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([_dense(p).reshape(-1) for p in bucket])
        if self._before != 1.0:
            flat *= self._before
        flat, context = self._compression.compress(flat)
        work = dist.all_reduce(flat, async_op=True)
        self._sent.append((work, flat, context))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for all, and write the results into the gradients."""
        if self.done:
            return
        while len(self._sent) < len(self.buckets):
            self._send()
        for bucket, (work, flat, context) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            whole, start = self._compression.decompress(flat, context), 0
            if self._after != 1.0:
                whole = whole * self._after
            for p in bucket:
                assert p.grad is not None
                p.grad.copy_(whole[start : start + p.numel()].view_as(p))
                start += p.numel()
        self.done = True

    def restart(self) -> None:
        """Begin the next step."""
        if self._sent and not self.done:
            self.finish()  # every rank has sent: nothing may stay under way
        self._sent.clear()
        self._seen = dict.fromkeys(self._seen, 0)
        self.done = False


def _dense(p: nn.Parameter) -> torch.Tensor:
    assert p.grad is not None
    if p.grad.is_sparse:
        raise JobError("a sparse gradient", rule="gradients are sent dense", fix="nn.Embedding(..., sparse=False)")
    return p.grad


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type and device in a row, last ones first, up to BUCKET bytes."""
    bucket: list[nn.Parameter] = []
    held = 0
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if bucket and (held + size > BUCKET or (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, held = [], 0
        bucket.append(p)
        held += size
    if bucket:
        yield bucket


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: type[NoCompressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: object = None,
) -> Any:
    """The optimizer, whose `step` first averages the gradients over the ranks; also `synchronize`, `skip_synchronize`.

    It is the same object, so schedulers that were made with it keep working. Buckets have 25 MB; `num_groups` and
    `groups` have no effect on the result, and none here.
    """
    require_init()
    refuse_process_set(process_set)
    if operator_of(op) not in (Average, Sum):
        raise InputError(f"DistributedOptimizer(op={op})", rule="gradients are averaged or summed", fix="hvd.Average")
    if backward_passes_per_step < 1 or gradient_predivide_factor <= 0:
        raise InputError("DistributedOptimizer()", rule="backward_passes_per_step >= 1, gradient_predivide_factor > 0")
    if hasattr(optimizer, "synchronize"):
        raise JobError("DistributedOptimizer() of a DistributedOptimizer", rule="gradients are averaged once")
    owned = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    _check_names(named_parameters, owned)
    exchange = GradientExchange(owned, op, compression, backward_passes_per_step, gradient_predivide_factor)
    _attach(optimizer, exchange)
    return optimizer


def _check_names(named: Iterable[tuple[str, nn.Parameter]] | None, owned: list[nn.Parameter]) -> None:
    """Refuse a list of names that lacks a parameter, as Horovod does."""
    if named is None:
        return
    pairs = list(named)
    if len({name for name, _ in pairs}) < len(pairs):
        raise InputError("named_parameters has a name twice", rule="each name once", fix="model.named_parameters()")
    known = {id(p) for _, p in pairs}
    missing = sum(id(p) not in known for p in owned)
    if missing:
        raise InputError(
            f"named_parameters lacks {missing} of the optimizer's {len(owned)} parameters",
            rule="it names all of them",
            fix="named_parameters=model.named_parameters()",
        )


def _attach(optimizer: Any, exchange: GradientExchange) -> None:
    """Give the optimizer Horovod's methods, of a subclass of its own class, as Horovod does."""
    base: Any = type(optimizer)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise JobError("step(closure)", rule="gradients are sent once per step", fix="backward, then step()")
        if self._synchronizes:
            exchange.finish()
        result = base.step(self)
        exchange.restart()
        return result

    def synchronize(self: Any) -> None:
        exchange.finish()

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        exchange.restart()
        base.zero_grad(self, set_to_none)

    @contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    methods = (step, synchronize, zero_grad, skip_synchronize)
    counted = vars(optimizer).pop("step", None)  # by a scheduler that was made before: it must not hide ours
    optimizer.__class__ = type(base.__name__, (base,), {m.__name__: m for m in methods})
    optimizer._synchronizes = True
    if counted is not None:

        @wraps(counted)
        def step_and_count(closure: Callable[[], Any] | None = None) -> Any:
            mark_stepped(optimizer)
            return step(optimizer, closure)

        optimizer.step = step_and_count


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Give parameters and buffers the values of `root_rank`'s: a state dict, or (name, tensor) pairs."""
    require_init()
    items = params.items() if isinstance(params, Mapping) else list(params)
    for name, value in items:
        if isinstance(value, torch.Tensor):
            broadcast_(value, root_rank)
        elif value is not None:
            raise InputError(
                f"broadcast_parameters() with {name!r}: {type(value).__name__}",
                rule="names and tensors",
                fix="model.state_dict(), or model.named_parameters()",
            )


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give the optimizer the hyper-parameters and states of `root_rank`'s."""
    require_init()
    state = broadcast_object(_on_cpu(optimizer.state_dict()), root_rank)
    if dist.get_rank() != root_rank:
        optimizer.load_state_dict(state)


def _on_cpu(value: Any) -> Any:
    """The same value with its tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(v) for key, v in value.items()}
    return [_on_cpu(v) for v in value] if isinstance(value, list) else value
