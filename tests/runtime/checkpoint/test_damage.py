"""All damage is detected before anything is loaded and named; the previous checkpoint is loaded instead."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest

from drumline.core.errors import CorruptFile
from drumline.runtime.checkpoint import Saver, load
from drumline.runtime.checkpoint.manifest import check_file, read_manifest

SHARD = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    engine = fakes.engine()
    with Saver(engine, folder) as saver:
        for _ in range(2):
            fakes.train(engine, 1)
            saver.save()
    return folder


def copy(two: Path, tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    return folder, folder / "step-00000002"


def test_a_thousand_flipped_bits(two: Path, tmp_path: Path) -> None:
    """Anywhere in any file; all are detected."""
    _, newest = copy(two, tmp_path)
    positions = [(p, i) for p in sorted(newest.iterdir()) for i in range(p.stat().st_size)]
    generator = random.Random(7)
    detected = 0
    for _ in range(1000):
        path, i = generator.choice(positions)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[i] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CorruptFile) as e:
            manifest = read_manifest(newest)
            for name, record in manifest.files.items():
                check_file(newest, name, record)
        detected += str(newest) in e.value.where
        path.write_bytes(good)
    assert detected == 1000
    assert load(fakes.engine(), newest).step == 2


def seal(newest: Path) -> None:
    """Recompute the digests, as an attacker would."""
    text = (newest / "manifest.json").read_bytes()
    files = json.loads(text)["files"]
    lines = [f"{files[n]['sha256']}  {n}\n" for n in sorted(files)]
    lines.append(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")
    (newest / "SHA256SUMS").write_text("".join(lines))


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(newest: Path) -> None:
        manifest = json.loads((newest / "manifest.json").read_bytes())
        change(manifest)
        (newest / "manifest.json").write_text(json.dumps(manifest))
        seal(newest)

    return damage


def truncate(newest: Path) -> None:
    data = (newest / SHARD).read_bytes()
    (newest / SHARD).write_bytes(data[:-1])


def stale(newest: Path) -> None:
    shutil.copy(newest.parent / "step-00000001" / SHARD, newest / SHARD)


def link(newest: Path) -> None:
    (newest / SHARD).rename(newest / "elsewhere")
    (newest / SHARD).symlink_to("elsewhere")


def outside(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(SHARD)
        for entry in manifest["tensors"].values():
            entry["runs"] = [[name, *run[1:]] for run in entry["runs"]]

    return change


def hole(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model/token.weight"]["runs"][0][2] -= 1


def other_file(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model/token.weight"]["runs"][0][0] = "rank-00009.safetensors"


def pipe(newest: Path) -> None:
    (newest / SHARD).unlink()
    os.mkfifo(newest / SHARD)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncation": (truncate, f"{SHARD} is damaged"),
    "missing shard": (lambda d: (d / SHARD).unlink(), f"{SHARD} is missing"),
    "stale shard": (stale, f"{SHARD} is damaged"),
    "missing manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
    "missing sums": (lambda d: (d / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    "edited manifest": (
        lambda d: (d / "manifest.json").write_bytes(b" " + (d / "manifest.json").read_bytes()),
        "manifest.json or SHA256SUMS is damaged",
    ),
    "not JSON": (
        lambda d: (
            (d / "manifest.json").write_text("{"),
            (d / "SHA256SUMS").write_text(hashlib.sha256(b"{").hexdigest() + "  manifest.json\n"),
        ),
        "manifest.json is damaged",
    ),
    "another version": (edit(lambda m: m.update(version=9)), "manifest.json has version 9"),
    "another format": (edit(lambda m: m.update(format="x")), "is no checkpoint manifest"),
    "unknown key": (edit(lambda m: m.update(zeal=1)), "unknown key 'zeal'"),
    "wrong type": (edit(lambda m: m["tensors"]["model/scale"].update(shape="x")), "shape"),
    "no type": (edit(lambda m: m["tensors"]["model/scale"].update(dtype="load")), "'load' is no dtype"),
    "a hole": (edit(hole), "has 27 of its 28 elements"),
    "a file not listed": (edit(other_file), "is in 'rank-00009.safetensors', which the manifest does not list"),
    "a path upwards": (edit(outside("../step-00000001/" + SHARD)), r"names the file '\.\./step-00000001/"),
    "an absolute path": (edit(outside("/etc/passwd")), "names the file '/etc/passwd'"),
    "a link": (link, "cannot be read: it is a link"),
    "a pipe": (pipe, "is no regular file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_is_loaded(two: Path, tmp_path: Path, kind: str) -> None:
    folder, newest = copy(two, tmp_path)
    damage, text = DAMAGE[kind]
    damage(newest)
    if kind != "missing manifest":
        with pytest.raises(CorruptFile, match=text) as e:
            load(fakes.engine(), newest)
        assert "step-00000001" in e.value.fix and str(newest) in e.value.where
    engine = fakes.engine()
    loaded = load(engine, folder)
    assert loaded.step == engine.steps == 1
    assert len(loaded.notes) == 1 and loaded.notes[0].endswith("step-00000001 is loaded instead")


def test_all_damaged(two: Path, tmp_path: Path) -> None:
    folder, newest = copy(two, tmp_path)
    truncate(newest)
    truncate(folder / "step-00000001")
    engine = fakes.engine()
    before = fakes.state(engine)
    with pytest.raises(CorruptFile, match="every checkpoint in .* is damaged"):
        load(engine, folder)
    fakes.assert_equal(before, fakes.state(engine))


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", [SHARD, "manifest.json", "SHA256SUMS"])
def test_pickle_instead_of_a_file(two: Path, tmp_path: Path, name: str) -> None:
    _, newest = copy(two, tmp_path)
    data = pickle.dumps(Evil(tmp_path / "sentinel"))
    (newest / name).write_bytes(data)
    if name == SHARD:  # with correct digests
        record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        edit(lambda m: m["files"].update({SHARD: record}))(newest)
    with pytest.raises(CorruptFile):
        load(fakes.engine(), newest)
    assert not (tmp_path / "sentinel").exists()


def test_state_that_cannot_be_decoded(two: Path, tmp_path: Path) -> None:
    _, newest = copy(two, tmp_path)
    edit(lambda m: m["state"].update(schedule={"~": "code", "value": "1"}))(newest)
    with pytest.raises(CorruptFile, match="cannot be decoded"):
        load(fakes.engine(), newest)
