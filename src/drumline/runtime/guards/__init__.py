"""Guards of a run: non-finite numbers, diverging replicas, loss spikes."""
