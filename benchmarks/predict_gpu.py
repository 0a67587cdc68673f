"""Ten models and more on one GPU: each predicted from its trace before it runs, then run by the engine.

    python benchmarks/predict_gpu.py run OUT [--only NAME ...] [--cluster FILE] [--unseen]    on the GPU
    python benchmarks/predict_gpu.py page OUT/results.json [--engine FILE ...] [--unseen]     writes docs/gpu.md
    python benchmarks/predict_gpu.py engine FILE                                    only the output of benchmarks/gpu.py

`run` measures the GPU as `drumline measure` does, unless it is given a cluster file, traces every model, and takes all
models in turns, three times: each time it predicts the step, and only then runs 20 of them. As `drumline train` does,
it probes how fast the host is now compared with the measurement (half a second) and predicts for that speed. Reported
are the medians of the three predictions and of the three times, because a shared host changes its speed by a fifth
within a minute. The peak of allocated memory is that of the first turn; the prediction without the probe is recorded,
too. At the end two models are tried under a cap of memory: with the largest batch that is predicted to leave a tenth
free, and with the smallest that is predicted not to fit. Expected before measuring: step time
within 10% on average and 20% at worst, memory within 5% on average; of the models of `--unseen`,
step time within 6% on average and 20% at worst.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_models.table import TABLE, Entry
from gpu_models.unseen import UNSEEN

import drumline as dl
from drumline.clusters import Cluster
from drumline.costs import estimate
from drumline.costs.what_if import with_host_slowdown
from drumline.measurement.host_overhead import host_slowdown
from drumline.models import Profile
from drumline.runtime.engine import initialize
from drumline.tracing import trace

TURNS, STEPS, WARM = 3, 20, 4
CAP = 24 * 2**30
CAPPED = ("GPT 768x12", "ResNet-50")
PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
MARKS = {
    "predicted": ("<!-- predicted -->", "<!-- end -->"),
    "unseen": ("<!-- unseen -->", "<!-- end of unseen -->"),
    "engine": ("<!-- engine -->", "<!-- end of engine -->"),
}


def traced(entry: Entry) -> Profile:
    """The profile of a model in the plan's precision, as a GPU computes."""
    return trace(entry.job(), precision=dl.Plan.parse(entry.plan).precision, device="cuda")


def run(out: Path, only: list[str], cluster_file: str | None, kernels: bool, table: Sequence[Entry]) -> None:
    """Measure, predict, run."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if cluster_file:
        cluster = Cluster.load(cluster_file)
    else:
        from drumline.loop.measure import measure_local

        cluster = measure_local(1)
    seconds = 0.0 if cluster_file else time.perf_counter() - start
    cluster.save(out / "cluster.toml")
    print(f"{_measured(seconds)}\n{cluster}", flush=True)
    results: dict[str, Any] = {"machine": _machine(), "measure_seconds": seconds, "spread": cluster.measurement_spread}
    results["models"] = []
    chosen = [entry for entry in table if not only or entry.name in only]
    turns: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in chosen}
    profiles: dict[str, Profile] = {}
    for _ in range(TURNS):
        results["models"] = []
        for entry in chosen:
            start = time.perf_counter()
            try:
                if entry.name not in profiles:
                    profiles[entry.name] = traced(entry)
                    profiles[entry.name].save(out / f"{file_name(entry)}.json")
                turns[entry.name].append(one(entry, profiles[entry.name], cluster))
                row = merged(turns[entry.name])
            except ImportError as e:
                row = {"name": entry.name, "skipped": str(e)}
            except Exception as e:
                row = {"name": entry.name, "failed": f"{type(e).__name__}: {str(e)[:500]}"}
            results["models"].append(row)
            print(json.dumps(row), f"({time.perf_counter() - start:.0f} s)", flush=True)
            (out / "results.json").write_text(json.dumps(results))
            free()
    if kernels:  # last: steps that came after a profiled one were slower on their host, for whatever reason
        for row in results["models"]:
            if "seconds" in row:
                row["kernels"] = _kernels(next(e for e in table if e.name == row["name"]))
                free()
    results["caps"] = [capped(e, cluster) for e in table if e.name in CAPPED and (not only or e.name in only)]
    (out / "results.json").write_text(json.dumps(results))
    print(json.dumps(results["caps"], indent=1))
    print(summary(results))


def file_name(entry: Entry) -> str:
    """The name of a file for an entry."""
    return entry.name.replace(" ", "-").replace(",", "").replace("/", "-")


def merged(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several turns: medians of the seconds, everything else of the first."""
    both = {
        name: statistics.median(t[name] for t in turns) for name in ("seconds", "predicted_seconds", "usual_seconds")
    }
    each = [{name: t[name] for name in ("seconds", "predicted_seconds", "pace", "spread")} for t in turns]
    return {**turns[0], **both, "turns": each}


def one(entry: Entry, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Predict one model, then run it."""
    plan = dl.Plan.parse(entry.plan)
    usual = estimate(profile, plan, cluster)
    pace = host_slowdown(cluster.device, torch.device("cuda")) or 1.0
    predicted = estimate(profile, plan, with_host_slowdown(cluster, pace))
    free()
    engine = initialize(entry.job(), plan)
    batch = _placed(entry, entry.batch)
    for _ in range(WARM):
        engine.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step(batch)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    peak, phases = torch.cuda.max_memory_allocated(), engine.clock
    return {
        "name": entry.name,
        "plan": entry.plan,
        "batch": entry.batch,
        "library": entry.library,
        "parameters": profile.parameters,
        "seconds": statistics.median(times),
        "spread": _spread(times),
        "predicted_seconds": predicted.step_seconds,
        "parts": predicted.parts,
        "peak": peak,
        "predicted_peak": predicted.memory_bytes,
        "memory_parts": predicted.memory_parts,
        "dtype": str(entry.dtype or ""),
        "phases": phases,
        "pace": pace,
        "usual_seconds": usual.step_seconds,
    }


def _kernels(entry: Entry) -> list[tuple[str, int, float]]:
    """Name, count and microseconds of the kernels of one step, longest first."""
    from torch.profiler import ProfilerActivity, profile

    engine, batch = initialize(entry.job(), dl.Plan.parse(entry.plan)), _placed(entry, entry.batch)
    for _ in range(WARM):
        engine.step(batch)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        engine.step(batch)
        torch.cuda.synchronize()
    rows = [(e.key[:120], e.count, e.self_device_time_total) for e in seen.key_averages() if e.self_device_time_total]
    return sorted(rows, key=lambda r: -r[2])[:80]


def capped(entry: Entry, cluster: Cluster) -> dict[str, Any]:
    """Under a cap: the largest batch that is predicted to leave a tenth free, and the smallest that does not fit."""
    plan = dl.Plan.parse(entry.plan)
    profile = traced(entry)

    def needs(batch: int) -> float:
        return estimate(dataclasses.replace(profile, batch_size=batch), plan, cluster).memory_bytes

    fits = max((b for b in range(2, 2000, 2) if needs(b) <= 0.9 * CAP), default=2)
    not_fits = next(b for b in range(2, 4000, 2) if needs(b) > CAP)
    result: dict[str, Any] = {"name": entry.name, "cap": CAP}
    for word, batch in (("fits", fits), ("does not fit", not_fits)):
        result[word] = {"batch": batch, "predicted": needs(batch), **_try(entry, plan, batch)}
    return result


def _try(entry: Entry, plan: dl.Plan, batch: int) -> dict[str, Any]:
    free()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP / total)
    verdict = "runs"
    engine = None
    try:
        engine = initialize(entry.job(batch), plan)
        placed = _placed(entry, batch)
        for _ in range(3):
            engine.step(placed)
    except torch.OutOfMemoryError:
        verdict = "runs out of memory"
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.set_per_process_memory_fraction(1.0)
    del engine
    free()
    return {"verdict": verdict, "peak": peak}


def _placed(entry: Entry, batch: int) -> tuple[Any, Any]:
    x, y = entry.sample(batch)
    x = x.cuda()
    return (x.to(entry.dtype) if entry.dtype and x.is_floating_point() else x), y.cuda()


def _spread(times: list[float]) -> float:
    quarters = statistics.quantiles(times, n=4)
    return (quarters[2] - quarters[0]) / 2 / statistics.median(times)


def _measured(seconds: float) -> str:
    """Describe the measurement; 0 seconds if a cluster file was given."""
    return f"measured in {seconds:.0f} s" if seconds else "priced by a measurement made before"


def _machine() -> str:
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def free() -> None:
    """Free the memory of the last model."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# -- the page


def summary(results: dict[str, Any]) -> str:
    """Format the table, the mean and the worst of both errors, and the results under the cap."""
    lines = [
        "| model | plan | batch | step | predicted | error | peak | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    times, peaks = [], []
    for row in results["models"]:
        if "seconds" not in row:
            lines.append(f"| {row['name']} | {row.get('skipped') or row.get('failed')} | | | | | | | |")
            continue
        time_error = row["predicted_seconds"] / row["seconds"] - 1
        peak_error = row["predicted_peak"] / row["peak"] - 1
        times.append(abs(time_error))
        peaks.append(abs(peak_error))
        plan = row["plan"].removeprefix("dp=1,") if not row["dtype"] else "all in bf16"
        lines.append(
            f"| {row['name']} | {plan} | {row['batch']} | {1e3 * row['seconds']:.1f} ms | "
            f"{1e3 * row['predicted_seconds']:.1f} ms | {100 * time_error:+.1f}% | {row['peak'] / 2**30:.2f} GiB | "
            f"{row['predicted_peak'] / 2**30:.2f} GiB | {100 * peak_error:+.1f}% |"
        )
    if times:
        lines += [
            "",
            f"Step time: mean error {100 * statistics.mean(times):.1f}%, worst {100 * max(times):.1f}%. "
            f"Peak memory: mean error {100 * statistics.mean(peaks):.1f}%, worst {100 * max(peaks):.1f}%.",
        ]
    for case in results.get("caps", ()):
        lines.append("")
        for word in ("fits", "does not fit"):
            tried = case[word]
            margin = "with a tenth to spare " if word == "fits" else ""
            cap, needs = case["cap"] / 2**30, tried["predicted"] / 2**30
            lines.append(
                f"{case['name']} under a cap of {cap:.0f} GiB: a batch of {tried['batch']} is predicted to need "
                f"{needs:.2f} GiB ({word} {margin}".rstrip()
                + f"); it {tried['verdict']}."
            )
    return "\n".join(lines)


def page(path: Path, engine: list[Path], mark: str) -> None:
    """Paste the table into docs/gpu.md, and the output of benchmarks/gpu.py if it is given."""
    results = json.loads(path.read_text())
    head = (
        f"{results['machine']}; {_measured(results['measure_seconds'])}, median spread of the repeats "
        f"{100 * results['spread']:.1f}%."
    )
    _paste(MARKS[mark], f"{head}\n\n{summary(results)}")
    if engine:
        paste_engine(engine)


def paste_engine(engine: list[Path]) -> None:
    """Paste the output of benchmarks/gpu.py into docs/gpu.md."""
    lines = [line for p in engine for line in p.read_text().splitlines()]
    shown = [line for line in dict.fromkeys(lines) if not line.startswith(("   predicted", "("))]
    _paste(MARKS["engine"], "\n".join(["```", *shown, "```"]))


def _paste(marks: tuple[str, str], text: str) -> None:
    before, rest = PAGE.read_text().split(marks[0])
    _, after = rest.split(marks[1])
    PAGE.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}")


def main() -> None:
    """Run, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "page", "engine"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--cluster")
    parser.add_argument("--engine", nargs="*", type=Path, default=[], help="files with the output of benchmarks/gpu.py")
    parser.add_argument("--unseen", action="store_true", help="the models of gpu_models/unseen.py instead")
    parser.add_argument("--kernels", action="store_true", help="also record the kernels of a step of each")
    given = parser.parse_args()
    if given.what == "engine":
        paste_engine([given.path, *given.engine])
    elif given.what == "page":
        page(given.path, given.engine, "unseen" if given.unseen else "predicted")
    else:
        run(given.path, given.only, given.cluster, given.kernels, UNSEEN if given.unseen else TABLE)


if __name__ == "__main__":
    main()
