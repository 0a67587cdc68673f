"""Collectives that run: a communicator over a transport, executing schedules.

Importing this makes the backends `shm` and `mpi4py` known to torch.distributed.
"""

from .choose import Choice
from .communicator import Communicator
from .mpi import group as mpigroup
from .ops import OPERATORS, Operator
from .shm import ShmTransport, register
from .threads import ThreadTransport, run_threads
from .torchdist import TorchTransport
from .transport import Native, Pending, Transport

__all__ = [
    "OPERATORS",
    "Choice",
    "Communicator",
    "Native",
    "Operator",
    "Pending",
    "ShmTransport",
    "ThreadTransport",
    "TorchTransport",
    "Transport",
    "run_threads",
]

register()
mpigroup.register()
