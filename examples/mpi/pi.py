"""Pi by a sum over ranks: each integrates every size-th stripe under 4 / (1 + x*x), and the root adds them up.

drumline run -n 4 examples/mpi/pi.py

pi is about 3.1415926536, from 1000000 stripes on 4 ranks
"""

import numpy as np

from drumline import MPI

STRIPES = 1_000_000

comm = MPI.COMM_WORLD
x = (np.arange(comm.rank, STRIPES, comm.size) + 0.5) / STRIPES
mine = np.array([np.sum(4.0 / (1.0 + x * x)) / STRIPES])
pi = np.zeros(1)
comm.Reduce(mine, pi, op=MPI.SUM, root=0)
if comm.rank == 0:
    print(f"pi is about {pi[0]:.10f}, from {STRIPES} stripes on {comm.size} ranks")
