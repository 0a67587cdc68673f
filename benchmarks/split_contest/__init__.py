"""The contestants of the benchmarks of plans that split the model, and what these benchmarks share."""
