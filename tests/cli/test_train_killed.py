"""A pipeline rank is killed during a step: the run ends, the rank is named, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

JOB = """
import os, sys
from pathlib import Path
sys.path += {paths!r}
import sleeping_jobs


def job():
    rank = os.environ.get("RANK")
    if rank is not None:
        Path(f"rank-{{rank}}.pid").write_text(str(os.getpid()))
    return sleeping_jobs.job((0.02, 0.02, 0.02), samples=6)
"""
SCRIPT = """
import j
import drumline as dl

engine = dl.initialize(j.job(), "pp=3,micro=6,backend={backend}")
for batch in engine.data(1000):
    engine.step(batch)
    open(f"stepped-{{engine.rank}}", "w").close()
"""
PATIENCE = 30.0
"""Seconds until everything must have ended; a rank that hangs would wait for torch's half an hour."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paths = [str(Path(__file__).parents[1] / "runtime" / "pipeline")]
    (tmp_path / "j.py").write_text(JOB.format(paths=paths))
    return tmp_path


@contextmanager
def started(folder: Path, *words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(*paths: Path, empty: Sequence[Path] = ()) -> None:
    end = time.monotonic() + 90
    while not all(p.exists() and p.read_text() for p in paths) or not all(p.exists() for p in empty):
        assert time.monotonic() < end, f"{paths} did not come"
        time.sleep(0.05)


@pytest.mark.slow
def test_through_the_command_line(folder: Path) -> None:
    words = (
        "-m",
        "drumline",
        "train",
        "j.py",
        "--plan",
        "pp=3,micro=6",
        "--cluster",
        "dgx-h100",
        "-o",
        "run",
        "--steps",
        "500",
        "--restarts",
        "0",
    )
    with started(folder, *words) as process:
        wait_for(folder / "rank-1.pid", folder / "run" / "steps.jsonl")
        os.kill(int((folder / "rank-1.pid").read_text()), signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 5, errors
    assert "rank 1 was ended by signal SIGKILL" in errors and "Traceback" not in errors
    for path in folder.glob("rank-*.pid"):
        assert not Path(f"/proc/{path.read_text()}").exists(), f"{path.name} still runs"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ranks_without_a_launcher(folder: Path, backend: str) -> None:
    """Started one by one: each of the other ranks ends by itself, and names the rank it waited for."""
    (folder / "script.py").write_text(SCRIPT.format(backend=backend))
    env = {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "DRUMLINE_STORE": str(folder / "store"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started(folder, "script.py", RANK=str(r), LOCAL_RANK=str(r), **env)) for r in range(3)
        ]
        wait_for(*(folder / f"rank-{r}.pid" for r in range(3)), empty=[folder / f"stepped-{r}" for r in range(3)])
        os.kill(ranks[1].pid, signal.SIGKILL)
        errors = {r: ranks[r].communicate(timeout=PATIENCE)[1] for r in (0, 2)}
    for r, text in errors.items():
        assert ranks[r].returncode not in (0, -signal.SIGKILL), text
        assert "rank 1" in text, text
