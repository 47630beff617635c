"""Compaction: segments of a published index that have aged are made anew, chosen by what that saves."""
