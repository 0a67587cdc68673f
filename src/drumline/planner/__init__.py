"""The planner: candidates, their scores, and why the best one wins."""

from .answer import Answer, Candidate
from .plan_families import PlanFamily
from .search import default_precision, price, search

__all__ = ["Answer", "Candidate", "PlanFamily", "default_precision", "price", "search"]
