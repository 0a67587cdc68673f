"""Times the segments of a model on this machine, forward and backward: `split=measured` balances stages by them.

A segment is the part of a model between two places where a stage may begin. The first rank runs one after the other,
each on tensors of its own, so that one segment's parameters are in memory at a time. All ranks use its timings.
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

WARMUP_RUNS, TIMED_RUNS = 1, 3
"""Runs of a segment; the median of the timed ones counts."""
MESSAGE_BYTES = 2**20
"""Size of the message that is timed for the cost of a byte."""


def measured_prices(
    capture: JobCapture, captured: CapturedGraph, modules: set[str], slices: int, channels: PipelineChannels
) -> BoundaryPrices:
    """Seconds by segment and by byte; every rank gets the first rank's."""
    at = [e.position for e in stage_entries(captured.graph, modules)]
    numbers = torch.full((len(at) + 2,), torch.nan, dtype=torch.float64, device=capture.device)
    if has_no_values(numbers):  # in a dry run nothing takes time
        return BoundaryPrices(per_byte=FLOPS_PER_BYTE[capture.device.type])
    numbers[0] = _seconds_per_byte(channels)
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            numbers[1:] = torch.tensor(segment_seconds(capture, captured, modules, slices), dtype=torch.float64)
        except Exception as e:  # the others wait for the broadcast: raised after it
            failed = e
    dist.broadcast(numbers, 0)
    if failed is not None:
        raise failed
    if bool(numbers.isnan().any()):
        raise GaveUp("rank 0 could not time the segments of the model", fix="see the error of rank 0, or split=auto")
    per_byte, *segments = numbers.tolist()
    return BoundaryPrices(tuple(segments), per_byte)


def segment_seconds(capture: JobCapture, captured: CapturedGraph, modules: set[str], slices: int) -> list[float]:
    """Seconds of one micro-batch by segment; where no stage can begin, the time counts to the segment before."""
    ends = [0, *(e.position for e in stage_entries(captured.graph, modules))]
    allowed = cuttable_positions(captured.graph, modules)
    staged = cut_into_stages(captured.graph, allowed)
    leaves = capture.real_batch(slices)
    seconds = dict.fromkeys(ends, 0.0)
    for start, index in zip([0, *allowed], range(len(staged.stages)), strict=True):
        seconds[start] = _Segment(capture, captured, staged, index, leaves).seconds()
    return [seconds[start] for start in ends]


def _seconds_per_byte(channels: PipelineChannels) -> float:
    """Timed with a long message between the first two ranks of a pipeline; the others do nothing."""
    if channels.rank > 1:
        return 0.0
    tensor = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=channels.device)
    there, back = (channels.send, channels.receive) if channels.rank == 0 else (channels.receive, channels.send)
    other = 1 - channels.rank

    def both_ways() -> None:
        for turn, move in enumerate((there, back)):
            move(tensor, other, turn).wait()

    return _median(both_ways, channels.device) / (2 * MESSAGE_BYTES)


class _Segment:
    """A segment that can be run repeatedly."""

    def __init__(
        self,
        capture: JobCapture,
        captured: CapturedGraph,
        staged: StagedGraph,
        index: int,
        leaves: Sequence[torch.Tensor],
    ) -> None:
        self.capture, self.staged, self.leaves = capture, staged, leaves
        self.device = capture.device
        self.draw = torch.Generator(self.device).manual_seed(1)
        self.root = ParameterHolder()
        placeholders = captured.placeholders("parameter") | captured.placeholders("buffer")
        for name in staged.names([index]):
            node = placeholders[name]
            value = self._like(node.meta["val"])
            is_parameter = node.meta["role"] == "parameter"
            register_tensor(
                self.root, name, nn.Parameter(value, requires_grad=node.meta["trained"]) if is_parameter else value
            )
        constants = {
            k: self._like(t) if isinstance(t, FakeTensor) else t.to(self.device) for k, t in captured.constants.items()
        }
        self.stage = staged.bind([index], self.root, constants).stages[index]
        self.inputs = self._inputs()

    def seconds(self) -> float:
        """Forward and backward, and a second forward if the plan recomputes layers."""
        forwards: list[float] = []

        def once() -> None:
            begin = time.perf_counter()
            outputs = self._forward()
            _synchronize(self.device)
            forwards.append(time.perf_counter() - begin)
            self._backward(outputs)

        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            both = _median(once, self.device)
        recomputes = self.capture.plan.recompute == "full"
        return both + (statistics.median(forwards[WARMUP_RUNS:]) if recomputes else 0.0)

    def _forward(self) -> tuple[torch.Tensor, ...]:
        for p in (*self.root.parameters(), *self.inputs):
            p.grad = None
        assert isinstance(self.stage.module, StageProgram)
        with torch.enable_grad(), compute_precision(self.capture.plan.precision, self.device):
            return self.stage.module(*self.inputs)

    def _backward(self, outputs: Sequence[torch.Tensor]) -> None:
        learned = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
        if learned:
            torch.autograd.backward(learned, [torch.ones_like(y) for y in learned])

    def _inputs(self) -> list[torch.Tensor]:
        """The batch as it is; outputs of other segments are drawn at random."""
        inputs = []
        for source in self.stage.inputs:
            if isinstance(source, StageInput):
                port = self.staged.stages[source.stage].outputs[source.output]
                drawn = port.unpack(self._like(port.receive_buffer(self.device)))
                inputs.append(drawn.requires_grad_(port.grad))
            else:
                inputs.append(self.leaves[int(source.name)])
        return inputs

    def _like(self, t: torch.Tensor) -> torch.Tensor:
        """Random values of a typical size; integers are 0, a valid index of every table, and conditions are true."""
        if t.is_floating_point():
            drawn = torch.randn(t.shape, generator=self.draw, device=self.device, dtype=torch.float32)
            return drawn.mul_(0.1).to(t.dtype)
        full = torch.ones if t.dtype == torch.bool or t.is_complex() else torch.zeros
        return full(t.shape, dtype=t.dtype, device=self.device)


def _median(run: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(WARMUP_RUNS + TIMED_RUNS):
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARMUP_RUNS:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
