"""What readers of an index use, and whose snapshot is too old for it."""
