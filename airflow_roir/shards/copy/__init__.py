"""Prepares an index over shards and copies its rows."""
