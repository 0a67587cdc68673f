"""One large image on four ranks: it does not fit on one rank; the bytes between tiles, and equal results.

    python benchmarks/tiles.py [--size 4096] [--cap 1700] [--steps 2] [--small 384] [--paste]

A small U-Net is trained on one image of 4096 x 4096 in float32, while every rank may have `cap` MiB more than it has at
its start (RLIMIT_DATA). Alone, a rank runs out of memory; with tile=2x2, four ranks train. The bytes that go between
tiles are compared with the formula of the halo, which is computed here from kernels, strides and paddings alone. On a
smaller image in float64, outputs and gradients are compared with those of the whole image on one device.
Expected before measuring: one rank fails, four train; bytes equal to the byte; differences below 1e-12.
`--paste` writes into docs/log/model-parallel.md.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from split_contest.page import paste
from torch import nn

from drumline.comm.environment import connect
from drumline.core.job import Job
from drumline.launchers import run_ranks
from drumline.partition.sharding.halo_exchange import rows_sent
from drumline.partition.sharding.layout import even_bounds
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.state.weights import seeded_model

TILES = (2, 2)
CHANNELS = 4
MIB = 2**20
SAME = 1e-12


class UNet(nn.Module):
    """One downsampling, one upsampling, and a skip connection between them."""

    def __init__(self) -> None:
        super().__init__()
        c = CHANNELS
        self.first, self.down = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.deep, self.up = nn.Conv2d(2 * c, c, 3, padding=1), nn.Conv2d(2 * c, c, 3, padding=1)
        self.last = nn.Conv2d(c, 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        skip = F.relu(self.first(x))
        x = F.relu(self.deep(F.relu(self.down(skip))))
        x = torch.cat([skip, F.interpolate(x, scale_factor=2.0)], 1)
        return self.last(F.relu(self.up(x)))


@dataclass(frozen=True)
class Conv:
    """The parameters of a convolution with a halo that the formula needs."""

    channels: int
    """Of its input."""
    over: int
    """The image has that many times as many rows."""
    stride: int = 1
    differentiated: bool = True
    """Whether somebody wants the gradient of its input."""


CONVOLUTIONS = (
    Conv(1, 1, differentiated=False),
    Conv(CHANNELS, 1, stride=2),
    Conv(2 * CHANNELS, 2),
    Conv(2 * CHANNELS, 1),
)
"""All are 3 x 3 with one row of padding."""


@lru_cache(maxsize=1)
def _images(size: int) -> torch.utils.data.Dataset[Any]:
    image = torch.randn(1, 1, size, size, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(image, image)


def job_of(size: int) -> Job:
    """Build a job that reconstructs its image."""
    return Job(
        model=UNet,
        loss=F.mse_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        data=partial(_images, size),
        batch_size=1,
    )


# -- the formula


def halo_bytes(size: int, rank: int, itemsize: int) -> dict[str, int]:
    """Compute the bytes a rank sends per step, forward and back: rows first, then columns of all rows it then has."""
    i, j = divmod(rank, TILES[1])
    sent = {"halo": 0, "halo back": 0}
    for conv in CONVOLUTIONS:
        bounds, wanted = _wanted(conv, size)
        own, rows = bounds[j + 1] - bounds[j], wanted[i][1] - wanted[i][0]
        unit = conv.channels * itemsize
        sent["halo"] += unit * (own * rows_sent(bounds, wanted, i) + rows * rows_sent(bounds, wanted, j))
        if conv.differentiated:  # what came is answered: with two ranks, what the other one sent
            back = own * rows_sent(bounds, wanted, 1 - i) + rows * rows_sent(bounds, wanted, 1 - j)
            sent["halo back"] += unit * back
    return sent


def _wanted(conv: Conv, size: int) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Find the cuts of the input and the rows each half of the outputs needs: o * stride - 1 to o * stride + 1."""
    bounds = even_bounds(size // conv.over, 2)
    outputs = pairwise(even_bounds(size // conv.over // conv.stride, 2))
    return bounds, [(a * conv.stride - 1, (b - 1) * conv.stride + 2) for a, b in outputs]


# -- what the ranks do


@dataclass
class Results:
    """Measurements of one rank."""

    losses: list[float] = field(default_factory=list)
    error: str = ""
    """Why training failed."""
    grown: float = 0.0
    """Peak memory growth since the start, in MiB."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of one step, by kind of message."""
    differences: dict[str, float] = field(default_factory=dict)
    """The largest difference from the whole image, relative to the largest number."""


def trained(_: Any, plan: str, size: int, cap: int, steps: int) -> Results:
    """Train under a cap of memory."""
    connect(backend="gloo")
    torch.set_num_threads(1)
    results, before = Results(), _status("VmRSS")
    with _capped(cap):
        try:
            engine = initialize(job_of(size), f"{plan},backend=gloo")
            results.sent = _counting(engine)
            for batch in engine.data(steps):
                results.sent.clear()
                results.losses.append(engine.step(batch))
        except (MemoryError, RuntimeError) as e:
            results.error = str(e).strip().split("\n")[0].rpartition("Allocator: ")[2] or type(e).__name__
            if "memory" not in results.error and "alloc" not in results.error and not isinstance(e, MemoryError):
                raise  # it failed, but not for want of memory
    results.grown = (_status("VmHWM") - before) / MIB
    return results


@contextmanager
def _capped(mebibytes: int) -> Iterator[None]:
    """Limit the growth of this process's private memory."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + mebibytes * MIB, before[1]))
    try:
        yield
    finally:
        gc.collect()
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _status(key: str) -> int:
    """Read a line of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _counting(engine: Engine) -> dict[str, int]:
    """Count the bytes of this rank's messages by kind, from now on."""
    sent: dict[str, int] = {}
    record: Any = engine.record
    plain: Callable[..., Any] = record.message

    def message(name: str, *tensors: torch.Tensor) -> Any:
        sent[name] = sent.get(name, 0) + sum(t.nbytes for t in tensors)
        return plain(name, *tensors)

    record.message = message
    return sent


def compared(_: Any, plan: str, size: int) -> Results:
    """Compare one step in float64 on tiles with the whole image."""
    connect(backend="gloo")
    torch.set_num_threads(1)
    job = job_of(size)
    engine = initialize(job, f"{plan},backend=gloo", dtype=torch.float64)
    made: dict[str, torch.Tensor] = {}

    def see(_: int, shown: Any, value: torch.Tensor) -> None:
        if shown.module == "":
            made["output"] = engine.strategy.whole_output(value.detach(), shown.splits)

    engine.strategy.watch_outputs(see)
    engine.__dict__["gradients_ready"] = lambda: made.update(engine.whole_gradients())
    batch = next(iter(engine.data(1)))
    results = Results(losses=[engine.step(batch)], sent={})
    model = seeded_model(job, torch.float64)
    x, y = (t.double() for t in _images(size)[0:1])
    output = model(x)
    loss = F.mse_loss(output, y)
    loss.backward()
    wanted = {"output": output.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    assert made.keys() == wanted.keys(), f"{sorted(made)} and {sorted(wanted)}"
    far = {name: float((made[name] - t).abs().max() / t.abs().max()) for name, t in wanted.items() if t is not None}
    output_far = far.pop("output")
    loss_far = abs(results.losses[0] - loss.item())
    results.differences = {"loss": loss_far, "output": output_far, "gradients": max(far.values())}
    return results


# -- the report


def report(size: int, cap: int, alone: Results, ranks: list[Results], small: int, exact: list[Results]) -> list[str]:
    """Format the tables and compare them with the expectations."""
    lines = [f"One image of {size} x {size} in float32; every rank may have {cap} MiB more than at its start.", ""]
    lines += ["| plan | what happened | most MiB of a rank | losses |", "|---|---|---|---|"]
    plan = f"tile={TILES[0]}x{TILES[1]}"
    for name, group in (("dp=1", [alone]), (plan, ranks)):
        error = next((f.error for f in group if f.error), "")
        losses = ", ".join(f"{loss:.4f}" for loss in group[0].losses)
        most = max(f.grown for f in group)
        lines.append(f"| {name} | {f'fails: {error}' if error else 'trains'} | {most:.0f} | {losses} |")
    fits = bool(alone.error) and not any(f.error for f in ranks) and ranks[0].losses[-1] < ranks[0].losses[0]
    lines += ["", f"- One rank fails and four train, with a falling loss: {'kept' if fits else 'missed'}."]
    lines += ["", "| rank | halo, bytes | by formula | back, bytes | by formula |", "|---|---|---|---|---|"]
    same = True
    for rank, one in enumerate(ranks):
        want = halo_bytes(size, rank, 4)
        cells = [(one.sent.get(kind, 0), want[kind]) for kind in ("halo", "halo back")]
        same &= all(a == b for a, b in cells)
        lines.append(f"| {rank} | {' | '.join(f'{n:,}' for pair in cells for n in pair)} |")
    lines += ["", f"- The bytes of a step are those of the formula: {'kept' if same else 'missed'}."]
    differences = {key: max(f.differences[key] for f in exact) for key in exact[0].differences}
    listed = ", ".join(f"{key} {value:.1e}" for key, value in differences.items())
    verdict = "kept" if max(differences.values()) <= SAME else "missed"
    lines.append(
        f"- Difference from the whole {small} x {small} image, float64: {listed}; at most {SAME:g}: {verdict}."
    )
    return lines


def main() -> None:
    """Run the cases, print the tables, and paste them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the image; a multiple of 4")
    parser.add_argument("--cap", type=int, default=1700, help="MiB that a rank may have beyond those at its start")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--small", type=int, default=384, help="rows and columns of the image in float64")
    parser.add_argument("--paste", action="store_true", help="write the tables into docs/log/model-parallel.md")
    options = parser.parse_args()
    plan, n = f"tile={TILES[0]}x{TILES[1]}", TILES[0] * TILES[1]
    exact = run_ranks(compared, plan, options.small, ranks=n, threads=1)
    given = (options.size, options.cap, options.steps)
    alone = run_ranks(trained, "dp=1", *given, ranks=1, threads=1)[0]
    ranks = run_ranks(trained, plan, *given, ranks=n, threads=1)
    lines = report(options.size, options.cap, alone, ranks, options.small, exact)
    print("\n".join(lines))
    if options.paste:
        paste("tiles", lines, f"{n} ranks, one thread each; pasted by `python benchmarks/tiles.py --paste`")


if __name__ == "__main__":
    main()
