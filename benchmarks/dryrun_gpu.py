"""Memory on one GPU: the dry run's prediction for a plan against the engine's measured peak, for six kinds of jobs.

    python benchmarks/dryrun_gpu.py [--device cuda] [--only gpt,cnn] [--out FILE] [--paste]

All dry runs come first, in the same process; on the device they allocate only what a single operator needs.
Then the engine runs the same plans, and the peak of allocated memory is read in their third step. Expected: parameters,
buffers and optimizer state agree to the byte, the peak within 5%. The workspace of libraries (`drumline
measure` measures it: a few tens of MiB) is not a tensor: it is measured first and shown separately. With `--device cpu`
the jobs are small, the peak counts live tensors, and what a CPU lacks (offload) or computes slowly (fp16) is left out.
`--paste` writes the table into docs/log/gpu.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cpu_jobs
from cpu_jobs import Samples
from gpt_task import GPT, Size, Tokens, loss_of
from split_contest.page import paste
from torch import nn

import drumline as dl
from drumline.measurement.gpu_kernels import measure_workspace
from drumline.runtime.dry_run import DryRunRank, dry_run
from drumline.runtime.dry_run.live_memory import LiveMemory, storage_bytes
from drumline.runtime.engine import Engine, initialize
from drumline.tracing.op_costs import tensors

PAGE = Path(__file__).parents[1] / "docs" / "log" / "gpu.md"
BOUND = 0.05
ALL = ("dp=1", "dp=1,precision=bf16", "dp=1,micro=2", "dp=1,zero=3")
PLANS = {
    "gpt": (*ALL, "dp=1,precision=bf16,recompute=full", "dp=1,recompute=selective", "dp=1,offload=optimizer"),
    "cnn": (*ALL, "dp=1,recompute=full"),
    "mlp": (*ALL, "dp=1,zero=3,chunk=4"),
    "unet": (*ALL, "dp=1,precision=fp16"),
    "lstm": ALL,
    "moe": ALL,
}


def _larger(job: dl.Job, batch: int, shape: tuple[int, ...], classes: int, of: tuple[int, ...] = ()) -> dl.Job:
    """The same model on a batch that fills a GPU; its samples are stored once."""
    one = Samples(1, shape, classes, of)[0]
    return replace(job, batch_size=batch, data=lambda: [one] * batch)


def _gpt() -> dl.Job:
    size = Size(context=512, width=768, heads=12, blocks=12)
    return replace(cpu_jobs.gpt(), model=partial(GPT, size), loss=loss_of, batch_size=16, data=partial(Tokens, 16, 512))


def _wide() -> nn.Module:
    first, last = nn.Linear(4096, 65536), nn.Linear(65536, 1024)
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), first, nn.ReLU(), last)


LARGE: dict[str, Callable[[], dl.Job]] = {
    "gpt": _gpt,
    "cnn": lambda: _larger(cpu_jobs.cnn(), 1024, (3, 32, 32), 10),
    "mlp": lambda: _larger(replace(cpu_jobs.mlp(), model=_wide), 512, (1024,), 1024),
    "unet": lambda: _larger(cpu_jobs.unet(), 64, (1, 256, 256), 4, (256, 256)),
    "lstm": lambda: _larger(cpu_jobs.lstm(), 2048, (128, 64), 10),
    "moe": lambda: _larger(cpu_jobs.moe(), 1024, (64, 256), 10),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Measured and predicted memory of a job under a plan."""

    job: str
    plan: str
    peak: int
    predicted: int
    workspace: int
    states: tuple[int, int, int]
    """Bytes of parameters, buffers, optimizer state."""
    predicted_states: tuple[int, int, int]

    @property
    def error(self) -> float:
        """Relative error of the predicted peak; the workspace of libraries is not counted."""
        return self.predicted / (self.peak - self.workspace) - 1

    def __str__(self) -> str:
        exact = (
            "states to the byte"
            if self.states == self.predicted_states
            else (f"STATES {self.states} and not {self.predicted_states}")
        )
        off = "" if abs(self.error) <= BOUND else "  MISSED"
        peak, libraries, predicted = (x / 2**20 for x in (self.peak, self.workspace, self.predicted))
        return (
            f"{self.job:5} {self.plan:36} peak {peak:9.1f} MiB, of it libraries {libraries:5.1f}; "
            f"predicted {predicted:9.1f} ({100 * self.error:+.1f}%){off}; {exact}"
        )


def table(rows: list[Row]) -> list[str]:
    """Lines of the page: a row for every plan, and the errors of all."""
    lines = ["| job | plan | peak | of it libraries | dry run | error |", "|---|---|---:|---:|---:|---:|"]
    for r in rows:
        sizes = " | ".join(f"{x / 2**20:.0f} MiB" for x in (r.peak, r.workspace, r.predicted))
        lines.append(f"| {r.job} | `{r.plan}` | {sizes} | {100 * r.error:+.1f}% |")
    same, errors = sum(r.states == r.predicted_states for r in rows), [abs(100 * r.error) for r in rows]
    mean = sum(errors) / len(errors)
    errors_of_all = f"the error of the peak is {mean:.1f}% on average, {max(errors):.1f}% at worst"
    return [*lines, "", f"States agree to the byte in {same} of {len(rows)} plans; {errors_of_all}."]


def job_of(name: str, device: str) -> dl.Job:
    """Build the job: large on a GPU, small on a CPU."""
    made: dl.Job = LARGE[name]() if device == "cuda" else getattr(cpu_jobs, name)()
    return made


def run(name: str, plan: str, device: str, predicted: DryRunRank, workspace: int) -> Row:
    """Measure the engine's peak memory and pair it with the dry run's prediction."""
    engine, peak = (_on_gpu if device == "cuda" else _on_cpu)(job_of(name, device), plan)
    state = [t for values in engine.optimizer.state.values() for t in tensors(values)]
    states = tuple(storage_bytes(x, device) for x in (engine.model.parameters(), engine.model.buffers(), state))
    predicted_states = predicted.parameters, predicted.buffers, predicted.optimizer
    return Row(name, plan, peak, predicted.peak, workspace, states, predicted_states)  # type: ignore[arg-type]  # three


def _on_gpu(job: dl.Job, plan: str) -> tuple[Engine, int]:
    engine = initialize(job, plan)
    (batch,) = engine.data(1)
    for _ in range(2):
        engine.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine.step(batch)
    torch.cuda.synchronize()
    return engine, torch.cuda.max_memory_allocated()


def _on_cpu(job: dl.Job, plan: str) -> tuple[Engine, int]:
    alive = LiveMemory("cpu")
    data = job.data()
    with alive:
        engine = initialize(replace(job, data=lambda: data), plan)
    (batch,) = engine.data(1)
    alive.include(tensors([(m.input, m.target) for m in batch.micros]))
    with alive:
        for _ in range(2):
            engine.step(batch)
        alive.start()
        engine.step(batch)
    return engine, alive.peak


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> int:
    """Run all jobs under all their plans; exit code 1 if a prediction misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default=",".join(PLANS), help="jobs, with commas between them")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    parser.add_argument("--paste", action="store_true", help="write the table into docs/log/gpu.md")
    given = parser.parse_args()
    rows: list[Row] = []
    failed: list[str] = []
    predicted = {}
    cases = [(name, plan) for name in given.only.split(",") for plan in PLANS[name]]
    for name, plan in cases:
        if given.device == "cpu" and ("offload" in plan or "fp16" in plan):
            continue
        with _noted(failed, f"dry run of {name} {plan}"):
            (predicted[name, plan],) = dry_run(job_of(name, given.device), plan, device=given.device).ranks
    workspace = int(measure_workspace(torch.device("cuda"))) if given.device == "cuda" else 0
    for (name, plan), rank in predicted.items():
        _free()
        with _noted(failed, f"{name} {plan}"):
            rows.append(run(name, plan, given.device, rank, workspace))
            print(rows[-1], flush=True)
    errors = [abs(r.error) for r in rows]
    wrong = [r for r in rows if r.states != r.predicted_states or abs(r.error) > BOUND]
    mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
    print(f"{len(rows)} plans, mean error {mean:.1f}%, worst {worst:.1f}%; {len(wrong)} missed, {len(failed)} failed")
    machine = torch.cuda.get_device_name(0) if given.device == "cuda" else "cpu"
    if given.paste:
        how = f"{machine}, torch {torch.__version__}; printed by `python benchmarks/dryrun_gpu.py --paste`"
        paste("dry run", table(rows), how, PAGE)
    if given.out:
        results = {"machine": machine, "torch": torch.__version__, "rows": [asdict(r) for r in rows], "failed": failed}
        given.out.write_text(json.dumps(results, indent=1))
    return 1 if wrong or failed else 0


@contextmanager
def _noted(failed: list[str], what: str) -> Iterator[None]:
    """Print and record a failure, and let the other cases go on."""
    try:
        yield
    except Exception as e:
        failed.append(f"{what}: {type(e).__name__}: {str(e)[:300]}")
        print("FAILED", failed[-1], flush=True)


if __name__ == "__main__":
    sys.exit(main())
