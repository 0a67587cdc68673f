"""Requests: operations that were started and not yet completed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import constants as C
from .exception import MPIError
from .handles import Handle
from .pending import PendingOperation, empty_status
from .status import Status


class Request(Handle, family=True):
    """An operation in progress."""

    __slots__ = ()
    _h: PendingOperation | None

    @property
    def _active(self) -> bool:
        return self._h is not None and self._h.started

    def _finish(self, status: Status | None) -> Any:
        """Complete it and return its result; the request becomes null, or inactive if it is persistent."""
        pending = self._h
        assert pending is not None
        if pending.start is not None:
            pending.started = False
        else:
            self._h = None
        if status is not None:
            pending.fill_status(status)
        return pending.finish()

    def _wait(self, status: Status | None) -> Any:
        if not self._active:
            empty_status(status)
            return None
        assert self._h is not None
        if self._h.wait is not None:
            self._h.wait()
        else:
            self._h.wait_for_items()
        return self._finish(status)

    def _test(self, status: Status | None) -> tuple[bool, Any]:
        if not self._active:
            empty_status(status)
            return True, None
        assert self._h is not None
        return (True, self._finish(status)) if self._h.make_progress() else (False, None)

    # -- single -------------------------------------------------------------------------------------------------------

    def Wait(self, status: Status | None = None) -> bool:
        """Return when it is complete."""
        self._wait(status)
        return True

    def Test(self, status: Status | None = None) -> bool:
        """Whether it is complete; if so, it is freed."""
        return self._test(status)[0]

    def wait(self, status: Status | None = None) -> Any:
        """Wait for it; returns the received object, or None."""
        return self._wait(status)

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Whether it is complete, and the received object."""
        return self._test(status)

    def Get_status(self, status: Status | None = None) -> bool:
        """Whether it is complete; the request is not freed."""
        if not self._active:
            empty_status(status)
            return True
        assert self._h is not None
        if not self._h.make_progress():
            return False
        if status is not None:
            self._h.fill_status(status)
        return True

    def Cancel(self) -> None:
        """Cancel it if nothing has matched it yet; a send cannot be cancelled."""
        if self._h is None:
            raise MPIError(C.ERR_REQUEST, "REQUEST_NULL", rule="a request that exists")
        if self._h.started:
            self._h.cancel()

    cancel = Cancel
    get_status = Get_status

    def Free(self) -> None:
        """Free the request; the operation continues."""
        if self._h is None:
            raise MPIError(C.ERR_REQUEST, "REQUEST_NULL", rule="a request that exists")
        self._h = None

    # -- multiple -----------------------------------------------------------------------------------------------------

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """The index of a completed request; UNDEFINED if none is active."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Waitany, with the received object."""
        if not _await(requests, any):
            empty_status(status)
            return C.UNDEFINED, None
        index = _ready(requests)[0]
        return index, requests[index]._finish(status)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """The index of a completed request, and whether there is one or none is active."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """Testany, with the received object."""
        ready = _ready(requests, progress=True)
        if ready:
            return ready[0], True, requests[ready[0]]._finish(status)
        flag = not any(r._active for r in requests)
        if flag:
            empty_status(status)
        return C.UNDEFINED, flag, None

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return when all are complete."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Any = None) -> list[Any]:
        """Wait for all; returns the received objects."""
        _await(requests, all)
        return _finish_all(requests, range(len(requests)), statuses)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Whether all are complete; if not, none is freed."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[bool, list[Any] | None]:
        """Testall, with the received objects."""
        ready = _ready(requests, progress=True)
        if len(ready) < sum(r._active for r in requests):
            return False, None
        return True, _finish_all(requests, range(len(requests)), statuses)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """The indices of completed requests, at least one; None if none is active."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[list[int] | None, list[Any] | None]:
        """Waitsome, with the received objects."""
        return cls._some(requests, statuses) if _await(requests, any) else (None, None)

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """The indices of completed requests, possibly none; None if none is active."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[list[int] | None, list[Any] | None]:
        """Testsome, with the received objects."""
        return cls._some(requests, statuses, progress=True) if any(r._active for r in requests) else (None, None)

    @classmethod
    def _some(
        cls, requests: Sequence[Request], statuses: Any, *, progress: bool = False
    ) -> tuple[list[int], list[Any]]:
        ready = _ready(requests, progress=progress)
        return ready, _finish_all(requests, ready, statuses)

    @classmethod
    def Get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """The index of a completed request; it is not freed."""
        ready = _ready(requests, progress=True)
        if ready:
            requests[ready[0]].Get_status(status)
            return ready[0], True
        if any(r._active for r in requests):
            return C.UNDEFINED, False
        empty_status(status)
        return C.UNDEFINED, True

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Whether all are complete; they are not freed."""
        flag = len(_ready(requests, progress=True)) == sum(r._active for r in requests)
        for request, status in zip(requests, _statuses(statuses, len(requests)), strict=False):
            if flag:
                request.Get_status(status)
        return flag

    @classmethod
    def Get_status_some(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """The indices of completed requests; they are not freed."""
        if not any(r._active for r in requests):
            return None
        ready = _ready(requests, progress=True)
        for i, status in zip(ready, _statuses(statuses, len(ready)), strict=False):
            requests[i].Get_status(status)
        return ready

    get_status_any, get_status_all, get_status_some = Get_status_any, Get_status_all, Get_status_some


def _ready(requests: Sequence[Request], *, progress: bool = False) -> list[int]:
    active = [(i, r._h) for i, r in enumerate(requests) if r._h is not None and r._h.started]
    matcher = next((p.matcher for _, p in active if p.matcher is not None), None)
    if progress and matcher is not None:
        matcher.make_progress()
        for _, pending in active:
            pending.advance()
    return [i for i, pending in active if pending.done]


def _await(requests: Sequence[Request], enough: Callable[..., bool]) -> bool:
    """Wait for any or all active requests; returns whether there are any."""
    active = [r._h for r in requests if r._h is not None and r._h.started]
    matcher = next((p.matcher for p in active if p.matcher is not None), None)
    brief = any(p.wait is not None for p in active)
    while matcher is not None and not enough(p.done for p in active):
        items = [item for p in active for item in p.items]
        matcher.wait_until(lambda: enough(p.items_done for p in active), items, brief=brief)
        for p in active:
            p.advance()
    return bool(active)


def _statuses(statuses: Any, n: int) -> Sequence[Status | None]:
    """n statuses; a list is extended to the needed length."""
    if statuses is None:
        return [None] * n
    if isinstance(statuses, list):
        statuses.extend(Status() for _ in range(n - len(statuses)))
    return [*statuses[:n], *[None] * (n - len(statuses))]


def _finish_all(requests: Sequence[Request], numbers: Sequence[int], statuses: Any) -> list[Any]:
    results = []
    for i, status in zip(numbers, _statuses(statuses, len(numbers)), strict=True):
        request = requests[i]
        if not request._active:
            empty_status(status)
        results.append(request._finish(status) if request._active else None)
    return results


REQUEST_NULL = Request._constant("REQUEST_NULL")
