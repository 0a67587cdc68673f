"""Any `nn.Module` -> `Profile`, on fake tensors, without allocating its parameters."""

from .tracing import trace

__all__ = ["trace"]
