"""`dl.pack`: every kind of source comes back as it was; what cannot be packed is named, and nothing is half written."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pack_sources
import pytest
import torch
from safetensors.numpy import save_file

import drumline as dl
from drumline.core.errors import InputError, JobError


def pack(*arguments: Any, **options: Any) -> Any:
    return dl.pack(*arguments, **{"workers": 1, **options})


def everything(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_class_folders(tmp_path: Path) -> None:
    source = pack_sources.class_folders(tmp_path / "src")
    report = pack(source, tmp_path / "dst", shard_size="8KB")
    assert len(report.index.shards) > 3 and report.written == len(report.index.shards) and not report.kept
    data = dl.PackedDataset(tmp_path / "dst", decode=lambda members: members)
    assert data.classes == ("cat", "dog", "été")
    paths = sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())
    assert [data.name(i) for i in range(len(data))] == paths
    for i, path in enumerate(paths):
        *payload, label = data[i].values()
        assert payload == [(source / path).read_bytes()]
        assert data.classes[int(label)] == path.partition("/")[0]


def test_workers_write_the_same_bytes(tmp_path: Path) -> None:
    source = pack_sources.class_folders(tmp_path / "src")
    pack(source, tmp_path / "one", shard_size="8KB")
    pack(source, tmp_path / "two", shard_size="8KB", workers=2)
    assert everything(tmp_path / "one") == everything(tmp_path / "two")
    assert sorted(everything(tmp_path / "one"))[:2] == ["index.json", "index.npy"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # WebDataset leaves its files open
def test_tar_and_webdataset_read_it(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    source = pack_sources.class_folders(tmp_path / "src", 20)
    report = pack(source, tmp_path / "dst", shard_size="8KB")
    files = [tmp_path / "dst" / s.file for s in report.index.shards]
    for path in files:
        with tarfile.open(path) as tar:
            assert all(m.isreg() and m.mode == 0o644 for m in tar.getmembers())
        listed = subprocess.run(["tar", "tf", path], capture_output=True, text=True, check=True)
        assert listed.stdout.count(".cls\n") == listed.stdout.count("\n") / 2 and not listed.stderr
    ours = dl.PackedDataset(tmp_path / "dst", decode=lambda members: members)
    read = webdataset.WebDataset([str(f) for f in files], shardshuffle=False)
    theirs = [{k: v for k, v in sample.items() if not k.startswith("__")} for sample in read]
    gc.collect()
    assert theirs == [ours[i] for i in range(20)]


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_tensors(tmp_path: Path, ending: str) -> None:
    with np.load(pack_sources.array_file(tmp_path / "a.npz")) as archive:
        arrays = dict(archive)
    if ending != ".npz":
        save_file(arrays, tmp_path / f"a{ending}")
    assert pack(tmp_path / f"a{ending}", tmp_path / "dst", shard_size="20KB").index.columns == ("input", "target")
    data = dl.PackedDataset(tmp_path / "dst")
    wanted = [7, 0, 99, 7, -1]
    x, y = data.collated(wanted)
    assert torch.equal(y, torch.tensor([7, 0, 99, 7, 99])) and x.dtype == torch.float32 and x.shape == (5, 3, 4)
    by_hand = torch.utils.data.default_collate([data[i] for i in wanted])
    assert torch.equal(x, by_hand[0]) and torch.equal(y, by_hand[1])
    x += 1  # a batch is the caller's own memory


def test_a_dataset_of_dicts(tmp_path: Path) -> None:
    source = pack_sources.Mixed()
    pack(source, tmp_path / "dst")
    data = dl.PackedDataset(tmp_path / "dst")
    for i in range(9):
        made = data[i]
        assert list(made) == ["x", "n", "words", "raw", "Flag"]
        assert torch.equal(made["x"], source[i]["x"]) and made["n"] == i and made["n"].dtype == torch.int64
        assert (made["words"], made["raw"], bool(made["Flag"])) == (f"text {i}", bytes([i]), i % 2 == 0)


def test_a_dataset_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef dataset():\n    return torch.utils.data.TensorDataset(torch.arange(5.), torch.arange(5))\n"
    )
    pack(f"{tmp_path}/mine.py:dataset", tmp_path / "dst")
    assert dl.PackedDataset(tmp_path / "dst").collated([4, 1])[1].tolist() == [4, 1]
    with pytest.raises(JobError, match="mine.py has no 'datasets'"):
        pack(f"{tmp_path}/mine.py:datasets", tmp_path / "other")


TABLES = {
    "paths.csv": ('path,label\nb.txt,no\n"a b.txt",yes\n', [("B", 0), ("A", 1)], ("no", "yes")),
    "numbers.csv": ("x,y2,target\n1,2,3\n4,5.5,10\n", [([1.0, 2.0], 3), ([4.0, 5.5], 10)], ()),
    "mixed.jsonl": (
        '{"q": "why?", "n": 1, "label": 0}\n\n{"n": 2, "q": "é", "label": 1}\n',
        [({"q": "why?", "n": 1}, 0), ({"q": "é", "n": 2}, 1)],
        (),
    ),
    "vectors.jsonl": ('{"v": [1, 2]}\n{"v": [3, 4]}\n', [[1.0, 2.0], [3.0, 4.0]], ()),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(tmp_path: Path, name: str) -> None:
    text, expected, classes = TABLES[name]
    (tmp_path / "a b.txt").write_text("A")
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / name).write_text(text)
    pack(tmp_path / name, tmp_path / "dst")
    data = dl.PackedDataset(tmp_path / "dst")
    assert data.classes == classes

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    made = [tuple(map(plain, s)) if isinstance(s, tuple) else plain(s) for s in (data[i] for i in range(len(data)))]
    assert made == expected


def test_text(tmp_path: Path) -> None:
    texts = ["first\nfile é\n" * 9000, "", "second"]
    for i, text in enumerate(texts):
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / f"{i}.txt").write_text(text)
    index = pack(tmp_path / "src", tmp_path / "dst", shard_size="50KB", end=0).index
    whole = b"".join(t.encode() + b"\0" for t in texts)
    assert index.dtype == "uint8" and index.samples == len(whole)
    assert b"".join((tmp_path / "dst" / s.file).read_bytes() for s in index.shards) == whole
    data = dl.PackedTokens(tmp_path / "dst", length=1000)
    assert len(data) == (len(whole) - 1) // 1000
    for i in (0, 65, 66, len(data) - 1, -1):
        x, y = data[i]
        at = (i % len(data)) * 1000
        assert bytes(x.tolist()) == whole[at : at + 1000] and bytes(y.tolist()) == whole[at + 1 : at + 1001]
    assert torch.equal(data.collated([3, 1])[1], torch.stack([data[3][1], data[1][1]]))


def test_long_texts_are_cut_at_line_ends(tmp_path: Path) -> None:
    from drumline.datasets.packed.text_source import TextSource, Tokenizer

    text = "".join(f"line {i} é\n" for i in range(300)) + "é" * 700
    (tmp_path / "a.txt").write_text(text)
    source = TextSource(tmp_path / "a.txt", Tokenizer(lambda part: [ord(c) for c in part], 0, "ord"), piece=101)
    assert len(source) > 20
    assert "".join(chr(c) for i in range(len(source)) for c in source.tokens(i)) == text


def test_a_tokenizer_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(
        "class T:\n    vocab_size = 1000\n    def encode(self, text):\n"
        "        return [len(w) for w in text.split()]\nt = T()\nbad = lambda s: [-1]\n"
    )
    (tmp_path / "a.txt").write_text("a bb ccc dddd")
    index = pack(tmp_path / "a.txt", tmp_path / "dst", tokenizer=f"{tmp_path}/words.py:t").index
    assert (index.dtype, index.vocabulary) == ("uint16", 1000)
    assert dl.PackedTokens(tmp_path / "dst", length=3)[0][1].tolist() == [2, 3, 4]
    with pytest.raises(InputError, match=r"gave no list of tokens for 'a.txt'\n  rule:  whole numbers from 0 to"):
        pack(tmp_path / "a.txt", tmp_path / "other", tokenizer=f"{tmp_path}/words.py:bad")


# -- what cannot be packed


def test_files_that_cannot_be_packed_are_named(tmp_path: Path) -> None:
    source = pack_sources.class_folders(tmp_path / "src", 20)
    (source / "cat" / "loop").symlink_to(source)
    (source / "cat" / "self").symlink_to("self")
    (source / "dog" / "gone").symlink_to("nothing")
    (source / "dog" / "again.bin").symlink_to(source / "cat" / "two words.bin")
    (source / "dog" / ".hidden").write_bytes(b"x")
    os.mkfifo(source / "dog" / "pipe")
    (source / "dog" / "old.pkl").write_bytes(pickle.dumps(1))
    with pytest.raises(InputError) as caught:
        pack(source, tmp_path / "dst")
    assert caught.value.what.endswith("has 5 files that cannot be packed")
    for text in (
        "'cat/loop': a link to a folder that contains it",
        "'cat/self': a link to nothing",
        "'dog/gone': a link to nothing",
        "'dog/pipe': not a regular file",
        "'dog/old.pkl': a pickled file",
    ):
        assert text in caught.value.where
    assert not (tmp_path / "dst").exists()
    report = pack(source, tmp_path / "dst", skip=True)
    assert len(report.index.skipped) == 5 and report.index.samples == 21


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pack_sources.class_folders(tmp_path / "src", 20)
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: "two words" not in str(p) and real(p, mode))
    with pytest.raises(InputError, match=r"has 1 file that cannot be packed\n  where: 'cat/two words.bin': permission"):
        pack(source, tmp_path / "dst")
    monkeypatch.undo()
    pack(source, tmp_path / "dst", shard_size="8KB")


REFUSED: dict[str, tuple[dict[str, str], str, str]] = {
    "outside": ({"a/1.bin": "x", "2.bin": "y"}, ".", "has files in class folders, and '2.bin' outside of them"),
    "nothing": ({".hidden": ""}, ".", r"has no files to pack \(1 hidden names are ignored\)"),
    "unknown": ({"a.xyz": ""}, "a.xyz", "a.xyz: what is in it is not known"),
    "missing": ({"a.csv": ""}, "b.csv", "(?s)no file or folder .*b.csv.*Did you mean 'a.csv'?"),
    "ragged": ({"a.csv": "x,y\n1\n"}, "a.csv", r"(?s)a row of .*a.csv has 1 columns.*line 2"),
    "twice": ({"a.csv": "x,x\n1,2\n"}, "a.csv", "the first line names each column, once"),
    "not json": ({"a.jsonl": '{"x": 1}\n[1]\n'}, "a.jsonl", r"is not JSONL\n  where: .*line 2"),
    "keys": ({"a.jsonl": '{"x": 1}\n{"y": 1}\n'}, "a.jsonl", "a row of .* has other keys: y"),
    "nan": ({"a.csv": "x\n1\nnan\n"}, "a.csv", r"a number that is not finite\n  where: row 2: x"),
    "gone": ({"a.csv": "path\nnone.txt\n"}, "a.csv", r"1 file that cannot be packed\n  where: 'none.txt'"),
    "empty": ({"a.txt": ""}, "a.txt", "a.txt has no text"),
    "damaged": ({"a.npy": "no"}, "a.npy", "a.npy cannot be packed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    files, target, message = REFUSED[name]
    for path, text in files.items():
        (tmp_path / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / path).write_text(text)
    with pytest.raises(InputError, match=message):
        pack(tmp_path / "src" / target, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_pickled_arrays_and_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(InputError, match="nothing is unpickled"):
        pack(tmp_path / "a.npy", tmp_path / "dst")
    with pytest.raises(
        InputError, match=r"list gives a object\n  where: sample 0, 'value'\n  rule:  .*nothing is pickled"
    ):
        pack([object()], tmp_path / "dst")
    with pytest.raises(InputError, match=r"list gives a str\n  where: sample 1"):
        pack([1, "x"], tmp_path / "dst")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "tabel"}, "Did you mean 'table'?"),
        ({"label": "x"}, r"--label for (.|\n)*packed as files, which has no --label"),
        ({"tokenizer": "bytes"}, "which has no --tokenizer"),
        ({"labels": "yes"}, "--labels yes"),
        ({"workers": 0}, "--workers 0"),
        ({"shard_size": "1"}, "--shard-size 1"),
        ({"shard_size": "big"}, "--shard-size big"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = pack_sources.class_folders(tmp_path / "src", 9)
    with pytest.raises(InputError, match=message):
        pack(source, tmp_path / "dst", **options)


def test_the_destination_is_a_folder_of_its_own(tmp_path: Path) -> None:
    source = pack_sources.class_folders(tmp_path / "src", 9)
    with pytest.raises(InputError, match="are in each other"):
        pack(source, source / "packed")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="has other files: thesis.txt"):
        pack(source, tmp_path / "dst", overwrite=True)
    assert [p.name for p in (tmp_path / "dst").iterdir()] == ["thesis.txt"]
