"""What a run shows: spans, lines, files, one step under the profiler."""
