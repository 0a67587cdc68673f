"""The contestants of `benchmarks/engines.py`: one file each, every one a `make(work)` that gives the step of a rank."""
