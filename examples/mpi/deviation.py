"""The standard deviation of numbers distributed over ranks: two all-reduces, and every rank has it.

drumline run -n 4 examples/mpi/deviation.py

4 ranks with 1000 numbers each: mean 1999.50, standard deviation 1154.70
all ranks have the same bits: True
"""

import math

import numpy as np

from drumline import MPI

comm = MPI.COMM_WORLD
mine = np.arange(1000.0) + 1000 * comm.rank
n = comm.allreduce(mine.size)
mean = comm.allreduce(mine.sum()) / n
squares = np.array([((mine - mean) ** 2).sum()])
comm.Allreduce(MPI.IN_PLACE, squares, op=MPI.SUM)
deviation = math.sqrt(squares[0] / n)

deviations = comm.gather(deviation, root=0)
if comm.rank == 0:
    print(f"{comm.size} ranks with {mine.size} numbers each: mean {mean:.2f}, standard deviation {deviation:.2f}")
    print(f"all ranks have the same bits: {len(set(deviations)) == 1}")
