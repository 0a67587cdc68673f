"""A job's model where the plan splits the model: this rank's parts of the parameters, and programs that run them.

The job's Python runs only to be captured, on tensors without values, once for each shape of a micro-batch. What runs
is the captured graph, spread over the plan's axes and cut into stages; its parameters keep the user's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph

from ...comm.scatter import backend_of
from ...core.errors import PlanError
from ...core.job import Job
from ...datasets.stream import Micro
from ...partition.again import recomputed
from ...partition.boundaries import FLOPS_PER_BYTE, Prices
from ...partition.capture import Captured, flatten
from ...partition.layout import Split
from ...partition.moves import gathered, part_of
from ...partition.program import Holder, splits_of
from ...partition.stage import Cut as Stages
from ...partition.stage import StageProgram
from ...partition.stages import cut, operators
from ...plans import Plan
from ...plans.plan import MEASURED
from ...reports.division import Division, division_of
from ...schedules.pipeline import Action
from ..memory.recompute import recomputed_layers
from ..pipeline.clock import Clock
from ..pipeline.run import Runner
from ..pipeline.shared import holders, sum_shared
from ..pipeline.step import Hooks, MicroBatch
from ..pipeline.wires import Wires
from ..precision import computing, to_device
from ..strategies.flat import FlatShard
from .captures import Captures
from .filling import Filling
from .groups import DATA, Groups
from .placing import Placement, holders_in
from .spreading import Shown, Spread, Spreader
from .timing import measured_prices


@dataclass(frozen=True, eq=False)
class Ready:
    """What runs micro-batches of one shape."""

    captured: Captured
    spread: Spread
    program: StageProgram | None
    """Without a pipeline."""
    stages: Stages | None
    """With one: this rank's have their modules."""
    own_weight: bool
    """Whether the weight of the loss is the job's own."""
    names: tuple[str, ...] = ("loss",)
    """What comes out, each as a sum and a weight."""


class SplitModel:
    """The model of one rank."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        groups: Groups,
        device: torch.device,
        dtype: torch.dtype | None,
        watch: Callable[..., Any] | None = None,
        flops_per_byte: float | None = None,
    ) -> None:
        self.plan, self.groups, self.device, self.dtype = plan, groups, device, dtype
        self.spreader = Spreader(plan, groups, device, watch)
        self._captures = Captures(job, plan, device, dtype)
        self.template = self._captures.template
        """The user's module, on tensors without values: what is captured."""
        self.layers = (
            frozenset(spec.name for spec in recomputed_layers(self.template, "full"))
            if plan.recompute == "full"
            else frozenset()
        )
        """The layers that are computed again in the backward."""
        self._ready: dict[Any, Ready] = {}
        self._seen: Callable[[int, Shown, torch.Tensor], None] | None = None
        self._count = 0
        self.peak = 0
        """The most forwards that this rank held at once in the last step of a pipeline."""
        group = groups.group(["pp"])
        back = groups.another(["pp"]) if group is not None and backend_of(group) == "nccl" else None
        self.wires = Wires(group, back, device=device) if group is not None else None
        self._pipe = Runner(self.wires) if self.wires is not None else None
        self.clock = Clock(device)
        """When the actions of a pipeline ran."""
        first = self._captures.first(groups.size(DATA))
        with computing(plan.precision, device):
            self.spreader.decide(first)
        prices = self._prices(first, flops_per_byte)
        self.places = Placement(plan, groups, first, self.spreader.splits, prices)
        """Who has what."""
        with computing(plan.precision, device):
            self.first = self.spreader.spread(first)
        """What a rank runs of the first batch: it shows what could not be split, and makes all groups."""
        self.root = Holder()
        """This rank's parameters and buffers."""
        self._filling = Filling(self._captures, self.places, self.root)
        self._filling.fill(first)

    def _prices(self, captured: Captured, flops_per_byte: float | None) -> Prices:
        """What the stages of a pipeline are balanced by."""
        if self.wires is None or self.plan.split != MEASURED:
            return Prices(per_byte=flops_per_byte or FLOPS_PER_BYTE[self.device.type])
        slices = self.groups.size(DATA)
        return measured_prices(self._captures, captured, holders_in(captured), slices, self.wires)

    @property
    def division(self) -> Division:
        """What the plan could not split, and where its stages begin."""
        left = self.spreader.choice.left if self.spreader.choice else {}
        return division_of(self.first.gathered, left, [name for name, _ in self.places.starts])

    # -- running

    def use(self, strategy: FlatShard) -> None:
        """The strategy that adds up the gradients."""
        self._strategy = strategy

    def loss_of(self, micro: Micro) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Sum and weight of the loss of a micro-batch, and whether the weight is the job's own."""
        ready, tensors = self.ready(micro)
        assert ready.program is not None
        self._show(ready, self._count)
        self._count += 1
        total, weight = ready.program(*tensors)
        return total, weight, ready.own_weight

    def begin(self) -> None:
        """The next micro-batch is the first of a step."""
        self._count = 0

    def train(
        self,
        micros: Sequence[Micro],
        factor: float,
        seed: Callable[[int, int], None],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> tuple[Sequence[tuple[torch.Tensor, ...]], bool]:
        """All micro-batches through the stages, forwards and backwards; the losses that this rank has."""
        made = [self.ready(m) for m in micros]
        batches = [self._micro_batch(r, t) for r, t in made]

        def before(stage: int, micro: int) -> None:
            seed(stage, micro)
            self._show(made[micro][0], micro)

        runner = self._runner(before, phase)
        with self.clock.step():
            result = runner.train(self.places.order_of(len(micros)), batches, factor)
        self._cut, self.peak = batches[0].cut, result.peak
        return result.losses, any(r.own_weight for r, _ in made)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Micro]) -> dict[str, torch.Tensor]:
        """(sum, weight) of the loss and of each metric over some micro-batches, as far as this rank counts them."""
        made = [self.ready(m, training=False) for m in micros]
        names = made[0][0].names
        if self.places.pipelined:
            runner = self._runner(lambda stage, micro: None, lambda name: nullcontext(), timed=False)
            batches = [self._micro_batch(r, t) for r, t in made]
            found: Sequence[Any] = runner.evaluate(self.places.order_of(len(micros)), batches).losses
        else:
            with computing(self.plan.precision, self.device):
                found = [r.program(*t) for r, t in made if r.program is not None]
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=self.device)
        for pairs in found if self.places.counts else ():
            sums += torch.stack([p.double() for p in pairs]).view(-1, 2)
        return dict(zip(names, sums, strict=True))

    def finish(self) -> None:
        """After the backwards: tied parameters of several stages get the sum, and the gradients are sent."""
        tied = holders(self._cut, self.places.order)
        if tied and self.wires is not None:
            sum_shared(dict(self.root.named_parameters()), tied, self.wires)
        self._strategy.send()

    def _micro_batch(self, ready: Ready, tensors: Sequence[torch.Tensor]) -> MicroBatch:
        assert ready.stages is not None
        return MicroBatch(ready.stages, {str(i): t for i, t in enumerate(tensors)})

    def _runner(
        self,
        seed: Callable[[int, int], None],
        phase: Callable[[str], AbstractContextManager[None]],
        *,
        timed: bool = True,
    ) -> Runner:
        assert self._pipe is not None
        names = {"F": "forward", "B": "backward", "W": "backward"}

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            clock = self.clock.action(action) if timed else nullcontext()
            with clock, phase(names[action.kind]), computing(self.plan.precision, self.device):
                yield

        self._pipe.hooks = Hooks(seed=seed, around=around)
        return self._pipe

    # -- looking at values

    def watch(self, seen: Callable[[int, Shown, torch.Tensor], None]) -> None:
        """Show (micro-batch, which output of which module, its part on this rank) of all that runs from now on."""
        self._seen = seen

    def unwatch(self) -> None:
        """Show nothing more."""
        self._seen = None
        for ready in self._ready.values():
            for program in _programs(ready, self.places.mine):
                program.watch(None)

    def _show(self, ready: Ready, micro: int) -> None:
        for program in _programs(ready, self.places.mine):
            program.watch(self._shower(micro) if self._seen else None)

    def _shower(self, micro: int) -> Callable[[Any, Any], Any]:
        seen = self._seen

        def show(node: Any, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and seen is not None and torch.is_grad_enabled():
                for shown in node.meta["shows"]:
                    seen(micro, shown, value)
            return value

        return show

    def whole(self, tensor: torch.Tensor, splits: Mapping[str, Split]) -> torch.Tensor:
        """A value, put together from the parts of the ranks that have parts of the same samples."""
        for axis in reversed([a for a in self.spreader.axes if a in splits]):
            tensor = gathered(tensor, splits[axis], self.spreader.axes[axis])
        return tensor

    # -- programs

    def ready(self, micro: Micro, training: bool = True) -> tuple[Ready, list[torch.Tensor]]:
        """What runs a micro-batch, and its tensors."""
        batch = (to_device(micro.input, self.device, self.dtype), to_device(micro.target, self.device, self.dtype))
        leaves, _ = flatten(batch)
        key = (
            training,
            micro.samples,
            *((tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else repr(v) for v in leaves),
        )
        if key not in self._ready:
            with self._captures.mode:
                fake = [
                    torch.empty(v.shape, dtype=v.dtype, device=v.device) if isinstance(v, torch.Tensor) else v
                    for v in leaves
                ]
            self._ready[key] = self._made(flatten(batch)[1](fake), micro.samples, training)
        ready = self._ready[key]
        return ready, self._own([v for v in leaves if isinstance(v, torch.Tensor)], ready)

    def _own(self, tensors: list[torch.Tensor], ready: Ready) -> list[torch.Tensor]:
        """This rank's parts of a batch: its tiles, its tokens."""
        heads = [n for n in ready.spread.graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"]
        own = []
        for node, t in zip(heads, tensors, strict=True):
            for axis, split in splits_of(node).items():
                t = part_of(t, split, self.groups.at[axis])
            own.append(t.contiguous())
        return own

    def _made(self, batch: Any, samples: int, training: bool) -> Ready:
        captured, own, names = self._captures.of(batch, samples, training=training)
        with computing(self.plan.precision, self.device):
            spread = self.spreader.spread(captured, present=samples > 0)
        constants = self._filling.values(captured.constants)
        if not self.places.pipelined:
            program = StageProgram(self._again(spread.graph, constants), self.root, constants)
            return Ready(captured, spread, program, None, own, names)
        starts = self.places.boundaries(captured)
        nodes = operators(spread.graph)
        at = [next((i for i, n in enumerate(nodes) if n.meta.get("origin", -1) >= s), len(nodes)) for s in starts]
        stages = cut(spread.graph, at)
        strange = [name for name in _read(stages, self.places.mine) if not self.places.has(name)]
        if strange:
            raise PlanError(
                f"a micro-batch of this shape needs {strange[0]} in another stage than the first one",
                rule="a stage holds the parameters that the first batch needs there",
                fix="split= at other modules",
            )
        if self.layers:
            again = [replace(s, graph=self._again(s.graph, constants)) if s.graph else s for s in stages.stages]
            stages = replace(stages, stages=tuple(again))
        return Ready(captured, spread, None, stages.bind(self.places.mine, self.root, constants), own, names)

    def _again(self, graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
        return recomputed(graph, self.layers, constants) if self.layers else graph


def _read(stages: Stages, mine: frozenset[int]) -> list[str]:
    """The parameters and buffers that these stages read: evaluation leaves some unread, such as a norm's count."""
    graphs = [g for s in sorted(mine) if (g := stages.stages[s].graph) is not None]
    heads = [n for g in graphs for n in g.nodes if n.op == "placeholder"]
    return [n.meta["name"] for n in heads if n.meta.get("role") in ("parameter", "buffer")]


def _programs(ready: Ready, mine: frozenset[int]) -> Iterator[StageProgram]:
    if ready.program is not None:
        yield ready.program
    if ready.stages is not None:
        for s in mine:
            module = ready.stages.stages[s].module
            if isinstance(module, StageProgram):
                yield module
