"""mpi4py's own tests, run against drumline.MPI: fetches its source package, puts our module in the place of its own,
and prints the share that passes, by file, with a reason for each test that does not.

    python benchmarks/mpi4py_tests.py                          # the files that must pass, on 1, 2, 3 and 4 ranks
    python benchmarks/mpi4py_tests.py --compare --together     # next to mpi4py itself under MPICH; one start for all
    python benchmarks/mpi4py_tests.py --all --ranks 2          # all files that concern drumline.MPI
    python benchmarks/mpi4py_tests.py test_op --transport gloo

A test passes when it passes on every rank. Skipped tests are counted separately. The exit code is 1 when a file that
must pass is below 90% of the tests that ran or, with --compare, below 95% of the tests that mpi4py itself passes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpi4py_files import MUST, MUST_LIKE_REAL, OTHERS, REASONS

VERSION = "4.1.2"
SHARE, SHARE_OF_REAL = 0.9, 0.95
TIMEOUT = 1200.0
"""Seconds for the files of one start."""
RANK = Path(__file__).with_name("mpi4py_rank.py")
SOURCE = Path(__file__).parents[1] / "src"
"""Tested is this copy of drumline, not an installed one."""

SHIM = '''
"""Stands in for mpi4py: its MPI is drumline's."""
import sys
from drumline import MPI
sys.modules[__name__ + ".MPI"] = MPI
from . import rc
'''
RC = """
initialize = finalize = threads = recv_mprobe = True
thread_level = "multiple"
errors = "exception"
"""


@dataclass
class Tally:
    """The outcome of the tests of one file on some number of ranks."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of those that were not skipped."""
        run = len(self.passed) + len(self.failed)
        return len(self.passed) / run if run else 1.0

    def of_file(self, name: str) -> Tally:
        """The tests of one file; its name alone is a file that does not load."""

        def mine(test: str) -> bool:
            return test.startswith(f"{name}.") or test.endswith(f".{name}")

        skipped, failed = ({t: why for t, why in d.items() if mine(t)} for d in (self.skipped, self.failed))
        return Tally([t for t in self.passed if mine(t)], skipped, failed)

    def share_of(self, real: Tally) -> float:
        """Of those that the real mpi4py passes."""
        return len(set(real.passed) & set(self.passed)) / len(real.passed) if real.passed else 1.0


def fetch(folder: Path) -> Path:
    """Unpack the source package; it is not built. Returns the folder of its tests."""
    archive_path = next(iter(sorted(folder.glob(f"mpi4py-{VERSION}.tar.gz"))), None)
    if archive_path is None:
        options = ["--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--quiet", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"mpi4py=={VERSION}"], check=True)
        archive_path = next(iter(folder.glob("mpi4py-*.tar.gz")))
    with tarfile.open(archive_path) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"mpi4py-{VERSION}" / "test"


def install(scratch: Path) -> Path:
    """Write the package that stands in for mpi4py; returns the folder to search for it."""
    shim = scratch / "stand_in" / "mpi4py"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text(SHIM)
    (shim / "rc.py").write_text(RC)
    return shim.parent


def run_ours(paths: list[Path], name: str, ranks: int, transport: str, scratch: Path) -> Tally:
    """One file, or several joined by commas, against drumline.MPI."""
    launcher = [sys.executable, "-m", "drumline", "run", "-n", str(ranks)] if ranks > 1 else [sys.executable]
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    if transport:
        env["DRUMLINE_TRANSPORT"] = transport
    return run(launcher, env, paths, name, ranks, scratch / f"ours-{name[:40]}-{ranks}")


def run_real(tests: Path, name: str, ranks: int, mpich: Path, scratch: Path) -> Tally:
    """One file against mpi4py itself, started by MPICH's mpiexec."""
    launcher = [str(mpich / "bin" / "mpiexec"), "-n", str(ranks), sys.executable]
    leave_out = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "MASTER_", "RANK", "WORLD_SIZE", "DRUMLINE_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(leave_out)}
    env["MPI4PY_LIBMPI"] = str(mpich / "lib" / "libmpi.so.12")
    return run(launcher, env, [tests], name, ranks, scratch / f"real-{name}-{ranks}")


def run(launcher: list[str], env: dict[str, str], paths: list[Path], name: str, ranks: int, out: Path) -> Tally:
    """Start the ranks and combine their results."""
    command = [*launcher, str(RANK), os.pathsep.join(map(str, paths)), name, str(out)]
    note = ""
    with open(f"{out}.log", "w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
        try:
            process.wait(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            note = f"did not end within {TIMEOUT:g} s"
        finally:
            if process.poll() is None:
                _end(process)
        log.seek(0)
        text = log.read()
    if process.returncode and not note:
        note = f"ended with {process.returncode}: {(text.strip().splitlines() or [''])[-1]}"
    return tally(out, name, ranks, note)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher: it ends its ranks, which may be in other process groups; then what is left of its own group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tally(out: Path, name: str, ranks: int, note: str) -> Tally:
    """Combine the results of the ranks."""
    by_rank: list[dict[str, tuple[str, str]]] = []
    for rank in range(ranks):
        path = Path(f"{out}-{rank}")
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        by_rank.append({test: (state, text) for test, state, text in lines})
    listing = Path(f"{out}-0.all")
    every = json.loads(listing.read_text()) if listing.exists() else [f"{name}.(does not load)"]
    every += [test for results in by_rank for test in results if test not in every]
    result = Tally()
    for test in dict.fromkeys(every):
        states = [results.get(test, ("failed", f"not run; {note}")) for results in by_rank]
        worst = min(states, key=lambda s: ["failed", "skipped", "passed"].index(s[0]))
        if worst[0] == "passed":
            result.passed.append(test)
        else:
            (result.failed if worst[0] == "failed" else result.skipped)[test] = worst[1]
    return result


def load_or_run(path: Path | None, make: Callable[[], Tally]) -> Tally:
    """Load the tally of an earlier run if it was stored, else make it."""
    if path is not None and path.exists():
        return Tally(**json.loads(path.read_text()))
    made = make()
    if path is not None:
        path.write_text(json.dumps(asdict(made)))
    return made


def reason(name: str) -> str:
    """Look up the reason the table gives for a test."""
    return next((text for start, text in REASONS.items() if name.startswith(start)), "")


def report(name: str, ranks: int, ours: Tally, real: Tally | None, verbose: bool) -> None:
    """A line for the file, and one for each test that does not pass."""
    if real is None:
        run_count = len(ours.passed) + len(ours.failed)
        print(
            f"{name:<24} {ranks} ranks: run {run_count:>4}, passed {len(ours.passed):>4}, skipped "
            f"{len(ours.skipped):>3}, failed {len(ours.failed):>3}: {100 * ours.share:5.1f}%",
            flush=True,
        )
    else:
        both = len(set(real.passed) & set(ours.passed))
        print(
            f"{name:<24} {ranks} ranks: the real one passes {len(real.passed):>4}, ours of these {both:>4}: "
            f"{100 * ours.share_of(real):5.1f}%  (ours passes {len(ours.passed)} in all)",
            flush=True,
        )
    for test, text in {**ours.failed, **ours.skipped}.items():
        if test in ours.failed if real is None else test in real.passed:
            words = reason(test) or f"no reason is known: {text.splitlines()[0] if text else ''}"
            print(f"    {test}: {words}")
    if verbose:
        for text, n in Counter(ours.skipped.values()).items():
            print(f"    skipped {n}: {text}")


def main() -> int:
    """Run the files that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="names of test files; default: those that must pass")
    parser.add_argument("--all", action="store_true", help="all files that concern drumline.MPI")
    parser.add_argument("--compare", action="store_true", help="count against what mpi4py itself passes under MPICH")
    parser.add_argument("--mpich", type=Path, default=Path(sys.prefix) / "mpich", help="where MPICH is installed")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--transport", default="", help="shm, gloo or mpi; default: what drumline chooses")
    parser.add_argument("--tests", type=Path, help="the folder of mpi4py's tests; default: its source package's")
    parser.add_argument("--folder", type=Path, help="keeps the source package and mpi4py's own results between runs")
    parser.add_argument("--together", action="store_true", help="start the ranks once for all files: sooner done")
    parser.add_argument("--verbose", action="store_true", help="reasons of skipped tests as well")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the ranks are ended, too
    names = given.files or [*MUST, *(MUST_LIKE_REAL if given.compare or given.all else ()), *(OTHERS * given.all)]
    bad = []
    with tempfile.TemporaryDirectory(prefix="drumline-mpi4py-") as text:
        scratch = Path(text)
        tests = given.tests or fetch(given.folder or scratch)
        stand_in = install(scratch)
        at_once = {}
        if given.together:
            for ranks in given.ranks:
                at_once[ranks] = run_ours([stand_in, tests], ",".join(names), ranks, given.transport, scratch)
        for name, ranks in itertools.product(names, given.ranks):
            real = None
            if given.compare:
                stored = given.folder / f"real-{name}-{ranks}.json" if given.folder else None
                real = load_or_run(stored, functools.partial(run_real, tests, name, ranks, given.mpich, scratch))
            if given.together:
                ours = at_once[ranks].of_file(name)
            else:
                ours = run_ours([stand_in, tests], name, ranks, given.transport, scratch)
            report(name, ranks, ours, real, given.verbose)
            share, least = (ours.share, SHARE) if real is None else (ours.share_of(real), SHARE_OF_REAL)
            if (name in MUST or (real and name in MUST_LIKE_REAL)) and share < least:
                bad.append(f"{name} on {ranks} ranks: {100 * share:.1f}% where {100 * least:g}% are needed")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
