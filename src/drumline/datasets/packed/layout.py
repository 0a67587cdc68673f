"""The files of a pack, their names, and the `PackIndex` value that describes them.

A pack is a folder: `shard-00000.tar`, ... (WebDataset's format) or `tokens-00000.bin`, ... (plain integers),
`index.npy` (one row per sample or block: where it lies, and its checksum), `names.jsonl` (where each sample came from),
and `index.json`, which is written last: without it, a pack is not finished.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ConfigDict

from ...core import files
from ...core.errors import CorruptFile, InputError
from ...core.regular_files import sha256

VERSION = 1
INDEX, ROWS, NAMES = "index.json", "index.npy", "names.jsonl"
JOURNAL = ".journal"
"""Folder of what is known about finished shards, until the pack is finished."""
KINDS = ("samples", "tokens")
FORMS = ("value", "tuple", "dict")
TOKEN_BLOCK = 2**16
"""Bytes of a token file with one checksum."""
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
_SHARD_NAME = re.compile(r"(shard-\d{5,9}\.tar|tokens-\d{5,9}\.bin)\Z")


def row_dtype(columns: int) -> np.dtype[np.void]:
    """One sample: its bytes in the shard (tar headers included), their checksum, and where each column is."""
    place = [("shard", "<u4"), ("start", "<u8"), ("length", "<u8"), ("checksum", "<u8")]
    each = [("at", "<u8", (columns,)), ("size", "<u8", (columns,)), ("ending", "<u2", (columns,))]
    return np.dtype([*place, *(each if columns else [])])


@dataclass(frozen=True, slots=True)
class PackedShard:
    """One shard."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    file: str
    bytes: int
    sha256: str
    samples: int
    """Samples, or tokens."""


@dataclass(frozen=True, slots=True)
class PackIndex:
    """The content of a finished pack."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    version: int
    kind: str
    """`samples` or `tokens`."""
    samples: int
    """Samples, or tokens, of all shards."""
    shards: tuple[PackedShard, ...]
    rows_sha256: str
    """Digest of `index.npy`."""
    source: str
    """Where it was packed from."""
    fingerprint: str
    """Digest of the names, sizes and times of the source, and of the options: what a second run compares."""
    columns: tuple[str, ...] = ()
    """The columns of a sample, in order."""
    endings: tuple[str, ...] = ()
    """Endings of the members of the shards, without the dot, by their number in `index.npy`."""
    form: str = "tuple"
    """A sample is a `value`, a `tuple` or a `dict` of its columns."""
    classes: tuple[str, ...] = ()
    """Names of the labels, by number."""
    dtype: str = ""
    """Of tokens."""
    vocabulary: int = 0
    """Number of different tokens that the tokenizer can give; 0 if it does not say."""
    skipped: tuple[str, ...] = ()
    """Files that could not be packed and were left out on request, with the reasons."""

    @classmethod
    def load(cls, folder: Path) -> PackIndex:
        """Read it, and check that it describes files of this folder only."""
        path = folder / INDEX
        if not path.exists():
            raise _unfinished(folder)
        index = files.from_plain(cls, files.read_json(path), str(path), CorruptFile)
        problems = {
            f"version is {index.version}, this program reads {VERSION}": index.version != VERSION,
            f"kind is {index.kind!r}": index.kind not in KINDS,
            f"form is {index.form!r}": index.form not in FORMS,
            f"dtype is {index.dtype!r}": index.kind == "tokens" and index.dtype not in TOKEN_DTYPES,
            "the shards do not add up": sum(s.samples for s in index.shards) != index.samples,
            "a number is negative": min([0, *(min(s.bytes, s.samples) for s in index.shards)]) < 0,
        }
        problems |= {f"{s.file!r} is no shard's name": True for s in index.shards if not _SHARD_NAME.match(s.file)}
        wrong = [text for text, holds in problems.items() if holds]
        if wrong:
            raise CorruptFile(f"{path} is damaged", where=str(path), rule=wrong[0], fix=REPAIR)
        return index

    def rows(self, folder: Path) -> np.ndarray:
        """The rows of `index.npy`, mapped into memory, once their digest is checked."""
        path = folder / ROWS
        if not path.exists():
            raise CorruptFile(f"{path} is missing", where=str(path), fix=REPAIR)
        if sha256(path) != self.rows_sha256:
            raise CorruptFile(f"{path} is damaged", where=str(path), rule="its digest is in index.json", fix=REPAIR)
        rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        expected = row_dtype(len(self.columns))
        count = self.samples if self.kind == "samples" else len(rows)
        if rows.dtype != expected or rows.shape != (count,):
            raise CorruptFile(f"{path} is damaged", where=str(path), rule=f"{count} rows of {expected}", fix=REPAIR)
        return rows


REPAIR = "run the same `drumline pack SRC DST` again: it keeps the good shards and writes the others anew"


def _unfinished(folder: Path) -> InputError:
    if not folder.is_dir():
        return InputError(f"no folder {folder}", rule="a pack is a folder that `drumline pack SRC DST` wrote")
    if (folder / JOURNAL).exists():
        done = len(list((folder / JOURNAL).glob("[0-9]*.json")))  # next to them lies what they are made from
        fix = "run the same `drumline pack SRC DST` again: it goes on where it stopped"
        rule = f"{done} {'shard is' if done == 1 else 'shards are'} complete"
        return InputError(f"the pack {folder} is not finished", rule=rule, fix=fix)
    return InputError(f"{folder} is not a pack", rule=f"a pack has the file {INDEX}", fix="drumline pack SRC DST")
