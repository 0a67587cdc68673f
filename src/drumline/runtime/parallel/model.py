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
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph

from ...data.stream import Micro
from ...errors import PlanError, TraceError
from ...job import Job, guard
from ...partition.again import recomputed
from ...partition.boundaries import Key, balanced, by_name, holders_of, positions
from ...partition.capture import Captured, capture, flatten
from ...partition.layout import Split
from ...partition.moves import gathered, part_of
from ...partition.program import Holder, put, splits_of
from ...partition.stage import Cut as Stages
from ...partition.stage import StageProgram
from ...partition.stages import cut, operators
from ...plan import Plan
from ...schedule.pipeline import Action, Pipeline, pipeline_order
from ...trace.fake import call, fake_batch, fake_mode, fake_model, first_sample
from ..adopt.given import Given
from ..memory.recompute import recomputed_layers
from ..pipeline.run import Runner
from ..pipeline.shared import holders, sum_shared
from ..pipeline.step import Hooks, MicroBatch
from ..pipeline.wires import Wires
from ..precision import computing, to_device
from ..strategies.flat import FlatShard
from ..strategies.pieces import Cut, Kind, Part
from ..weights import seeded_model
from .groups import COPIES, DATA, Groups
from .refuse import check_names, or_whole
from .spreading import Shown, Spread, Spreader

Weigh = Callable[..., tuple[torch.Tensor, torch.Tensor, bool]]


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
        self, job: Job, plan: Plan, groups: Groups, device: torch.device, dtype: torch.dtype | None, weigh: Weigh,
        watch: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.job, self.plan, self.groups, self.device, self.dtype, self._weigh = job, plan, groups, device, dtype, weigh
        self.spreader = Spreader(plan, groups, watch)
        self.mode = fake_mode()
        self.template = self._template()
        """The user's module, on tensors without values: what is captured."""
        self.template.train()
        self.layers = frozenset(
            spec.name for spec in recomputed_layers(self.template, "full")
        ) if plan.recompute == "full" else frozenset()  # fmt: skip
        """The layers that are computed again in the backward."""
        self._ready: dict[Any, Ready] = {}
        self._seen: Callable[[int, Shown, torch.Tensor], None] | None = None
        self._count = 0
        self._orders: dict[int, Pipeline] = {}
        self.peak = 0
        """The most forwards that this rank held at once in the last step of a pipeline."""
        group = groups.group(["pp"])
        back = groups.another(["pp"]) if group is not None and dist.get_backend(group) == "nccl" else None
        self.wires = Wires(group, back, device=device) if group is not None else None
        self._pipe = Runner(self.wires) if self.wires is not None else None
        self.root = Holder()
        """This rank's parameters and buffers."""
        self.mine: frozenset[int] = frozenset()
        """The stages of this rank."""
        self.order = self._order(plan.micro)
        self.starts: list[Key] = []
        """Where the stages begin."""
        sample = first_sample(job)
        n = -(-job.batch_size // (plan.micro * groups.size(DATA)))
        value, target = fake_batch(job, self.mode, sample=sample, n=n)
        with self.mode:
            value, target = to_device(value, device, dtype), to_device(target, device, dtype)
        first = self._captured((value, target), n, training=True)[0]
        self.spreader.decide(first)
        self._place_stages(first)
        with computing(plan.precision, device):
            self.first = self.spreader.spread(first)
        """What a rank runs of the first batch: it shows what could not be split, and makes all groups."""
        self.held = self._held(first)
        """The parameters and buffers that this rank has; the stages that have each."""
        self._fill(first)
        self.parts = self._parts(first)
        self.kinds = {
            name: Kind(tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for name, node in first.placeholders("parameter").items()
        }
        """Every parameter of the model, whole."""
        self.answers = self._answers(first)
        """The buffers that this rank answers for."""

    # -- running

    @property
    def data(self) -> tuple[int, int]:
        """How many slices a batch has, and which one is this rank's."""
        return self.groups.size(DATA), self.groups.index(DATA)

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
        self, micros: Sequence[Micro], factor: float, seed: Callable[[int, int], None],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> tuple[Sequence[tuple[torch.Tensor, ...]], bool]:
        """All micro-batches through the stages, forwards and backwards; the losses that this rank has."""
        made = [self.ready(m) for m in micros]
        batches = [self._micro_batch(r, t) for r, t in made]

        def before(stage: int, micro: int) -> None:
            seed(stage, micro)
            self._show(made[micro][0], micro)

        runner = self._runner(before, phase)
        result = runner.train(self._order(len(micros)), batches, factor)
        self._cut, self.peak = batches[0].cut, result.peak
        return result.losses, any(r.own_weight for r, _ in made)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Micro]) -> dict[str, torch.Tensor]:
        """(sum, weight) of the loss and of each metric over some micro-batches, as far as this rank counts them."""
        made = [self.ready(m, training=False) for m in micros]
        names = made[0][0].names
        if self.pipelined:
            runner = self._runner(lambda stage, micro: None, lambda name: nullcontext())
            batches = [self._micro_batch(r, t) for r, t in made]
            found: Sequence[Any] = runner.evaluate(self._order(len(micros)), batches).losses
        else:
            with computing(self.plan.precision, self.device):
                found = [r.program(*t) for r, t in made if r.program is not None]
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=self.device)
        for pairs in found if self.counts else ():
            sums += torch.stack([p.double() for p in pairs]).view(-1, 2)
        return dict(zip(names, sums, strict=True))

    def finish(self) -> None:
        """After the backwards: tied parameters of several stages get the sum, and the gradients are sent."""
        tied = holders(self._cut, self.order)
        if tied and self.wires is not None:
            sum_shared(dict(self.root.named_parameters()), tied, self.wires)
        self._strategy.send()

    def _micro_batch(self, ready: Ready, tensors: Sequence[torch.Tensor]) -> MicroBatch:
        assert ready.stages is not None
        return MicroBatch(ready.stages, {str(i): t for i, t in enumerate(tensors)})

    def _runner(self, seed: Callable[[int, int], None], phase: Callable[[str], AbstractContextManager[None]]) -> Runner:
        assert self._pipe is not None
        names = {"F": "forward", "B": "backward", "W": "backward"}

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            with phase(names[action.kind]), computing(self.plan.precision, self.device):
                yield

        self._pipe.hooks = Hooks(seed=seed, around=around)
        return self._pipe

    # -- what is where

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

    def _order(self, micros: int) -> Pipeline:
        if micros not in self._orders:
            self._orders[micros] = pipeline_order(self.plan.schedule, self.plan.pp, micros, self.plan.virtual)
        return self._orders[micros]

    @property
    def first_copy(self) -> bool:
        """Whether this rank is of the first copy of the model."""
        return all(self.groups.at[a] == 0 for a in ("replica", *COPIES))

    def _template(self) -> nn.Module:
        model, _ = fake_model(self.job, self.mode)
        moved: dict[int, torch.Tensor] = {}  # tied ones stay tied

        def move(t: torch.Tensor) -> torch.Tensor:
            if id(t) not in moved:
                wanted = self.dtype if self.dtype is not None and t.is_floating_point() else t.dtype
                new = t.detach().to(self.device, wanted)
                moved[id(t)] = nn.Parameter(new, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else new
            return moved[id(t)]

        with self.mode:
            for module in model.modules():
                for table in (module._parameters, module._buffers):
                    for key, t in table.items():
                        if t is not None:
                            table[key] = move(t)  # type: ignore[assignment]  # a parameter for a parameter
        return model

    def _place_stages(self, captured: Captured) -> None:
        if not self.pipelined:
            return
        homes = self.order.homes()
        self.mine = frozenset(s for s, rank in homes.items() if rank == self.groups.at["pp"])
        holders = holders_of([n.meta["name"] for n in captured.placeholders("parameter").values()])
        if self.plan.split:
            check_names(self.plan)
            self.starts = by_name(captured.graph, self.plan.split, holders)
        else:
            self.starts = balanced(captured.graph, self.order.stages, holders)

    def _held(self, captured: Captured) -> dict[str, tuple[int, ...]]:
        names = [n.meta["name"] for role in ("parameter", "buffer") for n in captured.placeholders(role).values()]
        if not self.pipelined:
            return dict.fromkeys(names, (0,))
        stages = cut(captured.graph, positions(captured.graph, self.starts, self._holders(captured)))
        found: dict[str, tuple[int, ...]] = {}
        for stage in stages.stages:
            for name in (*stage.params, *stage.buffers):
                found[name] = (*found.get(name, ()), stage.index)
        return {name: found.get(name, (0,)) for name in names}  # what no stage reads is saved all the same

    def _holders(self, captured: Captured) -> set[str]:
        return holders_of([n.meta["name"] for n in captured.placeholders("parameter").values()])

    def has(self, name: str) -> bool:
        """Whether this rank has a parameter or buffer."""
        return not self.pipelined or bool(self.mine & set(self.held.get(name, ())))

    def _parts(self, captured: Captured) -> dict[str, Part]:
        """What this rank has of every parameter, and whether it answers for it."""
        parts = {}
        homes = self.order.homes() if self.pipelined else {0: 0}
        for name, node in captured.placeholders("parameter").items():
            if not self.has(name):
                continue
            split = self.spreader.splits.get(name)
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

    @torch.no_grad()
    def _fill(self, captured: Captured) -> None:
        """The serial model's weights: the first rank builds it, each tensor travels once, a rank keeps its part."""
        given = isinstance(self.job.model, Given)
        leads = given or dist.get_rank() == 0
        source = self.job.model.take(self.dtype) if isinstance(self.job.model, Given) else None
        if source is None and leads:
            source = seeded_model(self.job, self.dtype)
        held = dict(source.named_parameters()) | dict(source.named_buffers()) if source is not None else {}
        for role in ("parameter", "buffer"):
            for name, node in captured.placeholders(role).items():
                whole = self._arrived(held.get(name), node.meta["val"], given)
                if not self.has(name):
                    continue
                split = self.spreader.splits.get(name)
                if split is not None:
                    whole = part_of(whole, split, self.groups.at["tp"]).contiguous().clone()
                if role == "parameter":
                    put(self.root, name, nn.Parameter(whole, requires_grad=bool(node.meta["trained"])))
                else:
                    put(self.root, name, whole)
        self._constants = self._attributes(source, given)

    def _arrived(self, value: torch.Tensor | None, like: torch.Tensor, given: bool) -> torch.Tensor:
        if value is None:
            whole = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        else:
            whole = value.detach().to(self.device, like.dtype).contiguous().clone()
        if not given and dist.get_world_size() > 1:
            dist.broadcast(whole, 0)
        return whole

    def _attributes(self, source: nn.Module | None, given: bool) -> dict[int, torch.Tensor]:
        """Tensors that modules keep as plain attributes: the template's have no values, so the source's are sent."""
        theirs = dict(source.named_modules()) if source is not None else {}
        found: dict[int, torch.Tensor] = {}
        for name, module in self.template.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    found[id(value)] = self._arrived(getattr(theirs[name], key) if theirs else None, value, given)
        return found

    # -- looking at values

    def watch(self, seen: Callable[[int, Shown, torch.Tensor], None]) -> None:
        """Show (micro-batch, which output of which module, its part on this rank) of all that runs from now on."""
        self._seen = seen

    def unwatch(self) -> None:
        """Show nothing more."""
        self._seen = None
        for ready in self._ready.values():
            for program in _programs(ready, self.mine):
                program.watch(None)

    def _show(self, ready: Ready, micro: int) -> None:
        for program in _programs(ready, self.mine):
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
        key = (training, micro.samples, *((tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else repr(v)
                                          for v in leaves))  # fmt: skip
        if key not in self._ready:
            with self.mode:
                fake = [torch.empty(v.shape, dtype=v.dtype, device=v.device) if isinstance(v, torch.Tensor) else v
                        for v in leaves]  # fmt: skip
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

    def forget(self) -> None:
        """Capture again: the template has changed."""
        self._ready.clear()

    def _captured(self, batch: Any, samples: int, training: bool) -> tuple[Captured, bool, tuple[str, ...]]:
        """The graph of a micro-batch: its loss, and to evaluate, the job's metrics too."""
        leaves, together = flatten(batch)
        own, names = [False], ["loss"]

        def run(model: nn.Module, given: list[Any]) -> Any:
            value, target = together(given)
            output = call(model, value)
            found: dict[str, Any] = {"loss": self.job.loss(output, target)}
            if not training and self.job.evaluate is not None:
                found.update(guard(self.job.evaluate, "the job's evaluate()", output, target))
            names[:] = list(found)
            pairs = []
            for result in found.values():
                total, weight, own[0] = self._weigh(self.job, result, value, target, samples)
                pairs += [total, weight.to(total.device)]
            return pairs

        self.template.train(training)
        with computing(self.plan.precision, self.device), or_whole(self.plan):
            return capture(self.template, run, leaves, self.mode), own[0], tuple(names)

    def _made(self, batch: Any, samples: int, training: bool) -> Ready:
        captured, own, names = self._captured(batch, samples, training)
        with computing(self.plan.precision, self.device):
            spread = self.spreader.spread(captured, present=samples > 0)
        constants = self._values(captured.constants)
        if not self.pipelined:
            program = StageProgram(self._again(spread.graph, constants), self.root, constants)
            return Ready(captured, spread, program, None, own, names)
        starts = positions(captured.graph, self.starts, self._holders(captured))
        nodes = operators(spread.graph)
        at = [next((i for i, n in enumerate(nodes) if n.meta.get("origin", -1) >= s), len(nodes)) for s in starts]
        stages = cut(spread.graph, at)
        strange = [name for name in _read(stages, self.mine) if not self.has(name)]
        if strange:
            raise PlanError(
                f"a micro-batch of this shape needs {strange[0]} in another stage than the first one",
                rule="a stage holds the parameters that the first batch needs there", fix="split= at other modules",
            )  # fmt: skip
        if self.layers:
            again = [replace(s, graph=self._again(s.graph, constants)) if s.graph else s for s in stages.stages]
            stages = replace(stages, stages=tuple(again))
        return Ready(captured, spread, None, stages.bind(self.mine, self.root, constants), own, names)

    def _again(self, graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
        return recomputed(graph, self.layers, constants) if self.layers else graph

    def _values(self, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The constants with their values."""
        found = {}
        for name, tensor in constants.items():
            if isinstance(tensor, FakeTensor):
                if id(tensor) not in self._constants:
                    raise TraceError(
                        f"{type(self.template).__name__} uses a tensor that is no parameter, buffer or attribute",
                        rule="what a model reads can be found in its modules", fix="register it as a buffer",
                    )  # fmt: skip
                tensor = self._constants[id(tensor)]
            found[name] = tensor.to(self.device)
        return found


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
