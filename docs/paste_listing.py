"""Writes the tables of algorithms in collectives.md anew, from the schedules."""

from __future__ import annotations

from pathlib import Path

from drumline.schedules.listing import pasted

DOCUMENT = Path(__file__).with_name("collectives.md")

if __name__ == "__main__":
    DOCUMENT.write_text(pasted(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
