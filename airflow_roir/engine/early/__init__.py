"""Finds duplicates of a unique index while it is built, long before the seal finds them all."""
