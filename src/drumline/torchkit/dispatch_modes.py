"""Modes that see every operator, switches that leave them, and their return when a forward runs again.

Written for torch 2.13. Missing public API: `torch.overrides.TorchFunctionMode` is public, its counterpart below
autograd is not, and neither are the stack of active modes and the guards that leave them. `set_grad_enabled`,
`enter_autocast` and `exit_autocast` are the calls that a captured graph holds in place of `with torch.no_grad()` and
`with torch.autocast(...)`: graph passes must recognise and emit them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch
from torch._C import _set_grad_enabled as set_grad_enabled
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DispatchMode",
    "UnwrappedDispatchMode",
    "enter_autocast",
    "exit_autocast",
    "function_modes",
    "reenter_function_modes",
    "set_grad_enabled",
    "with_view_tracking",
    "without_dispatch_modes",
    "without_function_modes",
]


class DispatchMode(TorchDispatchMode):
    """`__torch_dispatch__(func, types, args, kwargs)` is called for every operator while the mode is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own


class UnwrappedDispatchMode(DispatchMode):
    """A mode that is never active while torch compiles: without torch's guard, which costs time at every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Leave all dispatch modes: tensors inside are real."""
    return _disable_current_modes()  # type: ignore[no-any-return,no-untyped-call,unused-ignore]  # torch's own


def function_modes() -> list[TorchFunctionMode]:
    """The active function modes, outermost first."""
    return list(_get_current_function_mode_stack())


def without_function_modes() -> AbstractContextManager[object]:
    """Call operators past all function modes and tensor subclasses."""
    return torch._C.DisableTorchFunctionSubclass()


def with_view_tracking() -> AbstractContextManager[object]:
    """Below autograd: let `detach` share the version counter of its source."""
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


MakeContext = Callable[[], AbstractContextManager[None]]


def reenter_function_modes(make: MakeContext) -> AbstractContextManager[None]:
    """Call in a forward that will be recomputed: a context for the recomputation, with the same function modes.

    torch leaves the modes in the backward. A context of `make` is entered inside, anew for each recomputation.
    """
    return _Reentered(function_modes(), make)


class _Reentered(AbstractContextManager[None]):
    """The context of a recomputation; a retained graph enters it once per backward."""

    def __init__(self, modes: Sequence[AbstractContextManager[object]], make: MakeContext) -> None:
        self._modes, self._make = modes, make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for mode in self._modes if not function_modes() else ():
                stack.enter_context(mode)
            stack.enter_context(self._make())
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
