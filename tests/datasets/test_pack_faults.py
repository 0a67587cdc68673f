"""Packing that is interrupted: nothing is lost, no half shard is believed, and a second run finishes the first."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pack_sources
import pytest

import drumline as dl
from drumline.core.errors import CorruptFile, DrumlineError, GaveUp, InputError
from drumline.datasets.packed import durable
from drumline.datasets.packed.check import check_pack

SIZE = "8KB"


def pack(source: Any, destination: Path, **options: Any) -> Any:
    return dl.pack(source, destination, **{"workers": 1, "shard_size": SIZE, **options})


def everything(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where possible: these tests flush to disk thousands of times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_sources.class_folders(tmp_path_factory.mktemp("pack") / "src", 14)


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """The pack of an undisturbed run."""
    pack(source, source.parent / "whole")
    return everything(source.parent / "whole")


class Killer:
    """Ends this process at the n-th change on disk: before it, or in the middle of a write."""

    def __init__(self, n: int) -> None:
        self.left, self.real = n, {name: getattr(os, name) for name in ("write", "fsync", "rename", "unlink")}
        for name in self.real:
            setattr(os, name, lambda *a, name=name: self.change(name, *a))

    def change(self, name: str, *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            if name == "write":
                self.real["write"](arguments[0], bytes(arguments[1][: len(arguments[1]) // 2]))
            os._exit(9)
        return self.real[name](*arguments)


def killed_at(n: int, source: Path, folder: Path) -> bool:
    """Pack in a child process that dies at its n-th change on disk; whether it died."""
    child = os.fork()
    if child == 0:
        try:
            Killer(n)
            pack(source, folder)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_change_on_disk(source: Path, whole: dict[str, bytes], tmp_path: Path, stride: int) -> None:
    n, kept = 0, set()
    while killed_at(n + 1, source, folder := tmp_path / str(n)):
        n += stride
        with_index = (folder / "index.json").exists()
        if not with_index:
            with pytest.raises(InputError, match="is not finished|is not a pack|no folder"):
                dl.PackedDataset(folder)
        for path in folder.glob("shard-*.tar"):
            assert path.read_bytes() == whole[path.name], "a shard has its name only when it is complete"
        report = pack(source, folder)
        kept.add(report.kept)
        assert everything(folder) == whole
    assert n > 20 and len(kept) > (2 if stride == 1 else 1)


def test_a_second_run_does_nothing(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    first = pack(source, tmp_path / "dst")
    again = pack(source, tmp_path / "dst")
    assert (again.written, again.kept) == (0, first.written) and everything(tmp_path / "dst") == whole


@pytest.mark.parametrize("kind", ["flip", "cut", "missing", "index"])
def test_damaged_shards_are_written_anew(source: Path, whole: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "dst"
    pack(source, folder)
    path = folder / ("index.npy" if kind == "index" else "shard-00001.tar")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[:-700] if kind == "cut" else data)
    if kind == "missing":
        path.unlink()
    with pytest.raises(CorruptFile) as caught:
        check_pack(folder)
    assert path.name in str(caught.value) and caught.value.exit_code == 6
    report = pack(source, folder)
    assert everything(folder) == whole
    assert kind == "index" or report.written == 1
    check_pack(folder)


@pytest.mark.parametrize("change", ["grown", "options", "fewer"])
def test_another_source_is_refused(source: Path, tmp_path: Path, change: str) -> None:
    mine = pack_sources.class_folders(tmp_path / "src", 20)
    pack(mine, tmp_path / "dst")
    if change == "grown":
        (mine / "cat" / "new.bin").write_bytes(b"1")
    if change == "fewer":
        (mine / "cat" / "two words.bin").unlink()
    size = "9KB" if change == "options" else SIZE
    with pytest.raises(InputError, match=r"was packed from something else.*\n.*\n  try:   --overwrite"):
        pack(mine, tmp_path / "dst", shard_size=size)
    assert pack(mine, tmp_path / "dst", shard_size=size, overwrite=True).kept == 0
    check_pack(tmp_path / "dst")


def test_a_full_disk(source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.write, [0]

    def write(handle: int, data: Any) -> int:
        written[0] += len(data)
        if written[0] > 12_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    monkeypatch.setattr(durable.os, "write", write)
    with pytest.raises(InputError, match=r"cannot be written: No space left on device(.|\n)*make room") as caught:
        pack(source, tmp_path / "dst")
    assert caught.value.exit_code == 2
    monkeypatch.undo()
    assert not [p for p in (tmp_path / "dst").iterdir() if p.name.endswith(durable.PARTIAL)]
    with pytest.raises(InputError, match="is not finished") as unfinished:
        dl.PackedDataset(tmp_path / "dst")
    report = pack(source, tmp_path / "dst")
    assert report.kept and everything(tmp_path / "dst") == whole
    assert unfinished.value.rule.startswith(f"{report.kept} shard")


def test_shards_are_written_in_whole_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the system can keep them in large pages: each write but the last begins and ends at a multiple."""
    real, sizes = os.write, []
    monkeypatch.setattr(durable.os, "write", lambda handle, data: sizes.append(len(data)) or real(handle, data))
    parts = [bytes([k]) * (1000 * k + 7) for k in range(1, 120)]
    with durable.DurableFile(tmp_path / "file") as f:
        for part in parts:
            f.write(part)
    assert (tmp_path / "file").read_bytes() == b"".join(parts) and f.position == sum(sizes)
    assert f.digest.hexdigest() == hashlib.sha256(b"".join(parts)).hexdigest()
    assert len(sizes) > 3 and not any(n % durable._PIECE for n in sizes[:-1])


def limited(source: Path, folder: Path) -> str:
    """The error of a process that may not write files above 4 KB: the kernel's own refusal."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            pack(source, folder)
        except DrumlineError as e:
            os.write(write, e.what.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        text = f.read().decode()
    os.waitpid(child, 0)
    return text


def test_the_kernel_refuses_to_write(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    assert limited(source, tmp_path / "dst").endswith("shard-00000.tar cannot be written: File too large")
    pack(source, tmp_path / "dst")
    assert everything(tmp_path / "dst") == whole


def test_one_pack_at_a_time(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    with open(tmp_path / "dst" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another `drumline pack` is writing"):
            pack(source, tmp_path / "dst")


class Deadly:
    """A dataset whose sample 7 kills the process that loads it, unless that is the test's own."""

    parent = os.getpid()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Any:
        if i == 7 and os.getpid() != Deadly.parent:
            os.kill(os.getpid(), 9)
        return np.full(500, i)


def test_a_killed_worker_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GaveUp, match=r"a process of `drumline pack` was killed\n.*complete shards are kept"):
        pack(Deadly(), tmp_path / "dst", workers=2)
    pack(Deadly(), tmp_path / "dst")
    data = dl.PackedDataset(tmp_path / "dst")
    assert [int(data[i][0]) for i in range(16)] == list(range(16))
