"""Running a job under a plan, on torch's own engines."""

from . import rates

__all__ = ["rates"]
