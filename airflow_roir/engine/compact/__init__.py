"""Compaction: segments of a published index that have aged are made again, chosen by what that saves."""
