"""Ranks under mpiexec, by mpi4py: a transport, a post office, and an engine of torch process groups."""
