"""The contracts of collectives, which schedules are checked against.

m is always the bytes of the whole buffer: the result of all_gather and gather, the input of reduce_scatter and scatter,
the p blocks of one rank in all_to_all. Share r of it belongs to rank r.
"""

from __future__ import annotations

from math import isqrt

from .spec import Contract, Range, Schedule, even_ranges


def _everything(s: Schedule, rank: int, chunk: int) -> bool:
    return True


def _own_share(s: Schedule, rank: int, chunk: int) -> bool:
    return share(s, chunk) == rank


def _at_root(s: Schedule, rank: int, chunk: int) -> bool:
    return rank == s.root


def _own_blocks(s: Schedule, rank: int, chunk: int) -> bool:
    return pair(s, chunk)[0] == rank


def _all(s: Schedule, rank: int, chunk: int) -> tuple[int, ...]:
    return tuple(range(s.p))


def _from_owner(s: Schedule, rank: int, chunk: int) -> tuple[int, ...]:
    return (share(s, chunk),)


def _from_root(s: Schedule, rank: int, chunk: int) -> tuple[int, ...]:
    return (s.root,)


def _all_in_own_share(s: Schedule, rank: int, chunk: int) -> tuple[int, ...] | None:
    return _all(s, rank, chunk) if _own_share(s, rank, chunk) else None


def _all_at_root(s: Schedule, rank: int, chunk: int) -> tuple[int, ...] | None:
    return _all(s, rank, chunk) if rank == s.root else None


def _from_owner_at_root(s: Schedule, rank: int, chunk: int) -> tuple[int, ...] | None:
    return _from_owner(s, rank, chunk) if rank == s.root else None


def _from_root_in_own_share(s: Schedule, rank: int, chunk: int) -> tuple[int, ...] | None:
    return (s.root,) if _own_share(s, rank, chunk) else None


def _blocks_for_me(s: Schedule, rank: int, chunk: int) -> tuple[int, ...] | None:
    src, dst = pair(s, chunk)
    return (src,) if dst == rank else None


def _up_to_me(s: Schedule, rank: int, chunk: int) -> tuple[int, ...]:
    return tuple(range(rank + 1))


def _before_me(s: Schedule, rank: int, chunk: int) -> tuple[int, ...] | None:
    return tuple(range(rank)) if rank else None


def share(s: Schedule, chunk: int) -> int:
    """The owner of a chunk."""
    return chunk * s.p // s.chunks


def pair(s: Schedule, chunk: int) -> tuple[int, int]:
    """(sender, receiver) of a chunk of an all_to_all."""
    return divmod(chunk * s.p * s.p // s.chunks, s.p)


def pair_ranges(elements: int, chunks: int) -> tuple[Range, ...]:
    """Chunk src*p + dst is at position dst of the buffer of `src`; ranks that forward it keep it separately."""
    p = isqrt(chunks)
    return even_ranges(elements, p) * p


def no_ranges(elements: int, chunks: int) -> tuple[Range, ...]:
    """Empty ranges: a barrier carries no data."""
    return ((0, 0),) * chunks


ALL_REDUCE = Contract("all_reduce", _everything, _all, "every rank ends with the sum over all ranks")
ALL_GATHER = Contract(
    "all_gather", _own_share, _from_owner, "every rank ends with the share of every rank", chunk_names="shares"
)
REDUCE_SCATTER = Contract(
    "reduce_scatter",
    _everything,
    _all_in_own_share,
    "rank r ends with share r of the sum over all ranks",
    chunk_names="shares",
)
BROADCAST = Contract("broadcast", _at_root, _from_root, "every rank ends with the buffer of the root", rooted=True)
REDUCE = Contract("reduce", _everything, _all_at_root, "the root ends with the sum over all ranks", rooted=True)
GATHER = Contract(
    "gather",
    _own_share,
    _from_owner_at_root,
    "the root ends with the share of every rank",
    rooted=True,
    chunk_names="shares",
)
SCATTER = Contract(
    "scatter",
    _at_root,
    _from_root_in_own_share,
    "rank r ends with share r of the root's buffer",
    rooted=True,
    chunk_names="shares",
)
ALL_TO_ALL = Contract(
    "all_to_all", _own_blocks, _blocks_for_me, "rank r ends with block r of every rank", chunk_names="pairs"
)
BARRIER = Contract("barrier", _everything, _all, "every rank ends having heard of every rank", idempotent=True)
SCAN = Contract("scan", _everything, _up_to_me, "rank r ends with the sum over ranks 0 to r", chunk_names="line")
EXSCAN = Contract(
    "exscan", _everything, _before_me, "rank r > 0 ends with the sum over ranks 0 to r-1", chunk_names="line"
)
