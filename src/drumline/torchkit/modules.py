"""Base classes of torch's modules, and a module run with other parameters.

Written for torch 2.13. Missing public API: batch norm, instance norm and dropout come in variants by dimension whose
common bases are private; `torch.func.functional_call` calls `forward` alone and cannot wrap an export.
"""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as RunningNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.utils.stateless import _reparametrize_module as reparametrize

__all__ = ["BatchNormBase", "DropoutBase", "RunningNormBase", "reparametrize"]
