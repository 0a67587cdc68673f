"""A folder of files: one sample per file. Class folders, as ImageFolder reads them, give the labels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ...core.errors import InputError
from .file_tree import find_files, read_file
from .source import PackSource, ending_of, label_bytes, refuse

LABELS = ("auto", "folders", "none")


class FolderSource(PackSource):
    """The files below a folder, in the order of their paths. The first folder of a path is the class."""

    def __init__(self, root: Path, *, labels: str = "auto", skip: bool = False) -> None:
        self.root = root
        tree = find_files(root)
        self.skipped = refuse(str(root), tree.refused, skip=skip)
        self.files = tree.files
        if not self.files:
            ignored = f" ({tree.hidden} hidden names are ignored)" if tree.hidden else ""
            raise InputError(f"{root} has no files to pack{ignored}", rule="at least one file")
        outside = [f.path for f in self.files if "/" not in f.path]
        if labels == "auto":
            labels = "none" if len(outside) == len(self.files) else "folders"
        if labels == "folders" and outside:
            raise InputError(
                f"{root} has files in class folders, and {outside[0]!r} outside of them",
                rule="each file is in a class folder, whose name is its label, or none is",
                fix="move or remove it, or --labels none to pack all files without labels",
            )
        endings = sorted({ending_of(f.path) for f in self.files})
        self._codes = {ending: code for code, ending in enumerate(endings)}
        if labels == "folders":
            if "cls" in endings:
                raise InputError(f"{root} has files that end in .cls", rule="labels are written as .cls")
            self.classes = tuple(sorted({f.path.partition("/")[0] for f in self.files}))
            self._label = {name: number for number, name in enumerate(self.classes)}
            self.columns, self.form, self.endings = ("file", "label"), "tuple", (*endings, "cls")
        else:
            self.columns, self.form, self.endings = ("file",), "value", tuple(endings)

    def __len__(self) -> int:
        return len(self.files)

    def sizes(self) -> np.ndarray:
        """Bytes of each file."""
        return np.array([f.size for f in self.files], dtype=np.int64)

    def members(self, i: int) -> list[tuple[int, bytes]]:
        """The file, and its label."""
        path = self.files[i].path
        data = (self._codes[ending_of(path)], read_file(self.root / path, path))
        if not self.classes:
            return [data]
        label = self._label[path.partition("/")[0]]
        return [data, (len(self.endings) - 1, label_bytes(label, len(self.classes)))]

    def name(self, i: int) -> str:
        """The path below the folder."""
        return self.files[i].path

    def facts(self) -> Iterable[str]:
        """Paths, sizes and times."""
        return (f"{f.path}\0{f.size}\0{f.modified}" for f in self.files)
