"""Compaction: renews the aged segments of a published index, those that save most for their cost."""
