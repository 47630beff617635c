"""Partitions that come and go."""
