"""Compares an index with its source, and mends it."""
