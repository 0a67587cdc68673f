"""The two queues of a rank's messages, by context: receives that wait for one, and messages that nobody has asked for.

A message takes the oldest receive that fits it, a receive the oldest message; so messages do not overtake.
"""

from __future__ import annotations

from collections import deque

from .message import ANY, Arrival, Receive


class Queues:
    """One thread at a time uses them."""

    def __init__(self) -> None:
        self._posted: dict[int, list[Receive]] = {}
        self._unexpected: dict[int, deque[Arrival]] = {}

    def post(self, receive: Receive) -> None:
        """A receive that no message has met."""
        self._posted.setdefault(receive.context, []).append(receive)

    def keep(self, arrival: Arrival) -> None:
        """A message that no receive has met."""
        self._unexpected.setdefault(arrival.context, deque()).append(arrival)

    def claim(self, context: int, src: int, tag: int) -> Receive | None:
        """The oldest receive that a message fits, if there is one; it waits no more."""
        waiting = self._posted.get(context)
        if waiting:
            for i, receive in enumerate(waiting):
                if receive.src in (src, ANY) and receive.want in (tag, ANY):
                    del waiting[i]
                    return receive
        return None

    def find(self, context: int, src: int, tag: int, *, take: bool) -> Arrival | None:
        """The oldest message that a receive would take, if there is one; `take` keeps it for its finder."""
        arrivals = self._unexpected.get(context)
        if arrivals:
            for i, arrival in enumerate(arrivals):
                if src in (arrival.src, ANY) and tag in (arrival.tag, ANY):
                    if take:
                        del arrivals[i]
                    return arrival
        return None

    def withdraw(self, item: object) -> bool:
        """Take a receive back, if no message has met it; whether that was so."""
        if not isinstance(item, Receive) or item not in self._posted.get(item.context, ()):
            return False
        self._posted[item.context].remove(item)
        item.cancelled = item.done = True
        return True
