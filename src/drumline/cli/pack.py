"""`drumline pack`: pack many samples into a few large shards, which many ranks read quickly and in any order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import InputError
from ..core.units import format_bytes
from .common import print_json, warn

if TYPE_CHECKING:
    from ..datasets.packed.pack import PackReport

_LISTED = 5
"""Skipped names that are printed."""
_LINES = 10
"""Lines of progress where there is no terminal, at most."""


def pack(
    source: str = typer.Argument(
        ..., metavar="SRC", help="A folder, a .csv or .jsonl table, tensors, path.py:dataset, or text."
    ),
    destination: str = typer.Argument(None, metavar="DST", help="The folder of the pack."),
    kind: str = typer.Option("auto", "--as", help="Read SRC as files, table, tensors, dataset or text."),
    workers: int = typer.Option(None, "--workers", help="Processes that write shards (default: the cores)."),
    shard_size: str = typer.Option("256MB", "--shard-size", help="Approximate size of a shard."),
    labels: str = typer.Option("auto", "--labels", help="For a folder: `folders` (each is a class) or `none`."),
    label: str = typer.Option(None, "--label", metavar="COLUMN", help="For a table: the column with the labels."),
    tokenizer: str = typer.Option(None, "--tokenizer", help="For text: path.py:name (default: bytes)."),
    end: int = typer.Option(None, "--end", metavar="TOKEN", help="For text: a token to add after each file."),
    skip: bool = typer.Option(False, "--skip", help="Skip and list samples that cannot be packed."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Write everything again."),
    check: bool = typer.Option(False, "--check", help="Only check the pack SRC against its digests."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Pack data into shards with an index; a second run continues where the first one stopped."""
    from ..datasets.packed.check import check_pack
    from ..datasets.packed.pack import pack as run

    if check:
        if destination is not None:
            raise InputError(f"--check {source} {destination}", rule="--check takes one folder, the pack")
        index = check_pack(source)
        if as_json:
            print_json({"pack": source, "shards": len(index.shards), "samples": index.samples, "good": True})
        else:
            print(f"{source}: {_count(index.samples, index.kind)} in {_shards(len(index.shards))}, all as packed")
        return
    if destination is None:
        raise InputError("no destination", rule="drumline pack SRC DST", fix=f"drumline pack {source} packed")
    with _progress(quiet=as_json) as progress:
        report = run(
            source,
            destination,
            kind=kind,
            workers=workers,
            shard_size=shard_size,
            labels=labels,
            label=label,
            tokenizer=tokenizer,
            end=end,
            skip=skip,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        print_json(_document(report))
    else:
        _print(report)


def _count(samples: int, kind: str) -> str:
    noun = kind.removesuffix("s") if samples == 1 else kind
    return f"{samples:,} {noun}"


def _shards(n: int) -> str:
    return f"{n} shard{'' if n == 1 else 's'}"


def _document(report: PackReport) -> dict[str, Any]:
    index = report.index
    return {
        "pack": str(report.folder),
        "kind": index.kind,
        "samples": index.samples,
        "bytes": report.bytes,
        "shards": len(index.shards),
        "written": report.written,
        "kept": report.kept,
        "columns": list(index.columns),
        "classes": list(index.classes),
        "skipped": list(index.skipped),
    }


def _print(report: PackReport) -> None:
    index = report.index
    for text in index.skipped[:_LISTED]:
        warn(f"skipped {text}")
    if len(index.skipped) > _LISTED:
        warn(f"skipped {len(index.skipped) - _LISTED} more, listed in {report.folder / 'index.json'}")
    kept = f" ({report.kept} kept from an earlier run)" if report.kept else ""
    size = f"{format_bytes(report.bytes)} in {_shards(len(index.shards))}{kept}"
    print(f"packed {_count(index.samples, index.kind)} into {report.folder}: {size}")
    if index.kind == "samples":
        print(f"a sample has {', '.join(index.columns)}" + (f"; {len(index.classes)} classes" if index.classes else ""))
        print(f"read it: drumline.PackedDataset({str(report.folder)!r})")
    else:
        print(f"tokens are {index.dtype}; read them: drumline.PackedTokens({str(report.folder)!r}, length=...)")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere a line for every tenth."""
    if quiet:
        yield lambda what, done, total: None
        return
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from ..reports.console import console

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("packing", total=None)
        yield lambda what, done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Progress as plain lines."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, what: str, done: int, total: int) -> None:
        """Print a line when the next tenth is done."""
        tenth = _LINES * done // max(1, total)
        if self._shown < tenth < _LINES:
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr)
        self._shown = max(self._shown, tenth)
