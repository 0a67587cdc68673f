"""Pass a token round a ring without blocking: receives are posted first, so no order of ranks can deadlock.

drumline run -n 4 examples/mpi/ring.py

round 1: [3, 0, 1, 2]
round 2: [2, 3, 0, 1]
round 3: [1, 2, 3, 0]
round 4: [0, 1, 2, 3]
"""

import numpy as np

from drumline import MPI

comm = MPI.COMM_WORLD
after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
token, coming = np.array([comm.rank]), np.empty(1, dtype=int)
for number in range(1, comm.size + 1):
    requests = [comm.Irecv(coming, source=before, tag=number), comm.Isend(token, dest=after, tag=number)]
    MPI.Request.Waitall(requests)
    token[:] = coming
    tokens = comm.gather(int(token[0]), root=0)
    if comm.rank == 0:
        print(f"round {number}: {tokens}")
