"""Fits the constants of wires anew and writes the file that ships.

python -m drumline.costs.fabric published_collectives.csv -o src/drumline/clusters/wires.toml
"""

from __future__ import annotations

import argparse
import sys

from ...clusters.wires import load_wires
from ...core import files
from ...core.errors import DrumlineError
from .fit import counted, fit
from .rows import read_rows

COMMENT = (
    "Kinds of links, and how collectives run on them. Written by\n"
    "python -m drumline.costs.fabric published_collectives.csv -o wires.toml"
)


def main() -> None:
    """Fit, write, read back."""
    parser = argparse.ArgumentParser(prog="python -m drumline.costs.fabric", description="Fit the constants of wires.")
    parser.add_argument("csv")
    parser.add_argument("-o", "--output", required=True)
    given = parser.parse_args()
    try:
        rows, _ = read_rows(given.csv)
        files.write_toml(given.output, fit(rows), comment=COMMENT)
        print(f"{given.output}: {len(load_wires(given.output).wire)} wires from {len(counted(rows))} rows")
    except DrumlineError as e:
        print(e, file=sys.stderr)
        raise SystemExit(e.exit_code) from None


if __name__ == "__main__":
    main()
