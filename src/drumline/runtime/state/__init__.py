"""State of a rank: pieces of parameters, weights, buffers, the optimizer, process groups, the record of its steps."""
