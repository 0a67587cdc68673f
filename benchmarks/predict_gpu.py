"""Ten models and more on one GPU: each predicted from its trace before it runs, then run by the engine.

    python benchmarks/predict_gpu.py run OUT [--only NAME ...] [--cluster FILE] [--unseen]    on the GPU
    python benchmarks/predict_gpu.py page OUT/results.json [--engine FILE ...] [--unseen]     writes docs/gpu.md
    python benchmarks/predict_gpu.py engine FILE                                    only the output of benchmarks/gpu.py

`run` traces every model, measures the GPU as `drumline measure` does, unless it is given a cluster file, and takes all
models in turns. A turn consists of rounds: each probes how fast the host is now compared with the measurement, predicts
the step for that speed, and only then runs some steps. (`drumline train` predicts once, after one longer probe.)
Predictions and steps alternate, because a shared host changes its speed by a fifth within a second: reported are the
medians of all predictions and of the medians of all rounds' steps. The peak of allocated memory is that of the first
turn; the prediction without the probe is recorded, too. At the end two models are tried under a cap of memory: with the
largest batch that is predicted to leave a tenth free, and with the smallest that is predicted not to fit. Expected
before measuring:
step time within 10% on average and 20% at worst, memory within 5% on average; of the models of `--unseen`,
step time within 6% on average and 20% at worst.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gc
import json
import multiprocessing
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
from drumline.measurement.host_overhead import HostProbe
from drumline.models import Profile
from drumline.runtime.engine import initialize
from drumline.tracing import trace

TURNS, WARM = 3, 4
"""Turns of all models; uncounted steps of each."""
ROUNDS, PROBES, STEPS = 8, 16, 6
"""Rounds of a turn; steps of a round's probe, and of the model."""
TRACERS = 8
"""Processes that trace at once, before anything is timed."""
CAP = 24 * 2**30
CAPPED = ("GPT 768x12", "ResNet-50")
PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
ALL = (*TABLE, *UNSEEN)
MARKS = {
    "predicted": ("<!-- predicted -->", "<!-- end -->"),
    "unseen": ("<!-- unseen -->", "<!-- end of unseen -->"),
    "engine": ("<!-- engine -->", "<!-- end of engine -->"),
}


def traced(entry: Entry) -> Profile:
    """The profile of a model in the plan's precision, as a GPU computes."""
    return trace(entry.job(), precision=dl.Plan.parse(entry.plan).precision, device="cuda")


def _trace(entry_index: int) -> Profile | dict[str, str]:
    """Trace one model in a process of its own; returns why not, for its row."""
    try:
        return traced(ALL[entry_index])
    except ImportError as e:
        return {"skipped": str(e)}
    except Exception as e:
        return {"failed": f"{type(e).__name__}: {str(e)[:500]}"}


def traced_at_once(chosen: Sequence[Entry]) -> dict[str, Profile | dict[str, str]]:
    """Trace all models in a few processes."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(TRACERS, mp_context=context) as pool:
        profiles = pool.map(_trace, [ALL.index(entry) for entry in chosen])
        return dict(zip((entry.name for entry in chosen), profiles, strict=True))


def run(out: Path, only: list[str], cluster_file: str | None, kernels: bool, table: Sequence[Entry]) -> None:
    """Trace, measure, predict, run."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = [entry for entry in table if not only or entry.name in only]
    profiles = traced_at_once(chosen)
    for entry in chosen:
        profile = profiles[entry.name]
        if isinstance(profile, Profile):
            profile.save(out / f"{file_name(entry)}.json")
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
    turns: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in chosen}
    for _ in range(TURNS):
        results["models"] = []
        for entry in chosen:
            start, profile = time.perf_counter(), profiles[entry.name]
            row: dict[str, Any] = {"name": entry.name}
            if not isinstance(profile, Profile):
                row |= profile
            else:
                try:
                    turns[entry.name].append(one(entry, profile, cluster))
                    row = merged(turns[entry.name])
                except Exception as e:
                    row["failed"] = f"{type(e).__name__}: {str(e)[:500]}"
            results["models"].append(row)
            print(shown(row), f"({time.perf_counter() - start:.0f} s)", flush=True)
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


def shown(row: dict[str, Any]) -> str:
    """One line about one model so far."""
    if "seconds" not in row:
        return json.dumps(row)
    seconds, predicted, usual = (1e3 * row[name] for name in ("seconds", "predicted_seconds", "usual_seconds"))
    slowdown = statistics.median(r["slowdown"] for r in row["rounds"])
    return (
        f"{row['name']}: {seconds:.1f} ms, predicted {predicted:.1f} ms ({100 * (predicted / seconds - 1):+.1f}%), "
        f"without the probe {usual:.1f} ms; the host is expected to take {slowdown:.2f} times as long"
    )


def merged(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several turns: the medians of all rounds, everything else of the first."""
    rounds = [r for turn in turns for r in turn["rounds"]]
    both = {name: statistics.median(r[name] for r in rounds) for name in ("seconds", "predicted_seconds")}
    return {**turns[0], **both, "rounds": rounds}


def one(entry: Entry, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Predict one model and run it, in rounds."""
    plan = dl.Plan.parse(entry.plan)
    usual = estimate(profile, plan, cluster)
    free()
    engine = initialize(entry.job(), plan)
    batch = _placed(entry, entry.batch)
    for _ in range(WARM):
        engine.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        engine.step(batch)
    torch.cuda.synchronize()
    peak, probe = torch.cuda.max_memory_allocated(), HostProbe(torch.device("cuda"))
    rounds = []
    for _ in range(ROUNDS):
        slowdown = probe.slowdown(cluster.device, PROBES) or 1.0
        predicted = estimate(profile, plan, with_host_slowdown(cluster, slowdown))
        engine.step(batch)  # the first one after a probe
        times, phases = [], []
        for _ in range(STEPS):
            start = time.perf_counter()
            engine.step(batch)
            times.append(time.perf_counter() - start)
            phases.append(engine.clock)
        rounds.append(
            {
                "slowdown": slowdown,
                "predicted_seconds": predicted.step_seconds,
                "seconds": statistics.median(times),
                "phases": {name: statistics.median(p[name] for p in phases) for name in phases[0]},
            }
        )
    return {
        "name": entry.name,
        "plan": entry.plan,
        "batch": entry.batch,
        "library": entry.library,
        "parameters": profile.parameters,
        "parts": usual.parts,
        "peak": peak,
        "predicted_peak": usual.memory_bytes,
        "memory_parts": usual.memory_parts,
        "dtype": str(entry.dtype or ""),
        "usual_seconds": usual.step_seconds,
        "rounds": rounds,
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
