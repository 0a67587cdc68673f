"""Collectives on real interconnects: predicted from their link types, checked against published measurements."""

from .model import Interconnect, interconnect_seconds
from .validation import CollectivesValidation, ErrorSummary, PredictedCollective, validate_collectives

__all__ = [
    "CollectivesValidation",
    "ErrorSummary",
    "Interconnect",
    "PredictedCollective",
    "interconnect_seconds",
    "validate_collectives",
]
