"""What this machine does per second: kernels, messages, and both at once."""
