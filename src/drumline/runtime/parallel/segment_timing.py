"""How long the segments of a model take on this machine, forward and backward: what `split=measured` cuts stages by.

A segment is what lies between two places where a stage may begin. The first rank runs one after the other, each on
tensors of its own, so that no more than one segment's parameters are there at once. All ranks use its numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import GaveUp
from ...partition.capture import CapturedGraph
from ...partition.program import ParameterHolder, register_tensor
from ...partition.stage import StagedGraph, StageInput, StageProgram
from ...partition.stage_boundaries import FLOPS_PER_BYTE, BoundaryPrices, cuttable_positions, stage_entries
from ...partition.stage_cutting import cut_into_stages
from ...torchkit.fake_tensors import FakeTensor, has_no_values
from ..numerics.precision import compute_precision
from ..pipeline.channels import PipelineChannels
from .job_capture import JobCapture

WARM, TRIES = 1, 3
"""Runs of a segment that are not counted, and of which the median is."""
MESSAGE = 2**20
"""Bytes of the message whose time says what a byte costs."""


def measured_prices(
    captures: JobCapture, captured: CapturedGraph, holders: set[str], slices: int, wires: PipelineChannels
) -> BoundaryPrices:
    """Seconds by segment and by byte, those of the first rank on every rank."""
    at = [e.position for e in stage_entries(captured.graph, holders)]
    numbers = torch.full((len(at) + 2,), torch.nan, dtype=torch.float64, device=captures.device)
    if has_no_values(numbers):  # in a dry run nothing takes time
        return BoundaryPrices(per_byte=FLOPS_PER_BYTE[captures.device.type])
    numbers[0] = _seconds_per_byte(wires)
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            numbers[1:] = torch.tensor(segment_seconds(captures, captured, holders, slices), dtype=torch.float64)
        except Exception as e:  # the others wait: they are told before it is raised
            failed = e
    dist.broadcast(numbers, 0)
    if failed is not None:
        raise failed
    if bool(numbers.isnan().any()):
        raise GaveUp("rank 0 could not time the segments of the model", fix="see what rank 0 says, or split=auto")
    per_byte, *segments = numbers.tolist()
    return BoundaryPrices(tuple(segments), per_byte)


def segment_seconds(captures: JobCapture, captured: CapturedGraph, holders: set[str], slices: int) -> list[float]:
    """Of one micro-batch, by segment; where no stage can begin at an entry, its time is that of the segment before."""
    ends = [0, *(e.position for e in stage_entries(captured.graph, holders))]
    allowed = cuttable_positions(captured.graph, holders)
    made = cut_into_stages(captured.graph, allowed)
    leaves = captures.real_batch(slices)
    found = dict.fromkeys(ends, 0.0)
    for start, index in zip([0, *allowed], range(len(made.stages)), strict=True):
        found[start] = _Segment(captures, captured, made, index, leaves).seconds()
    return [found[start] for start in ends]


def _seconds_per_byte(wires: PipelineChannels) -> float:
    """Of a long message between the first two ranks of a pipeline; the others do not take part."""
    if wires.rank > 1:
        return 0.0
    tensor = torch.zeros(MESSAGE, dtype=torch.uint8, device=wires.device)
    there, back = (wires.send, wires.receive) if wires.rank == 0 else (wires.receive, wires.send)
    other = 1 - wires.rank

    def both_ways() -> None:
        for turn, move in enumerate((there, back)):
            move(tensor, other, turn).wait()

    return _median(both_ways, wires.device) / (2 * MESSAGE)


class _Segment:
    """A segment that can be run again and again."""

    def __init__(
        self,
        captures: JobCapture,
        captured: CapturedGraph,
        made: StagedGraph,
        index: int,
        leaves: Sequence[torch.Tensor],
    ) -> None:
        self.captures, self.made, self.leaves = captures, made, leaves
        self.device = captures.device
        self.draw = torch.Generator(self.device).manual_seed(1)
        self.root = ParameterHolder()
        held = captured.placeholders("parameter") | captured.placeholders("buffer")
        for name in made.names([index]):
            node = held[name]
            value = self._like(node.meta["val"])
            is_parameter = node.meta["role"] == "parameter"
            register_tensor(
                self.root, name, nn.Parameter(value, requires_grad=node.meta["trained"]) if is_parameter else value
            )
        constants = {
            k: self._like(t) if isinstance(t, FakeTensor) else t.to(self.device) for k, t in captured.constants.items()
        }
        self.stage = made.bind([index], self.root, constants).stages[index]
        self.inputs = self._inputs()

    def seconds(self) -> float:
        """Forward and backward, and the forward again where the plan computes layers twice."""
        forwards: list[float] = []

        def once() -> None:
            begin = time.perf_counter()
            outputs = self._forward()
            _settle(self.device)
            forwards.append(time.perf_counter() - begin)
            self._backward(outputs)

        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            both = _median(once, self.device)
        again = self.captures.plan.recompute == "full"
        return both + (statistics.median(forwards[WARM:]) if again else 0.0)

    def _forward(self) -> tuple[torch.Tensor, ...]:
        for p in (*self.root.parameters(), *self.inputs):
            p.grad = None
        assert isinstance(self.stage.module, StageProgram)
        with torch.enable_grad(), compute_precision(self.captures.plan.precision, self.device):
            return self.stage.module(*self.inputs)

    def _backward(self, outputs: Sequence[torch.Tensor]) -> None:
        learned = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
        if learned:
            torch.autograd.backward(learned, [torch.ones_like(y) for y in learned])

    def _inputs(self) -> list[torch.Tensor]:
        """The batch as it is; what other segments give is drawn, because their values are not there."""
        found = []
        for source in self.stage.inputs:
            if isinstance(source, StageInput):
                port = self.made.stages[source.stage].outputs[source.output]
                drawn = port.unpacked(self._like(port.receive_buffer(self.device)))
                found.append(drawn.requires_grad_(port.grad))
            else:
                found.append(self.leaves[int(source.name)])
        return found

    def _like(self, t: torch.Tensor) -> torch.Tensor:
        """Numbers of a usual size; whole ones are 0, which is a place in every table, and what is asked is true."""
        if t.is_floating_point():
            drawn = torch.randn(t.shape, generator=self.draw, device=self.device, dtype=torch.float32)
            return drawn.mul_(0.1).to(t.dtype)
        full = torch.ones if t.dtype == torch.bool or t.is_complex() else torch.zeros
        return full(t.shape, dtype=t.dtype, device=self.device)


def _median(run: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(WARM + TRIES):
        _settle(device)
        begin = time.perf_counter()
        run()
        _settle(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
