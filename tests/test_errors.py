"""The error tree: exit codes, the four lines, and that errors survive pickling from a rank."""

from __future__ import annotations

import pickle

import pytest

from drumline.core import errors

TREE = [
    (errors.DrumlineError, 1, Exception),
    (errors.InputError, 2, errors.DrumlineError),
    (errors.PlanError, 2, errors.InputError),
    (errors.ClusterError, 2, errors.InputError),
    (errors.JobError, 2, errors.InputError),
    (errors.TraceError, 2, errors.InputError),
    (errors.DoesNotFit, 3, errors.DrumlineError),
    (errors.VerificationError, 4, errors.DrumlineError),
    (errors.GaveUp, 5, errors.DrumlineError),
    (errors.StoppedByGuard, 5, errors.GaveUp),
    (errors.RankFailed, 5, errors.GaveUp),
    (errors.LaunchedRankFailed, 5, errors.GaveUp),
    (errors.CorruptFile, 6, errors.DrumlineError),
]


def test_the_tree_is_complete() -> None:
    own = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert own == {cls for cls, _, _ in TREE}
    assert all(cls.__name__ in (errors.__doc__ or "") for cls in own)


@pytest.mark.parametrize(("cls", "code", "parent"), TREE)
def test_code_and_parent(cls: type[errors.DrumlineError], code: int, parent: type[Exception]) -> None:
    assert cls.exit_code == code
    assert cls.__bases__ == (parent,)


@pytest.mark.parametrize("cls", [cls for cls, _, _ in TREE])
def test_errors_are_pickled(cls: type[errors.DrumlineError]) -> None:
    error = pickle.loads(pickle.dumps(cls("what", where="where", rule="rule", fix="fix")))
    assert type(error) is cls
    assert (error.what, error.where, error.rule, error.fix) == ("what", "where", "rule", "fix")


def test_lines() -> None:
    assert str(errors.DrumlineError("w", where="a", rule="b", fix="c")) == "w\n  where: a\n  rule:  b\n  try:   c"
    assert str(errors.DrumlineError("w")) == "w"


def test_nearest() -> None:
    assert errors.nearest("recomput", ["recompute", "zero"]) == "Did you mean 'recompute'?"
    assert errors.nearest("xyz", ["recompute", "zero"]) == ""
    assert errors.nearest("x", []) == ""
    assert errors.nearest("H100", ["h800", "h100-pcie", "dgx-h100"]) == "Did you mean 'dgx-h100' or 'h100-pcie'?"
