"""The calls that a captured graph holds in place of `with torch.no_grad()` and `with torch.autocast(...)`.

Written for torch 2.13. Missing public API: the public context managers do not appear in a graph; these functions do,
and graph passes must recognise and emit them.
"""

from __future__ import annotations

from torch._C import _set_grad_enabled as set_grad_enabled
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["enter_autocast", "exit_autocast", "set_grad_enabled"]
