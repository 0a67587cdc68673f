"""Places a split model on the ranks: stages, parts of parameters, buffers, and the rank that answers for each."""

from __future__ import annotations

from collections.abc import Mapping

from ...partition.capture import CapturedGraph
from ...partition.sharding.layout import Split
from ...partition.stage_boundaries import (
    BoundaryPrices,
    Key,
    balanced_boundaries,
    boundaries_by_name,
    boundary_positions,
    modules_with_parameters,
)
from ...partition.stage_cutting import cut_into_stages
from ...plans import Plan
from ...schedules.pipeline import Pipeline, pipeline_order
from ..state.pieces import ParameterPart, ParameterSlice, ParameterSpec
from .checks import check_stage_names
from .rank_grid import DATA_AXES, SAMPLE_AXES, RankGrid


class Placement:
    """One rank's part of a split model.

    `splits`: how tensor parallelism cuts parameters, by name; `prices`: the costs that stages are balanced by.
    """

    def __init__(
        self,
        plan: Plan,
        grid: RankGrid,
        captured: CapturedGraph,
        splits: Mapping[str, Split],
        prices: BoundaryPrices | None = None,
    ) -> None:
        self.plan, self.grid, self.splits, self._prices = plan, grid, splits, prices
        self._orders: dict[int, Pipeline] = {}
        self.order = self.order_of(plan.micro)
        self.stages: frozenset[int] = frozenset()
        """The stages of this rank."""
        self.starts: list[Key] = []
        """The first module of each stage but the first."""
        self._place_stages(captured)
        self.stages_of = self._stages_of(captured)
        """Parameter or buffer -> the stages that have it."""
        self.parts = self._parts(captured)
        """This rank's parts of the parameters."""
        self.specs = {
            name: ParameterSpec(tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for name, node in captured.placeholders("parameter").items()
        }
        """Every parameter of the model, whole."""
        self.owned_buffers = self._owned_buffers(captured)
        """The buffers that this rank answers for."""

    @property
    def batch_slices(self) -> tuple[int, int]:
        """Number of slices of a batch, and the index of this rank's."""
        return self.grid.size(DATA_AXES), self.grid.index(DATA_AXES)

    @property
    def pipelined(self) -> bool:
        """Whether the model runs in pipeline stages."""
        return self.plan.pp > 1

    @property
    def shows_outputs(self) -> bool:
        """Whether this rank shows assembled outputs for the ranks that share its samples."""
        return all(self.grid.coordinates[a] == 0 for a in (*SAMPLE_AXES, "tp"))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is counted: of the ranks that share samples, one rank's is."""
        return self.shows_outputs and (not self.pipelined or self.order.stages - 1 in self.stages)

    def order_of(self, micros: int) -> Pipeline:
        """The pipeline order for a number of micro-batches; where batches are in flight, of one that runs by itself."""
        if micros not in self._orders:
            name = "1f1b" if self.plan.keeps_batches_in_flight else self.plan.schedule
            self._orders[micros] = pipeline_order(name, self.plan.pp, micros, self.plan.virtual)
        return self._orders[micros]

    def boundaries(self, captured: CapturedGraph) -> list[int]:
        """Positions in a captured graph at which the stages begin."""
        return boundary_positions(captured.graph, self.starts, stage_modules(captured))

    def has(self, name: str) -> bool:
        """Whether this rank has a parameter or buffer."""
        return not self.pipelined or bool(self.stages & set(self.stages_of.get(name, ())))

    def _place_stages(self, captured: CapturedGraph) -> None:
        if not self.pipelined:
            return
        homes = self.order.homes()
        self.stages = frozenset(s for s, rank in homes.items() if rank == self.grid.coordinates["pp"])
        if self.plan.begins:
            check_stage_names(self.plan)
            self.starts = boundaries_by_name(captured.graph, self.plan.begins, stage_modules(captured))
        else:
            self.starts = balanced_boundaries(captured.graph, self.order.stages, stage_modules(captured), self._prices)

    def _stages_of(self, captured: CapturedGraph) -> dict[str, tuple[int, ...]]:
        names = [n.meta["name"] for role in ("parameter", "buffer") for n in captured.placeholders(role).values()]
        if not self.pipelined:
            return dict.fromkeys(names, (0,))
        stages = cut_into_stages(captured.graph, self.boundaries(captured))
        stages_of: dict[str, tuple[int, ...]] = {}
        for stage in stages.stages:
            for name in (*stage.params, *stage.buffers):
                stages_of[name] = (*stages_of.get(name, ()), stage.index)
        return {name: stages_of.get(name, (0,)) for name in names}  # what no stage reads is saved too

    def _parts(self, captured: CapturedGraph) -> dict[str, ParameterPart]:
        """This rank's part of every parameter, and whether it answers for it."""
        parts = {}
        homes = self.order.homes() if self.pipelined else {0: 0}
        for name, node in captured.placeholders("parameter").items():
            if not self.has(name):
                continue
            split = self.splits.get(name)
            first = not self.pipelined or homes[self.stages_of[name][0]] == self.grid.coordinates["pp"]
            counts = first and (split is not None or self.grid.coordinates["tp"] == 0)
            place = ParameterSlice(split, self.grid.coordinates["tp"]) if split is not None else None
            parts[name] = ParameterPart(name, tuple(node.meta["val"].shape), 0, place, counts)
        return parts

    def _owned_buffers(self, captured: CapturedGraph) -> frozenset[str]:
        alone = all(self.grid.coordinates[a] == 0 for a in (*DATA_AXES, *SAMPLE_AXES, "tp"))
        homes = self.order.homes() if self.pipelined else {0: 0}
        names = captured.placeholders("buffer")
        first = {n for n in names if self.has(n) and homes[self.stages_of[n][0]] == self.grid.coordinates["pp"]}
        return frozenset(first) if alone else frozenset()


def stage_modules(captured: CapturedGraph) -> set[str]:
    """The modules with parameters, at which stages may begin."""
    return modules_with_parameters([n.meta["name"] for n in captured.placeholders("parameter").values()])
