"""A CSV or JSONL table: columns of paths, a label, and inline values."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import InputError, nearest
from ...core.regular_files import open_regular
from .file_tree import read_file, refusal_of
from .source import PackSource, Refused, ending_of, label_bytes, refuse

PATHS = ("path", "file", "filename", "file_name", "image", "audio")
LABELS = ("label", "class", "target", "y")
RULE = (
    f"a column named {', '.join(PATHS)} holds paths, one named {', '.join(LABELS)} the label; "
    "other columns are values: numbers become one vector"
)


class TableSource(PackSource):
    """The rows of a table, in order. Paths are relative to the table's folder. The table is held in memory."""

    def __init__(self, table: Path, *, label: str | None = None, skip: bool = False) -> None:
        self.table, self.root = table, table.parent
        rows = _read_csv(table) if table.suffix.lower() == ".csv" else _read_jsonl(table)
        if not rows:
            raise InputError(f"{table} has no rows", rule="at least one row")
        names = list(rows[0])
        path = next((n for n in names if n.lower() in PATHS), None)
        if label is not None and label not in names:
            raise InputError(f"--label {label}", rule=f"a column of {table}", fix=nearest(label, names))
        label = label or next((n for n in names if n.lower() in LABELS), None)
        values = [n for n in names if n not in (path, label)]
        if path is None and not values:
            raise InputError(f"{table} has no inputs: its columns are {', '.join(names)}", rule=RULE)
        keep = self._check_paths(rows, path, skip=skip) if path else range(len(rows))
        self.rows, self.lines = [rows[i] for i in keep], list(keep)
        if not self.rows:
            raise InputError(f"{table} has no row that can be packed", rule="at least one row")
        self._path, self._label, self._values = path, label, values
        self._vectors = bool(values) and self._are_numbers(values)
        self._describe()

    def _check_paths(self, rows: list[dict[str, Any]], path: str, *, skip: bool) -> list[int]:
        refused, keep = [], []
        for i, row in enumerate(rows):
            value = row[path]
            usable = isinstance(value, str) and value and "\0" not in value
            reason = refusal_of(self.root / value) if usable else "not a path"
            if reason:
                refused.append(Refused(str(value), reason))
            else:
                keep.append(i)
        self.skipped = refuse(str(self.table), refused, skip=skip)
        return keep

    def _are_numbers(self, values: list[str]) -> bool:
        """Convert the values to numbers if all of them are."""
        try:
            vectors = [np.asarray([row[n] for n in values], dtype=np.float32).squeeze() for row in self.rows]
        except (TypeError, ValueError):
            return False
        if len({v.shape for v in vectors}) > 1:
            return False
        bad = next((i for i, v in enumerate(vectors) if not np.isfinite(v).all()), None)
        if bad is not None:
            where = f"row {self.lines[bad] + 1}: {', '.join(values)}"
            raise InputError(f"{self.table} has a number that is not finite", where=where, rule="finite numbers")
        self._numbers = vectors
        return True

    def _describe(self) -> None:
        columns, endings = [], []
        if self._path:
            columns.append("file")
            endings += sorted({ending_of(row[self._path]) for row in self.rows})
        if self._values:
            columns.append("values")
            endings.append("values.npy" if self._vectors else "values.json")
        if self._label:
            columns.append("label")
            self._labels = self._number_labels(self._label)
            if "cls" in endings:
                raise InputError(f"{self.table} names files that end in .cls", rule="labels are written as .cls")
            endings.append("cls")
        self.columns, self.endings = tuple(columns), tuple(endings)
        self.form = "value" if len(columns) == 1 else "tuple"
        self._codes = {ending: code for code, ending in enumerate(endings)}

    def _number_labels(self, label: str) -> list[int]:
        texts = [str(row[label]).strip() for row in self.rows]
        if all(t.isascii() and t.isdigit() and len(t) < 10 for t in texts):
            self._most = max(map(int, texts)) + 1
            return [int(t) for t in texts]
        self.classes = tuple(sorted(set(texts)))
        self._most = len(self.classes)
        number = {name: i for i, name in enumerate(self.classes)}
        return [number[t] for t in texts]

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self) -> np.ndarray:
        """Bytes of each row with its file."""
        own = 4 * len(self._values) if self._vectors else 200
        if not self._path:
            return np.full(len(self.rows), own, dtype=np.int64)
        return np.array([os.stat(self.root / r[self._path]).st_size + own for r in self.rows], dtype=np.int64)

    def members(self, i: int) -> list[tuple[int, bytes]]:
        """The file, the values, the label."""
        row, made = self.rows[i], []
        if self._path:
            path = row[self._path]
            made.append((self._codes[ending_of(path)], read_file(self.root / path, path)))
        if self._values:
            if self._vectors:
                made.append((self._codes["values.npy"], array_bytes(self._numbers[i])))
            else:
                values = {n: row[n] for n in self._values}
                made.append((self._codes["values.json"], json.dumps(values).encode()))
        if self._label:
            made.append((self._codes["cls"], label_bytes(self._labels[i], self._most)))
        return made

    def name(self, i: int) -> str:
        """The path of a row, or its number."""
        return str(self.rows[i][self._path]) if self._path else f"row {self.lines[i] + 1}"

    def facts(self) -> Iterable[str]:
        """The rows, with sizes and times of their files."""
        for row in self.rows:
            yield json.dumps(row, sort_keys=True)
            if self._path:
                status = os.stat(self.root / row[self._path])
                yield f"{status.st_size} {status.st_mtime_ns}"


def array_bytes(array: np.ndarray) -> bytes:
    """An array as a `.npy` file."""
    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
    return out.getvalue()


def _read_csv(table: Path) -> list[dict[str, Any]]:
    with open_regular(table) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header) or not all(header):
                raise InputError(f"{table}: its first line is {header}", rule="the first line names each column, once")
            rows = []
            for row in reader:
                if len(row) != len(header) and row:
                    where = f"{table}, line {reader.line_num}"
                    rule = f"{len(header)} columns: {', '.join(header)}"
                    raise InputError(f"a row of {table} has {len(row)} columns", where=where, rule=rule)
                if row:
                    rows.append(dict(zip(header, row, strict=True)))
        except csv.Error as e:
            raise InputError(f"{table} is not CSV", where=f"{table}, line {reader.line_num}", rule=str(e)) from None
        except UnicodeDecodeError as e:
            raise InputError(f"{table} is not text", rule=f"UTF-8: {e.reason}") from None
    return rows


def _read_jsonl(table: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with open_regular(table) as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            where = f"{table}, line {number}"
            try:
                row = json.loads(line, parse_constant=lambda text: math.nan)
            except (ValueError, RecursionError) as e:
                raise InputError(f"{table} is not JSONL", where=where, rule=f"one JSON object a line: {e}") from None
            if not isinstance(row, dict) or not row:
                raise InputError(f"{table} is not JSONL", where=where, rule="one JSON object a line")
            if rows and list(row) != list(rows[0]) and set(row) != set(rows[0]):
                rule = f"all rows have the same keys: {', '.join(rows[0])}"
                raise InputError(f"a row of {table} has other keys: {', '.join(row)}", where=where, rule=rule)
            rows.append(row)
    return rows
