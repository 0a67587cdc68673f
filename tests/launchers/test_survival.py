"""Trainings that survive their faults, end cleanly on signals, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fault_matrix
import psutil
import pytest
from fault_matrix import Cell, cover, problems

from drumline.core.errors import GaveUp, RankFailed, StoppedByGuard
from drumline.loop.checkpoints import CheckpointOptions
from drumline.loop.report import load_run, report
from drumline.loop.restarts import FaultOptions
from drumline.loop.train import train
from drumline.runtime.checkpoint.folder import complete_checkpoints

JOB = """
import dataclasses, itertools, os, subprocess, time, torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __init__(self, nap=0.0): self.nap = nap
    def __len__(self): return 40
    def __getitem__(self, i):
        time.sleep(self.nap)
        return torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64), i % 3

def made(nap, steps, dropout=0.2):
    return dl.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 3)).double(),
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        data=lambda: Data(nap), batch_size=8, steps=steps)

def job(): return made(0.0, 10)
def slow(): return made(0.02, 10000)
def jumping(): return dataclasses.replace(made(0.02, 10), loss=loss_with_a_jumping_clock)
def loss_with_a_jumping_clock(output, target):
    now, offset = time.time, next(OFFSETS)
    time.time = lambda: now() + offset
    return nn.functional.cross_entropy(output, target)
OFFSETS = itertools.cycle((3600.0, -7200.0, 3600.0))
def deadlocked(): return dataclasses.replace(made(0.02, 10), workers=1, data=lambda: Stuck(0.02))
class Stuck(Data):
    def __getitem__(self, i):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken > 24 and os.environ.get("RANK") == "1": time.sleep(3600)  # after six steps
        return super().__getitem__(i)
def bad(): return dataclasses.replace(made(0.0, 10), loss=loss_that_ends)
def loss_that_ends(output, target):
    CALLS.append(0)
    return nn.functional.cross_entropy(output, target) * (float("nan") if len(CALLS) > 6 else 1.0)
CALLS = []
def raising(): return dataclasses.replace(made(0.0, 10), loss=loss_that_raises)
def loss_that_raises(output, target):
    CALLS.append(0)
    if "RANK" in os.environ and len(CALLS) > 6: raise ValueError("a bug of the job")
    return nn.functional.cross_entropy(output, target)
def forty(): return made(0.02, 40, dropout=0.0)  # masks differ between replicas
def with_child():
    if "RANK" in os.environ:
        child = subprocess.Popen(["sleep", "600"])
        open(f"child-{os.environ['RANK']}", "w").write(str(child.pid))
    return made(0.02, 10000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "j.py").write_text(JOB)
    return tmp_path


def losses(
    folder: Path, name: str, plan: str = "dp=2", chaos: str = "", every: int = 2, **options: object
) -> list[float]:
    """The losses of a run of ten steps with injected faults."""
    run = train(
        folder / "j.py",
        plan,
        cluster="dgx-h100",
        output=folder / name,
        checkpoints=CheckpointOptions(every=every),
        faults=FaultOptions(chaos=chaos, **options),  # type: ignore[arg-type]
    )
    lines = (folder / name / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(10))  # every step once, in order
    assert load_run(folder / name).faults == run.faults
    if chaos:
        assert run.faults
    return run.losses


@pytest.mark.parametrize(("job", "error"), [("bad", StoppedByGuard), ("raising", RankFailed)])
def test_the_steps_before_a_failure_are_saved_without_an_interval(folder: Path, job: str, error: type[GaveUp]) -> None:
    """A guard saves at once; an exception that comes again finds the steps before it saved."""
    with pytest.raises(error) as caught:
        train(f"{folder / 'j.py'}:{job}", "dp=2", cluster="dgx-h100", output=folder / "run")
    assert caught.value.exit_code == 5
    steps = [json.loads(line)["step"] for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps))) and len(steps) > 1
    newest = complete_checkpoints(folder / "run" / "checkpoints")[0]
    assert newest.name == f"step-{len(steps):08d}"


@pytest.mark.parametrize("cell", cover(3), ids=str)
def test_the_rank_that_failed_is_named(cell: Cell, tmp_path: Path) -> None:
    assert problems(cell, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("cell", cover(40)[3:], ids=str)
def test_the_rank_that_failed_is_named_in_more_cells(cell: Cell, tmp_path: Path) -> None:
    assert problems(cell, tmp_path) == []


def test_the_check_for_the_named_rank_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fault_matrix.KINDS, "raise", ("another message", "another line"))
    wrong = problems(Cell("dp", "gloo", "raise", "forward", 1), tmp_path)
    assert [text.split(":")[0] for text in wrong] == ["the message is", "the traceback or stack has no 'another line'"]


def test_a_disturbed_run_equals_an_undisturbed_one(folder: Path) -> None:
    """Killed, crashed and failing ranks at four moments, the last during the restart after the one before."""
    straight = losses(folder, "straight")
    chaos = "kill:1@3,segv:0@5/optimizerx2,exit:1@7x3,kill:0/startx1"
    assert losses(folder, "disturbed", chaos=chaos) == straight


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", "pp=2,micro=2", "tp=2"])
@pytest.mark.parametrize("place", ["forward", "backward", "save", "end"])
def test_equal_under_every_family_of_plans(folder: Path, plan: str, backend: str, place: str) -> None:
    plan = f"{plan},backend={backend}"
    assert losses(folder, "b", plan, f"kill:1@4/{place}") == losses(folder, "a", plan)


@pytest.mark.slow
def test_without_checkpoints_it_starts_again(folder: Path) -> None:
    assert losses(folder, "b", chaos="kill:1@4", every=0) == losses(folder, "a", every=0)


@pytest.mark.slow
def test_two_ranks_at_once_during_a_save(folder: Path) -> None:
    chaos = "kill:1@4/save,kill:2@4/save"
    assert losses(folder, "b", "dp=3", chaos) == losses(folder, "a", "dp=3")


def test_fewer_ranks_then_all_again(folder: Path) -> None:
    """Rank 1 fails twice without a new step: the run continues without it, and takes it back."""
    job, saves = f"{folder / 'j.py'}:forty", CheckpointOptions(every=2)
    faults = FaultOptions(chaos="kill:1@4x2", min_ranks=1, regrow=2.0)
    run = train(job, "dp=2", cluster="dgx-h100", output=folder / "run", checkpoints=saves, faults=faults)
    assert run.faults[1].endswith("continued with dp=1")
    straight = train(job, "dp=2", cluster="dgx-h100", output=folder / "straight")
    assert [s.step for s in run.steps] == list(range(40))
    assert run.losses == pytest.approx(straight.losses, rel=1e-12)  # one rank adds in another order than two


def test_a_stopped_rank_is_named(folder: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        losses(folder, "run", chaos="stop:1@6", hang_timeout="2s", restarts=0)
    error = caught.value
    assert error.rank == 1 and error.kind == "hang"
    assert "rank 1 is stopped (state T)" in error.what
    assert "stack of rank 0" in error.trace and "rank 0: training, step 6" in error.what


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_hangs_are_survived(folder: Path, kind: str) -> None:
    assert losses(folder, "b", chaos=f"{kind}:1@6", hang_timeout="2s") == losses(folder, "a")


@pytest.mark.slow
def test_a_rank_that_keeps_the_interpreter_lock_is_named(folder: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        losses(folder, "run", chaos="lock:1@6", hang_timeout="2s", restarts=0)
    assert caught.value.rank == 1 and caught.value.kind == "hang"
    assert "stack of rank 1" in caught.value.trace and "in inject" in caught.value.trace


@pytest.mark.slow
def test_a_deadlocked_data_worker(folder: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        train(
            f"{folder / 'j.py'}:deadlocked",
            "dp=2",
            cluster="dgx-h100",
            output=folder / "run",
            faults=FaultOptions(restarts=0, hang_timeout="3s"),
        )
    assert caught.value.rank == 1 and caught.value.kind == "hang", caught.value
    assert "rank 1: " in caught.value.what and "data" in caught.value.what


@pytest.mark.slow
def test_a_fault_during_recovery(folder: Path) -> None:
    """Rank 0 dies at the start of the first two attempts."""
    assert losses(folder, "b", chaos="kill:0/startx2") == losses(folder, "a")


@pytest.mark.slow
def test_a_clock_that_jumps_by_an_hour(folder: Path) -> None:
    run = train(f"{folder / 'j.py'}:jumping", "dp=2", cluster="dgx-h100", output=folder / "run")
    assert len(run.steps) == 10 and not run.faults


@pytest.mark.slow
def test_a_minute_of_random_faults() -> None:
    """The soak of benchmarks/soak.py, which takes half an hour, in short."""
    script = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    words = [sys.executable, str(script), "--minutes", "1", "--every", "10", "--ranks", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| every step done exactly once | yes |" in done.stdout and "bit for bit" in done.stdout


def test_a_crash_loop_ends_with_a_report(folder: Path) -> None:
    with pytest.raises(RankFailed, match="gave up after 3 restarts, 3 of them without a new step") as caught:
        losses(folder, "run", chaos="kill:1@4!")
    assert caught.value.exit_code == 5
    run = load_run(folder / "run")
    assert "gave up" in run.failure and len(run.faults) == 3 and len(run.steps) == 4
    page = report(folder / "run").read_text()
    assert "gave up after 3 restarts" in page and "after step 4" in page
    # a failed run does not keep its folder from being used again
    assert len(losses(folder, "run")) == 10


HUNGRY = """
import os, torch
from torch import nn
import drumline as dl
from j import Data

def loss(output, target):
    rank = int(os.environ.get("RANK", -1))
    if rank == 1:
        with open("GROUP/cgroup.procs", "w") as f: f.write(str(os.getpid()))
        hoard = [torch.ones(4_000_000) for _ in range(100)]
    return nn.functional.cross_entropy(output, target)

def job():
    return dl.Job(model=lambda: nn.Linear(6, 3).double(), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                  data=Data, batch_size=8, steps=4)
"""


@pytest.mark.slow
def test_the_kernel_ends_a_rank_for_lack_of_memory(folder: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"drumline-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError as e:
        pytest.skip(f"control groups of version 1 cannot be made: {e}")
    try:
        (folder / "hungry.py").write_text(HUNGRY.replace("GROUP", str(group)))
        with pytest.raises(RankFailed) as caught:
            train(folder / "hungry.py", "dp=2", cluster="dgx-h100", output=folder / "run")
    finally:
        end = time.monotonic() + 5
        while (group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        group.rmdir()
    error = caught.value
    assert error.what == "rank 1 was ended by signal SIGKILL: the kernel ran out of memory"
    assert error.rule.startswith("predicted 64.0 MiB a rank of 78.1 GiB") and "zero=3" in error.fix


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def test_a_resumed_run_saves_its_work(folder: Path) -> None:
    """Also without an interval between saves."""
    job, output = folder / "j.py", folder / "run"
    for options, steps in ((CheckpointOptions(every=2), 4), (CheckpointOptions(resume="auto"), 7)):
        train(job, "dp=2", steps=steps, cluster="dgx-h100", output=output, checkpoints=options)
    assert saved_steps(output)[-1] == 7


def test_the_last_good_step_is_saved_before_a_stop(folder: Path) -> None:
    """A loss that is not finite ends the run, but its weights are good."""
    options = CheckpointOptions(every=4)
    with pytest.raises(StoppedByGuard):
        train(f"{folder / 'j.py'}:bad", "dp=2", cluster="dgx-h100", output=folder / "run", checkpoints=options)
    run = load_run(folder / "run")
    assert saved_steps(folder / "run") == [4, len(run.steps)] and len(run.steps) > 4
    assert run.failure.startswith("the loss is nan at step")


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`drumline train` in a process group of its own, once it has done two steps."""
    line = [sys.executable, "-m", "drumline", "train", *words, "--plan", "dp=2", "--cluster", "dgx-h100", "-o", "run"]
    process = subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        end = time.monotonic() + 90
        steps = folder / "run" / "steps.jsonl"
        while not steps.exists() or len(steps.read_text().splitlines()) < 2:
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.05)
        yield process
    finally:
        for member in (
            (*psutil.Process(process.pid).children(recursive=True), process) if process.poll() is None else ()
        ):
            member.kill()
        process.communicate()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("whom", ["everybody", pytest.param("one rank", marks=pytest.mark.slow)])
def test_preemption(folder: Path, number: signal.Signals, whom: str) -> None:
    """Schedulers signal all processes of a job: launcher, fork server, resource tracker and ranks."""
    with started(folder, "j.py:slow") as process:
        members = family(process)
        ranks = [p for p in members if p.ppid() not in (process.pid, os.getpid())]
        assert len(ranks) == 2
        for member in members if whom == "everybody" else ranks[1:]:
            member.send_signal(number)
        out, errors = process.communicate(timeout=60)
        assert gone(members)
    assert process.returncode == 0, out + errors
    assert "preempted: continue with --resume auto" in errors
    [checkpoint] = (folder / "run" / "checkpoints").glob("step-*")
    lines = (folder / "run" / "steps.jsonl").read_text().splitlines()
    assert int(checkpoint.name[5:]) == len(lines) == len(load_run(folder / "run").steps)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(folder: Path) -> None:
    with started(folder, "j.py:slow") as process:
        members = family(process)
        process.send_signal(signal.SIGSTOP)  # so that both arrive before the step ends
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT):
            process.send_signal(number)
        process.communicate(timeout=20)
        assert gone(members)
    assert process.returncode == 130


@pytest.mark.slow
def test_two_interrupts(folder: Path) -> None:
    with started(folder, "j.py:slow") as process:
        members = family(process)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        out, errors = process.communicate(timeout=20)
        assert gone(members)
    assert process.returncode in (130, -signal.SIGINT), out + errors
    assert "Traceback" not in errors


def ours(temporary: Path) -> list[str]:
    """What is left in a folder, but for the cache that torch makes when it is imported."""
    return [p.name for p in temporary.iterdir() if not p.name.startswith("torchinductor_")]


def test_a_long_name_of_the_folder_for_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket below it would have too long a path; job schedulers choose such names."""
    temporary = folder / ("x" * 100)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with started(folder, "j.py:job") as process:
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "step 10/10" in out, out + errors
    assert ours(temporary) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_behind(folder: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ranks have started end with them, and the launcher's temporary folders are removed."""
    temporary = Path(tempfile.mkdtemp())
    monkeypatch.setenv("TMPDIR", str(temporary))
    with started(folder, "j.py:with_child") as process:
        members = family(process)
        children = [psutil.Process(int((folder / f"child-{r}").read_text())) for r in range(2)]
        process.send_signal(number)
        process.communicate(timeout=20)
        assert gone([*members, *children])
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    end = time.monotonic() + 5
    while (left := ours(temporary)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []
    shutil.rmtree(temporary)
