"""The processes and the tables of benchmarks/server_or_ring.py."""
