"""The view that readers of an index use, and the snapshots that are too old for it."""
