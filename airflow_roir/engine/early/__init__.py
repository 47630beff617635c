"""Duplicates of a unique index are told of while it is built, long before the seal finds them all."""
