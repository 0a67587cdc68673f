"""Requests: what has been started and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..comm.mail.matching import Matching
from ..comm.mail.message import Item
from . import constants as C
from .exception import MPIError
from .handle import Handle
from .status import Status


class Pending:
    """What a request stands for: items to wait for, and what to do when they are done."""

    __slots__ = ("__weakref__", "cancel", "finish", "items", "matching", "start", "started", "tell", "wait")

    def __init__(
        self,
        matching: Matching | None,
        items: Sequence[Item],
        finish: Callable[[], Any] = lambda: None,
        tell: Callable[[Status], None] = Status._fill,
        cancel: Callable[[], object] = lambda: None,
        start: Callable[[], Pending] | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self.matching, self.items, self.finish, self.tell, self.cancel = matching, items, finish, tell, cancel
        self.start, self.wait = start, wait
        self.started = start is None
        """A persistent request is started again and again. `wait` is for what another thread does."""

    @property
    def done(self) -> bool:
        return all(item.done for item in self.items)

    def poke(self) -> bool:
        if not self.done and self.matching is not None:
            self.matching.poke()
        return self.done


def idle(status: Status | None) -> None:
    """Of a request that stands for nothing."""
    if status is not None:
        status._fill()


def done_already() -> Pending:
    """A message to or from nobody."""
    return Pending(None, (), tell=lambda status: status._fill(C.PROC_NULL, C.ANY_TAG))


class Request(Handle, family=True):
    """Something under way."""

    __slots__ = ()
    _h: Pending | None

    @property
    def _active(self) -> bool:
        return self._h is not None and self._h.started

    def _finish(self, status: Status | None) -> Any:
        """It is done: its result, and the request is null, or idle if it is persistent."""
        pending = self._h
        assert pending is not None
        if pending.start is not None:
            pending.started = False
        else:
            self._h = None
        if status is not None:
            pending.tell(status)
        return pending.finish()

    def _wait(self, status: Status | None) -> Any:
        if not self._active:
            idle(status)
            return None
        assert self._h is not None
        if self._h.wait is not None:
            self._h.wait()
        elif self._h.matching is not None and not self._h.done:
            self._h.matching.wait(*self._h.items)
        return self._finish(status)

    def _test(self, status: Status | None) -> tuple[bool, Any]:
        if not self._active:
            idle(status)
            return True, None
        assert self._h is not None
        return (True, self._finish(status)) if self._h.poke() else (False, None)

    # -- one -------------------------------------------------------------------------------------------------------

    def Wait(self, status: Status | None = None) -> bool:
        """Return when it is done."""
        self._wait(status)
        return True

    def Test(self, status: Status | None = None) -> bool:
        """Whether it is done; if so, it is over."""
        return self._test(status)[0]

    def wait(self, status: Status | None = None) -> Any:
        """Return when it is done: the object that was received, or None."""
        return self._wait(status)

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Whether it is done, and the object that was received."""
        return self._test(status)

    def Get_status(self, status: Status | None = None) -> bool:
        """Whether it is done; it stays as it is."""
        if not self._active:
            idle(status)
            return True
        assert self._h is not None
        if not self._h.poke():
            return False
        if status is not None:
            self._h.tell(status)
        return True

    def Cancel(self) -> None:
        """Take it back if nothing has met it yet; a send cannot be taken back."""
        if self._h is None:
            raise MPIError(C.ERR_REQUEST, "REQUEST_NULL", rule="a request that exists")
        if self._h.started:
            self._h.cancel()

    cancel = Cancel
    get_status = Get_status

    def Free(self) -> None:
        """Forget it; what is under way goes on."""
        if self._h is None:
            raise MPIError(C.ERR_REQUEST, "REQUEST_NULL", rule="a request that exists")
        self._h = None

    # -- many ------------------------------------------------------------------------------------------------------

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """The number of one that is done; UNDEFINED when none is under way."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """The same with the object that was received."""
        if not _await(requests, any):
            idle(status)
            return C.UNDEFINED, None
        index = _ready(requests)[0]
        return index, requests[index]._finish(status)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """The number of one that is done, and whether one is, or none is under way."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """The same with the object that was received."""
        ready = _ready(requests, poke=True)
        if ready:
            return ready[0], True, requests[ready[0]]._finish(status)
        flag = not any(r._active for r in requests)
        if flag:
            idle(status)
        return C.UNDEFINED, flag, None

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return when all are done."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Any = None) -> list[Any]:
        """The objects that were received, when all are done."""
        _await(requests, all)
        return _finish_all(requests, range(len(requests)), statuses)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Whether all are done; if not, all stay as they are."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[bool, list[Any] | None]:
        """The same with the objects that were received."""
        ready = _ready(requests, poke=True)
        if len(ready) < sum(r._active for r in requests):
            return False, None
        return True, _finish_all(requests, range(len(requests)), statuses)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """The numbers of those that are done, at least one; None when none is under way."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[list[int] | None, list[Any] | None]:
        """The same with the objects that were received."""
        return cls._some(requests, statuses) if _await(requests, any) else (None, None)

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """The numbers of those that are done, perhaps none; None when none is under way."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[list[int] | None, list[Any] | None]:
        """The same with the objects that were received."""
        return cls._some(requests, statuses, poke=True) if any(r._active for r in requests) else (None, None)

    @classmethod
    def _some(cls, requests: Sequence[Request], statuses: Any, *, poke: bool = False) -> tuple[list[int], list[Any]]:
        ready = _ready(requests, poke=poke)
        return ready, _finish_all(requests, ready, statuses)

    @classmethod
    def Get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """The number of one that is done; it stays as it is."""
        ready = _ready(requests, poke=True)
        if ready:
            requests[ready[0]].Get_status(status)
            return ready[0], True
        if any(r._active for r in requests):
            return C.UNDEFINED, False
        idle(status)
        return C.UNDEFINED, True

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Whether all are done; they stay as they are."""
        flag = len(_ready(requests, poke=True)) == sum(r._active for r in requests)
        for request, status in zip(requests, _statuses(statuses, len(requests)), strict=False):
            if flag:
                request.Get_status(status)
        return flag

    @classmethod
    def Get_status_some(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """The numbers of those that are done; they stay as they are."""
        if not any(r._active for r in requests):
            return None
        ready = _ready(requests, poke=True)
        for i, status in zip(ready, _statuses(statuses, len(ready)), strict=False):
            requests[i].Get_status(status)
        return ready

    get_status_any, get_status_all, get_status_some = Get_status_any, Get_status_all, Get_status_some


class Prequest(Request):
    """A message that is described once and started again and again."""

    __slots__ = ()

    def Start(self) -> None:
        """Start it once more."""
        if self._h is None or self._h.start is None or self._h.started:
            raise MPIError(C.ERR_REQUEST, "Start of a request that is null or under way", rule="wait for it first")
        begun = self._h.start()
        self._h.matching, self._h.items = begun.matching, begun.items
        self._h.finish, self._h.tell, self._h.cancel = begun.finish, begun.tell, begun.cancel
        self._h.started = True

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start several."""
        for request in requests:
            request.Start()


class Grequest(Request):
    """A request that the program itself completes: not asked for, so there is only the null one."""

    __slots__ = ()


def _ready(requests: Sequence[Request], *, poke: bool = False) -> list[int]:
    active = [(i, r._h) for i, r in enumerate(requests) if r._h is not None and r._h.started]
    matching = next((p.matching for _, p in active if p.matching is not None), None)
    if poke and matching is not None:
        matching.poke()
    return [i for i, pending in active if pending.done]


def _await(requests: Sequence[Request], enough: Callable[..., bool]) -> bool:
    """Wait for any or all of those under way; whether there are any."""
    active = [r._h for r in requests if r._h is not None and r._h.started]
    matching = next((p.matching for p in active if p.matching is not None), None)
    if matching is not None and not enough(p.done for p in active):
        items = [item for p in active for item in p.items]
        brief = any(p.wait is not None for p in active)
        matching.wait_until(lambda: enough(p.done for p in active), items, brief=brief)
    return bool(active)


def _statuses(statuses: Any, n: int) -> Sequence[Status | None]:
    """n of them; a list is made as long as needed, and no longer if it was empty."""
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
            idle(status)
        results.append(request._finish(status) if request._active else None)
    return results


REQUEST_NULL = Request._constant("REQUEST_NULL")
