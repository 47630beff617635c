"""Ships the writes of the shards to the index."""
