"""Record the losses that the original scripts print: python examples/migrations/record.py [NAME ...]

Each runs with its own tool on two CPU ranks. A tool that is not installed is named, and its old record stays. DeepSpeed
and Accelerate may be in a folder of their own, named by MIGRATION_PACKAGES.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
RECORD = FOLDER / "losses.json"
ORIGINALS: dict[str, tuple[str, list[str]]] = {
    "torch_one_device": ("torch", []),
    "torch_ddp": ("torch", []),
    "deepspeed_loop": ("deepspeed", ["--deepspeed"]),
    "accelerate_loop": ("accelerate", []),
    "horovod_loop": ("horovod", []),
}
"""The package that each needs, and its arguments."""
SAME_ARITHMETIC = {"horovod_loop": "torch_ddp"}
"""Where a tool cannot be installed: the original whose losses it must have."""


def packages() -> list[str]:
    """Where packages are looked for besides the environment."""
    folder = os.environ.get("MIGRATION_PACKAGES")
    return [folder] if folder else []


def version_of(package: str) -> str | None:
    """The version that is installed, or None."""
    found = importlib.metadata.distributions(name=package, path=[*sys.path, *packages()])
    return next((d.version for d in found), None)


def run_original(name: str, timeout: float = 900) -> list[str]:
    """The lines that an original script prints, run by its own tool."""
    script = str(FOLDER / "before" / f"{name}.py")
    ranks = [] if name == "torch_one_device" else ["-m", "drumline", "run", "-n", "2"]
    variables = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    path = os.pathsep.join([*packages(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *ranks, script, *ORIGINALS[name][1]],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **variables, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return [line for line in done.stdout.splitlines() if line.startswith(("loss ", "correct "))]


def main() -> None:
    """Record those that are named, or all."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in sys.argv[1:] or ORIGINALS:
        version = version_of(ORIGINALS[name][0])
        if version is not None:
            record[name] = {"with": f"{ORIGINALS[name][0]} {version}", "lines": run_original(name)}
            print(f"{name}: {len(record[name]['lines'])} lines, {record[name]['with']}")
        elif name in SAME_ARITHMETIC:
            same = SAME_ARITHMETIC[name]
            record[name] = {"with": f"the arithmetic of {same}", "lines": record[same]["lines"]}
            print(f"{name}: {ORIGINALS[name][0]} is not installed; the lines of {same}")
        else:
            print(f"{name}: {ORIGINALS[name][0]} is not installed; the old record stays")
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
