"""Drumline keeps your ranks in step."""
from .job import Job
__version__ = "0.1.0"
