"""Every kind of fault, in every rank and place of a run, under every family of plans and both backends.

    python tests/launchers/fault_matrix.py                      # all cells, about half an hour on two cores
    python tests/launchers/fault_matrix.py --plans dp --kinds kill,raise

Each cell trains a small job with one injected fault and no restarts, and checks that the true rank is named, that its
traceback or stack is shown where there can be one, that the exit code is 5, and that no process, folder or shared memory
is left behind.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing.util
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from drumline.core.errors import RankFailed
from drumline.loop.checkpoints import CheckpointOptions
from drumline.loop.restarts import FaultOptions
from drumline.loop.train import train

JOB = """
import torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): return torch.randn(6, generator=torch.Generator().manual_seed(i)), i % 4

def job():
    return dl.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        data=Data, batch_size=8, steps=4)
"""
PLANS = {"dp": "dp=2", "zero1": "dp=2,zero=1", "zero3": "dp=2,zero=3", "pp": "pp=2,micro=2", "tp": "tp=2"}
BACKENDS = ("shm", "gloo")
KINDS = {
    "raise": ("failed: InjectedError: injected into rank {rank}", "injected into rank {rank}"),
    "kill": ("was ended by signal SIGKILL", ""),
    "segv": ("was ended by signal SIGSEGV", "in inject"),
    "memory": ("can't allocate memory", "_run_out_of_memory"),
}
"""By kind, parts of the message and of the traceback or stack."""
PLACES = ("start", "forward", "backward", "collective", "save", "end")
RANKS = (0, 1)


@dataclass(frozen=True)
class Cell:
    """One fault in one run."""

    plan: str
    backend: str
    kind: str
    place: str
    rank: int

    def __str__(self) -> str:
        return f"{self.plan}-{self.backend}-{self.kind}-{self.place}-{self.rank}"


def cells(plans: list[str] | None = None, kinds: list[str] | None = None) -> list[Cell]:
    """All cells, or those of some plans and kinds."""
    return [Cell(*cell) for cell in itertools.product(plans or PLANS, BACKENDS, kinds or KINDS, PLACES, RANKS)]


def cover(count: int, seed: int = 0) -> list[Cell]:
    """Cells that cover every pair of values of two columns as far as `count` allows."""
    left, chosen = cells(), []
    random.Random(seed).shuffle(left)
    seen: set[tuple[object, ...]] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda cell: len(_pairs(cell) - seen))
        left.remove(best)
        seen |= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[object, ...]]:
    values = [(name, getattr(cell, name)) for name in ("plan", "backend", "kind", "place", "rank")]
    return set(itertools.combinations(values, 2))


def problems(cell: Cell, folder: Path) -> list[str]:
    """Train with the fault; what is wrong about how it ended."""
    job = folder / "job.py"
    job.write_text(JOB)
    multiprocessing.util.get_temp_dir()  # the fork server keeps its address for the whole process
    tempfile.tempdir = str(folder / "temporary")  # of its own: other programs use the usual one
    Path(tempfile.tempdir).mkdir()
    before = set(_leftovers())
    faults = FaultOptions(restarts=0, chaos=f"{cell.kind}:{cell.rank}@2/{cell.place}")
    try:
        train(
            job,
            f"{PLANS[cell.plan]},backend={cell.backend}",
            cluster="dgx-h100",
            output=folder / "run",
            checkpoints=CheckpointOptions(every=2),
            faults=faults,
        )
    except RankFailed as e:
        wrong = list(_wrong(cell, e))
    except BaseException as e:
        wrong = [f"{type(e).__name__}: {e}"]
    else:
        wrong = ["the run ended without an error"]
    finally:
        left_in, tempfile.tempdir = Path(tempfile.tempdir), None
    wrong += [f"left behind: {path.name}" for path in left_in.glob("drumline-*")]
    end = time.monotonic() + 5
    while (left := set(_leftovers()) - before) and time.monotonic() < end:
        time.sleep(0.05)
    return wrong + [f"left behind: {thing}" for thing in sorted(left)]


def _wrong(cell: Cell, error: RankFailed) -> Iterator[str]:
    message, trace = (part.format(rank=cell.rank) for part in KINDS[cell.kind])
    if not error.what.startswith(f"rank {cell.rank} ") or message not in error.what:
        yield f"the message is: {error.what}"
    if trace not in error.trace:
        yield f"the traceback or stack has no {trace!r}: {error.trace[-300:]!r}"
    if error.exit_code != 5:
        yield f"exit code {error.exit_code}"


def _leftovers() -> Iterator[str]:
    """Processes of ranks, and shared memory."""
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        server = "multiprocessing.forkserver" in " ".join(words) and process.ppid() == os.getpid()
        if not server and "resource_tracker" not in " ".join(words):
            yield f"process {process.pid} {process.name()}"
    yield from (str(path) for path in Path("/dev/shm").glob("drumline-*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    todo = cells(options.plans.split(","), options.kinds.split(","))
    good: Counter[tuple[str, str, str]] = Counter()
    bad: list[str] = []
    for i, cell in enumerate(todo, start=1):
        with tempfile.TemporaryDirectory() as folder:
            wrong = problems(cell, Path(folder))
        good[cell.plan, cell.backend, cell.place] += not wrong
        bad += [f"{cell}: {text}" for text in wrong]
        print(f"\r{i} of {len(todo)}, {len(bad)} wrong", end="", file=sys.stderr, flush=True)
    each = len(RANKS) * len(options.kinds.split(","))
    print(f"\n{'plan':8}{'backend':9}" + "".join(f"{place:>12}" for place in PLACES))
    for plan, backend in itertools.product(options.plans.split(","), BACKENDS):
        row = (f"{good[plan, backend, place]}/{each}" for place in PLACES)
        print(f"{plan:8}{backend:9}" + "".join(f"{text:>12}" for text in row))
    print(f"{len(todo) - len({line.split(':')[0] for line in bad})} of {len(todo)} cells as they should be")
    print(*bad, sep="\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
