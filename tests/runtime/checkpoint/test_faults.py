"""A save that is killed anywhere, or fails on a bad disk, leaves earlier checkpoints unchanged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch

from drumline.core.errors import GaveUp, InputError
from drumline.runtime.checkpoint import Saver, load
from drumline.runtime.checkpoint.disk import Disk

HOWS = ("before", "within", "after", "power")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Hundreds of tiny trainings: torch's threads would only slow them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints: the next save will remove the first."""
    folder = tmp_path_factory.mktemp("template") / "folder"
    states: dict[int, Any] = {}
    for _ in range(2):
        run_job(folder, fakes.Faulty(), states)
    assert sorted(states) == [1, 2]
    return folder


def run_job(folder: Path, disk: fakes.Faulty, states: dict[int, Any], *, wait: bool = True) -> int:
    """Resume, train one step and save; returns the last step that was reported as saved."""
    engine = fakes.engine()
    reported = -1
    saver = None
    if any(folder.glob("step-*")):
        reported = load(engine, folder).step
        states[reported] = fakes.state(engine)
    try:
        saver = Saver(engine, folder, keep=2, disk=disk)
        fakes.train(engine, 1)
        states[engine.steps] = fakes.state(engine)
        saver.save(wait=wait)
        saver.close()
        reported = engine.steps
    except fakes.Killed:
        if saver is not None and saver._lock is not None:
            saver._lock._end.set()  # stop its thread too
    return reported


def check(folder: Path, reported: int, states: dict[int, Any]) -> None:
    """The newest checkpoint is undamaged and no older than reported, and the next job can continue."""
    engine = fakes.engine()
    if reported < 0 and not any(folder.glob("step-*")):
        with pytest.raises(InputError, match="no checkpoint"):
            load(engine, folder)
    else:
        loaded = load(engine, folder)
        assert loaded.notes == () and loaded.step >= reported
        fakes.assert_equal(fakes.state(engine), states[loaded.step])
    step = run_job(folder, fakes.Faulty(), {})
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
    assert load(fakes.engine(), folder).step == step > reported


POINTS = 25
"""Minimum number of operations of a save: with two folders and four ways to die, more than 200 points."""


@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("start", ["empty", pytest.param("full", marks=pytest.mark.slow)])
def test_kill_at_every_operation(tmp_path: Path, template: Path, start: str, how: str, wait: bool) -> None:
    at = -1
    while True:
        at += 1
        folder, disk = tmp_path / str(at), fakes.Faulty(at, how)
        if start == "full":
            shutil.copytree(template, folder)
        states: dict[int, Any] = {}
        reported = run_job(folder, disk, states, wait=wait)
        if not disk.dead:
            break  # every operation was tried
        if folder.exists():
            check(folder, reported, states)
        shutil.rmtree(folder, ignore_errors=True)
    assert at > POINTS


def test_kill_during_cleanup(tmp_path: Path, template: Path) -> None:
    """The next job is killed too, while it removes the leftovers of the first."""
    for at in range(12):
        folder = tmp_path / str(at)
        shutil.copytree(template, folder)
        states: dict[int, Any] = {}
        assert run_job(folder, fakes.Faulty(20, "before"), states) == 2
        assert list(folder.glob(".writing-*"))
        reported = run_job(folder, fakes.Faulty(at, "after"), states)
        check(folder, reported, states)


@pytest.mark.parametrize("error", [fakes.FULL, fakes.BROKEN, fakes.READ_ONLY, fakes.QUOTA], ids=os.strerror)
@pytest.mark.parametrize("wait", [True, False])
def test_failing_disk(tmp_path: Path, error: int, wait: bool) -> None:
    """From each operation of the second save on, writes fail: training continues, and the first save is intact."""
    disk = fakes.Faulty()
    engine = fakes.engine()
    with Saver(engine, tmp_path, disk=disk) as saver:
        fakes.train(engine, 1)
        saver.save()
        good, first = fakes.state(engine), disk.count
    count = 0
    while True:
        disk = fakes.Faulty(None, error)
        saver = Saver(engine, tmp_path, disk=disk)
        disk.count, disk.at = 0, count
        fakes.train(engine, 1)
        try:
            saver.save(wait=wait)
            saver.finish()
        except GaveUp as e:
            assert f"step {engine.steps} was not saved: {os.strerror(error)}" in str(e)
        else:
            break  # only pruning could still fail; the new checkpoint is complete
        disk.at = None
        saver.close()
        other = fakes.engine()
        if load(other, tmp_path).step == 1:
            fakes.assert_equal(good, fakes.state(other))
        count += 1
    saver._release()
    assert count > 8 and first > 8


def test_save_after_the_disk_has_space_again(tmp_path: Path) -> None:
    """A background error is raised by the next call; the save after that succeeds."""
    engine, disk = fakes.engine(), fakes.Faulty(None, fakes.FULL, only="write")
    saver = Saver(engine, tmp_path, disk=disk)
    disk.at = disk.count
    assert saver.save(wait=False) is None
    with pytest.raises(
        GaveUp, match=r"step 0 was not saved: No space left on device(.|\n)*earlier checkpoints are unchanged"
    ):
        saver.save(wait=False)
    disk.at = None
    saver.save(wait=False)
    saver.close()
    assert load(fakes.engine(), tmp_path).step == 0


def test_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used for checkpoints"):
        Saver(fakes.engine(), tmp_path / "file")
    with pytest.raises(InputError, match="cannot be used for checkpoints: Read-only file system"):
        Saver(fakes.engine(), tmp_path / "new", disk=fakes.Faulty(0, fakes.READ_ONLY))


class SlowDisk(Disk):
    """Writes 20 MB/s."""

    def write(self, handle: int, data: bytes | memoryview) -> None:
        time.sleep(len(data) / 20e6)
        super().write(handle, data)


@pytest.mark.alone
def test_slow_disk_does_not_block_training(tmp_path: Path) -> None:
    """A background save blocks training for at most a tenth of the time of a foreground save."""
    engine = fakes.engine(model=torch.nn.Linear(1000, 3000))
    with Saver(engine, tmp_path, disk=SlowDisk()) as saver:
        saver.save(wait=False)
        saver.save()  # waits for the first too
        saver.save()
        waited = saver.stall
        stalls = []
        for _ in range(3):
            saver.save(wait=False)
            stalls.append(saver.stall)
            saver.finish()
    assert waited > 0.5 and min(stalls) < 0.1 * waited, (waited, stalls)


class PausedDisk(Disk):
    """Starts writing when `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def make_folder(self, path: Path) -> None:
        if path.name.startswith(".writing"):
            assert self.go.wait(60)
        super().make_folder(path)


def test_background_save_writes_the_state_at_the_call(tmp_path: Path) -> None:
    engine, disk = fakes.engine(), PausedDisk()
    fakes.train(engine, 1)
    before = fakes.state(engine)
    with Saver(engine, tmp_path, disk=disk) as saver:
        saver.save(wait=False)
        fakes.train(engine, 2)
        disk.go.set()
    other = fakes.engine()
    load(other, tmp_path)
    fakes.assert_equal(before, fakes.state(other))


SCRIPT = """
    import sys
    sys.path.insert(0, sys.argv[2])
    import fakes, torch
    from drumline.runtime.checkpoint import Saver
    torch.set_num_threads(1)  # as in the test: sums depend on it
    engine = fakes.engine()
    saver = Saver(engine, sys.argv[1])
    print("ready", flush=True)
    while True:
        fakes.train(engine, 1)
        saver.save(wait=engine.steps % 2 == 0)
"""


def test_killed_process(tmp_path: Path) -> None:
    """The lock of a killed process is free, and its newest checkpoint is undamaged."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(Path(fakes.__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    while not (tmp_path / "step-00000003").exists():
        assert process.poll() is None
    with pytest.raises(InputError, match=f"process {process.pid} on "):
        Saver(fakes.engine(), tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    engine = fakes.engine()
    assert load(engine, tmp_path).step >= 3
    straight = fakes.engine()
    fakes.train(straight, engine.steps)
    fakes.assert_equal(fakes.state(straight), fakes.state(engine))
    Saver(engine, tmp_path).close()
