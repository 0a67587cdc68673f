"""`precision=bf16-pure` and `fp8` on one GPU, next to bf16: proof, memory, step time, and the loss that is reached.

    python benchmarks/gpu_precisions.py [verify] [memory] [speed] [loss] [--small]

`verify` compares plans with one device. `memory` prints the peak of each precision and its prediction by the data sheet
of an H200. `speed` takes steps of all precisions in turns, and prices them with what `measure` finds on this GPU.
`loss` trains the same GPT in each precision, and in bf16 weights that are rounded to nearest. `--small` shrinks every
model, and runs on a CPU, too, without fp8 and without `memory` and `speed`.
Expected before measuring: memory within 5%; fp8 at most 0.85 of bf16 for a GPT of width 4096, and slower than bf16 for
width 768; losses of bf16-pure and fp8 within 2% of bf16, those rounded to nearest more than 10% above.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models.own import GPT

import drumline as dl
from drumline.clusters import load
from drumline.core.units import format_bytes, format_seconds
from drumline.costs import cost_model
from drumline.runtime.engine import initialize
from drumline.runtime.numerics.float8 import missing_float8
from drumline.runtime.verification.verify import verify
from drumline.tracing import trace

PRECISIONS = ("bf16", "bf16-pure", "fp8")
WORDS = 2048


def job(width: int, blocks: int, batch: int, length: int, samples: int = 512) -> dl.Job:
    """A GPT on sequences in which each token follows from the two before it, most of the time."""

    def data() -> Any:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(WORDS, (samples, length + 1), generator=generator)
        random = torch.rand(samples, length + 1, generator=generator) < 0.1
        for i in range(2, length + 1):
            follows = (tokens[:, i - 1] * 31 + tokens[:, i - 2] * 7 + 3) % WORDS
            tokens[:, i] = torch.where(random[:, i], tokens[:, i], follows)
        return [(t[:-1], t[1:]) for t in tokens]

    return dl.Job(
        model=lambda: GPT(width, blocks, WORDS, length),
        data=data,
        batch_size=batch,
        clip=1.0,
        loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, betas=(0.9, 0.999)),
    )


def precisions() -> tuple[str, ...]:
    """List the precisions that this machine supports."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lacks = missing_float8(device)
    if lacks:
        print(f"fp8 is left out: {lacks}")
    return PRECISIONS[:2] if lacks else PRECISIONS


def prove(small: bool) -> None:
    """Plans of one rank against one device."""
    for precision in precisions()[1:]:
        for more in ("", ",zero=1,micro=2", ",zero=3", ",zero=3,recompute=full"):
            plan = f"dp=1{more},precision={precision}"
            result = verify(job(64 if small else 256, 2, 8, 16 if small else 64), dl.Plan.parse(plan), steps=4)
            assert result is not None
            errors = {k: float(f"{v:.1e}") for k, v in result.errors.items()}
            verdict = "passed" if result.passed else f"FAILED at {result.first_divergence}"
            print(f"verify: {plan}: {verdict}, {errors}, any loss {result.later_losses:.1e}", flush=True)
            free()


def memory(small: bool) -> None:
    """Peak memory against the prediction."""
    trained = job(1024, 12, 16, 512)
    for precision in precisions():
        profile = trace(trained, precision=precision, device="cuda")
        for more in ("", ",recompute=full", ",zero=3", ",micro=4"):
            plan = dl.Plan.parse(f"dp=1{more},precision={precision}")
            predicted = cost_model(profile, load("dgx-h200").with_devices(1), precision).estimate(plan)
            free()
            torch.cuda.reset_peak_memory_stats()
            engine = initialize(trained, plan)
            for batch in engine.data(3):
                engine.step(batch)
            peak = torch.cuda.max_memory_allocated()
            error = 100 * (predicted.memory_bytes / peak - 1)
            parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in predicted.memory_parts.items() if v)
            print(
                f"memory: {plan}: peak {format_bytes(peak)}, predicted {format_bytes(predicted.memory_bytes)} "
                f"({error:+.1f}%; {parts})",
                flush=True,
            )
            del engine


def speed(small: bool) -> None:
    """Measure step times in turns and compare them with the predictions."""
    from gpu_models.host_bound import contest, interval, median, ratio

    from drumline.loop.measure import measure_local

    cluster = measure_local(1)
    if "fp8" in (known := load("dgx-h200").device.peak) and "fp8" not in cluster.device.peak:
        from dataclasses import replace

        peak = {**cluster.device.peak, "fp8": cluster.device.peak["bf16"] * known["fp8"] / known["bf16"]}
        cluster = replace(cluster, device=replace(cluster.device, peak=peak))
    for width, blocks, batch in ((768, 12, 8), (2048, 16, 8), (4096, 8, 8)):
        made = job(width, blocks, batch, 1024, samples=batch)
        placed = tuple(t.cuda() for t in torch.utils.data.default_collate(made.data()))
        steps: dict[str, Callable[[], Any]] = {}
        predicted = {}
        for precision in precisions():
            plan = dl.Plan.parse(f"dp=1,precision={precision}")
            steps[precision] = functools.partial(initialize(made, plan).step, placed)
            profile = trace(made, precision=precision, device="cuda")
            predicted[precision] = cost_model(profile, cluster, precision).estimate(plan).step_seconds
        rounds = contest(steps, 6.0)
        for precision in steps:
            took = median(rounds, precision)
            low, high = interval(rounds, precision, "bf16")
            print(
                f"speed: GPT {width}x{blocks}, batch {batch}: {precision} {format_seconds(took)}, "
                f"{ratio(rounds, precision, 'bf16'):.3f} of bf16 (95% interval {low:.3f} to {high:.3f}), predicted "
                f"{format_seconds(predicted[precision])} ({100 * (predicted[precision] / took - 1):+.1f}%)",
                flush=True,
            )
        del steps
        free()


def loss(small: bool) -> None:
    """The mean loss of the last steps of the same training in each precision."""
    trained, steps = (job(64, 2, 8, 16, 64), 60) if small else (job(512, 6, 32, 128), 600)
    reached = {}
    for name in (*precisions(), "bf16-pure, rounded to nearest"):
        engine = initialize(trained, f"dp=1,precision={name.partition(',')[0]}")
        if "nearest" in name:
            engine.update._rounding = None
        losses = [engine.step(batch) for batch in engine.data(steps)]
        reached[name] = sum(losses[-20:]) / 20
        print(
            f"loss: {name}: {losses[0]:.3f} at first, {reached[name]:.4f} in the last 20 of {steps} steps, "
            f"{100 * (reached[name] / reached['bf16'] - 1):+.1f}% of bf16",
            flush=True,
        )
        del engine
        free()


def free() -> None:
    """Free the memory of the last experiment."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Run the parts that were named, or all."""
    parts = {"verify": prove, "memory": memory, "speed": speed, "loss": loss}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    print(f"{torch.cuda.get_device_name(0) if gpu else 'CPU'}, torch {torch.__version__}")
    for name in given.parts or list(parts):
        if name in ("memory", "speed") and not gpu:
            print(f"{name}: needs a GPU")
            continue
        start = time.perf_counter()
        parts[name](given.small)
        print(f"({name}: {time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
