"""Fits the constants of wires anew and writes the file that ships.

python -m drumline.costs.networks published_collectives.csv -o src/drumline/clusters/link_types.toml
"""

from __future__ import annotations

import argparse
import sys

from ...clusters.link_types import load_link_types
from ...core import files
from ...core.errors import DrumlineError
from .fit import counted, fit
from .rows import read_rows

COMMENT = (
    "Kinds of links, and how collectives run on them. Written by\n"
    "python -m drumline.costs.networks published_collectives.csv -o link_types.toml"
)


def main() -> None:
    """Fit, write, read back."""
    parser = argparse.ArgumentParser(
        prog="python -m drumline.costs.networks", description="Fit the constants of wires."
    )
    parser.add_argument("csv")
    parser.add_argument("-o", "--output", required=True)
    given = parser.parse_args()
    try:
        rows, _ = read_rows(given.csv)
        files.write_toml(given.output, fit(rows), comment=COMMENT)
        print(f"{given.output}: {len(load_link_types(given.output).link_type)} wires from {len(counted(rows))} rows")
    except DrumlineError as e:
        print(e, file=sys.stderr)
        raise SystemExit(e.exit_code) from None


if __name__ == "__main__":
    main()
