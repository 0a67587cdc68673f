"""An interrupted measurement resumes, and the shapes of a GPU stay within their bounds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from drumline.costs.shape_interpolation import kernel_work
from drumline.measurement.gpu_shapes import MAX_OPERATIONS, convolution_shapes, matmul_shapes
from drumline.measurement.kernels import ShapeTiming, points_by_work
from drumline.measurement.resume_journal import MAX_AGE_S, ResumeJournal, delete_journal
from drumline.measurement.timing import Timing

CPU = torch.device("cpu")


def refuse() -> Timing:
    raise AssertionError("measured again")


def test_recorded_cases_are_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "here.part.0"
    first = ResumeJournal(path, CPU)
    assert first.known_cases == 0
    assert first.timed(("matmul", "fp32", 8), lambda: Timing(2.0, 0.1)) == Timing(2.0, 0.1)
    second = ResumeJournal(path, CPU)
    assert second.known_cases == 1
    assert second.timed(("matmul", "fp32", 8), refuse) == Timing(2.0, 0.1)
    assert second.timed(("matmul", "fp32", 16), lambda: Timing(3.0, 0.2)) == Timing(3.0, 0.2)
    delete_journal(str(tmp_path / "cache" / "here.part"))
    assert not path.exists()


@pytest.mark.parametrize("spoil", ["stamp", "when", "half"])
def test_old_foreign_or_torn_lines_are_ignored(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "here.part.0"
    ResumeJournal(path, CPU).timed(("conv", 1), lambda: Timing(2.0, 0.1))
    text = path.read_text()
    row = json.loads(text)
    row |= {"stamp": "another"} if spoil == "stamp" else {"when": time.time() - MAX_AGE_S - 1}
    path.write_text(text[: len(text) // 2] if spoil == "half" else json.dumps(row) + "\n")
    assert ResumeJournal(path, CPU).known_cases == 0


def test_without_a_path_nothing_is_written() -> None:
    journal = ResumeJournal(None, CPU)
    assert journal.timed(("x",), lambda: Timing(1.0, 0.0)) == Timing(1.0, 0.0)
    assert journal.known_cases == 0


def test_shapes_are_bounded_and_the_same_in_every_run() -> None:
    for most in MAX_OPERATIONS.values():
        shapes = matmul_shapes(most)
        assert shapes == matmul_shapes(most) and len(shapes) > 80
        assert all(kernel_work("matmul", s) <= most for s in shapes)
    assert len(set(convolution_shapes())) == len(convolution_shapes())


def test_points_by_work() -> None:
    """One point per factor of four in work."""
    shapes = [(1.0, n, n, n) for n in (64.0, 80.0, 512.0)]
    points = points_by_work(
        [ShapeTiming("matmul", s, Timing(kernel_work("matmul", s) / 1e12, 0.01)) for s in shapes], 4.0
    )
    assert [p.kernel for p in points] == ["matmul", "matmul"]
    assert all(p.rate == pytest.approx(1e12) for p in points)
    assert points[0].size < points[1].size


def test_a_folder_that_cannot_be_written_or_read_is_no_error(tmp_path: Path) -> None:
    """A read-only home."""
    journal = ResumeJournal(Path("/dev/null/.cache/here.part.0"), CPU)
    assert journal.timed(("x",), lambda: Timing(1.0, 0.0)) == Timing(1.0, 0.0)
    (tmp_path / "here.part.0").write_bytes(b"\xff\xfe")
    assert ResumeJournal(tmp_path / "here.part.0", CPU).known_cases == 0
