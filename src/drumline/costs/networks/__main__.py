"""Fit the constants of link types to published collectives and write the file that ships.

python -m drumline.costs.networks published_collectives.csv -o src/drumline/clusters/link_types.toml
"""

from __future__ import annotations

import argparse
import sys

from ...clusters.link_types import load_link_types
from ...core import files
from ...core.errors import DrumlineError
from .fit import fit_link_types, large_enough
from .rows import read_collectives

COMMENT = (
    "Link types, and how collectives run on them. Written by\n"
    "python -m drumline.costs.networks published_collectives.csv -o link_types.toml"
)


def main() -> None:
    """Fit, write, and read the file back."""
    parser = argparse.ArgumentParser(
        prog="python -m drumline.costs.networks", description="Fit the constants of link types."
    )
    parser.add_argument("csv")
    parser.add_argument("-o", "--output", required=True)
    args = parser.parse_args()
    try:
        rows, _ = read_collectives(args.csv)
        files.write_toml(args.output, fit_link_types(rows), comment=COMMENT)
        count = len(load_link_types(args.output).link_type)
        print(f"{args.output}: {count} link types from {len(large_enough(rows))} rows")
    except DrumlineError as e:
        print(e, file=sys.stderr)
        raise SystemExit(e.exit_code) from None


if __name__ == "__main__":
    main()
