"""Draw the pictures of the pages anew: every command `drumline simulate ... --picture docs/images/NAME.svg` on them.

python docs/draw_pictures.py          # all
python docs/draw_pictures.py zero     # those whose name contains a word
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"`drumline (simulate [^`]* --picture (docs/images/[\w-]+\.svg))`")


def commands() -> dict[str, str]:
    """The command of each picture, by its file; two commands for one picture are an error."""
    drawn: dict[str, str] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for command, picture in COMMAND.findall(page.read_text(encoding="utf-8")):
            if drawn.setdefault(picture, command) != command:
                raise SystemExit(f"{picture} is drawn by two commands")
    return drawn


if __name__ == "__main__":
    for picture, command in commands().items():
        if all(word in picture for word in sys.argv[1:]):
            subprocess.run([sys.executable, "-m", "drumline", *shlex.split(command)], cwd=ROOT, check=True)
