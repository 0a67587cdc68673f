"""Trace any `nn.Module` into a `Profile`, on fake tensors, without allocating its parameters."""

from .tracer import trace

__all__ = ["trace"]
