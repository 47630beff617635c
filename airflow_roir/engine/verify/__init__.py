"""Compares an index with its source, and repairs it."""
