"""Rows that share a key of a unique index: found, told, listed."""
