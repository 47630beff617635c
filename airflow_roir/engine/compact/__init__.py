"""Compaction: segments of a published index that have aged are built again, chosen by what that saves."""
