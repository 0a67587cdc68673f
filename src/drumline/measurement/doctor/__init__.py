"""Diagnosis of this machine: findings with remedies, and a test of every operation of every backend."""

from .backend_matrix import BackendColumn, OperationTrial, columns, try_column
from .findings import DoctorFinding, FindingState, examine, judge

__all__ = [
    "BackendColumn",
    "DoctorFinding",
    "FindingState",
    "OperationTrial",
    "columns",
    "examine",
    "judge",
    "try_column",
]
