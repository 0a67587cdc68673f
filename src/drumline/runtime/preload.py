"""What ranks need before they start; the launcher's server imports it once, and ranks are forked from there."""

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
import torch.profiler

from . import engine
from .verification import verify

__all__ = ["engine", "torch", "verify"]
