"""The average of a list by scatter and gather: the first rank distributes it, each rank averages its part.

drumline run -n 4 examples/mpi/average.py

rank 0 averages [0.0, 1.0, 2.0] to 1.00
rank 1 averages [3.0, 4.0, 5.0] to 4.00
rank 2 averages [6.0, 7.0, 8.0] to 7.00
rank 3 averages [9.0, 10.0, 11.0] to 10.00
the average of 12 numbers is 5.50
"""

import numpy as np

from drumline import MPI

comm = MPI.COMM_WORLD
numbers = np.arange(3.0 * comm.size) if comm.rank == 0 else None
mine = np.empty(3)
comm.Scatter(numbers, mine, root=0)

line = f"rank {comm.rank} averages {mine.tolist()} to {mine.mean():.2f}"
lines = comm.gather(line, root=0)
averages = np.empty(comm.size) if comm.rank == 0 else None
comm.Gather(np.array([mine.mean()]), averages, root=0)

if comm.rank == 0:
    print(*lines, sep="\n")
    print(f"the average of {3 * comm.size} numbers is {averages.mean():.2f}")
