"""Which plan: candidates, their scores, and why the winner won."""

from .answer import Answer, Candidate
from .families import Family
from .search import default_precision, search

__all__ = ["Answer", "Candidate", "Family", "default_precision", "search"]
