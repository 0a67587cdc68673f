"""Replicas as threads of one process, as in torch's `nn.DataParallel`. Kept for comparison, not for use.

Every forward scatters the batch over replicas that share (on several GPUs: copy) one set of weights, runs each in a
thread, and gathers the outputs for the loss. Its bottlenecks: one interpreter lock for all replicas, and one device
that has the outputs and sums all gradients.

BatchNorm statistics span the replicas: they are exchanged in the forward, and since one process has one autograd graph,
the backward needs nothing more. Dropout masks come from one generator, in the order of the threads' calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...core.errors import JobError
from ...datasets.stream import split_range
from ...torchkit.dispatch_modes import function_modes
from ...torchkit.modules import BatchNormBase, check_input_dim
from ...tracing.op_costs import tensors
from .replicate import WholeModel


class ThreadReplicas(WholeModel):
    """One copy of the weights, and `replicas` threads that compute with it."""

    def __init__(self, replicas: int, device: torch.device) -> None:
        super().__init__()
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        self._devices = [torch.device(device.type, i % count) if count > 1 else device for i in range(replicas)]

    def wrap(self, model: nn.Module) -> nn.Module:
        self.keep(model)
        return _Scattered(model, self._devices)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        yield


class _Scattered(nn.Module):
    """Scatter, run, gather."""

    def __init__(self, model: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.model, self._devices = model, devices
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="replica")
        self._exchange = _Exchange()
        for module in model.modules():
            if isinstance(module, BatchNormBase) and not isinstance(module, nn.SyncBatchNorm):
                # replicas are shallow copies, which keep this attribute
                module.forward = _Norm(module, self._exchange)  # type: ignore[assignment,method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        n = _samples((args, kwargs))
        parts = [part for part in split_range(n, len(self._devices)) if part]
        self._exchange.begin(len(parts))
        modes = _ThreadModes()
        futures = [
            self._pool.submit(self._run, i, modes, _slice(args, n, part, d), _slice(kwargs, n, part, d), d)
            for i, (part, d) in enumerate(zip(parts, self._devices, strict=False))
        ]
        outputs: list[Any] = []
        failed: Exception | None = None
        for future in futures:
            try:
                outputs.append(future.result())
            except threading.BrokenBarrierError as e:
                failed = failed or e
            except Exception as e:
                failed = e
        if failed is not None:
            raise failed
        return _join(outputs, [len(p) for p in parts], self._devices[0])

    def _run(self, index: int, modes: _ThreadModes, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Run one replica with the caller's modes, which are per thread."""
        try:
            with modes.entered(), self._exchange.as_replica(index):
                model = self.model if device == self._devices[0] else _copy(self.model, device)
                return model(*args, **kwargs)
        except BaseException:
            self._exchange.abort()
            raise


class _ThreadModes:
    """The caller's gradient mode, function modes and autocast, to be set in another thread."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._modes: list[TorchFunctionMode] = function_modes()
        self._casts = {
            kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        }

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.set_grad_enabled(self._grad), ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(_inside(mode))
            if not self._casts:
                yield
                return
            ((kind, dtype),) = self._casts.items()
            # autocast's cache of cast weights is per thread
            with torch.autocast(kind, dtype=dtype):
                yield


@contextmanager
def _inside(mode: TorchFunctionMode) -> Iterator[None]:
    """Enter the mode in this thread only, without the rest of its own `__enter__`, which its owner has run."""
    TorchFunctionMode.__enter__(mode)
    try:
        yield
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)


class _Exchange:
    """Exchanges values between the replicas of one forward."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.begin(1)

    def begin(self, n: int) -> None:
        """Start a forward of `n` replicas."""
        self._n = n
        self._table: list[Any] = [None] * n
        self._barrier = threading.Barrier(n)

    @contextmanager
    def as_replica(self, index: int) -> Iterator[None]:
        """Mark this thread as replica `index`."""
        self._thread.index = index
        yield

    @property
    def index(self) -> int:
        """The replica that runs in this thread."""
        return int(self._thread.index)

    def all_gather(self, mine: Any) -> list[Any]:
        """Every replica's value, in their order."""
        self._table[self.index] = mine
        self._barrier.wait()
        values = list(self._table)
        self._barrier.wait()  # no replica writes its next value while another still reads
        return values

    def abort(self) -> None:
        """Release the others, because this replica has failed."""
        self._barrier.abort()


class _Norm:
    """A BatchNorm's forward with the statistics of all replicas."""

    def __init__(self, module: BatchNormBase, exchange: _Exchange) -> None:
        self._module, self._exchange = module, exchange

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        m = self._module
        check_input_dim(m, x)
        if not m.training and m.running_mean is not None:
            return type(m).forward(m, x)
        x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        dims = [0, *range(2, x.dim())]
        n = x.numel() / x.shape[1]
        gathered = self._exchange.all_gather((x.mean(dims), x.var(dims, correction=0), n))
        means = [(m.to(x.device), k) for m, _, k in gathered]
        variances = [(v.to(x.device), k) for _, v, k in gathered]
        count = sum(k for _, k in means)
        mean = torch.stack([m * k for m, k in means]).sum(0) / count
        spread = [(v + (m - mean).square()) * k for (v, k), (m, _) in zip(variances, means, strict=True)]
        variance = torch.stack(spread).sum(0) / count
        if self._exchange.index == 0:
            self._update_running_statistics(mean.detach(), variance.detach(), count)
        shape = (1, -1, *([1] * (x.dim() - 2)))
        y: torch.Tensor = (x - mean.view(shape)) * torch.rsqrt(variance + m.eps).view(shape)
        if m.weight is None:
            return y
        return y * m.weight.to(x).view(shape) + m.bias.to(x).view(shape)

    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        m = self._module
        if not m.training or m.running_mean is None or m.running_var is None:
            return
        assert m.num_batches_tracked is not None
        m.num_batches_tracked.add_(1)
        factor = m.momentum if m.momentum is not None else 1.0 / float(m.num_batches_tracked)
        m.running_mean.lerp_(mean.to(m.running_mean), factor)
        m.running_var.lerp_((variance * (count / max(count - 1, 1))).to(m.running_var), factor)


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on another device; gradients flow from its copied weights to the originals."""
    from torch.nn.parallel import replicate

    return replicate(model, [device.index or 0])[0]


def _samples(value: Any) -> int:
    inputs = tensors(value)
    if not inputs or not inputs[0].dim():
        raise JobError("the model's input has no tensor with samples", rule="backend=threads cuts inputs by samples")
    return inputs[0].shape[0]


def _slice(value: Any, n: int, part: range, device: torch.device) -> Any:
    """One replica's samples; values without samples go to all."""
    if isinstance(value, torch.Tensor):
        whole = value[part.start : part.stop] if value.dim() and value.shape[0] == n else value
        return whole.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {k: _slice(v, n, part, device) for k, v in value.items()}
    return type(value)(_slice(v, n, part, device) for v in value) if isinstance(value, tuple | list) else value


def _join(outputs: list[Any], sizes: list[int], device: torch.device) -> Any:
    """Concatenate the replicas' outputs by samples."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        if not all(t.dim() and t.shape[0] == n for t, n in zip(outputs, sizes, strict=True)):
            raise JobError(
                f"the model's output of shape {tuple(first.shape)} does not count samples along its first dim",
                rule="backend=threads concatenates the replicas' outputs",
                fix="processes instead of threads: omit backend",
            )
        return torch.cat([t.to(device) for t in outputs])
    if isinstance(first, dict):
        values = {k: _join([o[k] for o in outputs], sizes, device) for k in first}
        return values if type(first) is dict else type(first)(**values)
    if isinstance(first, tuple | list):
        joined = [_join(list(column), sizes, device) for column in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first
