"""Groups: ordered sets of ranks, and their algebra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from . import constants as C
from .exception import MPIError
from .handles import Handle


class GroupMembers:
    """The ranks of a group, as world ranks."""

    __slots__ = ("__weakref__", "me", "ranks")

    def __init__(self, ranks: Sequence[int], me: int) -> None:
        self.ranks, self.me = tuple(ranks), me


class Group(Handle, family=True):
    """An ordered set of ranks."""

    __slots__ = ()
    _h: GroupMembers | None

    @property
    def _state(self) -> GroupMembers:
        if self._h is None:
            raise MPIError(C.ERR_GROUP, "GROUP_NULL", rule="a group that exists")
        return self._h

    def _subgroup(self, ranks: Sequence[int]) -> Self:
        me = self._state.me
        return type(self)(GROUP_EMPTY) if not ranks else type(self)._of(GroupMembers(ranks, me))

    def Get_size(self) -> int:
        """Number of ranks."""
        return len(self._state.ranks)

    def Get_rank(self) -> int:
        """This rank's number in the group, or UNDEFINED."""
        state = self._state
        return state.ranks.index(state.me) if state.me in state.ranks else C.UNDEFINED

    size = property(Get_size, doc="Number of ranks.")
    rank = property(Get_rank, doc="This rank's number in the group.")

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        """The numbers of this group's ranks in another group, by default in the world."""
        mine = self._state.ranks
        target: Sequence[int] | None = None if group is None else group._state.ranks
        translated = []
        for rank in range(len(mine)) if ranks is None else ranks:
            if rank == C.PROC_NULL:
                translated.append(rank)
                continue
            number = mine[self._check(rank)]
            translated.append(number if target is None else target.index(number) if number in target else C.UNDEFINED)
        return translated

    def Compare(self, group: Group) -> int:
        """IDENT, SIMILAR (a different order) or UNEQUAL."""
        a, b = self._state.ranks, group._state.ranks
        return C.IDENT if a == b else C.SIMILAR if sorted(a) == sorted(b) else C.UNEQUAL

    def Dup(self) -> Self:
        """A copy."""
        return type(self)._of(GroupMembers(self._state.ranks, self._state.me))

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Self:
        """The ranks of the first, then those only in the second."""
        a, b = group1._state, group2._state
        return cls(cls._base(group1, group2)._subgroup([*a.ranks, *(r for r in b.ranks if r not in a.ranks)]))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Self:
        """The ranks of the first that are also in the second."""
        b = group2._state.ranks
        return cls(cls._base(group1, group2)._subgroup([r for r in group1._state.ranks if r in b]))

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Self:
        """The ranks of the first that are not in the second."""
        b = group2._state.ranks
        return cls(cls._base(group1, group2)._subgroup([r for r in group1._state.ranks if r not in b]))

    @staticmethod
    def _base(group1: Group, group2: Group) -> Group:
        return group1 if group1._state.ranks else group2  # the empty group does not know this rank

    def Incl(self, ranks: Sequence[int]) -> Self:
        """These ranks, in this order."""
        _check_unique(ranks)
        return self._subgroup([self._state.ranks[self._check(r)] for r in ranks])

    def Excl(self, ranks: Sequence[int]) -> Self:
        """All ranks but these."""
        _check_unique(ranks)
        out = {self._check(r) for r in ranks}
        return self._subgroup([r for i, r in enumerate(self._state.ranks) if i not in out])

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Ranks in ranges (first, last, stride)."""
        return self.Incl(_ranges(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """All ranks but ranges (first, last, stride)."""
        return self.Excl(_ranges(ranks))

    def Free(self) -> None:
        """Free it."""
        _ = self._state
        self._h = None

    def _check(self, rank: int) -> int:
        size = len(self._state.ranks)
        if not 0 <= rank < size:
            raise MPIError(C.ERR_RANK, f"rank {rank} of a group", rule=f"0 <= rank < {size}")
        return rank


def _check_unique(ranks: Sequence[int]) -> None:
    if len(set(ranks)) != len(ranks):
        raise MPIError(C.ERR_RANK, f"ranks {list(ranks)}", rule="each rank once")


def _ranges(ranges: Sequence[Any]) -> list[int]:
    ranks: list[int] = []
    for first, last, stride in ranges:
        if stride == 0:
            raise MPIError(C.ERR_ARG, f"ranks {first} to {last} by 0", rule="stride != 0")
        ranks += range(first, last + (1 if stride > 0 else -1), stride)
    return ranks


GROUP_NULL = Group._constant("GROUP_NULL")
GROUP_EMPTY = Group._constant("GROUP_EMPTY", GroupMembers((), 0))
