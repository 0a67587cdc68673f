"""Trades time for memory: recomputation, tiling of large layers, offload to host memory."""
