"""Training with parameter servers: workers that compute gradients, servers that hold the weights, a coordinator."""
