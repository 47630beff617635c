"""Ships what was written in the shards to the index."""
