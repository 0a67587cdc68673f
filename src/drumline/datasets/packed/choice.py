"""Which source a path is: by what it is on disk and how it ends, or as the user says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...core.errors import InputError, nearest
from ...core.job import call_user_code, load_object
from .array_source import SUFFIXES as TENSOR_SUFFIXES
from .array_source import ArraySource
from .dataset_source import DatasetSource
from .file_tree import find_files
from .folder_source import LABELS, FolderSource
from .source import PackSource
from .table_source import TableSource
from .text_source import PIECE, TextSource, Tokenizer
from .text_source import SUFFIXES as TEXT_SUFFIXES

KINDS = ("auto", "files", "table", "tensors", "dataset", "text")
TABLE_SUFFIXES = (".csv", ".jsonl")
KIND_RULE = (
    "a folder of files, a .csv or .jsonl table, a .npy, .npz or .safetensors file, path.py:dataset, "
    "or text (a .txt or .md file, or a folder of nothing else)"
)
_IN_FILE = re.compile(r"(.+\.py)(?::([A-Za-z_]\w*))?\Z")


def choose_source(
    source: Any,
    *,
    kind: str = "auto",
    labels: str = "auto",
    label: str | None = None,
    tokenizer: Any = None,
    end: int | None = None,
    skip: bool = False,
    piece: int = PIECE,
) -> PackSource:
    """The source of a path, `path.py:name` or dataset. Options that its kind does not have are refused."""
    if kind not in KINDS:
        raise InputError(f"--as {kind}", rule=f"one of {', '.join(KINDS)}", fix=nearest(kind, KINDS))
    if labels not in LABELS:
        raise InputError(f"--labels {labels}", rule=f"one of {', '.join(LABELS)}", fix=nearest(labels, LABELS))
    kind = kind_of(source) if kind == "auto" else kind
    given = {"--labels": labels != "auto", "--label": label is not None}
    given |= {"--tokenizer": tokenizer is not None, "--end": end is not None}
    usable = {"files": ["--labels"], "table": ["--label"], "text": ["--tokenizer", "--end"]}.get(kind, [])
    for option, is_given in given.items():
        if is_given and option not in usable:
            raise InputError(f"{option} for {source}", rule=f"it is packed as {kind}, which has no {option}")
    if kind == "dataset":
        return _dataset(source)
    path = Path(source)
    if kind == "files":
        if not path.is_dir():
            raise InputError(f"{path} is no folder", rule="--as files packs a folder")
        return FolderSource(path, labels=labels, skip=skip)
    if kind == "table":
        return TableSource(path, label=label, skip=skip)
    if kind == "tensors":
        if path.suffix not in TENSOR_SUFFIXES:
            raise InputError(f"{path} holds no tensors", rule=f"its name ends in {', '.join(TENSOR_SUFFIXES)}")
        return ArraySource(path)
    if not path.exists():
        raise InputError(f"no file or folder {path}")
    return TextSource(path, _tokenizer(tokenizer), end=end, skip=skip, piece=min(PIECE, piece))


def kind_of(source: Any) -> str:
    """The kind of a source, by its path."""
    if not isinstance(source, str | Path) or (_IN_FILE.match(str(source)) and not Path(source).is_dir()):
        return "dataset"
    path = Path(source)
    if path.is_dir():
        files = find_files(path).files
        text = bool(files) and all(f.path.lower().endswith(TEXT_SUFFIXES) and "/" not in f.path for f in files)
        return "text" if text else "files"
    suffix = path.suffix.lower()
    kinds = dict.fromkeys(TABLE_SUFFIXES, "table") | dict.fromkeys(TENSOR_SUFFIXES, "tensors")
    kinds |= dict.fromkeys(TEXT_SUFFIXES, "text")
    if not path.exists():
        close = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise InputError(f"no file or folder {path}", rule=KIND_RULE, fix=close)
    if suffix not in kinds:
        raise InputError(f"{path}: what is in it is not known", rule=KIND_RULE, fix="--as table, tensors or text")
    return kinds[suffix]


def _dataset(source: Any) -> DatasetSource:
    if not isinstance(source, str | Path):
        return DatasetSource(source, type(source).__name__)
    match = _IN_FILE.match(str(source))
    if match is None:
        raise InputError(f"{source} names no dataset", rule="--as dataset packs path.py:name")
    path, name = match[1], match[2] or "dataset"
    reference = f"{path}:{name}"
    made, digest = load_object(Path(path), name)
    if not hasattr(made, "__getitem__") and callable(made):
        made = call_user_code(made, f"{reference}()")
    return DatasetSource(made, reference, digest)


def _tokenizer(tokenizer: Any) -> Tokenizer:
    if tokenizer is None or tokenizer == "bytes":
        return Tokenizer()
    if not isinstance(tokenizer, str):
        return Tokenizer.of(tokenizer, getattr(tokenizer, "__name__", type(tokenizer).__name__))
    match = _IN_FILE.match(tokenizer)
    if match is None or match[2] is None:
        raise InputError(f"--tokenizer {tokenizer}", rule="bytes, or path.py:name")
    made, digest = load_object(Path(match[1]), match[2])
    return Tokenizer.of(made, f"{tokenizer}@{digest[:16]}")
