"""What keeps a run honest: numbers that are not finite, replicas that drift apart, buffers put back."""
