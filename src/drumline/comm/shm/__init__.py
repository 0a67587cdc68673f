"""Memory that the processes of one host share: collectives and messages without a network."""

from .backend import register
from .core import Core
from .engine import ShmEngine
from .post import ShmPost
from .segment import NoSharedMemory, Segment
from .transport import ShmTransport

__all__ = ["Core", "NoSharedMemory", "Segment", "ShmEngine", "ShmPost", "ShmTransport", "register"]
