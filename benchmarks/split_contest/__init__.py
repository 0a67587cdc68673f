"""Contestants and shared parts of the benchmarks of plans that split the model."""
