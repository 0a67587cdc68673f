"""The training loop of one rank: steps, checkpoints along the way, one profiled step, the slowest rank."""
