"""PyTorch's own tests of process groups, from the installed torch, on the backend `shm` or on gloo.

    python benchmarks/torch_group_tests.py [-n 2] [--backend gloo] [--as mpi] [-k WORD] [--json FILE] [--against FILE]

Runs every test of `torch.testing._internal.distributed.distributed_test` (`DistributedTest._DistTestBase`) with torch's
own machinery: n processes per test, which meet in a new group. They are forked, not spawned, so that torch is imported
once. The tests decide by the backend's name what to run; here every backend is taken for gloo, also where they say
"gloo only", or with `--as mpi` for MPI, whose tests of all-to-all and of part of the ranks are left out for gloo. So
all backends face the same tests. One thing is not compared: the spans in torch's profiler, which it looks for on its
own backends only, because it wants them marked as asynchronous, and only C++ can do that.

Prints how many pass, are skipped (with torch's reasons) and fail. Ends with 1 if a test fails that CANNOT_PASS does not
explain, or if one passes that it says cannot.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import unittest
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

CANNOT_PASS: dict[str, dict[str, str]] = {
    "shm": dict.fromkeys(
        ("test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"),
        "torch.distributed.monitored_barrier refuses every backend but gloo by name (the group has the method)",
    ),
    "gloo": dict.fromkeys(
        ("test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group", "test_all_to_all_group"),
        "gloo's all_to_all takes tensors of one size only; theirs grow with the rank",
    ),
}
"""By backend: tests that cannot pass, and why."""
LIMIT = 90
"""Seconds that one test may take."""
PATIENCE = 30
"""Seconds that a group waits for its ranks; torch's tests have 60."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one test."""

    name: str
    result: str
    """`passed`, `skipped` or `failed`."""
    reason: str
    seconds: float


class Alias(str):
    """A backend's name that counts as another's, too, where a test compares it."""

    __slots__ = ("other",)

    def __new__(cls, name: str, other: str) -> Alias:
        """`name`, taken for `other`."""
        self = super().__new__(cls, name)
        self.other = other
        return self

    def __eq__(self, name: object) -> bool:
        return name == self.other or str.__eq__(self, name)

    def __ne__(self, name: object) -> bool:
        return not self == name

    __hash__ = str.__hash__


def load(backend: str, ranks: int, taken_for: str) -> Any:
    """Load torch's module of tests, configured to run `backend`."""
    # Its decorators judge by the name while it is imported.
    os.environ |= {
        "BACKEND": taken_for,
        "WORLD_SIZE": str(ranks),
        "INIT_METHOD": "file://",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT),
    }
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as tests

    import drumline.comm  # noqa: F401  # makes the backend known

    common_distributed.TIMEOUT_OVERRIDE = {}
    tests.default_pg_timeout = PATIENCE
    if backend != taken_for:
        tests.BACKEND = Alias(backend, taken_for)
        features = common_distributed.DistTestCases.backend_feature
        for name in ("ddp", "subgroup", "plugin"):
            features[name].add(backend)
    return tests


def case_of(tests: Any) -> type[unittest.TestCase]:
    """Make the class of all tests, with forked ranks."""

    class Forked(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            tests.INIT_METHOD = os.environ["INIT_METHOD"]  # a new file for each test
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            ranks = list(self.processes)
            super().tearDown()  # asks those that are left to end
            for rank in ranks:
                rank.join(5)
                if rank.exitcode is None:
                    rank.kill()
                    rank.join()
                rank.close()
            Path(self.file_name).unlink(missing_ok=True)

        def _check_return_codes(self, test: Any, seconds: float) -> None:
            super()._check_return_codes(test, seconds)  # looks at the first rank's
            if test not in self.skip_return_code_checks:
                self.assertEqual({rank.exitcode for rank in self.processes}, {0}, "a rank ended badly")

    return Forked


class Collect(unittest.TestResult):
    """Records outcomes and shows progress."""

    def __init__(self, show: TextIO, log: TextIO, total: int) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []
        self._show, self._log, self._total = show, log, total
        self._start, self._at = 0.0, 0

    def startTest(self, test: unittest.TestCase) -> None:
        """Remember when, and how long the log was."""
        super().startTest(test)
        self._start, self._at = time.monotonic(), os.fstat(self._log.fileno()).st_size

    def addSuccess(self, test: unittest.TestCase) -> None:
        """A test has passed."""
        self._add(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """A test does not apply here."""
        self._add(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """A test has failed."""
        self._add(test, "failed", self._cause(str(err[1])))

    addError = addFailure

    def _cause(self, text: str) -> str:
        """The line that says what went wrong: of the first rank that raised, or of what the ranks wrote."""
        causes = _last_lines(text)
        if not causes:
            written = os.pread(self._log.fileno(), 1 << 24, self._at).decode(errors="replace")
            causes = _last_lines(written)
        return (causes or [text.strip()])[0].splitlines()[0][:200]

    def _add(self, test: unittest.TestCase, result: str, reason: str) -> None:
        outcome = Outcome(test._testMethodName, result, reason, round(time.monotonic() - self._start, 2))
        self.outcomes.append(outcome)
        if self._show.isatty():
            print(f"\r\033[K{len(self.outcomes)}/{self._total} {outcome.name}", end="", file=self._show, flush=True)


def _last_lines(text: str) -> list[str]:
    """The error of each traceback in a text."""
    errors = []
    for trace in text.split("Traceback (most recent call last):\n")[1:]:
        lines = [line for line in trace.splitlines() if line and not line.startswith(" ")]
        errors += lines[:1]
    return errors


def run(
    backend: str, ranks: int, words: tuple[str, ...] = (), *, taken_for: str = "gloo", show: TextIO | None = None
) -> list[Outcome]:
    """Run the tests whose names contain one of `words`; all if there are none."""
    case = case_of(load(backend, ranks, taken_for))
    names = [n for n in unittest.TestLoader().getTestCaseNames(case) if not words or any(w in n for w in words)]
    with tempfile.TemporaryFile("w+") as log:
        collect = Collect(show or sys.stderr, log, len(names))
        saved = [os.dup(1), os.dup(2)]
        sys.stdout.flush()
        if collect._show.fileno() in (1, 2):
            collect._show = os.fdopen(os.dup(collect._show.fileno()), "w")
        try:
            # the output of the ranks is hidden: torch's tests provoke hundreds of tracebacks
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            unittest.TestSuite(map(case, names)).run(collect)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, old in enumerate(saved, 1):
                os.dup2(old, fd)
                os.close(old)
    return collect.outcomes


def main(arguments: list[str] | None = None) -> int:
    """Run the tests and print the results; the exit code says whether all are as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", "--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "2")), choices=range(2, 9))
    parser.add_argument("--backend", default="shm", choices=["shm", "gloo"])
    parser.add_argument("-k", action="append", default=[], metavar="WORD", help="only tests with this in their name")
    parser.add_argument("--as", dest="taken_for", default="gloo", choices=["gloo", "mpi"], help="whose tests to run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with such a file of another backend")
    asked = parser.parse_args(arguments)
    if asked.taken_for == "mpi" and asked.ranks < 3:
        parser.error("--as mpi needs at least 3 ranks: its tests of part of the ranks take ranks 1 and 2")
    start = time.monotonic()
    outcomes = run(asked.backend, asked.ranks, tuple(asked.k), taken_for=asked.taken_for)
    if not outcomes:
        parser.error("no test has such a name")
    import torch

    count = Counter(o.result for o in outcomes)
    facts = {
        "backend": asked.backend,
        "ranks": asked.ranks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "as": asked.taken_for,
        "seconds": round(time.monotonic() - start),
        "total": len(outcomes),
        **{result: count[result] for result in ("passed", "skipped", "failed")},
    }
    known = CANNOT_PASS[asked.backend]
    print(words_of(facts, outcomes, known))
    if asked.against:
        print(comparison(json.loads(asked.against.read_text()), outcomes))
    if asked.json:
        asked.json.write_text(json.dumps({**facts, "tests": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    return int(bool(unexpected(outcomes, known)))


def unexpected(outcomes: list[Outcome], known: dict[str, str]) -> list[Outcome]:
    """Tests that failed without a reason, or passed although there is one."""
    return [o for o in outcomes if o.result != "skipped" and (o.result == "failed") != (o.name in known)]


def words_of(facts: dict[str, Any], outcomes: list[Outcome], known: dict[str, str]) -> str:
    """Format the results for a person."""
    ran = facts["total"] - facts["skipped"]
    lines = [
        f"torch {facts['torch']}, {facts['ranks']} ranks, backend {facts['backend']}: {facts['passed']} of {ran} tests "
        f"pass, {facts['failed']} fail, {facts['skipped']} of all {facts['total']} are skipped; {facts['seconds']} s",
        *(f"  skipped {n:4}  {reason}" for reason, n in _reasons(outcomes)),
    ]
    if facts["backend"] != "gloo":
        lines.append("  note: what the profiler shows is asserted for torch's own backends only, here for gloo")
    for o in outcomes:
        if o.result == "failed":
            lines.append(f"  failed  {o.name}: {known.get(o.name, 'NOT EXPLAINED')} [{o.reason}]")
        elif o.result == "passed" and o.name in known:
            lines.append(f"  passed  {o.name}, which the table says cannot: {known[o.name]}")
    return "\n".join(lines)


def _reasons(outcomes: list[Outcome]) -> list[tuple[str, int]]:
    return Counter(o.reason for o in outcomes if o.result == "skipped").most_common()


def comparison(other: dict[str, Any], outcomes: list[Outcome]) -> str:
    """List tests whose result differs from another run."""
    there = {test["name"]: test["result"] for test in other["tests"]}
    differing = [o for o in outcomes if there.get(o.name, o.result) != o.result]
    lines = [f"  {o.name}: {o.result}, {other['backend']} {there[o.name]}" for o in differing]
    head = f"{other['backend']} on {other['ranks']} ranks: {other['passed']} pass, {other['failed']} fail"
    return "\n".join([f"{head}; {len(differing)} tests differ", *lines])


if __name__ == "__main__":
    sys.exit(main())
