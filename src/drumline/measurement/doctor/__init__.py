"""What this machine has and can do: findings with their remedies, and every operation of every backend tried."""

from .findings import Finding, State, examine
from .matrix import Column, Trial, columns, try_column
from .verdict import judge

__all__ = ["Column", "Finding", "State", "Trial", "columns", "examine", "judge", "try_column"]
