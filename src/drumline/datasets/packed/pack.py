"""`dl.pack`: a folder, a table, tensors, a dataset or text, packed into a few large shards with an index.

Shards are written in parallel, each under a temporary name until it is complete. A journal records the complete ones,
so that a run after a kill goes on where the last one stopped, and never believes half a shard.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core import files
from ...core.errors import CorruptFile, InputError
from ...core.regular_files import sha256
from ...core.units import parse_bytes
from .choice import choose_source
from .durable import PARTIAL, sync_folder, write_durably
from .layout import INDEX, JOURNAL, NAMES, ROWS, VERSION, PackedShard, PackIndex, row_dtype
from .shard_files import write_tar, write_tokens
from .source import PackSource
from .text_source import TextSource
from .workers import run_tasks

Progress = Callable[[str, int, int], None]
"""Receives (what runs now, parts done, parts in total)."""
SMALLEST_SHARD, LARGEST_SHARD = 2**10, 2**40
_OWN = (INDEX, ROWS, NAMES, JOURNAL, ".lock")


@dataclass(frozen=True, slots=True)
class PackReport:
    """A finished pack, and how much of it this run wrote."""

    folder: Path
    index: PackIndex
    written: int
    """Shards."""
    kept: int
    """Shards of an earlier run."""

    @property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(s.bytes for s in self.index.shards)


def pack(
    source: str | Path | Any,
    destination: str | Path,
    *,
    kind: str = "auto",
    workers: int | None = None,
    shard_size: str | float = "256MB",
    labels: str = "auto",
    label: str | None = None,
    tokenizer: Any = None,
    end: int | None = None,
    skip: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> PackReport:
    """Pack `source` into the folder `destination`; a second call goes on where the first was stopped.

    `source` is a folder, a `.csv` or `.jsonl` table, a `.npy`, `.npz` or `.safetensors` file, `path.py:dataset`, a text
    file, or a map-style dataset itself. `kind` (`files`, `table`, `tensors`, `dataset`, `text`) says how to read it if
    its name does not. `labels` is `folders` (the first folder is the class) or `none`; `label` the column of a table.
    `tokenizer` is a function of a text or `path.py:name`; without one, bytes are the tokens. `end` is a token that is
    written after each text file. `skip` leaves out what cannot be packed, and lists it in the index.
    """
    size = _shard_bytes(shard_size)
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InputError(f"--workers {workers}", rule="at least one")
    folder = Path(destination)
    _check_apart(source, folder)
    chosen = choose_source(
        source,
        kind=kind,
        labels=labels,
        label=label,
        tokenizer=tokenizer,
        end=end,
        skip=skip,
        piece=size,
    )
    with _own_folder(folder, overwrite=overwrite):
        return _Packing(chosen, folder, size, str(source) if isinstance(source, str | Path) else "a dataset").run(
            workers, progress
        )


class _Packing:
    """One run."""

    def __init__(self, source: PackSource, folder: Path, shard_bytes: int, name: str) -> None:
        self.source, self.folder, self.name = source, folder, name
        self.text = isinstance(source, TextSource)
        self.cuts = _cut(source, shard_bytes)
        self.fingerprint = f"{source.fingerprint()[:48]}-{shard_bytes:x}"
        self.journal = folder / JOURNAL

    def run(self, workers: int, progress: Progress) -> PackReport:
        """Write what is missing, then the index."""
        self._reopen()
        self.journal.mkdir(exist_ok=True)
        self._check_same_source()
        total = len(self.source)
        done = run_tasks(
            self.make_shard, len(self.cuts) - 1, workers, lambda n: progress("packing", min(n, total), total)
        )
        entries = [self._entry(k) for k in range(len(self.cuts) - 1)]
        index = self._publish([shard for shard, _ in entries])
        progress("packed", total, total)
        return PackReport(self.folder, index, sum(done), len(done) - sum(done))

    def make_shard(self, number: int, tick: Callable[[int], None]) -> int:
        """Write one shard and its journal entry; 0 if an earlier run has done it, and its digest still agrees."""
        first, last = self.cuts[number], self.cuts[number + 1]
        if self._is_good(number):
            tick(last - first)
            return 0
        path = self._shard_path(number)
        one = lambda: tick(1)  # noqa: E731  # a name for a short callback
        if isinstance(self.source, TextSource):
            shard, rows = write_tokens(self.source, number, first, last, path, one)
        else:
            shard, rows = write_tar(self.source, number, first, last, path, one)
        self._record(number, shard, rows)
        return 1

    # -- the journal

    def _shard_path(self, number: int) -> Path:
        return self.folder / (f"tokens-{number:05d}.bin" if self.text else f"shard-{number:05d}.tar")

    def _record(self, number: int, shard: PackedShard, rows: np.ndarray) -> None:
        """First the rows, then the entry that makes them count."""
        write_durably(self.journal / f"{number:05d}.npy", npy_bytes(rows))
        entry = files.to_plain(shard) | {"rows": sha256(self.journal / f"{number:05d}.npy")}
        write_durably(self.journal / f"{number:05d}.json", json.dumps(entry).encode())

    def _entry(self, number: int) -> tuple[PackedShard, np.ndarray]:
        """Raises where an entry is absent or damaged."""
        entry = files.read_json(self.journal / f"{number:05d}.json")
        rows_path = self.journal / f"{number:05d}.npy"
        if sha256(rows_path) != entry.pop("rows"):
            raise CorruptFile(f"{rows_path} is damaged")
        return files.from_plain(PackedShard, entry, str(self.journal)), np.load(rows_path, allow_pickle=False)

    def _is_good(self, number: int) -> bool:
        path = self._shard_path(number)
        try:
            shard, _ = self._entry(number)
            return shard.file == path.name and path.stat().st_size == shard.bytes and sha256(path) == shard.sha256
        except (CorruptFile, InputError, OSError, KeyError, AttributeError, ValueError):
            return False  # it is written anew

    def _check_same_source(self) -> None:
        path = self.journal / "source.json"
        if path.exists():
            with suppress(CorruptFile, InputError):
                if files.read_json(path) == {"fingerprint": self.fingerprint}:
                    return
            raise _other_source(self.folder)
        write_durably(path, json.dumps({"fingerprint": self.fingerprint}).encode())

    def _reopen(self) -> None:
        """Turn a finished pack back into a journal, so that damaged shards of it are written anew."""
        if not (self.folder / INDEX).exists():
            return
        index = PackIndex.load(self.folder)
        if index.fingerprint != self.fingerprint:
            raise _other_source(self.folder)
        self.journal.mkdir(exist_ok=True)
        self._check_same_source()
        try:
            rows = index.rows(self.folder)
        except CorruptFile:
            rows = None  # all shards are written anew
        for number, shard in enumerate(index.shards):
            if rows is not None and not (self.journal / f"{number:05d}.json").exists():
                self._record(number, shard, rows[rows["shard"] == number])

    # -- the end

    def _publish(self, shards: list[PackedShard]) -> PackIndex:
        rows = np.concatenate([self._entry(k)[1] for k in range(len(shards))])
        width = len(self.source.columns)
        assert rows.dtype == row_dtype(width)
        write_durably(self.folder / ROWS, npy_bytes(rows))
        if isinstance(self.source, TextSource):
            documents = [json.dumps(name) for name in self.source.paths]
            write_durably(self.folder / NAMES, "\n".join([*documents, ""]).encode())
        else:
            names = (json.dumps(self.source.name(i)) + "\n" for i in range(len(self.source)))
            write_durably(self.folder / NAMES, "".join(names).encode())
        text = self.source if isinstance(self.source, TextSource) else None
        index = PackIndex(
            version=VERSION,
            kind="tokens" if text else "samples",
            samples=sum(s.samples for s in shards),
            shards=tuple(shards),
            rows_sha256=sha256(self.folder / ROWS),
            source=self.name,
            fingerprint=self.fingerprint,
            columns=self.source.columns,
            endings=() if text else self.source.endings,
            form=self.source.form,
            classes=self.source.classes,
            dtype=text.tokenizer.dtype.name if text else "",
            vocabulary=text.tokenizer.vocabulary if text else 0,
            skipped=tuple(map(str, self.source.skipped)),
        )
        write_durably(self.folder / INDEX, (json.dumps(files.to_plain(index), indent=1) + "\n").encode())
        shutil.rmtree(self.journal)
        return index


def npy_bytes(rows: np.ndarray) -> bytes:
    """Rows as a `.npy` file."""
    out = io.BytesIO()
    np.save(out, rows, allow_pickle=False)
    return out.getvalue()


def _cut(source: PackSource, shard_bytes: int) -> list[int]:
    """The first sample of each shard, then the number of samples: a function of the source and the size alone."""
    ends = np.cumsum(source.sizes() + 512 * (1 + 2 * len(source.columns)) * bool(source.columns))
    cuts = [0]
    while cuts[-1] < len(ends):
        before = ends[cuts[-1] - 1] if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + shard_bytes, side="right"))))
    return cuts


def _shard_bytes(text: str | float) -> int:
    try:
        size = int(parse_bytes(text))
    except ValueError as e:
        raise InputError(f"--shard-size {text}", rule=str(e)) from None
    if not SMALLEST_SHARD <= size <= LARGEST_SHARD:
        raise InputError(f"--shard-size {text}", rule=f"from {SMALLEST_SHARD} to {LARGEST_SHARD} bytes")
    return size


def _check_apart(source: Any, folder: Path) -> None:
    if isinstance(source, str | Path) and Path(source).is_dir():
        inside, outside = folder.resolve(), Path(source).resolve()
        if inside == outside or outside in inside.parents or inside in outside.parents:
            raise InputError(f"{folder} and {source} are in each other", rule="a pack is not among what it packs")


@contextmanager
def _own_folder(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """A folder that holds nothing but a pack, locked against a second run; half-written files are removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = os.listdir(folder)
        shards = [n for n in names if n.startswith(("shard-", "tokens-")) and n.endswith((".tar", ".bin"))]
        other = sorted({n for n in names if not n.endswith(PARTIAL)} - {*_OWN, *shards})
        if other:
            raise InputError(f"{folder} has other files: {', '.join(other[:3])}", rule="a pack has a folder of its own")
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise InputError(f"{folder} cannot be written: {e.strerror}") from None
    try:
        _lock(lock, folder)
        try:
            for name in names:
                if name.endswith(PARTIAL) or (overwrite and name in (*shards, INDEX, ROWS, NAMES)):
                    os.unlink(folder / name)
            if overwrite:
                shutil.rmtree(folder / JOURNAL, ignore_errors=True)
            sync_folder(folder)
            yield
        finally:
            with suppress(OSError):
                os.unlink(folder / ".lock")
    finally:
        os.close(lock)


def _lock(handle: int, folder: Path) -> None:
    """Lock the file for this process, or refuse: the kernel releases it when the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(folder / ".lock")):
            return
    except OSError:
        pass  # another process has it, or had it and removed it a moment ago
    raise InputError(f"another `drumline pack` is writing {folder}", rule="one at a time")


def _other_source(folder: Path) -> InputError:
    return InputError(
        f"{folder} was packed from something else, or with other options",
        rule="names, sizes and times of the source, and the options, are as they were",
        fix="--overwrite to write all of it anew, or another destination",
    )
