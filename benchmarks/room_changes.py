"""Room changes of a command: how often a reader who follows the code from its first line changes packages.

Runs `drumline ARGUMENTS` (default: `plan examples/gpt.py --cluster dgx-a100 --devices 8`) under `sys.setprofile` and notes
each module of the package when one of its functions is called for the first time. Modules in that order are the path a
reader walks; a room change is two neighbours on the path from different rooms (top-level packages). Code that runs on
import does not count, nor do generated methods of dataclasses. Also printed: how often the command line is entered
again from another room, and the distinct (caller room, callee room) pairs.

    python benchmarks/room_changes.py [--path] [--source FOLDER] [ARGUMENTS ...]

`--path` prints the modules too; `--source` names the `src` folder to run, so that two versions can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
DEFAULT = ["plan", str(ROOT / "examples" / "gpt.py"), "--cluster", "dgx-a100", "--devices", "8"]
SKIPPED = ("<lambda>", "<genexpr>")


class Tracer:
    """Collects modules in the order of their first call, and the calls between rooms."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package.resolve()}/"
        self.modules: list[str] = []
        self.pairs: set[tuple[str, str]] = set()
        self.entries = 0
        self._seen: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """One profile event of the interpreter."""
        module = self._module(frame) if event == "call" and frame.f_code.co_name not in SKIPPED else ""
        if not module or (module not in self._seen and self._importing(frame)):
            return
        if module not in self._seen:
            self._seen.add(module)
            self.modules.append(module)
        caller = self._caller(frame)
        if caller and room(caller) != room(module):
            self.pairs.add((room(caller), room(module)))
            self.entries += room(module) == "cli"

    def _caller(self, frame: FrameType) -> str:
        """The nearest caller inside the package."""
        back = frame.f_back
        while back is not None and not (found := self._module(back)):
            back = back.f_back
        return found if back is not None else ""

    def _importing(self, frame: FrameType | None) -> bool:
        """Whether the call is made by the body of a module or of a class, or is one."""
        while frame is not None:
            if not frame.f_code.co_flags & inspect.CO_OPTIMIZED and self._module(frame):
                return True
            frame = frame.f_back
        return False

    def _module(self, frame: FrameType) -> str:
        """`planner/search` for a frame of the package, else nothing."""
        name = frame.f_code.co_filename
        return name[len(self._package) : -3] if name.startswith(self._package) else ""


def room(module: str) -> str:
    """The top-level package of a module."""
    return module.partition("/")[0]


def main() -> None:
    """Run the command, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", action="store_true", help="print the modules in the order of their first call")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the src folder to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command (default: plan examples/gpt.py ...)")
    options = parser.parse_args()
    sys.path.insert(0, str(options.source))
    from drumline.cli import app  # of the folder that was asked for

    sys.argv = ["drumline", *(options.arguments or DEFAULT)]
    tracer = Tracer(options.source / "drumline")
    with contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(tracer)
        try:
            app(standalone_mode=False)
        finally:
            sys.setprofile(None)
    changes = sum(room(a) != room(b) for a, b in pairwise(tracer.modules))
    if options.path:
        print(*tracer.modules, sep="\n")
    print(f"{len(tracer.modules)} modules, {changes} room changes, {tracer.entries} returns to the command line")
    print(f"{len(tracer.pairs)} pairs of rooms: {', '.join(f'{a}>{b}' for a, b in sorted(tracer.pairs))}")


if __name__ == "__main__":
    main()
