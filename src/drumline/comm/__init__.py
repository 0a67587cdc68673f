"""Collectives that run: a communicator over a transport, executing schedules."""

from .communicator import OPERATIONS, Communicator
from .threads import ThreadTransport, run_threads
from .torchdist import TorchTransport
from .transport import Pending, Transport

__all__ = ["OPERATIONS", "Communicator", "Pending", "ThreadTransport", "TorchTransport", "Transport", "run_threads"]
