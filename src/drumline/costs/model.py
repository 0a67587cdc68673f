"""The interface of a cost model: time and memory of one training step, for one plan or for many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ..clusters import Cluster
from ..plans import Plan
from ..plans.precision_conflicts import APPROXIMATE_PRECISIONS, approximate_note
from ..plans.sync_caveats import sync_caveat
from .contention_notes import contention_notes
from .estimate import Estimate
from .memory import PeakMemory
from .rank_model import RankModel
from .tuning import COMPILED_HOST
from .worker_times import WorkerTimes

if TYPE_CHECKING:
    from .plan_columns import PlanColumns, PlanScores


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One term of a step's time: its name, its formula in words with numbers, and its seconds."""

    name: str
    formula: str
    seconds: float


class CostModel(ABC):
    """Prices the plans of one profile on one cluster, all in one precision. Caches what plans have in common."""

    @abstractmethod
    def estimate(self, plan: Plan) -> Estimate:
        """Time and memory of one step."""

    @property
    @abstractmethod
    def error(self) -> float:
        """Stated bound on the relative error of a step time."""

    def estimates(self, plans: Iterable[Plan]) -> Iterator[Estimate]:
        """The estimates of many plans, in their order, as they are computed."""
        return map(self.estimate, plans)

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """The step time of many plans."""
        return [e.step_seconds for e in self.estimates(plans)]

    @abstractmethod
    def memory(self, plan: Plan) -> PeakMemory:
        """Peak memory of the rank that needs the most."""

    @abstractmethod
    def excess(self, plan: Plan) -> float:
        """Bytes that a plan needs beyond the memory of the device or its host; much quicker than an estimate."""

    def fits(self, plan: Plan) -> bool:
        """Whether the memory is sufficient."""
        return self.excess(plan) <= 0

    @abstractmethod
    def rank_model(self, plan: Plan) -> RankModel:
        """The part of the model on one rank, before pipeline stages are cut. Raises PlanError if it cannot be split."""

    @abstractmethod
    def worker_times(self, plan: Plan) -> WorkerTimes:
        """One worker's task of a plan whose replicas do not meet in every step (`sync`)."""

    @abstractmethod
    def on_links_of(self, cluster: Cluster) -> Self:
        """The same model for a cluster that differs in its links alone; compute times are reused."""

    @abstractmethod
    def with_batch_size(self, samples: int) -> Self:
        """The same model for another global batch size; kernel times are reused."""

    @property
    def source(self) -> str:
        """Where fitted prices come from and how accurate they are; empty if prices are summed over operators."""
        return ""

    @property
    def scores_whole_space(self) -> bool:
        """Whether it prices all plans of a model at once, on arrays."""
        return False

    def score(self, plans: PlanColumns) -> PlanScores:
        """Step time and approximate memory of many plans at once; only where `scores_whole_space`."""
        raise NotImplementedError(f"{type(self).__name__} prices plans one by one")

    def time_terms(self, plan: Plan, estimate: Estimate) -> list[TimeTerm] | None:
        """The formula of each part of an estimate; None where prices are summed over operators."""
        return None


def plan_notes(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Notes on what the price of a plan leaves out, or assumes."""
    notes = []
    if plan.offload != "none" and cluster.device.kind == "cpu":
        notes.append(f"offload={plan.offload} moves nothing here: a CPU has everything in host memory already")
    if plan.chunk > 1:
        notes.append("chunk: the logits are counted whole, whether a loss can do without them is not known here")
    if plan.compile:
        gpu = (
            f", and alone with a host that takes {COMPILED_HOST:g} times as long"
            if cluster.device.kind == "cuda"
            else ""
        )
        notes.append(f"compile=true is priced with unfused kernels{gpu}: what it fuses is not known before it runs")
    if plan.precision in APPROXIMATE_PRECISIONS:
        notes.append(approximate_note(plan.precision))
    if plan.precision == "fp8":
        notes.append("precision=fp8 is priced with the memory of bf16; its linear layers keep half of their inputs")
    if plan.backend == "threads":
        notes.append("backend=threads is priced as if replicas were processes, without their one interpreter lock")
    if plan.compress == "powersgd":
        notes.append("compress=powersgd is priced as if every parameter were a square matrix")
    notes += filter(None, [sync_caveat(plan)])
    if plan.has_coordinator and cluster.device.kind == "cuda" and cluster.device.host is None:
        notes.append("the memory of the parameter servers is not checked: device.host is not given")
    return (*notes, *contention_notes(plan, cluster))
