"""Text: files become tokens, one file after the other, by bytes or by a tokenizer of the user."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import InputError
from ...core.job import call_user_code
from .file_tree import find_files, refusal_of
from .source import PackSource, Refused, refuse

SUFFIXES = (".txt", ".md", ".text")
PIECE = 4 * 2**20
"""Bytes of text that are tokenized at once. Longer files are cut after the end of a line."""
LARGEST_TEXT = 2**50
"""Bytes of a text file, at most: it is read piece by piece."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a file that is tokenized by itself."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to numbers. Without `encode`, each byte is a token."""

    encode: Callable[[str], Any] | None = None
    vocabulary: int = 256
    """Number of different tokens; 0 if unknown."""
    reference: str = "bytes"

    @classmethod
    def of(cls, value: Any, reference: str) -> Tokenizer:
        """Build from a function, or from an object with `encode`, as the usual libraries have."""
        encode = getattr(value, "encode", value)
        if not callable(encode):
            raise InputError(f"{reference} is a {type(value).__name__}", rule="a function of a text, or has encode()")
        sizes = (getattr(value, name, None) for name in ("vocab_size", "n_vocab"))
        size = next((s for s in sizes if isinstance(s, int) and s > 0), 0)
        return cls(encode, size, reference)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every token."""
        size = self.vocabulary or 2**32
        return np.dtype("u1" if size <= 2**8 else "<u2" if size <= 2**16 else "<u4")

    def tokens(self, data: bytes, where: str) -> np.ndarray:
        """The tokens of a text."""
        if self.encode is None:
            return np.frombuffer(data, dtype=np.uint8)
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            rule = f"UTF-8; byte {e.start} of this part is not"
            raise InputError(f"{where!r} is not text", where=where, rule=rule) from None
        made = call_user_code(self.encode, f"the tokenizer {self.reference} on {where!r}", text)
        try:
            numbers = np.asarray(getattr(made, "ids", made), dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            numbers = np.zeros((0, 0), dtype=np.int64)
        most = 2 ** (8 * self.dtype.itemsize) - 1
        if numbers.ndim != 1 or (len(numbers) and not 0 <= numbers.min() <= numbers.max() <= most):
            raise InputError(
                f"the tokenizer {self.reference} gave no list of tokens for {where!r}",
                rule=f"whole numbers from 0 to {most}" + (", by its vocab_size" if self.vocabulary else ""),
            )
        return numbers.astype(self.dtype)


class TextSource(PackSource):
    """The pieces of text files. A sample of this source is a piece."""

    endings, form = ("bin",), "value"

    def __init__(
        self, path: Path, tokenizer: Tokenizer, *, end: int | None = None, skip: bool = False, piece: int = PIECE
    ) -> None:
        self.tokenizer, self.end = tokenizer, end
        if end is not None and not 0 <= end < 2 ** (8 * tokenizer.dtype.itemsize):
            raise InputError(f"--end {end}", rule=f"a token that fits into {tokenizer.dtype}")
        if path.is_dir():
            tree = find_files(path, LARGEST_TEXT)
            self.root, self.skipped = path, refuse(str(path), tree.refused, skip=skip)
            self.paths = [f.path for f in tree.files]
            self._facts = [f"{f.path}\0{f.size}\0{f.modified}" for f in tree.files]
        else:
            reason = refusal_of(path, largest=LARGEST_TEXT)
            refuse(str(path), [Refused(path.name, reason)] if reason else [], skip=False)
            self.root, self.paths = path.parent, [path.name]
            status = path.stat()
            self._facts = [f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}"]
        self.pieces = [p for k, name in enumerate(self.paths) for p in _pieces(self.root / name, name, k, piece)]
        if not any(p.end > p.start for p in self.pieces):
            raise InputError(f"{path} has no text", rule="at least one byte")
        self.columns = ()

    def __len__(self) -> int:
        return len(self.pieces)

    def sizes(self) -> np.ndarray:
        """Bytes of the tokens, if each byte were one."""
        return np.array([p.end - p.start for p in self.pieces], dtype=np.int64) * self.tokenizer.dtype.itemsize

    def tokens(self, i: int) -> np.ndarray:
        """The tokens of a piece, and the end token after the last of a file."""
        p = self.pieces[i]
        name = self.paths[p.file]
        try:
            with open(self.root / name, "rb") as f:
                f.seek(p.start)
                data = f.read(p.end - p.start)
        except OSError as e:
            raise InputError(f"{name!r} cannot be packed: {e.strerror}", where=str(self.root / name)) from None
        made = self.tokenizer.tokens(data, name)
        last = i + 1 == len(self.pieces) or self.pieces[i + 1].file != p.file
        return np.append(made, self.tokenizer.dtype.type(self.end)) if last and self.end is not None else made

    def members(self, i: int) -> list[tuple[int, bytes]]:
        """The tokens as bytes."""
        return [(0, self.tokens(i).tobytes())]

    def name(self, i: int) -> str:
        """The path of the file."""
        return self.paths[self.pieces[i].file]

    def facts(self) -> Iterable[str]:
        """Paths, sizes and times, and the tokenizer."""
        yield f"{self.tokenizer.reference} {self.tokenizer.vocabulary} {self.end}"
        yield from self._facts


def _pieces(path: Path, name: str, number: int, piece: int) -> list[TextPiece]:
    """Cut a file after line ends; a line that is longer than a piece is cut where UTF-8 begins a character."""
    try:
        size, start, made = os.stat(path).st_size, 0, []
        with open(path, "rb") as f:
            while size - start > piece:
                f.seek(start)
                data = f.read(piece)
                cut = data.rfind(b"\n") + 1
                if not cut:
                    cut = next((k for k in range(len(data) - 1, 0, -1) if data[k] & 0xC0 != 0x80), len(data))
                made.append(TextPiece(number, start, start + cut))
                start += cut
        return [*made, TextPiece(number, start, size)]
    except OSError as e:
        raise InputError(f"{name!r} cannot be packed: {e.strerror}", where=str(path)) from None
