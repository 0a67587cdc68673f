"""`drumline pack` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import command
import numpy as np


def words(folder: Path) -> Path:
    (folder / "src" / "a").mkdir(parents=True)
    for i in range(40):
        (folder / "src" / "a" / f"{i:02d} x.bin").write_bytes(bytes(i))
    return folder / "src"


def test_pack_check_and_repair(tmp_path: Path) -> None:
    source, dst = words(tmp_path), tmp_path / "dst"
    done = command.here("pack", source, dst, "--shard-size", "20KB", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"packed 40 samples into {dst}: 85.5 KiB in 6 shards",
        "a sample has file, label; 1 classes",
        f"read it: drumline.PackedDataset({str(dst)!r})",
    ]
    assert command.here("pack", dst, "--check").stdout == f"{dst}: 40 samples in 6 shards, all as packed\n"
    (dst / "shard-00001.tar").write_bytes(b"no")
    (dst / "shard-00003.tar").unlink()
    bad = command.here("pack", dst, "--check")
    assert bad.returncode == 6
    assert f"2 of 6 shards of {dst} are damaged" in bad.stderr
    assert "shard-00001.tar differs from its digest; no file shard-00003.tar" in bad.stderr
    again = command.here("pack", source, dst, "--shard-size", "20KB", "--json")
    document = json.loads(again.stdout)
    assert (document["written"], document["kept"], document["samples"]) == (2, 4, 40)
    assert json.loads(command.here("pack", dst, "--check", "--json").stdout)["good"] is True


def test_errors_have_a_way_out(tmp_path: Path) -> None:
    source = words(tmp_path)
    for arguments, text in (
        ((source,), "try:   drumline pack"),
        ((tmp_path / "srx", tmp_path / "dst"), "Did you mean 'src'?"),
        ((source, source / "dst"), "are in each other"),
        ((source, tmp_path / "dst", "--as", "foto"), "--as foto"),
        ((source, tmp_path / "dst", "--check"), "--check takes one folder"),
        ((source, "--check"), "is not a pack"),
        ((f"{tmp_path}/none.py:data", tmp_path / "dst"), "no file"),
    ):
        done = command.here("pack", *arguments)
        assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "dst").exists()


def test_skipped_files_are_listed(tmp_path: Path) -> None:
    source = words(tmp_path)
    (source / "a" / "gone").symlink_to("nothing")
    done = command.here("pack", source, tmp_path / "dst")
    assert done.returncode == 2 and "'a/gone': a link to nothing" in done.stderr
    done = command.here("pack", source, tmp_path / "dst", "--skip")
    assert done.returncode == 0 and "skipped 'a/gone': a link to nothing" in done.stderr


def test_text_and_tensors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    done = command.here("pack", tmp_path / "a.txt", tmp_path / "text")
    assert done.stdout.startswith(f"packed 5 tokens into {tmp_path / 'text'}: 5 B in 1 shard\ntokens are uint8")
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    done = command.here("pack", tmp_path / "x.npy", tmp_path / "x", "--json")
    assert json.loads(done.stdout)["columns"] == ["value"]
