"""The local launcher: results in order, the root cause of failures, and no leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_functions as on_ranks
import torch
from world import World

import drumline as dl
from drumline.core.errors import GaveUp, InputError, PlanError, RankFailed
from drumline.launchers import run_ranks
from drumline.launchers.hang_watch import HangWatch

BAD = 1


def failure(how: str, ranks: int = 3) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        dl.spawn(on_ranks.fails, BAD, how, ranks=ranks)
    return caught.value


def test_results_come_in_order() -> None:
    results = dl.spawn(on_ranks.whereabouts, "a", 2, ranks=3)
    assert [(r, n, given) for r, n, _, given in results] == [(r, 3, ("a", 2)) for r in range(3)]


def test_tensors_are_returned() -> None:
    results = dl.spawn(on_ranks.add_up, ranks=2)
    assert all(torch.equal(x, torch.full((3,), 3.0)) for x in results)


def test_each_rank_has_its_own_arguments() -> None:
    x = torch.zeros(2)
    assert dl.spawn(on_ranks.mutate, x, ranks=2) == [[1.0, 1.0], [2.0, 2.0]]
    assert x.tolist() == [0.0, 0.0]


def test_one_rank_and_threads() -> None:
    assert run_ranks(on_ranks.emit_and_return, 0, ranks=1) == [0]
    [(rank, size, threads, given)] = dl.spawn(on_ranks.whereabouts, ranks=1)
    assert (rank, size, given) == (0, 1, ())
    assert threads >= 1


def test_events() -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    results = run_ranks(on_ranks.emit_and_return, 3, ranks=2, threads=1, on_event=lambda r, e: seen.append((r, e)))
    assert results == [0, 1]
    assert sorted((r, e["i"]) for r, e in seen) == [(r, i) for r in range(2) for i in range(3)]


def test_records_sent_before_a_failure_are_delivered(tmp_path: Path) -> None:
    """The launcher waits for its screen while a rank fails; nothing that was sent is lost."""
    seen = []

    def slow(rank: int, event: dict[str, Any]) -> None:
        seen.append(event["i"])
        while len(seen) == 3 and not (tmp_path / "failed").exists():
            time.sleep(0.05)
        if len(seen) == 3:
            time.sleep(0.5)  # the error has arrived, too

    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: after the last record"):
        run_ranks(on_ranks.emits_and_fails, str(tmp_path), 200, ranks=2, threads=1, on_event=slow)
    assert seen == list(range(200))


def test_records_sent_before_a_hang_are_delivered() -> None:
    seen = []

    def slow(rank: int, event: dict[str, Any]) -> None:
        seen.append((rank, event["i"]))
        time.sleep(0.1)

    with pytest.raises(RankFailed, match="no progress"):
        run_ranks(on_ranks.emits_and_hangs, 60, ranks=2, threads=1, on_event=slow, watch=HangWatch(0.5))
    assert sorted(seen) == [(rank, i) for rank in range(2) for i in range(60)]


def test_an_error_names_the_rank() -> None:
    error = failure("value")
    assert error.what == "rank 1 failed: ValueError: the first line"
    assert error.rank == BAD and "in fails" in error.trace
    assert str(error).endswith("ValueError: the first line\nthe second")


def test_drumline_errors_are_raised_unchanged() -> None:
    with pytest.raises(PlanError) as caught:
        dl.spawn(on_ranks.fails, BAD, "ours", ranks=2)
    assert str(caught.value) == "a plan\n  where: here\n  rule:  r\n  try:   f"


def test_a_killed_rank_is_reported_with_its_signal() -> None:
    error = failure("kill")
    assert error.what == "rank 1 was ended by signal SIGKILL"
    assert failure("segv", 2).what == "rank 1 was ended by signal SIGSEGV"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "rank 1 failed: SystemExit: 3"),
        ("os._exit", "rank 1 ended with exit code 7 before it was done"),
        ("unpicklable", "rank 1 failed: "),
    ],
)
def test_other_failures(how: str, words: str) -> None:
    assert failure(how, 2).what.startswith(words)


def test_if_all_fail_the_first_is_reported() -> None:
    with pytest.raises(GaveUp, match="rank [01] failed: ValueError: from [01]"):
        dl.spawn(on_ranks.all_fail, ranks=2)


@pytest.mark.parametrize("ranks", [0, -1, 513])
def test_number_of_ranks(ranks: int) -> None:
    with pytest.raises(InputError, match=f"{ranks} ranks\n  rule:  from 1 to 512 ranks on one machine"):
        dl.spawn(on_ranks.add_up, ranks=ranks)


def test_functions_that_cannot_be_sent() -> None:
    """The variable is named; a lambda without one is sent by value."""
    lock = threading.Lock()
    with pytest.raises(InputError, match="the variable 'lock' cannot be sent to ranks: .*\n  rule:  functions of"):
        dl.spawn(lambda: lock, ranks=2)
    with pytest.raises(InputError, match="the function or its arguments cannot be sent to ranks"):
        dl.spawn(on_ranks.whereabouts, lock, ranks=2)


def test_rank_zero_first(world: Any, tmp_path: Path) -> None:
    made: World = world(3)
    first, *others = made.run(on_ranks.in_order, str(tmp_path))
    assert first == []
    assert all("0" in seen for seen in others)
    assert made.run(on_ranks.zero_fails_first) == ["raised", "done", "done"]


SCRIPT = """
import sys, json
from pathlib import Path
sys.path[:0] = {paths!r}
import torch, small_jobs
import drumline as dl

def train(threads=1):
    torch.set_num_threads(threads)
    engine = dl.initialize(small_jobs.make("cnn", steps=5), dtype=torch.float64)
    losses = [engine.step(batch) for batch in engine.data()]
    return engine.rank, engine.ranks, losses, engine.evaluate()["loss"]

if __name__ == "__main__":
    if sys.argv[2:] == ["spawn"]:
        results = dl.spawn(train, ranks=2)
    else:
        results = [train()]
    for result in results:
        Path(sys.argv[1], f"{{result[0]}}.json").write_text(json.dumps(result))
"""


@pytest.mark.slow
def test_one_script_three_ways(tmp_path: Path) -> None:
    """The same script has the same losses alone, under torchrun and in `dl.spawn`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=[str(Path(__file__).parents[1])]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone = _results([sys.executable, str(script)], tmp_path / "alone")
    assert [(rank, ranks) for rank, ranks, _, _ in alone] == [(0, 1)]
    for command, more in (([*torchrun, str(script)], ""), ([sys.executable, str(script)], "spawn")):
        results = _results(command, tmp_path / f"two{more}", *filter(None, [more]))
        assert sorted((rank, ranks) for rank, ranks, _, _ in results) == [(0, 2), (1, 2)]
        for _, _, losses, evaluated in results:
            assert losses == pytest.approx(alone[0][2], rel=1e-10)
            assert evaluated == pytest.approx(alone[0][3], rel=1e-10)


def _results(command: list[str], folder: Path, *more: str) -> list[Any]:
    """The output of each rank, by file: lines of two ranks on one terminal would mix."""
    folder.mkdir()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder), *more], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


SLEEPS = """import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))
time.sleep(60)
"""
SPAWNS = """import os, pathlib, sys, time
import drumline as dl

def wait(folder):
    pathlib.Path(folder, os.environ['RANK']).write_text(str(os.getpid()))
    time.sleep(60)

if __name__ == '__main__':
    dl.spawn(wait, sys.argv[1], ranks=2)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize(
    "text, command", [(SLEEPS, ["-m", "drumline", "run", "-n", "2"]), (SPAWNS, [])], ids=["run", "spawn"]
)
def test_killing_the_launcher_ends_its_ranks(tmp_path: Path, text: str, command: list[str], how: str) -> None:
    """Also if the ranks do not communicate with it."""
    script = tmp_path / "sleep.py"
    script.write_text(text)
    launcher = subprocess.Popen([sys.executable, *command, str(script), str(tmp_path)])
    notes = [tmp_path / "0", tmp_path / "1"]
    end = time.monotonic() + 60
    while not all(note.exists() and note.read_text() for note in notes) and time.monotonic() < end:
        time.sleep(0.05)
    ranks = [int(note.read_text()) for note in notes]
    launcher.send_signal(getattr(signal, how))
    launcher.wait(30)
    end = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in ranks)
