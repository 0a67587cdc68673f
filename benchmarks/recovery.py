"""Recovery after a killed rank: from the kill until every rank computes again, next to plain DDP under torchrun.

    python benchmarks/recovery.py [--rounds 5] [--paste]

Contestants, in turns: `drumline train` with its own ranks, and a plain DDP script that saves and loads checkpoints with
torch.save under `torchrun --max-restarts`. Both train the same model, save every five steps, and lose rank 1 by a
SIGKILL. Printed with the bounds that `drumline train` must hold: it says within 1 s that the rank has failed, and all
ranks compute again within 5 s.
Expected before measuring: 1 s against torchrun's 2 to 4 s, because our ranks are forked from a process that has
imported torch already.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from engine_peers.ratios import ratio
from split_contest.page import paste

NOTICED, AGAIN = 1.0, 5.0
"""Seconds from the kill within which `drumline train` says that a rank failed, and computes again on all ranks."""
PAGE = Path(__file__).parent.parent / "docs" / "faults.md"
MODEL = """
import os, time
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).parent
SAVE_EVERY = 5

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        if "RANK" in os.environ:
            (HERE / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

    def forward(self, x):
        time.sleep(0.05)
        if "RANK" in os.environ and not torch.compiler.is_compiling() and type(x) is torch.Tensor:
            with (HERE / f"steps-{os.environ['RANK']}").open("a") as f:
                f.write(f"{time.monotonic()}\\n")
        return super().forward(x)

class Data(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return torch.randn(64, generator=torch.Generator().manual_seed(i)), i % 10
"""
JOB = (
    MODEL
    + """
import drumline as dl

def job():
    return dl.Job(model=Net, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
                  data=Data, batch_size=16, steps=1000)
"""
)
PLAIN = (
    MODEL
    + """
import torch.distributed as dist

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data, rank, step = Data(), dist.get_rank(), 0
saved = HERE / "checkpoint.pt"
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 1000:
    rows = [data[(16 * step + 8 * rank + i) % 1000] for i in range(8)]
    x, y = torch.stack([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    step += 1
    if step % SAVE_EVERY == 0 and rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.new")
        os.replace(f"{saved}.new", saved)
"""
)
FAILED = re.compile(r"rank 1 (failed|was)|failed \(exitcode")
"""A line in which a launcher says that a rank has failed."""
TRAIN = [sys.executable, "-m", "drumline", "train", "script.py", "--cluster", "dgx-h100", "-o", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CONTESTANTS = {
    "drumline train": (JOB, [*TRAIN, "--plan", "dp=2,backend=gloo", "--save-every", "5"]),
    "plain DDP, torchrun": (PLAIN, [*TORCHRUN, "--max-restarts", "3", "script.py"]),
}


def recovery(text: str, command: list[str]) -> tuple[float, float]:
    """Kill rank 1; returns the seconds until the launcher reports it and until both ranks compute, or infinity."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(text)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipe, merged = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=pipe, stderr=merged, text=True, start_new_session=True
        )
        lines: list[tuple[float, str]] = []
        reader = threading.Thread(target=_read, args=(process, lines))
        reader.start()
        try:
            if not _wait(lambda: all(len(_steps(folder, r)) >= 14 for r in (0, 1)), process):
                raise SystemExit(f"the run does not begin: {command}")
            killed = time.monotonic()
            os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
            # a step of the survivor that was under way does not count
            if not _wait(lambda: all(any(t > killed + 0.2 for t in _steps(folder, r)) for r in (0, 1)), process):
                return _noticed(lines, killed), math.inf
            again = max(min(t for t in _steps(folder, r) if t > killed + 0.2) for r in (0, 1)) - killed
            return _noticed(lines, killed), again
        finally:
            _end(process)
            reader.join()
            time.sleep(1.0)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and its ranks: those of torchrun have sessions of their own, and outlive it."""
    ranks = []
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # first: it would start its ranks again
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    """Record when each line was printed; runs in a thread."""
    for line in process.stdout or ():
        lines.append((time.monotonic(), line))


def _noticed(lines: list[tuple[float, str]], killed: float) -> float:
    """Find the seconds from the kill to the first line that reports a failed rank."""
    return next((t - killed for t, line in list(lines) if t > killed and FAILED.search(line)), math.inf)


def _steps(folder: Path, rank: int) -> list[float]:
    path = folder / f"steps-{rank}"
    return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _wait(done: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Wait until it is done; False after a minute, or if the run has ended."""
    end = time.monotonic() + 60
    while not done():
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paste", action="store_true")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    noticed: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name, (text, command) in CONTESTANTS.items():
            seconds_to_notice, again = recovery(text, command)
            noticed[name].append(seconds_to_notice)
            seconds[name].append(again)
    both = [pair for pair in zip(*seconds.values(), strict=True) if max(pair) < math.inf]
    rows = ["| | median | slowest |", "|---|---|---|"]
    for name, each in seconds.items():
        late = sum(t == math.inf for t in each)
        slowest = f"{late} of {len(each)} did not recover within a minute" if late else f"{max(each):.2f} s"
        rows.append(f"| {name} | {statistics.median(each):.2f} s | {slowest} |")
    for name, each in noticed.items():
        rows.append(f"| {name}: the kill noticed | {statistics.median(each):.2f} s | {max(each):.2f} s |")
    for what, bound, each in (("noticed", NOTICED, noticed), ("computing again", AGAIN, seconds)):
        slowest = max(each["drumline train"])
        rows.append(f"| bound of drumline train, {what} | {bound:g} s | {'kept' if slowest <= bound else 'broken'} |")
    if both:
        rows.append(f"| ratio, where both recovered within a minute | {ratio(*zip(*both, strict=True))} | |")
    print("\n".join(rows))
    if options.paste:
        paste("recovery", rows, f"{options.rounds} rounds in turns, printed by `python benchmarks/recovery.py`", PAGE)


if __name__ == "__main__":
    main()
