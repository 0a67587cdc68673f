"""Communication between ranks: a communicator that runs collective schedules over a transport.

Importing this package registers the backends `shm`, `mpi4py` and `checked_gloo` with torch.distributed.
"""

from .auto_algorithm import ChosenAlgorithm
from .communicator import Communicator
from .hosts import HostTransport
from .mpi.process_group import register as register_mpi4py
from .operators import OPERATORS, Operator
from .process_group.gloo_group import register as register_checked_gloo
from .shm import ShmTransport
from .shm import register as register_shm
from .threads import ThreadTransport, run_threads
from .torch_transport import TorchTransport
from .transport import NativeCollective, PendingMessage, Transport

Choice, Native, Pending = ChosenAlgorithm, NativeCollective, PendingMessage
"""Names of earlier releases."""

__all__ = [
    "OPERATORS",
    "Choice",
    "ChosenAlgorithm",
    "Communicator",
    "HostTransport",
    "Native",
    "NativeCollective",
    "Operator",
    "Pending",
    "PendingMessage",
    "ShmTransport",
    "ThreadTransport",
    "TorchTransport",
    "Transport",
    "run_threads",
]

register_shm()
register_mpi4py()
register_checked_gloo()
