"""Pipeline schedules on four ranks whose layers sleep: predicted and measured step times.

    python benchmarks/pipelines.py [--blocks 20] [--sleep 20] [--micro 8] [--paste]

Eight equal layers sleep in the forward, for the gradient of the input and for that of the weight, so that four stages
work at the same time on fewer cores. The engine runs every schedule in the same ranks, in turns. The prediction is
`costs.pipeline_clock.time_pipeline` on the sleeps and the measured time of a message. Activations are counted where the
layers store them. Expected before measuring: each step within 10% of its prediction; zero-bubble ahead of interleaved
ahead of 1F1B ahead of naive; bytes as `peak_activation_bytes` predicts. `--paste` writes
into docs/log/model-parallel.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_peers.ratios import Ratio, ratio
from sleeping import Sleeper, Sleeps, activations
from split_contest.page import paste
from torch import nn

from drumline.comm.environment import connect
from drumline.core.job import Job
from drumline.costs.pipeline_clock import time_pipeline
from drumline.costs.pipeline_memory import peak_activation_bytes
from drumline.launchers import run_ranks
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.parallel.model_parallel import ModelParallel
from drumline.schedules.pipeline import Pipeline, pipeline_order

RANKS, LAYERS, WIDTH = 4, 8, 16384
BYTES = 4 * WIDTH
"""Activation bytes of a layer for a micro-batch of one sample; a message between stages has as many."""
WARM = 2
NEAR = 0.10
"""How far a step may be from its prediction."""


@dataclass(frozen=True)
class Case:
    """A schedule, and the number of stages per rank."""

    schedule: str
    virtual: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}, virtual={self.virtual}" if self.virtual > 1 else self.schedule

    @property
    def layers(self) -> int:
        """Number of layers per stage."""
        return LAYERS // (RANKS * self.virtual)

    def plan(self, micro: int) -> str:
        """Write the plan in notation, with equal stages."""
        starts = "+".join(f"layers.{i}" for i in range(self.layers, LAYERS, self.layers))
        more = f",virtual={self.virtual}" if self.virtual > 1 else ""
        return f"pp={RANKS},micro={micro},schedule={self.schedule}{more},split={starts},backend=gloo"

    def order(self, micro: int) -> Pipeline:
        """Build the action table that the engine runs."""
        return pipeline_order(self.schedule, RANKS, micro, self.virtual)


NAIVE, GPIPE, ONE, INTER = Case("naive"), Case("gpipe"), Case("1f1b"), Case("interleaved", 2)
H1, V = Case("zero-bubble"), Case("zero-bubble", 2)
CASES = (NAIVE, GPIPE, ONE, INTER, H1, V)
CHAIN = ((NAIVE, ONE), (ONE, INTER), (INTER, H1), (INTER, V))
"""(slower, faster) according to theory."""


@dataclass
class Results:
    """Measurements of one rank."""

    message: float = 0.0
    """Seconds of one message between stages."""
    seconds: dict[Case, list[float]] = field(default_factory=dict)
    """Seconds per step of the slowest rank, by block."""
    forwards: dict[Case, int] = field(default_factory=dict)
    """Peak number of forwards whose activations this rank kept at once."""
    bytes: dict[Case, int] = field(default_factory=dict)
    """Peak activation bytes of this rank's layers."""
    loss: dict[Case, float] = field(default_factory=dict)


class Layers(nn.Module):
    """A chain of layers; the first has no input gradient to compute, but sleeps as long as the others."""

    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeper(WIDTH, sleeps, first=i == 0) for i in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def contest(emit: Callable[[dict[str, Any]], None], sleeps: Sleeps, micro: int, blocks: int) -> Results:
    """Run all schedules in turns, on one rank."""
    connect(backend="gloo")
    torch.set_num_threads(1)
    job = _job(sleeps, micro)
    engines = {case: initialize(job, case.plan(micro)) for case in CASES}
    batches = {case: next(iter(engine.data(1))) for case, engine in engines.items()}
    results = Results(message=_message_seconds(), seconds={case: [] for case in CASES})
    for case, engine in engines.items():
        for _ in range(WARM):
            activations.restart()
            results.loss[case] = engine.step(batches[case])
        results.forwards[case], results.bytes[case] = _peak_forwards(engine), activations.peak
    for block in range(blocks):
        for case in random.Random(block).sample(CASES, len(CASES)):
            results.seconds[case].append(_timed(partial(engines[case].step, batches[case])))
        emit({"block": block + 1})
    return results


def _peak_forwards(engine: Engine) -> int:
    assert isinstance(engine.strategy, ModelParallel)
    return engine.strategy.peak


def _job(sleeps: Sleeps, micro: int) -> Job:
    draw = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(*(torch.randn(micro, WIDTH, generator=draw) for _ in range(2)))
    return Job(
        model=partial(Layers, sleeps),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        data=lambda: data,
        batch_size=micro,
    )


def _timed(step: Callable[[], Any]) -> float:
    """Time a step: seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def _message_seconds(rounds: int = 30) -> float:
    """Time half a round trip between the first two ranks."""
    x, times = torch.zeros(WIDTH), []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
            dist.send(x, 0)
        times.append((time.perf_counter() - begin) / 2)
    taken = torch.tensor([statistics.median(times)], dtype=torch.float64)
    dist.broadcast(taken, 0)
    return taken.item()


def predicted(case: Case, micro: int, sleeps: Sleeps, message: float) -> float:
    """Predict the seconds of a step from its schedule alone.

    The first stage has no input gradient to compute: where the backward is split, all of it is in W.
    """
    order, n = case.order(micro), case.layers
    f, b, w = (n * t for t in (sleeps.forward, sleeps.input, sleeps.weight))
    backward, weight = [b] * order.stages, [w] * order.stages
    if order.splits_backward:
        backward[0], weight[0] = 0.0, b + w
    else:
        backward, weight = [b + w] * order.stages, [0.0] * order.stages
    return time_pipeline(order, forward=f, backward=backward, weight=weight, transfer=message).seconds


def report(ranks: list[Results], micro: int, sleeps: Sleeps) -> list[str]:
    """Format the table and compare it with the expectations."""
    results = ranks[0]
    ms = " + ".join(f"{1e3 * t:g}" for t in (sleeps.forward, sleeps.input, sleeps.weight))
    lines = [
        f"{LAYERS} layers of {ms} ms (forward, gradient of the input, of the weight), {micro} micro-batches; a message "
        f"of {BYTES // 1024} KiB takes {1e3 * results.message:.2f} ms; {len(results.seconds[ONE])} blocks.",
        "",
        "| order | predicted | step | step / predicted | within 10% | most forwards kept, by rank | most KiB kept "
        "| in theory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        expected = predicted(case, micro, sleeps, results.message)
        r = ratio(results.seconds[case], [expected] * len(results.seconds[case]))
        forwards = ", ".join(str(rank.forwards[case]) for rank in ranks)
        most = max(rank.bytes[case] for rank in ranks)
        step = 1e3 * statistics.median(results.seconds[case])
        lines.append(
            f"| {case} | {1e3 * expected:.1f} ms | {step:.1f} ms | {r} | {_verdict(r)} "
            f"| {forwards} | {most // 1024} | {_peak_in_theory(case, micro) // 1024} |"
        )
    return [*lines, "", *_conclusions(ranks, micro)]


def _verdict(r: Ratio) -> str:
    if r.low >= 1 - NEAR and r.high <= 1 + NEAR:
        return "kept"
    return "missed" if r.low > 1 + NEAR or r.high < 1 - NEAR else "open: the interval holds the bound"


def _peak_in_theory(case: Case, micro: int) -> int:
    """Peak bytes of a rank if stages keep the inputs of their layers until the weight gradients are computed."""
    order = case.order(micro)
    return int(max(peak_activation_bytes(order, [case.layers * BYTES] * order.stages)))


def _conclusions(ranks: list[Results], micro: int) -> list[str]:
    results, lines = ranks[0], []
    for slow, fast in CHAIN:
        r = ratio(results.seconds[slow], results.seconds[fast])
        verdict = "ahead" if r.low > 1 else "behind" if r.high < 1 else "level"
        lines.append(f"- {slow} takes {r} of {fast}: {fast} is {verdict}.")
    measured = {case: max(rank.bytes[case] for rank in ranks) for case in CASES}
    theory = {case: _peak_in_theory(case, micro) for case in CASES}
    wrong = [str(case) for case in CASES if measured[case] != theory[case]]
    verdict = (
        f"differ from theory: {', '.join(wrong)}" if wrong else "are those of theory, to the byte, for every order"
    )
    listed = " <= ".join(str(case) for case in sorted(CASES, key=measured.__getitem__))
    lines.append(f"- The most bytes of activations at once {verdict}: {listed}.")
    spread = max(results.loss.values()) - min(results.loss.values())
    lines.append(f"- The losses of the orders differ by {spread:.1e}.")
    return lines


def main() -> None:
    """Run the schedules, print the table, and paste it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="of every order: a step each")
    parser.add_argument("--sleep", type=float, default=20.0, help="milliseconds of each part of a layer")
    parser.add_argument("--micro", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--paste", action="store_true", help="write the table into docs/log/model-parallel.md")
    options = parser.parse_args()
    sleeps = Sleeps(*(1e-3 * options.sleep,) * 3)
    ranks = run_ranks(contest, sleeps, options.micro, options.blocks, ranks=RANKS, threads=1)
    lines = report(ranks, options.micro, sleeps)
    print("\n".join(lines))
    if options.paste:
        paste("pipelines", lines, f"{RANKS} ranks, one thread each; pasted by `python benchmarks/pipelines.py --paste`")


if __name__ == "__main__":
    main()
