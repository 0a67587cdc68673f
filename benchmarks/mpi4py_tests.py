"""mpi4py's own tests, run against drumline.MPI: fetches its source package, puts our module in the place of its own,
and prints the share that passes, by file, with a reason for each test that does not.

    python benchmarks/mpi4py_tests.py                          # the files that must pass, on 1, 2, 3 and 4 ranks
    python benchmarks/mpi4py_tests.py --all --ranks 2          # their neighbours as well
    python benchmarks/mpi4py_tests.py test_op --transport gloo

A test passes when it passes on every rank. What is skipped is counted apart. The exit code is 1 when a file that must
pass is below 90%.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

VERSION = "4.1.2"
MUST = (
    "test_p2p_buf",
    "test_p2p_obj",
    "test_cco_buf",
    "test_cco_obj",
    "test_cco_vec",
    "test_cco_nb_buf",
    "test_group",
    "test_op",
    "test_status",
    "test_request",
    "test_comm",
)
NEIGHBOURS = (
    "test_address",
    "test_attributes",
    "test_buffer",
    "test_cco_nb_vec",
    "test_datatype",
    "test_environ",
    "test_errhandler",
    "test_errorcode",
    "test_exceptions",
    "test_grequest",
    "test_handle",
    "test_info",
    "test_msgspec",
    "test_msgzero",
    "test_objmodel",
    "test_p2p_buf_matched",
    "test_p2p_obj_matched",
    "test_pack",
    "test_pickle",
    "test_rma",
    "test_rma_nb",
    "test_subclass",
    "test_threads",
    "test_win",
)
SHARE = 0.9
TIMEOUT = 600.0

_CUDA = "pretends that host memory is a GPU's; here torch reads GPU memory, and has none"
_ODD = "not asked for: descriptions of memory that contradict themselves get other errors, or none"
REASONS = {
    "test_attributes.": "what a program's own attribute function raises is raised as it is, not as MPI.Exception",
    "test_buffer.": "not asked for: MPI.buffer is a numpy array here, without obj and release",
    "test_errhandler.TestErrhandlerFile": "not asked for: MPI-IO",
    "test_errhandler.TestErrhandlerSession": "not asked for: sessions",
    "test_errhandler.": "not asked for: error handlers made by programs; errors are always raised",
    "test_errorcode.": "not asked for: error codes that programs add",
    "test_exceptions.": "not asked for: the file needs sessions to load",
    "test_grequest.": "not asked for: generalized requests",
    "test_handle.TestHandleFile": "not asked for: MPI-IO",
    "test_handle.TestHandleSession": "not asked for: sessions",
    "test_info.": "not asked for: Info is a mapping here, so keys() is a view, and null ones can be updated by nothing",
    "test_msgspec.TestMessageSimpleDLPackGPUBuf": _CUDA,
    "test_msgspec.TestMessageCAIBuf": _ODD,
    "test_msgspec.TestMessageDLPackCPUBuf": _ODD,
    "test_msgspec.": "not asked for: MPI.buffer is a numpy array here",
    "test_objmodel.": "not asked for: mpi4py's internals, sessions and MPI-IO",
    "test_subclass.": "not asked for: the file needs MPI-IO to load",
}
"""Why a test does not pass, by the beginning of `file.class.method`; the first that fits."""

RUNNER = '''
import json, os, sys, unittest, warnings
folder, name, out = sys.argv[1:4]
sys.path[:0] = [folder]
import mpi4py  # ours: it stands in for mpi4py's package


class Result(unittest.TestResult):
    """One line for each test as soon as it ends, so that a hang costs only what follows it."""

    def __init__(self):
        super().__init__()
        self.file = open(out, "a", buffering=1)
        self.state = ("passed", "")

    def startTest(self, test):
        super().startTest(test)
        self.state = ("passed", "")

    def bad(self, what, err):
        text = f"{err[0].__name__}: {err[1]}" if isinstance(err, tuple) else str(err)
        if self.state[0] != "failed":
            self.state = (what, text[:400])

    def addError(self, test, err):
        super().addError(test, err)
        self.bad("failed", err)
        if not hasattr(test, "_testMethodName"):
            self.say(test)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.bad("failed", err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.bad("failed", err)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.bad("skipped", reason)

    def say(self, test):
        self.file.write(json.dumps([test.id(), *self.state]) + "\\n")

    def stopTest(self, test):
        super().stopTest(test)
        self.say(test)


suite = unittest.defaultTestLoader.loadTestsFromName(name)
with open(out + ".all", "w") as f:
    def ids(s):
        for t in s:
            if isinstance(t, unittest.TestSuite):
                yield from ids(t)
            else:
                yield t.id()
    json.dump(list(ids(suite)), f)
warnings.simplefilter("ignore")
suite.run(Result())
sys.stdout.flush()
'''

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
    """What became of the tests of one file on some number of ranks."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of those that were not skipped."""
        run = len(self.passed) + len(self.failed)
        return len(self.passed) / run if run else 1.0


def fetch(folder: Path) -> Path:
    """Unpack the source package; it is not built. Where its tests are."""
    kept = next(iter(sorted(folder.glob(f"mpi4py-{VERSION}.tar.gz"))), None)
    if kept is None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-binary",
            ":all:",
            "--no-deps",
            "--no-build-isolation",
            "--quiet",
            "--dest",
            str(folder),
            f"mpi4py=={VERSION}",
        ]
        subprocess.run(command, check=True)
        kept = next(iter(folder.glob("mpi4py-*.tar.gz")))
    with tarfile.open(kept) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"mpi4py-{VERSION}" / "test"


def install(tests: Path) -> None:
    """Put the package that stands in beside the tests."""
    shim = tests / "mpi4py"
    shim.mkdir(exist_ok=True)
    (shim / "__init__.py").write_text(SHIM)
    (shim / "rc.py").write_text(RC)
    (tests / "drumline_runner.py").write_text(RUNNER)


def run(tests: Path, name: str, ranks: int, transport: str, folder: Path) -> Tally:
    """One file on some ranks."""
    out = folder / f"{name}-{ranks}"
    program = (
        "import os, runpy, sys\n"
        f"sys.argv = ['runner', {str(tests)!r}, {name!r}, {str(out)!r} + '-' + os.environ.get('RANK', '0')]\n"
        f"runpy.run_path({str(tests / 'drumline_runner.py')!r}, run_name='__main__')\n"
    )
    script = folder / f"{name}-{ranks}.py"
    script.write_text(program)
    env = dict(os.environ)
    if transport:
        env["DRUMLINE_TRANSPORT"] = transport
    if ranks == 1:
        command = [sys.executable, str(script)]
    else:
        command = [sys.executable, "-m", "drumline", "run", "-n", str(ranks), str(script)]
    note = ""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=TIMEOUT)
        if process.returncode:
            note = f"ended with {process.returncode}: {(text.strip().splitlines() or [''])[-1]}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher and its ranks are a group of their own
        text, _ = process.communicate()
        note = f"did not end within {TIMEOUT:g} s"
    return tally(out, name, ranks, note)


def tally(out: Path, name: str, ranks: int, note: str) -> Tally:
    """Put the ranks' lines together."""
    found: list[dict[str, tuple[str, str]]] = []
    for rank in range(ranks):
        path = Path(f"{out}-{rank}")
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found.append({test: (state, text) for test, state, text in lines})
    listing = Path(f"{out}-0.all")
    every = json.loads(listing.read_text()) if listing.exists() else [f"{name}.(does not load)"]
    every += [test for results in found for test in results if test not in every]
    result = Tally()
    for test in dict.fromkeys(every):
        states = [results.get(test, ("failed", f"not run; {note}")) for results in found]
        worst = min(states, key=lambda s: ["failed", "skipped", "passed"].index(s[0]))
        if worst[0] == "passed":
            result.passed.append(test)
        else:
            (result.failed if worst[0] == "failed" else result.skipped)[test] = worst[1]
    return result


def reason(name: str) -> str:
    """What the table says of a test."""
    return next((text for start, text in REASONS.items() if name.startswith(start)), "")


def report(name: str, ranks: int, result: Tally, verbose: bool) -> None:
    """A line for the file, and one for each test that does not pass."""
    run_count = len(result.passed) + len(result.failed)
    print(
        f"{name:<24} {ranks} ranks: run {run_count:>4}, passed {len(result.passed):>4}, skipped "
        f"{len(result.skipped):>3}, failed {len(result.failed):>3}: {100 * result.share:5.1f}%",
        flush=True,
    )
    for test, text in result.failed.items():
        words = reason(test) or f"no reason is known: {text.splitlines()[0] if text else ''}"
        print(f"    {test}: {words}")
    if verbose:
        for text, n in Counter(result.skipped.values()).items():
            print(f"    skipped {n}: {text}")


def main() -> int:
    """Run what is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="names of test files; default: those that must pass")
    parser.add_argument("--all", action="store_true", help="the neighbours as well")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--transport", default="", help="shm, gloo or mpi; default: what drumline chooses")
    parser.add_argument("--folder", type=Path, help="where the source package is kept; default: a temporary folder")
    parser.add_argument("--verbose", action="store_true", help="reasons of skipped tests as well")
    given = parser.parse_args()
    names = given.files or [*MUST, *(NEIGHBOURS if given.all else ())]
    bad = []
    with tempfile.TemporaryDirectory(prefix="drumline-mpi4py-") as scratch:
        tests = fetch(given.folder or Path(scratch))
        install(tests)
        for name in names:
            for ranks in given.ranks:
                result = run(tests, name, ranks, given.transport, Path(scratch))
                report(name, ranks, result, given.verbose)
                if name in MUST and result.share < SHARE:
                    bad.append(f"{name} on {ranks} ranks")
    if bad:
        print(f"below {100 * SHARE:g}%: {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
