"""Parameter servers against a ring all-reduce: seconds of both in a synchronous step, and where they cross.

p workers have m bytes of gradients each; n servers have m / n bytes of the weights each. Every link has both directions
at full speed. Pushes (gradients to the servers) and pulls (weights back) do not overlap in a synchronous step: the
update is between them. Start-up times of messages that are on their way at the same time overlap, their bytes share the
port:

    ring     2(p-1) alpha + 2(p-1)/p m beta
    servers  2 alpha + 2 max(m beta, p/n m beta_s)           each a process on a host of its own
    servers  2 alpha + 2 max(m beta, (p-1)/n m beta_s)       each on the host of a worker (colocated), n < p
    servers  2 alpha + 2 (p-1)/p m beta                      the same with n = p: the bytes of a ring, in two rounds

beta_s is that of a server's link. Where messages to servers and those of the ring are of different kinds (remote calls
and a process group), each has measured numbers of its own: `link` and `start_up` for servers, in place of 2 alpha, and
`ring_link` for the ring. The schedule `all_reduce:server` is a colocated server among ranks that receive one
message after the other: it pays p - 1 start-ups for each of its two rounds.
"""

from __future__ import annotations

from ..clusters import Link
from ..core.errors import InputError
from .collective_forms import ring_all_reduce_seconds

MOST_WORKERS = 4096
"""Up to which crossing points are searched."""


def server_exchange_seconds(
    p: int,
    m: float,
    link: Link,
    *,
    servers: int = 1,
    colocated: bool = False,
    server_link: Link | None = None,
    start_up: float | None = None,
) -> float:
    """Seconds in which p workers push m bytes each to the servers and pull as many, at the same time as each other.

    `start_up`: seconds of an exchange without bytes, if it was measured; 2 alpha by default.
    """
    _check(p, m, servers)
    one_way = transfer_seconds(p, m, link, servers=servers, colocated=colocated, server_link=server_link)
    return (2 * link.alpha if start_up is None else start_up) + 2 * one_way


def transfer_seconds(
    p: int, m: float, link: Link, *, servers: int = 1, colocated: bool = False, server_link: Link | None = None
) -> float:
    """Seconds on the wire, one way: of the busiest worker's link or of the busiest server's."""
    beta_s = (server_link or link).beta
    if not colocated:
        return max(m * link.beta, p / servers * m * beta_s)
    # what a worker and the server on its host exchange does not travel; with n = p every worker has a server
    sent = m * link.beta * ((servers - 1) / servers if servers == p else 1.0)
    return max(sent, (p - 1) / servers * m * beta_s) if p > 1 else 0.0


def crossing_bytes(
    p: int,
    link: Link,
    *,
    servers: int = 1,
    colocated: bool = False,
    server_link: Link | None = None,
    ring_link: Link | None = None,
    start_up: float | None = None,
) -> float:
    """Bytes of gradients below which servers are faster than the ring; 0 if there are none, infinite if always.

    Both are linear in m: start-up times, 2(p-1) of the ring against those of an exchange, speak for servers, the bytes
    for the ring. `ring_link` is the ring's, if it is not `link`; `start_up` is that of `server_exchange_seconds`.
    """
    _check(p, 1.0, servers)
    ring = ring_link or link
    saved = 2 * (p - 1) * ring.alpha - (2 * link.alpha if start_up is None else start_up)
    per_byte = 2 * transfer_seconds(p, 1.0, link, servers=servers, colocated=colocated, server_link=server_link)
    extra = per_byte - 2 * (p - 1) / p * ring.beta
    if saved < 0:
        return 0.0
    if extra <= 1e-12 * ring.beta:
        return float("inf") if saved > 0 or extra < -1e-12 * ring.beta else 0.0
    return saved / extra


def workers_where_servers_win(
    m: float, link: Link, *, servers: int = 1, colocated: bool = False, server_link: Link | None = None
) -> tuple[int, int] | None:
    """The fewest and the most workers, up to MOST_WORKERS, for which servers are faster than the ring; None if never.

    Start-ups of a ring grow with p, and so do the bytes through a server: on one kind of link, servers win for many
    workers where alpha > m beta / n, and else for few or none.
    """
    _check(servers, m, servers)

    def wins(p: int) -> bool:
        seconds = server_exchange_seconds(p, m, link, servers=servers, colocated=colocated, server_link=server_link)
        return seconds < ring_all_reduce_seconds(p, m, link) * (1 - 1e-12)

    winning = [p for p in range(max(2, servers), MOST_WORKERS + 1) if wins(p)]
    return (winning[0], winning[-1]) if winning else None


def fewest_servers(
    p: int, m: float, link: Link, *, colocated: bool = False, server_link: Link | None = None
) -> int | None:
    """The least number of servers, up to one for each worker, that is faster than the ring; None if none is."""
    _check(p, m, 1)
    ring = ring_all_reduce_seconds(p, m, link)
    for n in range(1, p + 1):
        if server_exchange_seconds(p, m, link, servers=n, colocated=colocated, server_link=server_link) < ring * (
            1 - 1e-12
        ):
            return n
    return None


def _check(p: int, m: float, servers: int) -> None:
    if p < 1 or m < 0 or not 1 <= servers <= p:
        raise InputError(f"{servers} servers for {p} workers, {m:g} bytes", rule="1 <= servers <= workers, bytes >= 0")
