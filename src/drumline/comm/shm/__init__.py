"""Shared memory between the processes of one host: collectives and messages without a network."""

from .core import NativeCore
from .endpoint import ShmEndpoint
from .process_group import ShmBackend, register
from .segment import NoSharedMemory, SharedSegment
from .transport import ShmTransport

__all__ = ["NativeCore", "NoSharedMemory", "SharedSegment", "ShmBackend", "ShmEndpoint", "ShmTransport", "register"]
