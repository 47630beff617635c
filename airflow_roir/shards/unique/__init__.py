"""Unique indexes over shards: which shard holds a key."""
