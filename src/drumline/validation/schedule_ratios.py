"""Pipeline schedules against the published runs of the Zero Bubble paper: how much faster than 1F1B each is.

Stage times come from the operators of the model at the rates of the cluster's data sheet, so absolute times are too
short; ratios need no calibration. Two assumptions about messages, which the paper does not state, were made after its
ratios were known: a rank waits for what it sends, and one message between nodes uses one network port
(`network.topology = "rail"`). docs/pipelines.md says what they change.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..clusters import Cluster, load
from ..core import files
from ..core.errors import InputError
from ..costs.operator_model import OperatorCostModel
from ..costs.pipeline_clock import time_pipeline
from ..costs.pipeline_cost import PipelineCost
from ..models.zoo.transformer import TransformerSize, gpt_of_size
from ..plans import Plan
from ..schedules import zero_bubble_h2
from ..theory.alpha_beta import Topology, message_seconds
from ..theory.topologies import cluster_topology

SOURCE = "Zero Bubble Pipeline Parallelism"
BASE = "1F1B"
SCHEDULES = {
    BASE: "schedule=1f1b",
    "1F1B-I": "schedule=interleaved",
    "ZB-1p": "schedule=zero-bubble",
    "ZB-2p": "schedule=zero-bubble",  # its stages; the order is H2
}
"""Schedule in the table -> plan."""


@dataclass(frozen=True, slots=True)
class ScheduleRatio:
    """One schedule for one model: its speed over that of 1F1B."""

    model: str
    stages: int
    micros: int
    schedule: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the simulated ratio."""
        return self.simulated / self.measured - 1


def schedule_ratios(path: str | Path, cluster: str = "dgx-a100", *, waits: bool = True) -> list[ScheduleRatio]:
    """Ratios of every model and number of micro-batches of the paper in a table of published runs.

    `waits=False` drops both assumptions: messages travel while ranks compute, over all ports of a node.
    """
    rows = [row for row in csv.DictReader(files.read_csv(path).splitlines()) if SOURCE in (row["source"] or "")]
    if not rows:
        raise InputError(f"no runs of {SOURCE}", where=str(path), rule="a table of published runs with that source")
    groups: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        key = (row["source_row"].split()[0], row["global_batch"])
        groups.setdefault(key, {})[row["schedule"]] = row
    return [ratio for (model, _), runs in groups.items() for ratio in _ratios(model, runs, cluster, waits)]


def _ratios(model: str, runs: dict[str, dict[str, str]], cluster: str, waits: bool) -> list[ScheduleRatio]:
    simulated = {name: _simulated(name, row, cluster, waits) for name, row in runs.items()}
    measured = {name: float(row["iter_s_derived"]) for name, row in runs.items()}
    p, m = int(runs[BASE]["pp"]), _micros(runs[BASE])
    return [
        ScheduleRatio(model, p, m, name, measured[BASE] / measured[name], simulated[BASE] / simulated[name])
        for name in SCHEDULES
        if name in runs and name != BASE
    ]


def _micros(row: dict[str, str]) -> int:
    return int(row["global_batch"]) // int(row["micro_batch"])


def _simulated(name: str, row: dict[str, str], cluster: str, waits: bool) -> float:
    """Seconds of a step."""
    p, virtual, layers, heads = (int(row[key]) for key in ("pp", "vpp", "layers", "heads"))
    plan = Plan.parse(f"pp={p},virtual={virtual},micro={_micros(row)},precision=fp16,{SCHEDULES[name]}")
    # equally many layers in each stage, where embedding and head count as one each
    names = ["embedding", *(f"blocks.{i}" for i in range(layers)), "head"]
    each = len(names) // (p * virtual)
    plan = dataclasses.replace(plan, split=tuple(names[each * i] for i in range(1, p * virtual)))
    size = TransformerSize(
        layers,
        int(row["hidden"]),
        heads,
        heads,
        int(row["ffn"]),
        int(row["vocab"]),
        int(row["seq_len"]),
        int(row["global_batch"]),
    )
    machines = load(cluster).with_devices(max(p, 8))
    if waits:
        machines = _one_port_a_message(machines)
    step = OperatorCostModel(gpt_of_size(row["source_row"], size), machines, plan.precision).step(plan)
    assert step.pipeline is not None
    update = max(sum(part.seconds for part in tail) for tail in step.tails)
    return update + _pipeline_seconds(step.pipeline, name, cluster_topology(machines, p), waits)


def _one_port_a_message(cluster: Cluster) -> Cluster:
    if cluster.network is None:
        return cluster
    return dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, topology="rail"))


def _pipeline_seconds(cost: PipelineCost, name: str, topology: Topology, waits: bool) -> float:
    """Until the last action ends; if ranks wait, an action lasts until its message has arrived."""
    hops = [
        message_seconds(stage[-1].output, topology.link(cost.homes[i], cost.homes[i + 1]))
        for i, stage in enumerate(cost.stages[:-1])
    ]
    own = hops if waits else [0.0] * len(hops)
    forward = [f + hop for f, hop in zip(cost.forward, [*own, 0.0], strict=True)]
    backward = [b + hop for b, hop in zip(cost.backward, [0.0, *own], strict=True)]
    order = zero_bubble_h2(cost.ranks, cost.micros) if name == "ZB-2p" else cost.order
    transfer = 0.0 if waits else hops
    times = time_pipeline(order, forward=forward, backward=backward, weight=cost.weight, transfer=transfer)
    return times.longest_rank_seconds if name == "ZB-2p" else times.seconds


def ratios_table(ratios: Sequence[ScheduleRatio]) -> str:
    """A Markdown table: measured and simulated speed over 1F1B."""
    names = [name for name in SCHEDULES if name != BASE]
    lines = [f"| model, stages, micro-batches | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    groups: dict[str, dict[str, ScheduleRatio]] = {}
    for one in ratios:
        groups.setdefault(f"{one.model}, {one.stages}, {one.micros}", {})[one.schedule] = one
    for head, there in groups.items():
        cells = (f"{there[n].measured:.2f}, {there[n].simulated:.2f}" if n in there else "" for n in names)
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)
