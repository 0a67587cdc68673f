"""Room changes of a command: how often a reader who follows the code in the order it runs changes packages.

Runs `drumline ARGUMENTS` (default: `plan examples/gpt.py --cluster dgx-a100 --devices 8`) under `sys.setprofile` and
lists the modules of the package in the order of their first call. A room change is two neighbours in this list from
different rooms (top-level packages). Code that runs on import does not count.

Leaf rooms hold values (core, clusters, models, plans, schedules), formulas (theory) and torch's private names
(torchkit): a reader looks something up there and returns. They are left out of the first number and included in the
second. The third is how often a module of `cli` is entered for the first time from another room.

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
LEAVES = {"core", "clusters", "models", "plans", "schedules", "theory", "torchkit"}
OLD_LEAVES = {"cluster", "model", "plan", "schedule", "errors", "files", "job", "mesh", "timeline", "units"}
"""Names of the same rooms before they were renamed, so that older code can be counted too."""


class FirstCalls:
    """Lists the modules of a package in the order of their first call."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package.resolve()}/"
        self.modules: list[str] = []
        self._known: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """One profile event of the interpreter."""
        module = self._module(frame) if event == "call" else ""
        if module and module not in self.modules and not self._importing(frame):
            self.modules.append(module)

    def _importing(self, frame: FrameType | None) -> bool:
        """Whether the call is, or is made by, the body of a module or class: only functions have fast locals."""
        while frame is not None:
            if self._module(frame) and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                return True
            frame = frame.f_back
        return False

    def _module(self, frame: FrameType) -> str:
        """`planner/search` for a frame of the package, else nothing."""
        name = frame.f_code.co_filename
        if name not in self._known:
            self._known[name] = name[len(self._package) : -3] if name.startswith(self._package) else ""
        return self._known[name]


def room(module: str) -> str:
    """The top-level package of a module."""
    return module.partition("/")[0]


def changes(modules: list[str]) -> int:
    """Neighbours from different rooms."""
    return sum(room(a) != room(b) for a, b in pairwise(modules))


def main() -> None:
    """Run the command, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", action="store_true", help="print the modules in the order of their first call")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the src folder to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command (default: plan examples/gpt.py ...)")
    options = parser.parse_args()
    sys.path.insert(0, str(options.source))
    import torch  # noqa: F401  # its own imports are no step of the command, and take a while when watched

    from drumline.cli import app  # from the folder that was asked for

    sys.argv = ["drumline", *(options.arguments or DEFAULT)]
    calls = FirstCalls(options.source / "drumline")
    with contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(calls)
        try:
            app(standalone_mode=False)
        finally:
            sys.setprofile(None)
    path = [m for m in calls.modules if room(m) not in LEAVES | OLD_LEAVES]
    entries = sum(room(b) == "cli" != room(a) for a, b in pairwise(calls.modules))
    if options.path:
        print(*calls.modules, sep="\n")
    print(f"{changes(path)} room changes over {len(path)} modules")
    print(f"{changes(calls.modules)} over {len(calls.modules)} modules with leaf rooms")
    print(f"{entries} returns to the command line")


if __name__ == "__main__":
    main()
