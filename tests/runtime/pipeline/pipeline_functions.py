"""Functions that the ranks of the pipeline tests run, and hand-written orders."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import MODELS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import drumline.partition.rules  # noqa: F401  # registers the rules
from drumline.core.errors import GaveUp
from drumline.partition.capture import CapturedGraph, capture
from drumline.partition.program import ParameterHolder, register_tensor
from drumline.partition.sharding.layout import even_split
from drumline.partition.sharding.redistribution import Axis, part_of
from drumline.partition.sharding_pass import ShardingPass
from drumline.partition.stage import StagedGraph
from drumline.partition.stage_cutting import cut_into_stages, graph_operators
from drumline.runtime.pipeline.channels import PipelineChannels
from drumline.runtime.pipeline.stage_actions import PipelineMicroBatch, StepHooks
from drumline.runtime.pipeline.step import PipelineRunner
from drumline.runtime.pipeline.tied_parameters import sum_tied_gradients, tied_ranks
from drumline.runtime.state.process_groups import process_group
from drumline.schedules.pipeline import Action, Kind, Pipeline, one_f_one_b

FACTOR = 0.37


@cache
def captured(name: str, n: int) -> CapturedGraph:
    """A model of pipeline_models with its loss, for n samples, as a graph: written down once in a process."""
    model, loss, batches = MODELS[name]
    return graph_of(model().double(), loss, batches(n, 0))


def graph_of(model: nn.Module, run: Callable[[nn.Module, list[Any]], Any], leaves: list[torch.Tensor]) -> CapturedGraph:
    """A model with its loss, as a graph."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return capture(model, run, [mode.from_tensor(x) for x in leaves], mode)


def even_cut(graph: CapturedGraph, stages: int) -> StagedGraph:
    """Stages of about as many operators."""
    n = len(graph_operators(graph.graph))
    return cut_into_stages(graph.graph, [n * s // stages for s in range(1, stages)])


def _all(kind: Kind, stage: int, micros: int) -> list[Action]:
    return [Action(kind, stage, i) for i in range(micros)]


def gpipe(p: int, m: int) -> Pipeline:
    """All forwards, then all backwards from the last."""
    lanes = tuple(tuple(_all("F", s, m) + _all("B", s, m)[::-1]) for s in range(p))
    return Pipeline("gpipe", p, m, lanes)


def backwards(p: int, m: int) -> Pipeline:
    """GPipe with the micro-batches the other way round."""
    lanes = tuple(tuple(_all("F", s, m)[::-1] + _all("B", s, m)) for s in range(p))
    return Pipeline("backwards", p, m, lanes)


def naive(p: int, m: int) -> Pipeline:
    """One micro-batch after the other."""
    lanes = tuple(tuple(a for i in range(m) for a in (Action("F", s, i), Action("B", s, i))) for s in range(p))
    return Pipeline("naive", p, m, lanes)


def separate_weights(p: int, m: int) -> Pipeline:
    """1F1B whose weights' backwards lag one behind."""
    lanes = []
    for lane in one_f_one_b(p, m).lanes:
        new: list[Action] = []
        waiting: list[Action] = []
        for action in lane:
            new.append(action)
            if action.kind == "B":
                waiting.append(Action("W", action.stage, action.micro))
                if len(waiting) > 1:
                    new.append(waiting.pop(0))
        lanes.append(tuple(new + waiting))
    return Pipeline("separate_weights", p, m, tuple(lanes))


def weights_last(p: int, m: int) -> Pipeline:
    """GPipe, and the weights when all else is done."""
    lanes = tuple((*lane, *_all("W", s, m)) for s, lane in enumerate(gpipe(p, m).lanes))
    return Pipeline("weights last", p, m, lanes)


def _several(name: str, p: int, m: int, own: Callable[[int], Sequence[int]], *, split: bool = False) -> Pipeline:
    lanes = []
    for r in range(p):
        stages = sorted(own(r))
        lane = [a for s in stages for a in _all("F", s, m)]
        for s in reversed(stages):
            lane += _all("B", s, m) + (_all("W", s, m) if split else [])
        lanes.append(tuple(lane))
    return Pipeline(name, 2 * p, m, tuple(lanes))


def rounds(p: int, m: int) -> Pipeline:
    """Two stages on each rank, dealt round."""
    return _several("rounds", p, m, lambda r: (r, r + p))


def vee(p: int, m: int) -> Pipeline:
    """Two stages on each rank, there and back, separate weight backwards: the turn is a handover on one rank."""
    return _several("vee", p, m, lambda r: (r, 2 * p - 1 - r), split=True)


ORDERS: dict[str, Callable[[int, int], Pipeline]] = {
    "gpipe": gpipe,
    "naive": naive,
    "1f1b": one_f_one_b,
    "separate_weights": separate_weights,
    "weights last": weights_last,
    "rounds": rounds,
    "vee": vee,
}


class Setup:
    """A model in stages on this rank, and its serial twin."""

    def __init__(
        self,
        name: str,
        order: Pipeline,
        sizes: Sequence[int],
        *,
        reads: Any = "all",
        hooks: Any = None,
        group: Any = None,
    ) -> None:
        model, self.loss, batches = MODELS[name]
        torch.manual_seed(5)
        self.order = order
        self.serial: nn.Module = model().double()
        self.model = copy.deepcopy(self.serial)
        self.seen: list[str] = []
        """Messages, as a recorder sees them."""
        self.wires = PipelineChannels(group or dist.group.WORLD, follow=self._follow)
        self.mine = [s for s, rank in order.homes().items() if rank == self.wires.rank]
        self.leaves = [batches(n, seed) for seed, n in enumerate(sizes)]
        cuts: dict[int, StagedGraph] = {}
        for n in dict.fromkeys(sizes):
            graph = captured(name, n)
            cuts[n] = even_cut(graph, order.stages).bind(self.mine, self.model, graph.constants)
        reading = reads == "all" or 0 in self.mine
        self.micros = [
            PipelineMicroBatch(cuts[n], {str(i): x for i, x in enumerate(leaves)} if reading else {})
            for n, leaves in zip(sizes, self.leaves, strict=True)
        ]
        self.cut = self.micros[0].cut
        self.runner = PipelineRunner(self.wires, hooks, batch_on=reads)

    def _follow(self, name: str, work: Any, tensor: torch.Tensor) -> Any:
        self.seen.append(name)
        return work

    def names(self) -> set[str]:
        """The parameters on this rank."""
        return {n for s in self.mine for n in self.cut.stages[s].params}


def error(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference; none is zero."""
    if a is None or b is None:
        other = a if b is None else b
        return 0.0 if other is None else float(other.abs().max())
    return float((a.double() - b.double()).abs().max())


def train(name: str, order: Pipeline, sizes: Sequence[int], reads: str = "all", steps: int = 1) -> dict[str, Any]:
    """Gradients and losses against those of the serial twin."""
    events: list[int] = []
    here = Setup(name, order, sizes, reads=reads, hooks=StepHooks(last_backward=events.append))
    serial = []
    for _ in range(steps):
        serial = []
        for leaves in here.leaves:
            total, weight = here.loss(here.serial, leaves)
            (total * FACTOR).backward()
            serial.append((total.item(), weight.item()))
        result = here.runner.train(order, here.micros, FACTOR)
    before = {
        n: p.grad.clone() for n, p in here.model.named_parameters() if n in here.cut.shared and p.grad is not None
    }
    sum_tied_gradients(dict(here.model.named_parameters()), tied_ranks(here.cut, order), here.wires)
    twin = dict(here.serial.named_parameters())
    names = here.names()
    gradients = {n: error(p.grad, twin[n].grad) for n, p in here.model.named_parameters() if n in names}
    assert all(p.grad is None for n, p in here.model.named_parameters() if n not in names)
    buffers = dict(here.serial.named_buffers())
    mine = {n for s in here.mine for n in here.cut.stages[s].buffers}
    moved = [error(b, buffers[n]) for n, b in here.model.named_buffers() if n in mine]
    return {
        "gradients": gradients,
        "losses": [(float(a), float(b)) for a, b in result.losses],
        "serial": serial,
        "peak": result.peak,
        "buffers": max(moved, default=0.0),
        "last": events,
        "stages": here.mine,
        "shared": sorted(here.cut.shared),
        "bytes": here.wires.bytes_sent,
        "changed": {n: error(before[n], here.model.get_parameter(n).grad) for n in before},
    }


def evaluate(name: str, order: Pipeline, sizes: Sequence[int]) -> dict[str, Any]:
    """The losses of a forward alone; nothing is left of it."""
    here = Setup(name, order, sizes)
    with torch.no_grad():
        serial = [tuple(map(float, here.loss(here.serial, leaves))) for leaves in here.leaves]
    losses = here.runner.evaluate(order, here.micros).losses
    assert all(not a.requires_grad for a, _ in losses) and torch.is_grad_enabled()
    assert all(p.grad is None for p in here.model.parameters())
    return {"losses": [(float(a), float(b)) for a, b in losses], "serial": serial}


def chance(orders: Sequence[Pipeline], m: int, by: str) -> list[dict[str, torch.Tensor]]:
    """Gradients of a model with dropout under several orders; `by` says what seeds the random numbers."""
    results = []
    for order in orders:
        seeds: dict[str, Callable[[int, int], None]] = {
            "micro": lambda stage, micro: torch.manual_seed(100 * stage + micro) and None,
            "nothing": lambda stage, micro: None,
        }
        torch.manual_seed(0)
        here = Setup("dropping", order, [3] * m, hooks=StepHooks(seed=seeds[by]))
        here.runner.train(order, here.micros, FACTOR)
        results.append({n: p.grad for n, p in here.model.named_parameters() if p.grad is not None})
    return results


def record(order: Pipeline, m: int) -> list[str]:
    """The moments that hooks see."""
    from contextlib import contextmanager

    seen: list[str] = []

    @contextmanager
    def around(action: Action) -> Any:
        seen.append(f"+{action}")
        yield
        seen.append(f"-{action}")

    hooks = StepHooks(
        seed=lambda s, i: seen.append(f"seed {s} {i}"),
        around_action=around,
        last_backward=lambda s: seen.append(f"last {s}"),
    )
    here = Setup("mlp", order, [2] * m, hooks=hooks)
    here.runner.train(order, here.micros, FACTOR)
    return seen


def fails(order: Pipeline, m: int) -> str:
    """The last rank's stage raises; what the others say."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    here = Setup("mlp", order, [2] * m, group=group)
    last = here.wires.rank == here.wires.ranks - 1
    if last:
        stages = [replace(s, module=_broken) for s in here.cut.stages]
        here.micros = [replace(m, cut=replace(m.cut, stages=tuple(stages))) for m in here.micros]
    try:
        here.runner.train(order, here.micros, FACTOR)
    except (ValueError, GaveUp) as e:
        dist.barrier()  # the one that failed stays until the others have given up
        return f"{type(e).__name__}: {e}"
    finally:
        dist.destroy_process_group(group)
    return "done"


def other_shapes(order: Pipeline) -> None:
    """A micro-batch of another size than was captured."""
    here = Setup("mlp", order, [2])
    leaves = {str(i): x for i, x in enumerate(MODELS["mlp"][2](3, 0))}
    here.runner.train(order, [replace(here.micros[0], leaves=leaves)], FACTOR)


def side_by_side(order: Pipeline, m: int) -> dict[str, Any]:
    """Two pipelines at a time: ranks 0 and 2, ranks 1 and 3."""
    groups = [process_group([0, 2]), process_group([1, 3])]
    here = Setup("lm", order, [2] * m, group=groups[dist.get_rank() % 2])
    here.runner.train(order, here.micros, FACTOR)
    for leaves in here.leaves:
        (here.loss(here.serial, leaves)[0] * FACTOR).backward()
    sum_tied_gradients(dict(here.model.named_parameters()), tied_ranks(here.cut, order), here.wires)
    errors = [error(here.model.get_parameter(n).grad, here.serial.get_parameter(n).grad) for n in here.names()]
    return {"error": max(errors), "seen": sorted(set(here.seen))}


def _broken(*_: Any) -> Any:
    raise ValueError("this stage is broken")


def split_over(order: Pipeline, m: int) -> dict[str, float]:
    """Stages whose wide layers are also split over two ranks each: ranks (0, 1) are the first, (2, 3) the second."""
    rank = dist.get_rank()
    rows, lines = ([process_group(ranks) for ranks in both] for both in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    axis = Axis("tp", 2, rank % 2, rows[rank // 2])
    here = Setup("lm", order, [2] * m, group=lines[rank % 2])
    graph = captured("lm", 2)
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    heads = graph.placeholders("parameter")
    splits = {n: even_split(d, 16, 2) for n in heads for end, d in dims.items() if n.endswith(end)}
    spread = ShardingPass(graph.graph, axis, graph.mode, {heads[n].name: split for n, split in splits.items()}).run()
    root = ParameterHolder()
    for name, p in here.serial.named_parameters():
        part = part_of(p.detach(), splits[name], axis.index) if name in splits else p.detach()
        register_tensor(root, name, nn.Parameter(part.clone()))
    made = even_cut(replace(graph, graph=spread), order.stages).bind(here.mine, root, graph.constants)
    here.runner.train(order, [replace(micro, cut=made) for micro in here.micros], FACTOR)
    sum_tied_gradients(dict(root.named_parameters()), tied_ranks(made, order), here.wires)
    for leaves in here.leaves:
        (here.loss(here.serial, leaves)[0] * FACTOR).backward()
    errors = {}
    for name in made.names(here.mine):
        whole = here.serial.get_parameter(name).grad
        assert whole is not None
        part = part_of(whole, splits[name], axis.index) if name in splits else whole
        errors[name] = error(root.get_parameter(name).grad, part)
    return errors


def leftovers(order: Pipeline, m: int) -> int:
    """Tensors that steps leave behind, also for the garbage collector: the growth from the third step to the fifth."""
    here = Setup("mlp", order, [2] * m)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            here.runner.train(order, here.micros, FACTOR)
            counts.append(sum(type(x) in (torch.Tensor, nn.Parameter) for x in gc.get_objects()))
    finally:
        gc.enable()
    return counts[4] - counts[2]
