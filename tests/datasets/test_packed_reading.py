"""Reading packs: every sample once an epoch whatever the ranks, workers and restarts; damage is named, nothing runs."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pack_sources
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loader import equal
from test_stream import job

import drumline as dl
from drumline.core.errors import CorruptFile, InputError, JobError
from drumline.datasets import Loader, RankBatch, Stream
from drumline.datasets.packed import shard_reader
from drumline.datasets.packed.checksum import checksum
from drumline.datasets.packed.layout import PackedShard
from drumline.datasets.packed.shard_order import shard_order
from drumline.torchkit.data_workers import without_sigchld_handler

SAMPLES = 103


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample i is (an array of i, i), in shards of about 17 samples."""
    folder = tmp_path_factory.mktemp("packed")
    pack_sources.array_file(folder / "a.npz", SAMPLES)
    dl.pack(folder / "a.npz", folder / "dst", shard_size="30KB", workers=1)
    return folder / "dst"


@pytest.fixture
def mine(packed: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in packed.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def numbers(batch: RankBatch) -> list[int]:
    """The samples of a batch that count, each checked to be itself."""
    seen = []
    for m in batch.micros:
        assert torch.equal(m.input, m.target.float()[:, None, None].expand_as(m.input))
        seen += m.target[: m.samples].tolist()
    return seen


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(1, 40),
    st.sampled_from(["samples", "shards"]),
)
def test_ledger(packed: Path, runs: list[tuple[int, int, int]], batch_size: int, shuffle: str) -> None:
    """Every sample once an epoch through restarts under other numbers of ranks and micro-batches."""
    data = dl.PackedDataset(packed, shuffle=shuffle)
    seen: Counter[int] = Counter()
    step, size = 0, job(batch_size=batch_size)
    per_epoch = -(-SAMPLES // batch_size)
    for dp, micro, steps in (*runs, (2, 1, 10**6)):
        for _ in range(min(steps, 2 * per_epoch - step)):
            for index in range(dp):  # each rank and run begins anew, as after a kill
                seen.update(numbers(Stream(size, data, dp=dp, index=index, micro=micro).batch(step)))
            step += 1
            assert max(seen.values()) - min(seen[i] for i in range(SAMPLES)) <= 1
    assert seen == dict.fromkeys(range(SAMPLES), 2)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_load_the_same_batches(packed: Path) -> None:
    data = dl.PackedDataset(packed)
    with Loader(Stream(job(), data, dp=2, index=1, micro=2), workers=2) as ahead:
        for step in (0, 1, 2, 30, 31):
            assert equal(ahead.batch(step), Stream(job(), data, dp=2, index=1, micro=2).batch(step))


def test_a_transform_that_draws_depends_on_the_sample_and_not_on_the_ranks(packed: Path) -> None:
    data = dl.PackedDataset(packed, transform=lambda s: (torch.rand(2, dtype=torch.float64), s[1]))

    def drawn(dp: int) -> dict[int, list[float]]:
        micros = [m for i in range(dp) for m in Stream(job(), data, dp=dp, index=i).batch(2).micros]
        return {int(y): x.tolist() for m in micros for x, y in zip(m.input, m.target, strict=True)}

    assert drawn(1) == drawn(2) and len(drawn(1)) == 4


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_torchs_own_loader(packed: Path) -> None:
    data = dl.PackedDataset(packed)
    loader = torch.utils.data.DataLoader(data, 10, shuffle=True, num_workers=2, multiprocessing_context="fork")
    with without_sigchld_handler():
        assert sorted(i for _, y in loader for i in y.tolist()) == list(range(SAMPLES))


def test_another_process_opens_the_pack_itself(packed: Path, tmp_path: Path) -> None:
    data = pickle.loads(pickle.dumps(dl.PackedDataset(packed, shuffle="shards", transform=tuple)))
    assert data[7][1] == 7 and data._shuffle == "shards" and data._transform is tuple
    (tmp_path / "a.txt").write_text("some words")
    dl.pack(tmp_path / "a.txt", tmp_path / "text", workers=1)
    tokens = pickle.loads(pickle.dumps(dl.PackedTokens(tmp_path / "text", length=4)))
    assert bytes(tokens[1][0].tolist()) == b" wor"


def test_an_epoch_from_few_shards_at_a_time(packed: Path) -> None:
    sizes = [s.samples for s in dl.PackedDataset(packed).index.shards]
    order = shard_order(sizes, torch.Generator().manual_seed(1), together=2)
    assert sorted(order.tolist()) == list(range(SAMPLES))
    shard = np.repeat(np.arange(len(sizes)), sizes)[order]
    assert len(sizes) > 4 and all(len(set(shard[k : k + 10])) <= 4 for k in range(0, SAMPLES, 10))
    assert torch.equal(order, shard_order(sizes, torch.Generator().manual_seed(1), together=2))
    assert not torch.equal(order, shard_order(sizes, torch.Generator().manual_seed(2), together=2))


def test_any_order_with_repetitions(packed: Path) -> None:
    data = dl.PackedDataset(packed)
    wanted = random.Random(0).choices(range(SAMPLES), k=300)
    assert data.collated(wanted)[1].tolist() == wanted
    assert [y.item() for _, y in data.__getitems__(wanted)] == wanted


def test_many_shards_are_not_all_open(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_reader, "_MOST_OPEN", 2)
    data = dl.PackedDataset(packed)
    before = len(os.listdir("/proc/self/fd"))
    for i in random.Random(0).choices(range(SAMPLES), k=60):
        assert data[i][1] == i
    assert len(os.listdir("/proc/self/fd")) <= before + 4, "a descriptor and a mapping each"
    del data
    assert len(os.listdir("/proc/self/fd")) < before, "a dataset that is no longer used has nothing open"


def test_samples_of_different_shapes(tmp_path: Path) -> None:
    dl.pack([(np.arange(n), n) for n in (3, 1, 3)], tmp_path / "dst", workers=1)
    data = dl.PackedDataset(tmp_path / "dst")
    assert [len(x) for x, _ in data.__getitems__([0, 1, 2])] == [3, 1, 3]
    assert data.collated([2, 0])[0].tolist() == [[0, 1, 2]] * 2
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        data.collated([0, 1])


def test_decode_and_transform(tmp_path: Path) -> None:
    (tmp_path / "src" / "a").mkdir(parents=True)
    (tmp_path / "src" / "a" / "1.xyz").write_bytes(b"123")
    dl.pack(tmp_path / "src", tmp_path / "dst", workers=1)
    with pytest.raises(JobError, match=r"there is no decoder for .xyz\n  where: sample 0 of .*, 'a/1.xyz'"):
        dl.PackedDataset(tmp_path / "dst")[0]
    whole = dl.PackedDataset(
        tmp_path / "dst", decode=lambda m: (int(m["xyz"]), int(m["cls"])), transform=lambda s: s[::-1]
    )
    assert whole[0] == (0, 123)


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "src" / "red").mkdir(parents=True)
    image.new("RGB", (5, 4), (255, 0, 9)).save(tmp_path / "src" / "red" / "1.PNG")
    dl.pack(tmp_path / "src", tmp_path / "dst", workers=1)
    pixels, label = dl.PackedDataset(tmp_path / "dst")[0]
    assert pixels.shape == (3, 4, 5) and pixels[:, 2, 2].tolist() == [255, 0, 9] and label == 0


@pytest.mark.parametrize("sizes", [[64] * 12, [512, 1536, 512, 0, 1024], [2560] * 9, [7, 600, 1, 512]])
def test_ranges_of_any_size_are_the_bytes_of_the_shards(tmp_path: Path, sizes: list[int]) -> None:
    """Whole units, blocks of a tar file, or neither: in two shards, with a part of the ranges left out."""
    bytes_of = [np.random.default_rng(k).integers(0, 256, sum(sizes) + 100, dtype=np.uint8) for k in range(2)]
    shards = []
    for k, data in enumerate(bytes_of):
        (tmp_path / f"shard-{k:05d}.tar").write_bytes(data.tobytes())
        shards.append(PackedShard(f"shard-{k:05d}.tar", len(data), "", len(sizes)))
    starts = [0, *np.cumsum(sizes).tolist()]
    ranges = [(k, starts[i], sizes[i]) for k in range(2) for i in range(k, len(sizes), 2)]
    shard, start, length = (np.array(column, dtype=np.uint64) for column in zip(*ranges, strict=True))
    wanted = [bytes_of[k][a : a + n] for k, a, n in ranges]
    sums = np.array([checksum(part) for part in wanted], dtype=np.uint64)
    reader = shard_reader.ShardReader(tmp_path, tuple(shards))
    assert reader.read(shard, start, length, sums).tobytes() == np.concatenate(wanted).tobytes()
    sums[-1] ^= np.uint64(1)
    with pytest.raises(CorruptFile, match=r"shard-00001.tar is damaged"):
        reader.read(shard, start, length, sums)


# -- damage


def test_every_flipped_bit_is_found(mine: Path) -> None:
    """In any byte that belongs to a sample: the sample is refused, all others are good."""
    path = mine / "shard-00002.tar"
    good = path.read_bytes()
    rows = dl.PackedDataset(mine)._rows
    rows = rows[rows["shard"] == 2]
    for at in random.Random(1).sample(range(len(good) - 1024), 60):
        damaged = bytearray(good)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        data = dl.PackedDataset(mine)
        (hit,) = np.flatnonzero((rows["start"] <= at) & (at < rows["start"] + rows["length"]))
        first = int(np.flatnonzero(data._rows["shard"] == 2)[0])
        with pytest.raises(
            CorruptFile, match=r"shard-00002.tar is damaged\n(.*\n)+  try:   run the same `drumline pack"
        ):
            data.collated([0, first + int(hit)])
        others = [first + k for k in range(len(rows)) if k != hit]
        assert data.collated(others)[1].tolist() == others


DAMAGE = {
    "missing": (lambda p: p.unlink(), "shard-00001.tar is missing"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), r"it has \d+ bytes, its index says \d+"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), r"it has \d+ bytes, its index says \d+"),
    "another": (lambda p: p.write_bytes(p.with_name("shard-00002.tar").read_bytes()), "differ from their checksum"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "shard-00001.tar (is damaged|cannot be read)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_shards_are_named(mine: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(mine / "shard-00001.tar")
    stream = Stream(job(batch_size=SAMPLES), dl.PackedDataset(mine))
    with pytest.raises(CorruptFile, match=message) as caught:
        stream.batch(0)
    assert caught.value.exit_code == 6 and str(mine) in str(caught.value)


def test_a_shard_that_shrinks_while_it_is_open(mine: Path) -> None:
    data = dl.PackedDataset(mine)
    data.collated(range(SAMPLES))
    os.truncate(mine / "shard-00001.tar", 600)
    with pytest.raises(CorruptFile, match="shard-00001.tar is damaged(.|\n)*it ends at byte 600, its index says"):
        data.collated(range(SAMPLES))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"shard-00001.tar"', '"../../etc/passwd"', "'../../etc/passwd' is no shard's name"),
        ('"version": 1', '"version": 2', "version is 2, this program reads 1"),
        ('"samples": 103', '"samples": 104', "the shards do not add up"),
        ('"kind": "samples"', '"kind": "pickles"', "kind is 'pickles'"),
        ('"columns": [', '"columns": ["more", ', "index.npy is damaged"),
        ('"kind"', '"kinds"', "kinds"),
        ("{", "", "index.json is damaged"),
    ],
)
def test_a_damaged_index_is_refused(mine: Path, old: str, new: str, message: str) -> None:
    path = mine / "index.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CorruptFile, match=message):
        dl.PackedDataset(mine)


class Sentinel:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_nothing_is_unpickled(mine: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    out = io.BytesIO()
    np.save(out, np.array([Sentinel(evil)], dtype=object), allow_pickle=True)
    for i, data in enumerate((pickle.dumps(Sentinel(evil)), out.getvalue())):
        (tmp_path / f"src{i}").mkdir()
        (tmp_path / f"src{i}" / "1.npy").write_bytes(data)
        dl.pack(tmp_path / f"src{i}", tmp_path / f"dst{i}", workers=1)
        pack = dl.PackedDataset(tmp_path / f"dst{i}")
        for read in (lambda pack=pack: pack[0], lambda pack=pack: pack.collated([0])):
            with pytest.raises(JobError, match="a .npy member cannot be read"):
                read()
    (mine / "index.npy").write_bytes(out.getvalue())
    with pytest.raises(CorruptFile, match="index.npy is damaged"):
        dl.PackedDataset(mine)
    assert not evil.exists()


def test_what_is_no_pack_is_refused(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    dl.pack(tmp_path / "a.txt", tmp_path / "text", workers=1)
    with pytest.raises(InputError, match="no folder"):
        dl.PackedDataset(tmp_path / "none")
    with pytest.raises(InputError, match="is not a pack"):
        dl.PackedDataset(tmp_path)
    with pytest.raises(InputError, match="PackedTokens"):
        dl.PackedDataset(tmp_path / "text")
    with pytest.raises(InputError, match="samples, not tokens"):
        dl.PackedTokens(packed, length=3)
    with pytest.raises(InputError, match="has 10 tokens"):
        dl.PackedTokens(tmp_path / "text", length=10)
    with pytest.raises(InputError, match="samples or shards"):
        dl.PackedDataset(packed, shuffle="all")
    for i in (SAMPLES, -SAMPLES - 1):
        with pytest.raises(IndexError, match="from 0 to 102"):
            dl.PackedDataset(packed)[i]


def test_damaged_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 1000)
    dl.pack(tmp_path / "a.txt", tmp_path / "dst", workers=1, shard_size="100KB")
    path = sorted((tmp_path / "dst").glob("tokens-*.bin"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tokens = dl.PackedTokens(tmp_path / "dst", length=100)
    assert tokens[0][0].tolist() == list(range(100))
    with pytest.raises(CorruptFile, match=f"{path.name} is damaged"):
        tokens[len(tokens) - 1]
