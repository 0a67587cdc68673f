"""Which plan: candidates, their scores, and why the winner won."""

from .answer import Answer, Candidate

__all__ = ["Answer", "Candidate"]
