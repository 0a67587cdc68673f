"""Which plan: candidates, their scores, and why the winner won."""

from .answer import Answer, Candidate
from .search import default_precision, search

__all__ = ["Answer", "Candidate", "default_precision", "search"]
