"""Ranks under mpiexec, through mpi4py: a transport, an endpoint, a torch process group, and their rendezvous."""
