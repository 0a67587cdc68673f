"""Foundations of all other packages: errors, units, files, meshes, timelines and the user's `Job`."""
