"""Starts `drumline` commands under real launchers, and reads what they left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
JOB = str(HERE / "joined_job.py")
_LEAVE_OUT = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM_", "OMPI_", "PMI_", "GLOO_")


def environment(**more: str) -> dict[str, str]:
    """The variables of a fresh shell."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(_LEAVE_OUT)}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    return {**base, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def torchrun(n: int, *options: str) -> list[str]:
    """The command line of torchrun up to the module."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), *options, "-m", "drumline"]


def run(command: list[str], folder: Path, *, timeout: float = 150, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def train(plan: str, output: str, *options: str) -> list[str]:
    """The words of a training that needs no measurement."""
    return ["train", JOB, "--plan", plan, "-o", output, "--cluster", "dgx-h100", "--json", *options]


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON document that a command printed: one, and nothing else."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint of a run folder."""
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda p: p.name)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(newest.glob("*.safetensors")):
        tensors |= {f"{file.name}:{k}": v for k, v in load_file(file).items()}
    assert tensors, list(newest.iterdir())
    return tensors


def same_weights(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same bits."""
    first, second = final_weights(a), final_weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def have(*programs: str) -> str:
    """Why a test cannot run: the program that is not installed; empty if all are there."""
    missing = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""
