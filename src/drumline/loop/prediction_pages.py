"""Pages about what was predicted and not run: a search of plans, and a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InputError

if TYPE_CHECKING:
    from ..planner import Answer
    from ..reports.simulation_page import SimulationReport
    from .plan import PlanSearch
    from .simulate import Simulation


def write_prediction(
    value: Answer | Simulation, *, output: str | Path | None = None, trace: str | Path | None = None
) -> Path:
    """The page of an answer, as far as it goes without its question, or of a simulation."""
    from ..planner import Answer
    from ..reports.plan_page import PLAN_PAGE, write_plan_page
    from ..reports.plan_report import PlanReport

    if not isinstance(value, Answer):
        return write_simulation(value, output=output, trace=trace)
    if trace:
        raise InputError("a trace of a plan", rule="only runs and simulations have a timeline", fix="dl.simulate")
    return write_plan_page(PlanReport.of_answer(value), output or PLAN_PAGE)


def write_search(search: PlanSearch, output: str | Path) -> Path:
    """The page of a search. The map of the space and the scaling curve are computed for it, which takes seconds."""
    from ..reports.plan_page import write_plan_page
    from ..reports.plan_report import PlanReport

    q = search.question
    report = PlanReport.of_search(
        search.answer,
        search.estimates,
        q.profile,
        q.cluster,
        precision=q.precision,
        given=q.given,
        reserve=q.reserve,
    )
    return write_plan_page(report, output)


def write_simulation(
    simulation: Simulation, *, output: str | Path | None = None, trace: str | Path | None = None
) -> Path:
    """The page of a simulation, and its timeline for Perfetto. A collective or a pipeline is played step by step."""
    from ..core import files
    from ..reports.simulation_page import SIMULATION_PAGE, write_simulation_page

    page = Path(output or SIMULATION_PAGE)
    page = page / SIMULATION_PAGE if page.is_dir() else page
    if (text := _schedule_page(simulation)) is not None:
        files.write_text(page, text)
    else:
        page = write_simulation_page(simulation_report(simulation), page)
    if trace:
        files.write_text(trace, simulation.timeline.to_chrome())
    return page


def _schedule_page(s: Simulation) -> str | None:
    """The page that plays a collective or a pipeline; None for a step of a job."""
    from ..reports.schedule_page import collective_page, pipeline_page

    if s.schedule is not None:
        return collective_page(s.schedule, where=s.title, seconds=s.step_seconds)
    if s.pipeline is None or s.bubble is None:
        return None
    notes = []
    if s.updates is not None:
        versions, late = ", ".join(map(str, s.updates.versions)), ", ".join(str(max(x)) for x in s.updates.staleness)
        notes = [
            "This picture fills and drains; a full pipeline has no bubble.",
            f"Versions of the weights, by stage: {versions}; staleness: {late}.",
        ]
    return pipeline_page(s.pipeline, s.timeline, bubble=s.bubble, notes=notes)


def simulation_report(s: Simulation) -> SimulationReport:
    """The values of a simulation that its page shows."""
    from ..reports.simulation_page import SimulationReport

    return SimulationReport(
        title=s.title,
        timeline=s.timeline,
        step_seconds=s.step_seconds,
        parts=s.parts,
        estimate=s.estimate,
        planned_seconds=s.planned_seconds,
        planned_by=s.planned_by,
        schedule=str(s.schedule) if s.schedule is not None else "",
        bubble=s.bubble,
        activations=s.activations,
        workers=s.workers,
        memory=s.memory,
        links=s.links,
        path=s.critical_path,
        facts=tuple(_facts(s)),
        notes=s.notes,
    )


def _facts(s: Simulation) -> Iterator[tuple[str, str]]:
    """Throughput, latency and use of the devices, as far as the simulation knows them."""
    from ..core.units import format_count, format_seconds

    if s.samples_per_second:
        more = f", {format_count(s.tokens_per_second)} tokens/s" if s.tokens_per_second else ""
        yield "Throughput", f"{format_count(s.samples_per_second)} samples/s{more}"
    if s.latency_seconds:
        yield "Latency", f"{format_seconds(s.latency_seconds)} from the first forward of a batch to its update"
    if s.mfu:
        yield "MFU", f"{100 * s.mfu:.1f}% of the peak of all devices"
