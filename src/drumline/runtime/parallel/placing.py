"""Which rank has what of a split model: stages, parts of parameters, buffers, and who answers for them."""

from __future__ import annotations

from collections.abc import Mapping

from ...partition.boundaries import Key, Prices, balanced, by_name, holders_of, positions
from ...partition.capture import Captured
from ...partition.layout import Split
from ...partition.stages import cut
from ...plans import Plan
from ...schedules.pipeline import Pipeline, pipeline_order
from ..strategies.pieces import Cut, Kind, Part
from .groups import COPIES, DATA, Groups
from .refuse import check_names


class Placement:
    """The places of one plan, as one rank sees them.

    `splits`: how tensor parallelism cuts parameters, by name; `prices`: what stages are balanced by.
    """

    def __init__(
        self, plan: Plan, groups: Groups, captured: Captured, splits: Mapping[str, Split], prices: Prices | None = None
    ) -> None:
        self.plan, self.groups, self.splits, self._prices = plan, groups, splits, prices
        self._orders: dict[int, Pipeline] = {}
        self.order = self.order_of(plan.micro)
        self.mine: frozenset[int] = frozenset()
        """The stages of this rank."""
        self.starts: list[Key] = []
        """Where the stages begin."""
        self._place_stages(captured)
        self.held = self._held(captured)
        """Parameter or buffer -> the stages that have it."""
        self.parts = self._parts(captured)
        """What this rank has of the parameters."""
        self.kinds = {
            name: Kind(tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for name, node in captured.placeholders("parameter").items()
        }
        """Every parameter of the model, whole."""
        self.answers = self._answers(captured)
        """The buffers that this rank answers for."""

    @property
    def data(self) -> tuple[int, int]:
        """How many slices a batch has, and which one is this rank's."""
        return self.groups.size(DATA), self.groups.index(DATA)

    @property
    def pipelined(self) -> bool:
        """Whether the model runs in stages."""
        return self.plan.pp > 1

    @property
    def speaks(self) -> bool:
        """Whether this rank shows values for those that have parts of the same samples, when they are put together."""
        return all(self.groups.at[a] == 0 for a in (*COPIES, "tp"))

    @property
    def counts(self) -> bool:
        """Whether this rank's loss is counted: of ranks that have parts of the same samples, one is."""
        return self.speaks and (not self.pipelined or self.order.stages - 1 in self.mine)

    @property
    def first_copy(self) -> bool:
        """Whether this rank is of the first copy of the model."""
        return all(self.groups.at[a] == 0 for a in ("replica", *COPIES))

    def order_of(self, micros: int) -> Pipeline:
        """The order of so many micro-batches."""
        if micros not in self._orders:
            self._orders[micros] = pipeline_order(self.plan.schedule, self.plan.pp, micros, self.plan.virtual)
        return self._orders[micros]

    def boundaries(self, captured: Captured) -> list[int]:
        """Where the stages begin in a captured graph."""
        return positions(captured.graph, self.starts, holders_in(captured))

    def has(self, name: str) -> bool:
        """Whether this rank has a parameter or buffer."""
        return not self.pipelined or bool(self.mine & set(self.held.get(name, ())))

    def _place_stages(self, captured: Captured) -> None:
        if not self.pipelined:
            return
        homes = self.order.homes()
        self.mine = frozenset(s for s, rank in homes.items() if rank == self.groups.at["pp"])
        if self.plan.begins:
            check_names(self.plan)
            self.starts = by_name(captured.graph, self.plan.begins, holders_in(captured))
        else:
            self.starts = balanced(captured.graph, self.order.stages, holders_in(captured), self._prices)

    def _held(self, captured: Captured) -> dict[str, tuple[int, ...]]:
        names = [n.meta["name"] for role in ("parameter", "buffer") for n in captured.placeholders(role).values()]
        if not self.pipelined:
            return dict.fromkeys(names, (0,))
        stages = cut(captured.graph, self.boundaries(captured))
        found: dict[str, tuple[int, ...]] = {}
        for stage in stages.stages:
            for name in (*stage.params, *stage.buffers):
                found[name] = (*found.get(name, ()), stage.index)
        return {name: found.get(name, (0,)) for name in names}  # what no stage reads is saved all the same

    def _parts(self, captured: Captured) -> dict[str, Part]:
        """What this rank has of every parameter, and whether it answers for it."""
        parts = {}
        homes = self.order.homes() if self.pipelined else {0: 0}
        for name, node in captured.placeholders("parameter").items():
            if not self.has(name):
                continue
            split = self.splits.get(name)
            first = not self.pipelined or homes[self.held[name][0]] == self.groups.at["pp"]
            counts = first and (split is not None or self.groups.at["tp"] == 0)
            place = Cut(split, self.groups.at["tp"]) if split is not None else None
            parts[name] = Part(name, tuple(node.meta["val"].shape), 0, place, counts)
        return parts

    def _answers(self, captured: Captured) -> frozenset[str]:
        alone = all(self.groups.at[a] == 0 for a in (*DATA, *COPIES, "tp"))
        homes = self.order.homes() if self.pipelined else {0: 0}
        names = captured.placeholders("buffer")
        first = {n for n in names if self.has(n) and homes[self.held[n][0]] == self.groups.at["pp"]}
        return frozenset(first) if alone else frozenset()


def holders_in(captured: Captured) -> set[str]:
    """The modules with parameters, at which stages may begin."""
    return holders_of([n.meta["name"] for n in captured.placeholders("parameter").values()])
