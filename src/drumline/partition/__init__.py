"""Splits a model over ranks: capture as a graph, shard over mesh axes, cut into pipeline stages."""
