"""Two jobs on one run folder: the second is refused with process, host and age of the first."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumline.core.errors import InputError
from drumline.loop.run_lock import lock_run, locks, releases_run_lock
from drumline.loop.training import prepare_folder
from drumline.runtime.checkpoint import lock
from drumline.runtime.checkpoint.disk import Disk
from drumline.runtime.checkpoint.lock import LOCK, process_start

HOLDER = """
import sys, time
from pathlib import Path
from drumline.loop.training import prepare_folder
prepare_folder(Path(sys.argv[1]), overwrite=False)
print("locked", flush=True)
time.sleep(60)
"""
JOB = """
import time, torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, i):
        time.sleep(0.02)
        return torch.ones(4) * i, i % 2

def job():
    return dl.Job(model=lambda: nn.Linear(4, 2), loss=nn.functional.cross_entropy,
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.01), data=Data, batch_size=4, steps=500)
"""


@releases_run_lock
def prepared(folder: Path) -> None:
    prepare_folder(folder, overwrite=True)
    assert len(locks()) == 1


@pytest.mark.parametrize("kernel_locks", [True, False])
def test_a_second_job_is_refused_and_a_dead_one_is_replaced(
    tmp_path: Path, kernel_locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system whose `flock` fails: there the process that the file names is looked for."""
    if not kernel_locks:

        def unsupported(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", unsupported)
        monkeypatch.setattr(lock, "SETTLE", 0.01)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout and holder.stdout.readline() == "locked\n"
        (tmp_path / "run" / "run.json").write_text("of the first")
        for _ in range(2):  # to be refused changes nothing
            with pytest.raises(
                InputError, match=f"another job is training in .*run: process {holder.pid} on "
            ) as caught:
                prepared(tmp_path / "run")
            assert platform.node() in str(caught.value) and "started" in caught.value.what
            assert "seen" in caught.value.what and caught.value.where.endswith(LOCK)
        assert (tmp_path / "run" / "run.json").exists() and not locks()
    finally:
        holder.kill()
        holder.communicate()
    prepared(tmp_path / "run")
    prepared(tmp_path / "run")  # released
    assert not (tmp_path / "run" / "run.json").exists()


def test_another_host_counts_as_dead_when_its_heartbeat_stops(tmp_path: Path) -> None:
    owner = {"pid": 1, "host": "elsewhere", "since": int(time.time()) - 7200, "nonce": "x"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    with pytest.raises(InputError, match=r"process 1 on elsewhere, started 2\.00 h ago, seen 0 s ago"):
        prepared(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    prepared(tmp_path)


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b'{"pid": "x"}', b'{"pid": -1, "host": 3}', b"{" * 5000])
def test_a_damaged_lock_file_is_replaced(tmp_path: Path, text: bytes) -> None:
    (tmp_path / LOCK).write_bytes(text)
    os.utime(tmp_path / LOCK, (0, 0))
    prepared(tmp_path)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot be locked"):
        prepared(tmp_path)
    assert (tmp_path / "precious").read_text() == "data"


def test_a_reused_process_number_is_not_the_owner() -> None:
    own = process_start(os.getpid())
    assert own and own == process_start(os.getpid()) != process_start(1)
    assert process_start(2**22 + 1) is None


def test_locks_are_released_by_an_error(tmp_path: Path) -> None:
    @releases_run_lock
    def fails() -> None:
        lock_run(tmp_path)
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fails()


@pytest.mark.slow
def test_two_trainings_in_one_folder(tmp_path: Path) -> None:
    """Without checkpoints: the second ends with exit code 2, and the first one's record is complete."""
    (tmp_path / "j.py").write_text(JOB)
    words = [sys.executable, "-m", "drumline", "train", "j.py", "--plan", "dp=1", "--cluster", "dgx-h100", "-o", "run"]
    first = subprocess.Popen([*words, "--steps", "200"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "run" / "steps.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.05)
        second = subprocess.run([*words, "--steps", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert first.poll() is None, "the first has ended before the second started"
        assert second.returncode == 2 and f"process {first.pid} on" in second.stderr, second.stderr
        assert first.wait(100) == 0
    finally:
        first.kill()
        first.wait()
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 200


def test_the_heartbeat_of_a_lock_goes_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of files that is away for a while: a lock without a heartbeat would be taken over."""
    beats: list[int] = []

    class AwayForAWhile(Disk):
        def touch(self, handle: int) -> None:
            beats.append(handle)
            if len(beats) < 3:
                raise OSError(errno.ESTALE, "Stale file handle")
            super().touch(handle)

    monkeypatch.setattr(lock, "HEARTBEAT", 0.01)
    held = lock.FolderLock(AwayForAWhile(), tmp_path, "nonce")
    end = time.monotonic() + 20
    while len(beats) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    held.release()
    assert len(beats) >= 4
