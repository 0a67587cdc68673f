"""MPI semantics: groups, typed messages, requests, collectives and windows. Programs use it as `drumline.MPI`."""

from .intracomm import run_threads

__all__ = ["run_threads"]
