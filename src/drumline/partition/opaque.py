"""While a model is captured: functions with a backward of their own stay one operator; what would be lost is refused.

The tracer sees operators, not autograd. It would walk into a `torch.autograd.Function` and write down its forward,
whose derivative is another one. So such a call becomes a node that calls it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from ..core.errors import TraceError
from .statistics import AVERAGED


@contextmanager
def opaque(model: nn.Module) -> Iterator[None]:
    """Around the capture of a model."""
    plain: Any = torch.autograd.Function.__dict__["apply"]
    hook: Any = torch.Tensor.register_hook
    attributes = [
        (m, {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in vars(m).items()}) for m in model.modules()
    ]
    for m in model.modules():
        if isinstance(m, _BatchNorm) and m.momentum is None and m.track_running_stats:
            m.momentum = AVERAGED

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode = get_proxy_mode()
        call = plain.__get__(None, cls)
        if mode is None:
            return call(*args, **kwargs)
        if cls is CheckpointFunction:  # (function, whether to keep the random state, *inputs)
            return args[0](*args[2:])
        with disable_proxy_modes_tracing():
            out = call(*args, **kwargs)
        tracer: Any = mode.tracer
        proxies = tree_map(tracer.unwrap_proxy, args)
        node = tracer.create_proxy("call_function", call, proxies, kwargs, name=cls.__name__)
        return track_tensor_tree(out, node, constant=None, tracer=tracer)

    def refuse(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        if get_proxy_mode() is None:
            return hook(tensor, *_, **__)
        raise TraceError(
            f"{type(model).__name__} puts a hook on a tensor in its forward",
            rule="a plan that splits the model runs its operators, and would run without the hook",
            fix="write it as a torch.autograd.Function",
        )

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    torch.Tensor.register_hook = refuse  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]
        # a cache that the forward filled holds tensors of the trace; hooks go with the flags that say they are there
        for module, before in attributes:
            for key in set(vars(module)) - set(before):
                del vars(module)[key]
            for key, (value, content) in before.items():
                vars(module)[key] = value
                if content is not None and key not in ("_parameters", "_buffers", "_modules"):
                    value.clear()
                    value.update(content)
