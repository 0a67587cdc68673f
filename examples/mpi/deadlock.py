"""A broken exchange: both ranks receive before they send, so both wait forever. Drumline reports it, with the lines.

drumline run -n 2 examples/mpi/deadlock.py

deadlock: ranks 0, 1 wait for messages that cannot arrive
  rank 0: Recv from rank 1, tag 7, at deadlock.py:18
  rank 1: Recv from rank 0, tag 7, at deadlock.py:18
"""

import numpy as np

from drumline import MPI

comm = MPI.COMM_WORLD
other = 1 - comm.rank
mine, theirs = np.full(3, float(comm.rank)), np.empty(3)

comm.Recv(theirs, source=other, tag=7)  # the fix: comm.Sendrecv(mine, other, 7, theirs, other, 7)
comm.Send(mine, dest=other, tag=7)
