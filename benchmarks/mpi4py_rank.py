"""One rank of benchmarks/mpi4py_tests.py: runs test files of mpi4py and writes a line for each test that ends.

A line is written as soon as a test ends, so a hang costs only the tests that follow it.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
import warnings
from collections.abc import Iterator
from typing import Any


class LineResult(unittest.TestResult):
    """Writes (test, passed, failed or skipped, why) for each test."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  # open until the process ends
        self._state = ("passed", "")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._state = ("passed", "")

    def _note(self, state: str, why: Any) -> None:
        text = f"{why[0].__name__}: {why[1]}" if isinstance(why, tuple) else str(why)
        if self._state[0] != "failed":
            self._state = (state, text[:400])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._note("failed", err)
        if not hasattr(test, "_testMethodName"):  # the module or class could not be set up
            self._write(test)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note("failed", err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note("failed", err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note("skipped", reason)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._write(test)

    def _write(self, test: unittest.TestCase) -> None:
        self._file.write(json.dumps([test.id(), *self._state]) + "\n")


def test_ids(suite: unittest.TestSuite) -> Iterator[str]:
    """The names of all tests."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from test_ids(test)
        else:
            yield test.id()


def main() -> None:
    """Run the files `names` with `paths` in front of the module search path."""
    paths, names, out = sys.argv[1:4]
    sys.path[:0] = paths.split(os.pathsep)
    rank = next((os.environ[v] for v in ("RANK", "PMI_RANK") if v in os.environ), "0")
    suite = unittest.defaultTestLoader.loadTestsFromNames(names.split(","))
    with open(f"{out}-{rank}.all", "w") as file:
        json.dump(list(test_ids(suite)), file)
    warnings.simplefilter("ignore")
    suite.run(LineResult(f"{out}-{rank}"))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
