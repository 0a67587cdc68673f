"""Collectives on real links: predicted from what the links are made of, and held against published measurements."""

from .model import Fabric, fabric_seconds
from .validation import CollectivesValidation, Errors, Predicted, validate_collectives

__all__ = ["CollectivesValidation", "Errors", "Fabric", "Predicted", "fabric_seconds", "validate_collectives"]
