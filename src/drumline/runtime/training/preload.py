"""Modules that every rank needs: the launcher's fork server imports them once, and ranks are forked from it."""

import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
import torch.profiler

from ...torchkit.compiler import load_compiler
from .. import engine
from ..verification import verify

load_compiler()

__all__ = ["engine", "torch", "verify"]
