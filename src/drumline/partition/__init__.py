"""One model over the ranks of a mesh axis: captured as a flat graph, split by rules, cut into stages."""
