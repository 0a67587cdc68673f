# ruff: noqa: F401  # names for programs, not for this file
"""`from drumline import MPI`: mpi4py's names and behaviour, over shared memory, gloo or MPI itself.

docs/mpi.md lists what is supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .mpi.byte_buffer import buffer
from .mpi.comm import COMM_NULL, Comm, Intercomm
from .mpi.constants import *  # noqa: F403
from .mpi.datatype import Datatype
from .mpi.exception import Get_error_class, Get_error_string
from .mpi.exception import MPIError as Exception
from .mpi.group import GROUP_EMPTY, GROUP_NULL, Group
from .mpi.handles import (
    ERRHANDLER_NULL,
    ERRORS_ABORT,
    ERRORS_ARE_FATAL,
    ERRORS_RETURN,
    FILE_NULL,
    SESSION_NULL,
    Errhandler,
    File,
    Session,
)
from .mpi.info import INFO_ENV, INFO_NULL, Info
from .mpi.intracomm import COMM_SELF, COMM_WORLD, Intracomm, _comm_lock_table
from .mpi.library import *  # noqa: F403
from .mpi.memory import BOTTOM, BUFFER_AUTOMATIC, IN_PLACE
from .mpi.message import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from .mpi.op import (
    BAND,
    BOR,
    BXOR,
    LAND,
    LOR,
    LXOR,
    MAX,
    MAXLOC,
    MIN,
    MINLOC,
    NO_OP,
    OP_NULL,
    PROD,
    REPLACE,
    SUM,
    Op,
)
from .mpi.persistent_request import Grequest, Prequest
from .mpi.pickling import Pickle
from .mpi.pickling import default as pickle
from .mpi.predefined_types import TYPES
from .mpi.request import REQUEST_NULL, Request
from .mpi.status import Status
from .mpi.topology import UNWEIGHTED, WEIGHTS_EMPTY
from .mpi.topology_comm import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from .mpi.win import WIN_NULL, Win

memory = buffer  # its name in older programs
globals().update(TYPES)  # INT, DOUBLE and all the others

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
