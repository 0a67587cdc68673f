"""Tensors in parts on the ranks of a mesh axis, and the communication that moves them: no graphs here."""
