"""The data-parallel family on one GPU: what the engine adds to a bare loop, and models larger than the device.

    python benchmarks/gpu.py [overhead] [graph] [compiled] [verify] [memory] [offload] [chunk] [--cluster FILE]

`overhead` takes steps of a bare loop and of the engine in turns and prints the ratio. `graph` measures the GPU,
unless a cluster file has its measurement, predicts what `graph=true` saves, and runs it; `compiled` compares
`compile=true` with the plain engine. `verify` proves the plans that only a GPU can run. `memory` compares the peak of
several plans with the prediction. `offload` and `chunk` cap the memory of the device with
`set_per_process_memory_fraction` and train what does not fit under the cap: with the optimizer, or everything, in host
memory; and a linear layer that is larger than the cap.
Expected before measuring: overhead below 1.02; a captured step at most 0.65 of a bare loop for ResNet-50 and ViT at 32
and 0.25 for a small MLP, predicted within 15%; peaks within 5% of what is predicted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import host_bound
from gpu_models.host_bound import BARE, bare_loop, contest, interval, median, ratio
from gpu_models.own import GPT
from torch import nn

import drumline as dl
from drumline.clusters import load
from drumline.core.units import format_bytes, format_seconds
from drumline.costs import estimate
from drumline.runtime.engine import initialize
from drumline.runtime.verification.verify import verify
from drumline.tracing import trace

CAPS = {"states": 5 * 2**30, "layer": 3 * 2**29}


class Wide(nn.Module):
    """Two layers, the first of which is `rows` x `width`: larger than many a device."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(width, rows), nn.Linear(rows, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.wide(x)))


def gpt_job(width: int, blocks: int, batch: int, words: int = 32768, length: int = 1024) -> dl.Job:
    """A GPT on random tokens."""

    def data() -> Any:
        tokens = torch.randint(words, (64, length + 1), generator=torch.Generator().manual_seed(0))
        return [(t[:-1], t[1:]) for t in tokens]

    return dl.Job(
        model=lambda: GPT(width, blocks, words, length),
        data=data,
        batch_size=batch,
        clip=1.0,
        loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
    )


def wide_job(width: int, rows: int) -> dl.Job:
    """The wide model on random vectors."""

    def data() -> Any:
        x = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
        return [(x[i], i % 16) for i in range(64)]

    return dl.Job(
        model=lambda: Wide(width, rows),
        data=data,
        batch_size=8,
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    )


# -- what the engine adds


def overhead(seconds: float = 10.0) -> None:
    """Ratio of step times, engine / bare loop: rounds of one step each, in an order that changes, for some seconds."""
    host_bound.overhead(seconds)
    for width, layers, batch, precision in ((1536, 16, 16, "bf16"), (768, 12, 8, "fp32")):
        job = gpt_job(width, layers, batch)
        placed = tuple(t.cuda() for t in torch.utils.data.default_collate(job.data()[:batch]))
        plan = f"dp=1,precision={precision}"
        step = functools.partial(initialize(job, plan).step, placed)
        rounds = contest({BARE: bare_loop(job, placed, precision), plan: step}, seconds)
        low, high = interval(rounds, plan, BARE)
        print(
            f"overhead: GPT {width}x{layers} in {precision}, batch {batch}: {BARE} "
            f"{format_seconds(median(rounds, BARE))}, engine {format_seconds(median(rounds, plan))}, {len(rounds)} "
            f"rounds: {ratio(rounds, plan, BARE):.3f} (95% interval {low:.3f} to {high:.3f})",
            flush=True,
        )
        del step
        free()


def graph(cluster_file: str | None) -> None:
    """Compare the time a captured step saves with the prediction made with this GPU's own measurement."""
    from drumline.loop.measure import measure_local

    host_bound.graph(load(cluster_file) if cluster_file else measure_local(1))


def compiled(seconds: float = 6.0) -> None:
    """`compile=true` and `graph=true`, each alone and both, for the ViT and ResNet-50."""
    for entry in host_bound.HOST_BOUND[1:3]:
        batch, job = host_bound.placed(entry), entry.job()
        steps: dict[str, Callable[[], Any]] = {BARE: bare_loop(job, batch)}
        for more in ("", ",compile=true", ",graph=true", ",compile=true,graph=true"):
            steps[f"{entry.plan}{more}"] = functools.partial(initialize(job, f"{entry.plan}{more}").step, batch)
        rounds = contest(steps, seconds)
        print(f"compiled: {entry.name}, batch {entry.batch}: {BARE} {format_seconds(median(rounds, BARE))}")
        for plan in list(steps)[1:]:
            low, high = interval(rounds, plan, BARE)
            took, share = format_seconds(median(rounds, plan)), ratio(rounds, plan, BARE)
            print(f"   {plan}: {took}, {share:.3f} of it (95% interval {low:.3f} to {high:.3f})", flush=True)
        del steps
        free()


# -- proof


PLANS = (
    "dp=1",
    "dp=1,precision=tf32",
    "dp=1,precision=bf16",
    "dp=1,precision=fp16,micro=2",
    "dp=1,zero=1",
    "dp=1,zero=2,micro=2",
    "dp=1,zero=3,precision=bf16",
    "dp=1,zero=3,precision=fp16",
    "dp=1,offload=optimizer",
    "dp=1,zero=2,offload=optimizer,precision=bf16",
    "dp=1,zero=3,offload=optimizer",
    "dp=1,zero=3,offload=all",
    "dp=1,zero=3,offload=all,precision=bf16,micro=2",
    "dp=1,recompute=selective",
    "dp=1,recompute=full,zero=3,offload=all",
    "dp=1,chunk=4",
    "dp=1,chunk=4,zero=3,offload=all",
    "dp=1,compile=true",
    "dp=1,backend=threads",
    "dp=1,zero=3,shard=1,recompute=selective,precision=bf16",
)


def prove() -> None:
    """Every plan of one rank against the reference, on the GPU."""
    for plan in PLANS:
        job = gpt_job(128, 2, 4, words=512, length=32)
        try:
            result = verify(job, dl.Plan.parse(plan), steps=4)
            assert result is not None
            verdict = "passed" if result.passed else f"FAILED at {result.first_divergence}"
            print(f"verify: {plan}: {verdict}, { ({k: float(f'{v:.1e}') for k, v in result.errors.items()}) }")
        except Exception as e:
            print(f"verify: {plan}: {type(e).__name__}: {str(e)[:300]}")
        free()


# -- larger than the device


def under_cap(name: str, job: dl.Job, plan: str, cap: int, steps: int = 3) -> None:
    """Train with a cap on the device's memory; the peak against the prediction."""
    total = torch.cuda.get_device_properties(0).total_memory
    free()
    profile = trace(job)
    cluster = load("dgx-h200").with_devices(1)
    made = dl.Plan.parse(plan)
    predicted = estimate(profile, made, cluster)
    states = profile.parameters * profile.parameter_bytes + profile.trained * (
        profile.parameter_bytes + profile.state_per_parameter
    )
    torch.cuda.set_per_process_memory_fraction(cap / total)
    verdict = "trains"
    seconds: list[float] = []
    try:
        engine = initialize(job, made)
        torch.cuda.reset_peak_memory_stats()
        losses = []
        for batch in engine.data(steps):
            start = time.perf_counter()
            losses.append(engine.step(batch))
            seconds.append(time.perf_counter() - start)
        assert all(math.isfinite(x) for x in losses)
        verdict += f", losses {', '.join(f'{x:.3f}' for x in losses)}"
    except torch.OutOfMemoryError:
        verdict = "runs out of memory"
    peak = max(1, torch.cuda.max_memory_allocated())
    print(
        f"{name}: {plan}: states {format_bytes(states)}, cap {format_bytes(cap)}: {verdict}; "
        f"peak {format_bytes(peak)}, predicted {format_bytes(predicted.memory_bytes)} "
        f"({100 * (predicted.memory_bytes / peak - 1):+.1f}%)"
        + (f", {format_seconds(statistics.median(seconds))} a step" if seconds else "")
    )
    print("   predicted MiB:", {k: round(v / 2**20, 1) for k, v in predicted.memory_parts.items() if v})
    if "engine" in locals():
        del engine
    torch.cuda.set_per_process_memory_fraction(1.0)
    free()


def memory() -> None:
    """Peaks of a GPT of 185 million parameters under many plans."""
    job = gpt_job(1024, 12, 16, words=32768, length=512)
    for rest in (
        "",
        ",recompute=selective",
        ",recompute=full",
        ",micro=4",
        ",offload=optimizer",
        ",zero=1",
        ",zero=2,micro=4",
        ",zero=3",
        ",zero=3,recompute=full",
        ",zero=3,offload=all",
        ",zero=3,offload=all,recompute=full",
        ",chunk=4",
        ",zero=3,offload=all,chunk=4",
    ):
        for precision in ("fp32", "bf16"):
            under_cap("memory", job, f"dp=1{rest},precision={precision}", 130 * 2**30)


def offload() -> None:
    """Half a billion parameters: 7.5 GiB of states under a cap of 5 GiB."""
    job = gpt_job(1536, 16, 4, words=32768, length=512)
    for plan in (
        "dp=1,precision=bf16,recompute=full",
        "dp=1,precision=bf16,recompute=full,offload=optimizer",
        "dp=1,zero=3,precision=bf16,recompute=full,offload=all",
        "dp=1,zero=3,precision=bf16,offload=all",
    ):
        under_cap("offload", job, plan, CAPS["states"])


def chunk() -> None:
    """A linear layer of 2 GiB under a cap of 1.5 GiB."""
    job = wide_job(8192, 65536)
    for plan in ("dp=1,zero=3,offload=all", "dp=1,zero=3,offload=all,chunk=8", "dp=1,zero=3,offload=all,chunk=16"):
        under_cap("chunk", job, plan, CAPS["layer"])


def free() -> None:
    """Free the memory of the last experiment."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Run the parts that were named, or all."""
    parts: dict[str, Callable[[], None]] = {
        "overhead": overhead,
        "graph": lambda: graph(options.cluster),
        "compiled": compiled,
        "verify": prove,
        "memory": memory,
        "offload": offload,
        "chunk": chunk,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--cluster", help="a measurement of this GPU, for `graph`")
    options = parser.parse_args()
    names = options.parts or list(parts)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    for name in names:
        start = time.perf_counter()
        parts[name]()
        print(f"({name}: {time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
