"""A long training with random faults: it ends by itself, with the weights of an undisturbed one.

    python benchmarks/soak.py [--minutes 30] [--ranks 4] [--every 18] [--seed 0] [--paste]

Ranks are killed, stopped, crash, exit and raise at random steps. A step spends most of its time asleep, so the result
depends little on how busy the machine is. Printed: faults by kind, whether every step was done exactly once and all
losses and weights equal those of an undisturbed run, and the goodput: the share of the time that went into steps of
the result. The limit on restarts without a new step is the usual one. Exit code 1 if a step is missing or the weights
differ; with half an hour or more, also below 60 faults or 70% goodput. Expected before measuring: 110 faults in 35
minutes and 85%; restarts take a second, a stopped rank is noticed after ten.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from split_contest.page import paste

from drumline.loop.checkpoints import CheckpointOptions
from drumline.loop.restarts import FaultOptions
from drumline.loop.train import train
from drumline.reports import Run
from drumline.runtime.checkpoint.folder import complete_checkpoints

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"
STEP = 0.25
"""Seconds of sleep in a step."""
SAVE_EVERY = 4
"""Steps. A run gives up after three restarts without a new step, so the steps that are repeated after a fault must be
few next to those between two faults: with 4, about one soak in two hundred gives up."""
WHOLE, FAULTS, GOODPUT = 30.0, 60, 0.7
"""Minutes of a whole soak, and what it must show."""
JOB = """
import time, torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __init__(self, nap): self.nap = nap
    def __len__(self): return 1000
    def __getitem__(self, i):
        time.sleep(self.nap)
        return torch.randn(32, generator=torch.Generator().manual_seed(i)), i % 10

def made(nap):
    return dl.Job(
        model=lambda: nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 10)),
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        data=lambda: Data(nap), batch_size=4 * {ranks})

def fast(): return made(0.0)
def slow(): return made({step} / 4)
"""


def trained(folder: Path, name: str, plan: str, steps: int, chaos: str = "") -> tuple[Run, float]:
    """A training, and the seconds it took."""
    start = time.monotonic()
    run = train(
        f"{folder / 'job.py'}:{'slow' if chaos else 'fast'}",
        plan,
        steps=steps,
        cluster="dgx-h100",
        output=folder / name,
        checkpoints=CheckpointOptions(every=SAVE_EVERY),
        faults=FaultOptions(chaos=chaos),
    )
    return run, time.monotonic() - start


def digests(folder: Path) -> dict[str, str]:
    """The digest of every file of the last checkpoint, which holds weights, optimizer and random state."""
    newest = complete_checkpoints(folder / "checkpoints")[0]
    lines = (newest / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines) if name.endswith(".safetensors")}


def kind_of(fault: str) -> str:
    """The kind of a fault, from its message."""
    for word in ("SIGKILL", "SIGSEGV", "exit code", "no progress"):
        if word in fault:
            return {"exit code": "exit", "no progress": "stopped"}.get(word, word)
    return "exception"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=float, default=18.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paste", action="store_true")
    options = parser.parse_args()
    steps = max(SAVE_EVERY, round(0.9 * 60 * options.minutes / STEP))
    plan = f"dp={options.ranks}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB.format(ranks=options.ranks, step=STEP))
        run, seconds = trained(folder, "disturbed", plan, steps, f"random:{options.every}#{options.seed}")
        straight, _ = trained(folder, "straight", plan, steps)
        written = [json.loads(line)["step"] for line in (folder / "disturbed" / "steps.jsonl").read_text().splitlines()]
        once = written == list(range(steps))
        equal = run.losses == straight.losses and digests(folder / "disturbed") == digests(folder / "straight")
    usual = statistics.median(s.seconds for s in run.steps) + STEP
    goodput = steps * usual / seconds
    kinds = Counter(map(kind_of, run.faults))
    rows = [
        "| | |",
        "|---|---|",
        f"| time | {seconds / 60:.1f} min, {options.ranks} ranks, {steps} steps |",
        f"| faults | {len(run.faults)}: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())} |",
        f"| every step done exactly once | {'yes' if once else 'NO'} |",
        f"| losses, weights, optimizer equal to an undisturbed run | {'yes, bit for bit' if equal else 'NO'} |",
        f"| goodput | {100 * goodput:.0f}% |",
    ]
    print("\n".join(rows))
    if options.paste:
        how = f"a fault every {options.every:g} s on average, load {os.getloadavg()[0]:.1f}"
        paste("soak", rows, f"{how}; pasted by `python benchmarks/soak.py --minutes {options.minutes:g} --paste`", PAGE)
    enough = options.minutes < WHOLE or (len(run.faults) >= FAULTS and goodput >= GOODPUT)
    sys.exit(not (once and equal and enough))


if __name__ == "__main__":
    main()
