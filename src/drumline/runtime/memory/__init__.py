"""Memory for time: what is computed again, cut into parts, or kept in host memory."""
