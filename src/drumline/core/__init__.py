"""What every other package uses: errors, units, files, meshes, timelines and the user's `Job`."""
