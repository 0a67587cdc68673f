"""Learning rates and batch sizes: schedules, scaling rules, the gradient noise scale."""
