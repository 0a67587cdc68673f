"""`drumline validate` of a file of published collectives, which its columns tell from one of published runs."""

from __future__ import annotations

import csv
import dataclasses
import io

from ..core.files import read_text


def has_collectives(file: str) -> bool:
    """Whether a file's columns are those of published collectives."""
    from ..costs.networks.rows import is_collectives

    return is_collectives(next(csv.reader(io.StringIO(read_text(file))), []))


def validate_collectives_file(file: str, *, loso: bool, as_json: bool) -> None:
    """Predict every row, and say how far off."""
    from ..costs.networks import validate_collectives
    from ..reports.text import console
    from .common import print_json

    found = validate_collectives(file, leave_one_out=loso)
    if as_json:
        print_json(
            {
                "rows": len(found.rows),
                "skipped": [dataclasses.asdict(one) for one in found.skipped],
                "levels": {name: dataclasses.asdict(errors) for name, errors in found.levels.items()},
                "left_out": {name: dataclasses.asdict(errors) for name, errors in found.left_out.items()},
                "sources": {name: dataclasses.asdict(errors) for name, errors in found.sources.items()},
            }
        )
        return
    out = console()
    for line in found.lines():
        out.print(line)
    for name, errors in found.sources.items():
        if errors.rows:
            out.print(f"{name}: {errors.rows} rows, mean {100 * errors.mean:.1f}%, bias {100 * errors.bias:+.1f}%")
    reasons = sorted({one.reason for one in found.skipped})
    for reason in reasons:
        lines = [str(one.line) for one in found.skipped if one.reason == reason]
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        out.print(f"not read: {reason} (lines {', '.join(lines[:5])}{more})")
