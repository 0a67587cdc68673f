"""One rank of a job under a plan: its state, forward and backward, the update, evaluation."""
