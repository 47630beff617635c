"""Verifies an index over shards, and repairs it."""
