"""Ranks as a grid with two columns: `Split` makes a communicator of each row and each column, which sum independently.

drumline run -n 4 examples/mpi/grid.py

rank 0 at row 0, column 0: sum of its row 1, sum of its column 2
rank 1 at row 0, column 1: sum of its row 1, sum of its column 4
rank 2 at row 1, column 0: sum of its row 5, sum of its column 2
rank 3 at row 1, column 1: sum of its row 5, sum of its column 4
"""

from drumline import MPI

COLUMNS = 2

comm = MPI.COMM_WORLD
row, column = divmod(comm.rank, COLUMNS)
along_row = comm.Split(color=row, key=column)
along_column = comm.Split(color=column, key=row)
sums = along_row.allreduce(comm.rank), along_column.allreduce(comm.rank)
line = f"rank {comm.rank} at row {row}, column {column}: sum of its row {sums[0]}, sum of its column {sums[1]}"
lines = comm.gather(line, root=0)
if comm.rank == 0:
    print(*lines, sep="\n")
