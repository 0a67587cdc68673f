"""How the data-parallel ranks hold one model: replicated, in flat shards, sharded, as threads."""
